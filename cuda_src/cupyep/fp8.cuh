#pragma once
// Rows as 8-bit floats (e4m3) with a scale per 128 values. The rule stands in cupyep/fp8.py, its twin, bit by bit.
#include <cupyep/ptx/cvt.cuh>

namespace cupyep {

struct Scale {
  float value;    // what a reader multiplies with
  float inverse;  // what values are multiplied with
};

// Of 128 values whose largest magnitude is `amax`.
template <bool kRoundScale>
__device__ __forceinline__ Scale scale_of(float amax) {
  amax = fmaxf(amax, 1e-4f);
  if constexpr (!kRoundScale) return {__fdiv_rn(amax, 448.0f), __fdiv_rn(448.0f, amax)};
  const float value = __uint_as_float((__float_as_uint(__fdiv_rn(amax, 448.0f)) + 0x7fffffu) & 0xff800000u);
  return {value, __fdiv_rn(1.0f, value)};
}

#if __CUDA_ARCH__ >= 900
// Two values as e4m3: `lower` in the low byte.
__device__ __forceinline__ ptx::u32 e4m3x2(float upper, float lower) {
  return ptx::cvt_rn_satfinite_e4m3x2_f32(upper, lower);
}
#else
// Without the instruction. Normal: the upper 4 + 3 bits of exponent and mantissa, rebiased; below 2^-6: units of 2^-9.
__device__ __forceinline__ ptx::u32 e4m3(float value) {
  const ptx::u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude < 0x3c800000u) return sign | static_cast<ptx::u32>(__float2int_rn(__uint_as_float(magnitude) * 512.0f));
  const ptx::u32 code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  return sign | (code < 0x7eu ? code : 0x7eu);
}

__device__ __forceinline__ ptx::u32 e4m3x2(float upper, float lower) { return e4m3(upper) << 8 | e4m3(lower); }
#endif

// Four values as e4m3, the first in the lowest byte.
__device__ __forceinline__ ptx::u32 e4m3x4(const float* values) {
  return e4m3x2(values[3], values[2]) << 16 | e4m3x2(values[1], values[0]);
}

}  // namespace cupyep
