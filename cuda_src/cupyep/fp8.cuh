#pragma once
// fp8 e4m3 (1.4.3, bias 7, largest 448, no infinity), and the scale that a block of values shares. The rule of the
// cast stands in cupyep/backends/numpy/fp8.py, the twin, bit by bit.
#include <cupyep/ptx/cvt.cuh>

namespace cupyep {

struct Scale {
  float value;    // what a reader multiplies with
  float inverse;  // what values are multiplied with
};

// Of values whose largest magnitude is `amax`.
template <bool kRoundScale>
__device__ __forceinline__ Scale scale_of(float amax) {
  amax = fmaxf(amax, 1e-4f);
  if constexpr (!kRoundScale) return {__fdiv_rn(amax, 448.0f), __fdiv_rn(448.0f, amax)};
  const float value = __uint_as_float((__float_as_uint(__fdiv_rn(amax, 448.0f)) + 0x7fffffu) & 0xff800000u);
  return {value, __fdiv_rn(1.0f, value)};
}

#if __CUDA_ARCH__ >= 900
// Two values as e4m3, `lower` in the low byte: to nearest even; past 448 saturated; NaN becomes 0x7f.
__device__ __forceinline__ ptx::u32 e4m3x2(float upper, float lower) {
  return ptx::cvt_rn_satfinite_e4m3x2_f32(upper, lower);
}
#else
// Without the instruction.
__device__ __forceinline__ ptx::u32 to_e4m3(float value) {
  constexpr ptx::u32 kLargest = 0x43e00000, kLeastNormal = 0x3c800000;  // 448, 2^-6
  const ptx::u32 bits = __float_as_uint(value), sign = bits >> 24 & 0x80;
  ptx::u32 magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;
  magnitude = magnitude < kLargest ? magnitude : kLargest;
  if (magnitude < kLeastNormal) return sign | __float2uint_rn(__fmul_rn(__uint_as_float(magnitude), 512.0f));
  return sign | (((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3));  // exponents are biased by 127
}

__device__ __forceinline__ ptx::u32 e4m3x2(float upper, float lower) { return to_e4m3(upper) << 8 | to_e4m3(lower); }
#endif

// Values as e4m3, the first in the lowest byte.
template <int kNum>
__device__ __forceinline__ ptx::u32 packed_e4m3(const float* values) {
  static_assert(kNum == 1 || kNum == 2 || kNum == 4);
  ptx::u32 packed = e4m3x2(kNum > 1 ? values[kNum > 1] : 0.0f, values[0]);
  if constexpr (kNum == 4) packed |= e4m3x2(values[3], values[2]) << 16;
  return packed;
}

// Exact. The code's exponent lies where a float has its low exponent bits, so a factor of 2^120 is all that is missing.
__device__ __forceinline__ float from_e4m3(ptx::u32 code) {
  if ((code & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000);
  return __fmul_rn(__uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20), 0x1p120f);
}

// A power of two as its biased exponent: 2^-127 .. 2^127, 255 is NaN.
__device__ __forceinline__ float from_e8m0(ptx::u32 code) {
  return __uint_as_float(code == 0 ? 0x00400000 : code == 255 ? 0x7fc00000 : code << 23);
}

}  // namespace cupyep
