#pragma once
// fp8 e4m3 (1.4.3, bias 7, largest 448, no infinity) by integer arithmetic, for every architecture alike.
#include <cupyep/ptx/types.cuh>

namespace cupyep {

// To nearest even; past 448 it saturates; NaN becomes 0x7f.
__device__ __forceinline__ ptx::u32 to_e4m3(float value) {
  constexpr ptx::u32 kLargest = 0x43e00000, kLeastNormal = 0x3c800000;  // 448, 2^-6
  const ptx::u32 bits = __float_as_uint(value), sign = bits >> 24 & 0x80;
  ptx::u32 magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;
  magnitude = magnitude < kLargest ? magnitude : kLargest;
  if (magnitude < kLeastNormal) return sign | __float2uint_rn(__fmul_rn(__uint_as_float(magnitude), 512.0f));
  return sign | (((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3));  // exponents are biased by 127
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
