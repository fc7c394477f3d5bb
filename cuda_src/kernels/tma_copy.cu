// COPY: rows or one run of bytes, between any global memory: this GPU's or a peer's. Any number of CTAs, kWarps each.
//
//   in    src, rows of row_bytes at src_pitch; src_rows says which, or 0 for all in order
//   out   dst likewise; with cfg::kAdd the elements are added to it (atomically, relaxed, at gpu scope)
//   sync  none: stream order. A row whose index lies outside of its array is skipped
//   moves each row once from and once to memory: the SM's store port is the limit (60 GB/s)
//
// Work is cut into units, a chunk of a row each, and dealt to the warps of the grid in turn, so that CTAs stay level.
// TMA: a ring of slots per warp (copy_ring.cuh). Vectors: the same units through registers, for addresses that differ
// modulo 16 and for GPUs without bulk copies.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cupyep/vec.cuh>
#if __CUDA_ARCH__ >= 900
#include <cupyep/copy_ring.cuh>
#endif

using namespace cupyep;
using ptx::u32;
using ptx::u64;
using u8 = unsigned char;

template <int kAdd>
struct ElementOf {
  using Type = u8;
};
template <>
struct ElementOf<cfg::kAddFloat32> {
  using Type = float;
};
template <>
struct ElementOf<cfg::kAddFloat16> {
  using Type = __half;
};
template <>
struct ElementOf<cfg::kAddBfloat16> {
  using Type = __nv_bfloat16;
};
template <>
struct ElementOf<cfg::kAddInt32> {
  using Type = int;
};

// What one warp moves at a time. dst is null where there is nothing to move.
struct Unit {
  u8* dst;
  const u8* src;
  u32 bytes;
};

// The row that number `row` stands for, or -1.
__device__ __forceinline__ long long index_of(u64 rows, u32 row, u32 num_rows) {
  long long index = row;
  if (rows != 0) {
    if constexpr (cfg::kIdxBytes == 8) index = reinterpret_cast<const long long*>(rows)[row];
    else index = reinterpret_cast<const int*>(rows)[row];
  }
  return index >= 0 && index < num_rows ? index : -1;
}

__device__ __forceinline__ Unit unit_of(const CopyParams& p, u32 number) {
  const u32 row = number / p.num_chunks, chunk = number - row * p.num_chunks;
  const long long to = index_of(p.dst_rows, row, p.num_dst_rows), from = index_of(p.src_rows, row, p.num_src_rows);
  if (to < 0 || from < 0) return {nullptr, nullptr, 0};
  const u64 offset = static_cast<u64>(chunk) * p.chunk_bytes, left = p.row_bytes - offset;
  return {reinterpret_cast<u8*>(p.dst + to * p.dst_pitch + offset),
          reinterpret_cast<const u8*>(p.src + from * p.src_pitch + offset),
          left < p.chunk_bytes ? static_cast<u32>(left) : p.chunk_bytes};
}

// Element by element, by `num_threads` threads: ends, and what no wider path can move.
template <typename Element = ElementOf<cfg::kAdd>::Type>
__device__ __forceinline__ void move_elements(u8* dst, const u8* src, u32 bytes, u32 thread, u32 num_threads) {
  Element* to = reinterpret_cast<Element*>(dst);
  const Element* from = reinterpret_cast<const Element*>(src);
  for (u32 i = thread; i < bytes / sizeof(Element); i += num_threads) {
    if constexpr (sizeof(Element) == 1) to[i] = from[i];
    else atomicAdd(to + i, from[i]);
  }
}

