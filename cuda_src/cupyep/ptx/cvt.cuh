#pragma once
// Conversions between float and the 16-bit and 8-bit types, rounding to nearest even; their values are raw bits.
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

#if __CUDA_ARCH__ >= 900
// cvt.rn.satfinite.e4m3x2.f32 d, a, b;           d = a in the upper byte, b in the lower one; sm_89 has it too    sm_90
__device__ __forceinline__ u32 cvt_rn_satfinite_e4m3x2_f32(float upper, float lower) {
  unsigned short bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(upper), "f"(lower));
  return bits;
}
#endif

}  // namespace cupyep::ptx
