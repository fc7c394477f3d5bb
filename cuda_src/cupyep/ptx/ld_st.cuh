#pragma once
// Loads, stores and atomics: flags with an explicit order and scope, payload as 128-bit vectors.
//
// Scope gpu reaches the threads of this device; sys also reaches peers over NVLink and the host. Flags are 4 or 8
// bytes, naturally aligned, in global memory: this device's, a mapped peer's, or pinned host memory.
#include <cupyep/ptx/types.cuh>

namespace cupyep::ptx {

// ld.relaxed.gpu.global.u32 dst, [addr];                                                                          sm_70
__device__ __forceinline__ u32 ld_relaxed_gpu(const u32* addr) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(gmem_addr(addr)) : "memory");
  return value;
}

// ld.relaxed.gpu.global.u64 dst, [addr];                                                                          sm_70
__device__ __forceinline__ u64 ld_relaxed_gpu(const u64* addr) {
  u64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(gmem_addr(addr)) : "memory");
  return value;
}

// ld.relaxed.sys.global.u32 dst, [addr];                                                                          sm_70
__device__ __forceinline__ u32 ld_relaxed_sys(const u32* addr) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(gmem_addr(addr)) : "memory");
  return value;
}

// ld.relaxed.sys.global.u64 dst, [addr];                                                                          sm_70
__device__ __forceinline__ u64 ld_relaxed_sys(const u64* addr) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(gmem_addr(addr)) : "memory");
  return value;
}

// ld.acquire.gpu.global.u32 dst, [addr];                                                                          sm_70
__device__ __forceinline__ u32 ld_acquire_gpu(const u32* addr) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(gmem_addr(addr)) : "memory");
  return value;
}

// ld.acquire.gpu.global.u64 dst, [addr];                                                                          sm_70
__device__ __forceinline__ u64 ld_acquire_gpu(const u64* addr) {
  u64 value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(gmem_addr(addr)) : "memory");
  return value;
}

// ld.acquire.sys.global.u32 dst, [addr];                                                                          sm_70
__device__ __forceinline__ u32 ld_acquire_sys(const u32* addr) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(gmem_addr(addr)) : "memory");
  return value;
}

// ld.acquire.sys.global.u64 dst, [addr];                                                                          sm_70
__device__ __forceinline__ u64 ld_acquire_sys(const u64* addr) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(gmem_addr(addr)) : "memory");
  return value;
}

// st.relaxed.gpu.global.u32 [addr], src;                                                                          sm_70
__device__ __forceinline__ void st_relaxed_gpu(u32* addr, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(gmem_addr(addr)), "r"(value) : "memory");
}

// st.relaxed.gpu.global.u64 [addr], src;                                                                          sm_70
__device__ __forceinline__ void st_relaxed_gpu(u64* addr, u64 value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(gmem_addr(addr)), "l"(value) : "memory");
}

// st.relaxed.sys.global.u32 [addr], src;                                                                          sm_70
__device__ __forceinline__ void st_relaxed_sys(u32* addr, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(gmem_addr(addr)), "r"(value) : "memory");
}

// st.relaxed.sys.global.u64 [addr], src;                                                                          sm_70
__device__ __forceinline__ void st_relaxed_sys(u64* addr, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(gmem_addr(addr)), "l"(value) : "memory");
}

// st.release.gpu.global.u32 [addr], src;                                                                          sm_70
__device__ __forceinline__ void st_release_gpu(u32* addr, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(gmem_addr(addr)), "r"(value) : "memory");
}

// st.release.gpu.global.u64 [addr], src;                                                                          sm_70
__device__ __forceinline__ void st_release_gpu(u64* addr, u64 value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(gmem_addr(addr)), "l"(value) : "memory");
}

// st.release.sys.global.u32 [addr], src;                                                                          sm_70
__device__ __forceinline__ void st_release_sys(u32* addr, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(gmem_addr(addr)), "r"(value) : "memory");
}

// st.release.sys.global.u64 [addr], src;                                                                          sm_70
__device__ __forceinline__ void st_release_sys(u64* addr, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(gmem_addr(addr)), "l"(value) : "memory");
}

// red.release.gpu.global.add.u32 [addr], src;                                                                     sm_70
__device__ __forceinline__ void red_release_gpu_add(u32* addr, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(gmem_addr(addr)), "r"(value) : "memory");
}

// red.release.sys.global.add.u32 [addr], src;                                                                     sm_70
__device__ __forceinline__ void red_release_sys_add(u32* addr, u32 value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(gmem_addr(addr)), "r"(value) : "memory");
}

