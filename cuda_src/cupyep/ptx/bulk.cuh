#pragma once
// Bulk copies by the async proxy (1-D TMA), bulk reductions, bulk groups, and L2 cache policies.
//
// Addresses are 16-byte aligned and `bytes` is a multiple of 16. One thread issues a copy. Loads report to an mbarrier;
// stores and reductions join the issuing thread's current bulk group, which that same thread commits and waits for.
#include <cupyep/ptx/cache_policy.cuh>

namespace cupyep::ptx {

#if __CUDA_ARCH__ >= 900

// cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [dstMem], [srcMem], size, [mbar];             sm_90
// The destination is this CTA's own shared memory (a shared::cta address is also a shared::cluster one).
__device__ __forceinline__ void cp_async_bulk_g2s(void* dst, const void* src, u32 bytes, u64* mbar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(smem_addr(dst)),
      "l"(gmem_addr(src)), "r"(bytes), "r"(smem_addr(mbar))
      : "memory");
}

// cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [dstMem], [srcMem], size, [mbar],
//     cache-policy;                                                                                               sm_90
__device__ __forceinline__ void cp_async_bulk_g2s_l2_cache_hint(void* dst, const void* src, u32 bytes, u64* mbar,
                                                                u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(smem_addr(dst)),
      "l"(gmem_addr(src)), "r"(bytes), "r"(smem_addr(mbar)), "l"(policy)
      : "memory");
}

// cp.async.bulk.global.shared::cta.bulk_group [dstMem], [srcMem], size;                                           sm_90
__device__ __forceinline__ void cp_async_bulk_s2g(void* dst, const void* src, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem_addr(dst)), "r"(smem_addr(src)),
               "r"(bytes)
               : "memory");
}

// cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [dstMem], [srcMem], size, cache-policy;              sm_90
__device__ __forceinline__ void cp_async_bulk_s2g_l2_cache_hint(void* dst, const void* src, u32 bytes, u64 policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(gmem_addr(dst)),
               "r"(smem_addr(src)), "r"(bytes), "l"(policy)
               : "memory");
}

// cp.async.bulk.commit_group;                                                                                     sm_90
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// cp.async.bulk.wait_group N;                                                                                     sm_90
// Until at most N of this thread's newest groups are unfinished; all older writes are done and visible to it.
template <int N>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// cp.async.bulk.wait_group.read N;                                                                                sm_90
// Only until the other groups have *read* their source: frees the shared memory, says nothing of the destination.
template <int N>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// cp.async.bulk.prefetch.L2.global [srcMem], size;                                                                sm_90
__device__ __forceinline__ void cp_async_bulk_prefetch_l2(const void* src, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(gmem_addr(src)), "r"(bytes) : "memory");
}

// cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [dstMem], [srcMem], size;                            sm_90
// Each element is added atomically (relaxed, gpu scope); the order of additions is not defined.
__device__ __forceinline__ void cp_reduce_async_bulk_s2g_add_f32(void* dst, const void* src, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   gmem_addr(dst)),
               "r"(smem_addr(src)), "r"(bytes)
               : "memory");
}

// cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [dstMem], [srcMem], size;                      sm_90
__device__ __forceinline__ void cp_reduce_async_bulk_s2g_add_noftz_f16(void* dst, const void* src, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], %2;" ::"l"(
                   gmem_addr(dst)),
               "r"(smem_addr(src)), "r"(bytes)
               : "memory");
}

// cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [dstMem], [srcMem], size;                     sm_90
__device__ __forceinline__ void cp_reduce_async_bulk_s2g_add_noftz_bf16(void* dst, const void* src, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], %2;" ::"l"(
                   gmem_addr(dst)),
               "r"(smem_addr(src)), "r"(bytes)
               : "memory");
}

// cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [dstMem], [srcMem], size;                            sm_90
__device__ __forceinline__ void cp_reduce_async_bulk_s2g_add_s32(void* dst, const void* src, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;" ::"l"(
                   gmem_addr(dst)),
               "r"(smem_addr(src)), "r"(bytes)
               : "memory");
}

// cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [dstMem], [srcMem], size;                            sm_90
__device__ __forceinline__ void cp_reduce_async_bulk_s2g_add_u32(void* dst, const void* src, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;" ::"l"(
                   gmem_addr(dst)),
               "r"(smem_addr(src)), "r"(bytes)
               : "memory");
}

#endif  // __CUDA_ARCH__ >= 900

}  // namespace cupyep::ptx
