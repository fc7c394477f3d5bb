#pragma once
// The user's expert ids, as COUNT and the low-latency dispatch read them.
#include <cupyep/ptx/types.cuh>

namespace cupyep {

using ptx::u32;
using ptx::u64;

// ids[j] = topk_idx[at + j * stride] of `count`; past the end the last one, as loads without conditions do not wait for
// each other.
template <u32 kLoads, class Id>
__device__ __forceinline__ void load_ids(long long (&ids)[kLoads], const Id* topk_idx, u32 at, u32 stride, u32 count) {
#pragma unroll
  for (u32 j = 0; j < kLoads; ++j) ids[j] = topk_idx[min(at + j * stride, count - 1)];
}

// The same of `topk_idx` from its element `first` on, i64 or i32.
template <u32 kLoads>
__device__ __forceinline__ void load_ids(long long (&ids)[kLoads], u64 topk_idx, bool idx64, u64 first, u32 at, u32 stride,
                                         u32 count) {
  if (idx64) load_ids(ids, reinterpret_cast<const long long*>(topk_idx) + first, at, stride, count);
  else load_ids(ids, reinterpret_cast<const int*>(topk_idx) + first, at, stride, count);
}

__device__ __forceinline__ long long id_at(u64 topk_idx, bool idx64, u64 at) {
  return idx64 ? reinterpret_cast<const long long*>(topk_idx)[at] : reinterpret_cast<const int*>(topk_idx)[at];
}

}  // namespace cupyep