// By one warp, through registers.
__device__ __forceinline__ void move_vectors(const Unit& unit) {
  constexpr u32 kBatch = 8;  // loads in flight per lane
  const u32 lane = threadIdx.x % 32, num_vecs = unit.bytes / sizeof(Vec);
  const Vec* from = reinterpret_cast<const Vec*>(unit.src);
  Vec* to = reinterpret_cast<Vec*>(unit.dst);
  for (u32 start = lane; start < num_vecs; start += 32 * kBatch) {
    Vec batch[kBatch];
#pragma unroll
    for (u32 j = 0; j < kBatch; ++j) {
      if (start + 32 * j < num_vecs) batch[j] = from[start + 32 * j];
    }
#pragma unroll
    for (u32 j = 0; j < kBatch; ++j) {
      if (start + 32 * j < num_vecs) to[start + 32 * j] = batch[j];
    }
  }
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ u64 policy_of(int hint) {
  return hint == cfg::kHintEvictLast ? ptx::createpolicy_fractional_evict_last()
                                     : ptx::createpolicy_fractional_evict_first();
}

// From shared memory. cfg:: decides which instruction it is.
__device__ __forceinline__ void store(u8* dst, const u8* slot, u32 bytes, u64 policy) {
  if constexpr (cfg::kAdd == cfg::kAddFloat32) ptx::cp_reduce_async_bulk_s2g_add_f32(dst, slot, bytes);
  else if constexpr (cfg::kAdd == cfg::kAddFloat16) ptx::cp_reduce_async_bulk_s2g_add_noftz_f16(dst, slot, bytes);
  else if constexpr (cfg::kAdd == cfg::kAddBfloat16) ptx::cp_reduce_async_bulk_s2g_add_noftz_bf16(dst, slot, bytes);
  else if constexpr (cfg::kAdd == cfg::kAddInt32) ptx::cp_reduce_async_bulk_s2g_add_s32(dst, slot, bytes);
  else if constexpr (cfg::kStoreHint == cfg::kHintNone) ptx::cp_async_bulk_s2g(dst, slot, bytes);
  else ptx::cp_async_bulk_s2g_l2_cache_hint(dst, slot, bytes, policy);
}

// The units of one warp. All lanes work 32 of them out at a time, so that the latency of indices is paid once for all.
class Rows {
 public:
  using Unit = ::Unit;

  __device__ Rows(const CopyParams& p, u32 first, u32 stride, u32 count)
      : p_(p), first_(first), stride_(stride), count_(count) {}

  __device__ __forceinline__ Unit take(u32 i) {
    const u32 lane = threadIdx.x % 32;
    if (i % 32 == 0 && i + lane < count_) mine_ = unit_of(p_, first_ + (i + lane) * stride_);
    const u64 dst = __shfl_sync(~0u, reinterpret_cast<u64>(mine_.dst), i % 32);
    const u64 src = __shfl_sync(~0u, reinterpret_cast<u64>(mine_.src), i % 32);
    return {reinterpret_cast<u8*>(dst), reinterpret_cast<const u8*>(src), __shfl_sync(~0u, mine_.bytes, i % 32)};
  }

  __device__ __forceinline__ void load(const Unit& unit, u8* slot, u64* full) const {
    if (unit.dst == nullptr) return ptx::mbarrier_arrive(full);  // nothing comes: the phase is over
    ptx::mbarrier_arrive_expect_tx(full, unit.bytes);
    if constexpr (cfg::kLoadHint == cfg::kHintNone) ptx::cp_async_bulk_g2s(slot, unit.src, unit.bytes, full);
    else ptx::cp_async_bulk_g2s_l2_cache_hint(slot, unit.src, unit.bytes, full, load_policy_);
  }

  __device__ __forceinline__ void store(const Unit& unit, const u8* slot) const {
    if (unit.dst != nullptr) ::store(unit.dst, slot, unit.bytes, store_policy_);
  }

 private:
  const CopyParams& p_;
  const u32 first_, stride_, count_;
  const u64 load_policy_ = policy_of(cfg::kLoadHint), store_policy_ = policy_of(cfg::kStoreHint);
  Unit mine_ = {};
};
#endif

extern "C" __global__ void __launch_bounds__(cfg::kWarps * 32, 1) tma_copy(const __grid_constant__ CopyParams p) {
  if (blockIdx.x == 0) {
    u8* dst = reinterpret_cast<u8*>(p.dst);
    const u8* src = reinterpret_cast<const u8*>(p.src);
    move_elements(dst - p.head_bytes, src - p.head_bytes, p.head_bytes, threadIdx.x, blockDim.x);
    move_elements(dst + p.row_bytes, src + p.row_bytes, p.tail_bytes, threadIdx.x, blockDim.x);
  }
  const u32 first = threadIdx.x / 32 * gridDim.x + blockIdx.x, stride = cfg::kWarps * gridDim.x;
  const u32 total = p.num_rows * p.num_chunks, count = total > first ? (total - first + stride - 1) / stride : 0;
#if __CUDA_ARCH__ >= 900
  if constexpr (cfg::kMover == cfg::kMoverTma) {
    extern __shared__ __align__(128) u8 smem[];
    Rows rows(p, first, stride, count);
    copy_ring(rows, count, smem);
  } else
#endif
  for (u32 i = 0; i < count; ++i) {
    const Unit unit = unit_of(p, first + i * stride);
    if (unit.dst == nullptr) continue;
    if constexpr (cfg::kAdd == cfg::kAddNone) move_vectors(unit);
    else move_elements(unit.dst, unit.src, unit.bytes, threadIdx.x % 32, 32);
  }
}
