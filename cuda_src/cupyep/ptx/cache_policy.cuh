#pragma once
// What L2 is to do with the lines of an access: the last operand of the instructions with .L2::cache_hint.
#include <cupyep/ptx/types.cuh>

namespace cupyep::ptx {

// createpolicy.fractional.L2::evict_first.b64 policy, fraction;                                                   sm_80
// L2 gives these lines up first: data that is read once.
__device__ __forceinline__ u64 createpolicy_fractional_evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// createpolicy.fractional.L2::evict_last.b64 policy, fraction;                                                    sm_80
// L2 gives these lines up last: data that is read again soon.
__device__ __forceinline__ u64 createpolicy_fractional_evict_last() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace cupyep::ptx
