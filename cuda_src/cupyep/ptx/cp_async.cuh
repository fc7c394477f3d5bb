#pragma once
// Non-bulk asynchronous copies: 4, 8 or 16 bytes from global to shared memory by each thread for itself.
//
// Both addresses are multiples of the size. A copy joins the issuing thread's current group, which that same thread
// commits and waits for. Until its wait the destination may not be accessed and the source may not change; after it the
// bytes are that thread's, and another thread's after a barrier. These are accesses of the generic proxy, so they need
// no proxy fence, unlike bulk copies.
#include <cupyep/ptx/types.cuh>

namespace cupyep::ptx {

// cp.async.cg.shared.global [dst], [src], 16;                                                                     sm_80
// By way of L2 only: data that is read once.
__device__ __forceinline__ void cp_async_cg_16(void* smem, const void* gmem) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_addr(smem)), "l"(gmem_addr(gmem)) : "memory");
}

// cp.async.cg.shared.global.L2::cache_hint [dst], [src], 16, cache-policy;                                        sm_80
__device__ __forceinline__ void cp_async_cg_16_l2_cache_hint(void* smem, const void* gmem, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(smem_addr(smem)), "l"(gmem_addr(gmem)),
               "l"(policy)
               : "memory");
}

// cp.async.ca.shared.global [dst], [src], cp-size;                                                                sm_80
// By way of L1 and L2.
template <int kBytes>
__device__ __forceinline__ void cp_async_ca(void* smem, const void* gmem) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "kBytes: expected 4, 8 or 16");
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(smem_addr(smem)), "l"(gmem_addr(gmem)), "n"(kBytes)
               : "memory");
}

// cp.async.commit_group;                                                                                          sm_80
// Closes this thread's current group, which may be empty.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group N;                                                                                          sm_80
// Until at most kPending of this thread's newest groups are unfinished; what older ones wrote is visible to it.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cupyep::ptx
