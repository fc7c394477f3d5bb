#pragma once
// Conversions between float and the 16-bit types, rounding to nearest even; 16-bit values are raw bits.
#include <cupyep/ptx/types.cuh>

namespace cupyep::ptx {

// cvt.f32.f16 d, a;                                                                                               sm_53
__device__ __forceinline__ float cvt_f32_f16(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// cvt.rn.f16x2.f32 d, a, b;                                    d = a in the upper half, b in the lower half       sm_80
__device__ __forceinline__ u32 cvt_rn_f16x2_f32(float upper, float lower) {
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(upper), "f"(lower));
  return bits;
}

// cvt.rn.bf16x2.f32 d, a, b;                                   d = a in the upper half, b in the lower half       sm_80
__device__ __forceinline__ u32 cvt_rn_bf16x2_f32(float upper, float lower) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(upper), "f"(lower));
  return bits;
}

}  // namespace cupyep::ptx
