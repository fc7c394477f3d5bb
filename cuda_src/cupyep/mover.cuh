#pragma once
// How a warp of PUSH moves rows: through a ring in shared memory by bulk copies (sm_90), or through registers.
// One policy, chosen by cfg::kMover; both have the same five steps: construct, wait, store, next, drain.
#include <cupyep/sync.cuh>
#include <cupyep/vec.cuh>
#if __CUDA_ARCH__ >= 900
#include <cupyep/ptx/bulk.cuh>
#include <cupyep/ptx/mbarrier.cuh>
#endif

namespace cupyep {

// A chunk of a row: rows too long for the ring are split by columns.
struct Unit {
  u32 token, chunk;
  u32 offset;  // bytes from the row's start
  u32 bytes;
};

// The units of one warp: every (warps of the grid)-th of num_tokens * kNumChunks, so that CTAs stay level. Warps from
// kWarps on have none, and no ring.
struct Walk {
  u32 first, stride, count;

  __device__ explicit Walk(u32 num_tokens)
      : first(threadIdx.x / 32 * gridDim.x + blockIdx.x), stride(cfg::kWarps * gridDim.x) {
    const u32 total = num_tokens * cfg::kNumChunks;
    count = threadIdx.x / 32 < cfg::kWarps && total > first ? (total - first + stride - 1) / stride : 0;
  }

  __device__ __forceinline__ Unit unit(u32 i) const {
    const u32 index = first + i * stride, chunk = index % cfg::kNumChunks, offset = chunk * cfg::kChunkBytes;
    const u32 left = cfg::kRowBytes - offset;
    return {index / cfg::kNumChunks, chunk, offset, left < cfg::kChunkBytes ? left : cfg::kChunkBytes};
  }
};

#if __CUDA_ARCH__ >= 900
// A ring of kStages slots per warp. Phases complete in order, so slot s is in phase (number of its use) & 1.
class TmaMover {
 public:
  __device__ TmaMover(u8* smem, const Walk& walk, const u8* x) : walk_(walk), x_(x) {
    const u32 warp = threadIdx.x / 32;
    ring_ = smem + warp * cfg::kStages * cfg::kSlotBytes;
    full_ = reinterpret_cast<u64*>(smem + cfg::kWarps * cfg::kStages * cfg::kSlotBytes) + warp * cfg::kStages;
    if (walk.count > 0 && threadIdx.x % 32 == 0) {
      for (u32 stage = 0; stage < cfg::kStages; ++stage) ptx::mbarrier_init(full_ + stage, 1);
      ptx::fence_mbarrier_init_release_cluster();  // H6; the warp barrier below hands it to the lanes that wait
#pragma unroll 1
      for (u32 i = 0; i < cfg::kStages && i < walk.count; ++i) load(i);
    }
    issued_ = walk.count < cfg::kStages ? walk.count : cfg::kStages;
    __syncwarp();
  }

  // Until unit i is in its slot. A load from our own memory always lands.
  // sync(chunk.load) ACQUIRE.cta: every lane observes the phase (H1). Pairs with RELEASE in load.
  __device__ __forceinline__ void wait(u32) {
    while (!ptx::mbarrier_try_wait_parity(full_ + stage_, phase_)) {
    }
  }

  // Each lane: its destination's place for the row, or null. That block is writable since wait_posts (H7).
  __device__ __forceinline__ void store(u8* row, const Unit& unit) {
    if (row != nullptr) ptx::cp_async_bulk_s2g(row + unit.offset, ring_ + stage_ * cfg::kSlotBytes, unit.bytes);
  }

  // Closes unit i's stores and refills the slot of unit i - 1, which every lane's stores have read by then. No fence:
  // the slot passes from bulk load to bulk store and back, and no thread touches it.
  __device__ __forceinline__ void next(u32 i) {
    ptx::cp_async_bulk_commit_group();
    if (i > 0) {
      ptx::cp_async_bulk_wait_group_read<1>();
      __syncwarp();
      if (issued_ < walk_.count) {
        if (threadIdx.x % 32 == 0) load(issued_);
        ++issued_;
      }
    }
    if (++stage_ == cfg::kStages) stage_ = 0, phase_ ^= 1;
    waited_ = i + 1;
  }

  // Also on the way out after an abort: nothing of ours may land in shared memory that is no longer ours.
  __device__ __forceinline__ void drain() {
    for (; waited_ < issued_; ++waited_) {
      wait(waited_);
      if (++stage_ == cfg::kStages) stage_ = 0, phase_ ^= 1;
    }
    ptx::cp_async_bulk_wait_group<0>();  // H4: by the threads that issued
  }

 private:
  __device__ __forceinline__ void load(u32 i) {
    const Unit unit = walk_.unit(i);
    const u32 stage = i % cfg::kStages;
    // sync(chunk.load) RELEASE.cluster: the copy's last act is to complete the bytes of full (H1). Read by: wait.
    ptx::mbarrier_arrive_expect_tx(full_ + stage, unit.bytes);
    ptx::cp_async_bulk_g2s(ring_ + stage * cfg::kSlotBytes, x_ + static_cast<u64>(unit.token) * cfg::kRowBytes + unit.offset,
                           unit.bytes, full_ + stage);
  }

  Walk walk_;
  const u8* x_;
  u8* ring_;
  u64* full_;
  u32 stage_ = 0, phase_ = 0, issued_ = 0, waited_ = 0;
};
#endif

// Registers in place of the ring: 4 vectors per lane at a time, stored to every destination of the token.
class VectorMover {
 public:
  __device__ VectorMover(u8*, const Walk&, const u8* x) : x_(x) {}
  __device__ __forceinline__ void wait(u32) {}

  // All lanes: each names its own destination's place for the row, or null.
  __device__ __forceinline__ void store(u8* row, const Unit& unit) {
    constexpr u32 kBatch = 4;
    const Vec* from = reinterpret_cast<const Vec*>(x_ + static_cast<u64>(unit.token) * cfg::kRowBytes + unit.offset);
    const u32 lane = threadIdx.x % 32, num_vecs = unit.bytes / sizeof(Vec);
    const u32 takers = __ballot_sync(kAll, row != nullptr);
    if (takers == 0) return;
    for (u32 start = lane; start < num_vecs + lane; start += 32 * kBatch) {  // the same number of turns in every lane
      Vec batch[kBatch];
#pragma unroll
      for (u32 j = 0; j < kBatch; ++j) {
        if (start + 32 * j < num_vecs) batch[j] = from[start + 32 * j];
      }
      for (u32 left = takers; left != 0; left &= left - 1) {
        const u64 there = __shfl_sync(kAll, reinterpret_cast<u64>(row), __ffs(left) - 1);
        Vec* to = reinterpret_cast<Vec*>(there + unit.offset);
#pragma unroll
        for (u32 j = 0; j < kBatch; ++j) {
          if (start + 32 * j < num_vecs) to[start + 32 * j] = batch[j];
        }
      }
    }
  }

  __device__ __forceinline__ void next(u32) {}
  __device__ __forceinline__ void drain() {}

 private:
  const u8* x_;
};

template <int kMover>
struct MoverOf {
  using Type = VectorMover;
};
#if __CUDA_ARCH__ >= 900
template <>
struct MoverOf<cfg::kMoverTma> {
  using Type = TmaMover;
};
#endif
using Mover = MoverOf<cfg::kMover>::Type;

}  // namespace cupyep
