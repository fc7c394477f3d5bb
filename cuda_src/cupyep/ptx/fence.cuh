#pragma once
// Fences: between the generic and the async proxy, for a new mbarrier, and between threads.
#include <cupyep/ptx/types.cuh>

namespace cupyep::ptx {

// fence.acq_rel.cta;                                                                                              sm_70
__device__ __forceinline__ void fence_acq_rel_cta() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// fence.acq_rel.gpu;                                                                                              sm_70
__device__ __forceinline__ void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// fence.acq_rel.sys;                                                                                              sm_70
__device__ __forceinline__ void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

#if __CUDA_ARCH__ >= 900

// fence.proxy.async;                                                                                              sm_90
// Orders this thread's generic accesses and the async proxy's (bulk copies), in every state space.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// fence.proxy.async.shared::cta;                                                                                  sm_90
// For shared memory alone: by every thread that wrote what a bulk store reads, or read what a bulk load replaces.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.proxy.async.global;                                                                                       sm_90
// For global memory alone: after an acquire whose data a bulk copy reads or overwrites.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// fence.mbarrier_init.release.cluster;                                                                            sm_90
// By the thread that initialised mbarriers, before the CTA barrier after which they are used.
__device__ __forceinline__ void fence_mbarrier_init_release_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

#endif  // __CUDA_ARCH__ >= 900

}  // namespace cupyep::ptx
