#pragma once
// mbarrier: a 64-bit object in shared memory, 8-byte aligned, that counts arrivals and bytes.
//
// A phase completes when the pending arrivals and the pending bytes are both zero; then the barrier re-arms itself for
// the next phase. A wait names the parity of the phase it waits for: 0 for the first, then 1, 0, 1... Waiting with the
// parity of the phase before the current one succeeds at once, so a waiter must flip its parity after each wait.
#include <cupyep/ptx/types.cuh>

namespace cupyep::ptx {

// mbarrier.init.shared::cta.b64 [addr], count;                                                                    sm_80
// By one thread; other threads and the async proxy see it after fence_mbarrier_init_release_cluster and a CTA barrier.
__device__ __forceinline__ void mbarrier_init(u64* mbar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(mbar)), "r"(count) : "memory");
}

// mbarrier.inval.shared::cta.b64 [addr];                                                                          sm_80
// Before the eight bytes are used for anything else.
__device__ __forceinline__ void mbarrier_inval(u64* mbar) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(smem_addr(mbar)) : "memory");
}

// mbarrier.arrive.shared::cta.b64 _, [addr];                                         (.release.cta by default)    sm_80
__device__ __forceinline__ void mbarrier_arrive(u32 mbar_addr) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbar_addr) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u64* mbar) { mbarrier_arrive(smem_addr(mbar)); }

// mbarrier.test_wait.parity.shared::cta.b64 waitComplete, [addr], phaseParity;       (.acquire.cta by default)    sm_80
// Never blocks. True when the phase of this parity has completed.
__device__ __forceinline__ bool mbarrier_test_wait_parity(const u64* mbar, u32 parity) {
  u32 done;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(smem_addr(mbar)), "r"(parity)
      : "memory");
  return done != 0;
}

#if __CUDA_ARCH__ >= 900

// mbarrier.arrive.expect_tx.shared::cta.b64 _, [addr], tx_count;                     (.release.cta by default)    sm_90
// Adds `bytes` to the phase's pending bytes, then arrives: one step, so the phase cannot complete in between.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* mbar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(mbar)), "r"(bytes) : "memory");
}

// mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [addr], tx_count;                                                sm_90
// Adds bytes and does not arrive: somebody's arrival of the same phase must still be outstanding.
__device__ __forceinline__ void mbarrier_expect_tx(u64* mbar, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(mbar)), "r"(bytes)
               : "memory");
}

// mbarrier.try_wait.parity.shared::cta.b64 waitComplete, [addr], phaseParity;        (.acquire.cta by default)    sm_90
// One try: the hardware may suspend the thread for a while (its own limit), then answers. The caller loops.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u32 mbar_addr, u32 parity) {
  u32 done;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(mbar_addr), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ bool mbarrier_try_wait_parity(const u64* mbar, u32 parity) {
  return mbarrier_try_wait_parity(smem_addr(mbar), parity);
}

#endif  // __CUDA_ARCH__ >= 900

}  // namespace cupyep::ptx
