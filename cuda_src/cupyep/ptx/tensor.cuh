#pragma once
// Tiled tensor copies (TMA proper), 1-D to 5-D, described by a CUtensorMap that the host encoded.
//
// `tensor_map` is the generic address of the 128 bytes: a `const __grid_constant__` parameter, or global memory,
// 64-byte aligned. Coordinates are element indices, innermost dimension first. The shared side is 128-byte aligned.
#include <cupyep/ptx/types.cuh>

namespace cupyep::ptx {

#if __CUDA_ARCH__ >= 900

// prefetch.tensormap [addr];                                                                                      sm_90
__device__ __forceinline__ void prefetch_tensormap(const void* tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}

// cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [dstMem], [tensorMap, coords],
//     [mbar];                                                                                                     sm_90
__device__ __forceinline__ void cp_async_bulk_tensor_1d_g2s(void* dst, const void* tensor_map, int c0, u64* mbar) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2}], [%3];" ::"r"(smem_addr(dst)),
      "l"(tensor_map), "r"(c0), "r"(smem_addr(mbar))
      : "memory");
}

// cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [tensorMap, coords], [srcMem];                       sm_90
__device__ __forceinline__ void cp_async_bulk_tensor_1d_s2g(const void* tensor_map, int c0, const void* src) {
  asm volatile(
      "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%1}], [%2];" ::"l"(tensor_map),
      "r"(c0), "r"(smem_addr(src))
      : "memory");
}

// cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [dstMem], [tensorMap, coords],
//     [mbar];                                                                                                     sm_90
__device__ __forceinline__ void cp_async_bulk_tensor_2d_g2s(void* dst, const void* tensor_map, int c0, int c1,
                                                            u64* mbar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(smem_addr(dst)),
      "l"(tensor_map), "r"(c0), "r"(c1), "r"(smem_addr(mbar))
      : "memory");
}

// cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [tensorMap, coords], [srcMem];                       sm_90
__device__ __forceinline__ void cp_async_bulk_tensor_2d_s2g(const void* tensor_map, int c0, int c1, const void* src) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(tensor_map),
      "r"(c0), "r"(c1), "r"(smem_addr(src))
      : "memory");
}

// cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [dstMem], [tensorMap, coords],
//     [mbar];                                                                                                     sm_90
__device__ __forceinline__ void cp_async_bulk_tensor_3d_g2s(void* dst, const void* tensor_map, int c0, int c1, int c2,
                                                            u64* mbar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(smem_addr(dst)),
      "l"(tensor_map), "r"(c0), "r"(c1), "r"(c2), "r"(smem_addr(mbar))
      : "memory");
}

// cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [tensorMap, coords], [srcMem];                       sm_90
__device__ __forceinline__ void cp_async_bulk_tensor_3d_s2g(const void* tensor_map, int c0, int c1, int c2,
                                                            const void* src) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(tensor_map),
      "r"(c0), "r"(c1), "r"(c2), "r"(smem_addr(src))
      : "memory");
}

// cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [dstMem], [tensorMap, coords],
//     [mbar];                                                                                                     sm_90
__device__ __forceinline__ void cp_async_bulk_tensor_4d_g2s(void* dst, const void* tensor_map, int c0, int c1, int c2,
                                                            int c3, u64* mbar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(smem_addr(dst)),
      "l"(tensor_map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(smem_addr(mbar))
      : "memory");
}

// cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [tensorMap, coords], [srcMem];                       sm_90
__device__ __forceinline__ void cp_async_bulk_tensor_4d_s2g(const void* tensor_map, int c0, int c1, int c2, int c3,
                                                            const void* src) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(tensor_map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(smem_addr(src))
      : "memory");
}

// cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [dstMem], [tensorMap, coords],
//     [mbar];                                                                                                     sm_90
__device__ __forceinline__ void cp_async_bulk_tensor_5d_g2s(void* dst, const void* tensor_map, int c0, int c1, int c2,
                                                            int c3, int c4, u64* mbar) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(smem_addr(dst)),
      "l"(tensor_map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(smem_addr(mbar))
      : "memory");
}

// cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [tensorMap, coords], [srcMem];                       sm_90
__device__ __forceinline__ void cp_async_bulk_tensor_5d_s2g(const void* tensor_map, int c0, int c1, int c2, int c3,
                                                            int c4, const void* src) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(tensor_map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(smem_addr(src))
      : "memory");
}

#endif  // __CUDA_ARCH__ >= 900

}  // namespace cupyep::ptx
