#pragma once
// A vector of bytes as a thread moves it, and what combine does with its elements: add in fp32, round once.
#include <cupyep/ptx/cvt.cuh>

namespace cupyep {

template <int kBytes>
struct alignas(kBytes) VecOf {
  unsigned int words[kBytes / 4];
};
template <>
struct alignas(2) VecOf<2> {
  unsigned short words[1];
};
template <>
struct VecOf<1> {
  unsigned char words[1];
};

using Vec = VecOf<cfg::kVecBytes>;  // the widest that divides a row

// Elements of type kDType in a vector.
template <int kDType, int kBytes>
constexpr int kElements = kBytes / (kDType == cfg::kDTypeFloat32 ? 4 : 2);

// The elements in fp32, exactly.
template <int kDType, int kBytes>
__device__ __forceinline__ void widened(float* values, const VecOf<kBytes>& vec) {
  constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const ptx::u32 word = vec.words[i];
    if constexpr (kDType == cfg::kDTypeFloat32) {
      values[i] = __uint_as_float(word);
    } else if constexpr (kDType == cfg::kDTypeBfloat16) {
      values[2 * i] = __uint_as_float(word << 16);
      if constexpr (kBytes >= 4) values[2 * i + 1] = __uint_as_float(word & 0xffff0000u);
    } else {
      values[2 * i] = ptx::cvt_f32_f16(static_cast<unsigned short>(word));
      if constexpr (kBytes >= 4) values[2 * i + 1] = ptx::cvt_f32_f16(static_cast<unsigned short>(word >> 16));
    }
  }
}

// sums[i] += element i, in fp32 and never contracted: both backends give the same bits.
template <int kDType, int kBytes>
__device__ __forceinline__ void accumulate(float* sums, const VecOf<kBytes>& vec) {
  float values[kElements<kDType, kBytes>];
  widened<kDType>(values, vec);
#pragma unroll
  for (int i = 0; i < kElements<kDType, kBytes>; ++i) sums[i] = __fadd_rn(sums[i], values[i]);
}

// sums[i] += weight * element i; both steps are rounded.
template <int kDType, int kBytes>
__device__ __forceinline__ void accumulate_weighted(float* sums, const VecOf<kBytes>& vec, float weight) {
  float values[kElements<kDType, kBytes>];
  widened<kDType>(values, vec);
#pragma unroll
  for (int i = 0; i < kElements<kDType, kBytes>; ++i) sums[i] = __fadd_rn(sums[i], __fmul_rn(weight, values[i]));
}

// The sums as elements of kDType, to nearest even.
template <int kDType, int kBytes>
__device__ __forceinline__ VecOf<kBytes> rounded(const float* sums) {
  constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  VecOf<kBytes> vec;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (kDType == cfg::kDTypeFloat32) {
      vec.words[i] = __float_as_uint(sums[i]);
    } else {
      const float lower = sums[2 * i], upper = kBytes >= 4 ? sums[kBytes >= 4 ? 2 * i + 1 : 0] : 0.0f;
      vec.words[i] = kDType == cfg::kDTypeBfloat16 ? ptx::cvt_rn_bf16x2_f32(upper, lower) : ptx::cvt_rn_f16x2_f32(upper, lower);
    }
  }
  return vec;
}

}  // namespace cupyep