// atom.relaxed.gpu.global.add.u32 dst, [addr], src;                                                               sm_70
// Returns the value before the addition.
__device__ __forceinline__ u32 atom_relaxed_gpu_add(u32* addr, u32 value) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(gmem_addr(addr)), "r"(value)
               : "memory");
  return before;
}

// atom.acq_rel.gpu.global.add.u32 dst, [addr], src;                                                               sm_70
// Returns the value before the addition.
__device__ __forceinline__ u32 atom_acq_rel_gpu_add(u32* addr, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(gmem_addr(addr)), "r"(value)
               : "memory");
  return before;
}

// atom.acq_rel.sys.global.add.u32 dst, [addr], src;                                                               sm_70
// Returns the value before the addition.
__device__ __forceinline__ u32 atom_acq_rel_sys_add(u32* addr, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.sys.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(gmem_addr(addr)), "r"(value)
               : "memory");
  return before;
}

// atom.relaxed.gpu.global.cas.b32 dst, [addr], compare, src;                                                      sm_70
// Stores `value` if the word equals `compare`; returns what it was.
__device__ __forceinline__ u32 atom_relaxed_gpu_cas(u32* addr, u32 compare, u32 value) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(gmem_addr(addr)), "r"(compare), "r"(value)
               : "memory");
  return before;
}

// atom.relaxed.gpu.global.cas.b64 dst, [addr], compare, src;                                                      sm_70
// Stores `value` if the word equals `compare`; returns what it was.
__device__ __forceinline__ u64 atom_relaxed_gpu_cas(u64* addr, u64 compare, u64 value) {
  u64 before;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(gmem_addr(addr)), "l"(compare), "l"(value)
               : "memory");
  return before;
}

// atom.acq_rel.gpu.global.cas.b32 dst, [addr], compare, src;                                                      sm_70
// Stores `value` if the word equals `compare`; returns what it was.
__device__ __forceinline__ u32 atom_acq_rel_gpu_cas(u32* addr, u32 compare, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(gmem_addr(addr)), "r"(compare), "r"(value)
               : "memory");
  return before;
}

// atom.acq_rel.gpu.global.cas.b64 dst, [addr], compare, src;                                                      sm_70
// Stores `value` if the word equals `compare`; returns what it was.
__device__ __forceinline__ u64 atom_acq_rel_gpu_cas(u64* addr, u64 compare, u64 value) {
  u64 before;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(gmem_addr(addr)), "l"(compare), "l"(value)
               : "memory");
  return before;
}

// atom.acq_rel.sys.global.cas.b32 dst, [addr], compare, src;                                                      sm_70
// Stores `value` if the word equals `compare`; returns what it was.
__device__ __forceinline__ u32 atom_acq_rel_sys_cas(u32* addr, u32 compare, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(gmem_addr(addr)), "r"(compare), "r"(value)
               : "memory");
  return before;
}

// atom.acq_rel.sys.global.cas.b64 dst, [addr], compare, src;                                                      sm_70
// Stores `value` if the word equals `compare`; returns what it was.
__device__ __forceinline__ u64 atom_acq_rel_sys_cas(u64* addr, u64 compare, u64 value) {
  u64 before;
  asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(gmem_addr(addr)), "l"(compare), "l"(value)
               : "memory");
  return before;
}

// The vector forms are weak: ordered only by the barriers and flags around them. All addresses are 16-byte aligned.

// ld.global.L1::no_allocate.v4.u32 {x, y, z, w}, [addr];                                                          sm_70
// Never .nc: a peer may write this memory while the kernel runs. Read once, so it takes no room in L1.
__device__ __forceinline__ uint4 ld_global_v4(const void* addr) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(gmem_addr(addr))
               : "memory");
  return v;
}

// st.global.L1::no_allocate.v4.u32 [addr], {x, y, z, w};                                                          sm_70
__device__ __forceinline__ void st_global_v4(void* addr, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(gmem_addr(addr)), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// ld.shared.v4.u32 {x, y, z, w}, [addr];                                                                          sm_20
__device__ __forceinline__ uint4 ld_shared_v4(u32 addr) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr) : "memory");
  return v;
}
__device__ __forceinline__ uint4 ld_shared_v4(const void* addr) { return ld_shared_v4(smem_addr(addr)); }

// st.shared.v4.u32 [addr], {x, y, z, w};                                                                          sm_20
__device__ __forceinline__ void st_shared_v4(void* addr, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem_addr(addr)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

}  // namespace cupyep::ptx
