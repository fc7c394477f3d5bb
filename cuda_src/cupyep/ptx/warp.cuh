#pragma once
// Warp election, named CTA barriers, clocks and ids, and dependent launch.
#include <cupyep/ptx/types.cuh>

namespace cupyep::ptx {

// bar.sync a, b;                                                                                                  sm_20
// Named barrier `id` (1..15; 0 is __syncthreads) of `num_threads` threads, a multiple of 32, whole warps.
__device__ __forceinline__ void bar_sync(u32 id, u32 num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// bar.arrive a, b;                                                                                                sm_20
// Arrives and goes on; `num_threads` counts the arriving and the waiting threads together.
__device__ __forceinline__ void bar_arrive(u32 id, u32 num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// bar.warp.sync membermask;                                                                                       sm_30
__device__ __forceinline__ void bar_warp_sync(u32 mask = 0xffffffffu) {
  asm volatile("bar.warp.sync %0;" ::"r"(mask) : "memory");
}

// mov.u64 dst, %globaltimer;                                                                                      sm_30
// Nanoseconds of a clock that all SMs of a GPU share; two GPUs' clocks differ. Its step can be a microsecond.
__device__ __forceinline__ u64 globaltimer() {
  u64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// mov.u32 dst, %smid;                                                                                             sm_20
__device__ __forceinline__ u32 smid() {
  u32 id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

// nanosleep.u32 t;                                                                                                sm_70
// Between 0 and twice `ns`; at most a millisecond.
__device__ __forceinline__ void nanosleep(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

#if __CUDA_ARCH__ >= 900

// elect.sync d|p, membermask;                                                                                     sm_90
// True in one lane of the warp, the same one each time; all 32 lanes must call it together.
__device__ __forceinline__ bool elect_sync() {
  u32 elected;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "elect.sync _|p, 0xffffffff;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(elected)
      :
      : "memory");
  return elected != 0;
}

// griddepcontrol.wait;                                                                                            sm_90
// Until the kernels that this one depends on have finished and their writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// griddepcontrol.launch_dependents;                                                                               sm_90
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

#endif  // __CUDA_ARCH__ >= 900

}  // namespace cupyep::ptx
