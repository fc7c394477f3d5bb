#pragma once
// How PULL adds a token's rows: out of rings of row slots that bulk loads fill (sm_90), or out of registers.
// One policy, chosen by cfg::kMover. Every warp but the CTA's last takes part.
#include <cupyep/sync.cuh>
#include <cupyep/vec.cuh>
#if __CUDA_ARCH__ >= 900
#include <cupyep/ptx/bulk.cuh>
#include <cupyep/ptx/mbarrier.cuh>
#endif

namespace cupyep {

constexpr u32 kRankWords = (cfg::kNumRanks + 31) / 32;  // of 32 ranks each

// Where rows lie at each rank, from the posts and the routing; in shared memory.
struct Sources {
  u8* rows[cfg::kNumRanks];
  float* weights[cfg::kNumRanks];
};

// The row of `token` at `rank`, counted from our first row there, or -1.
__device__ __forceinline__ int order_at(const PullParams& p, u32 token, u32 rank) {
  if (token >= p.num_tokens || rank >= cfg::kNumRanks) return -1;
  return reinterpret_cast<const int*>(p.order)[static_cast<u64>(token) * cfg::kNumRanks + rank];
}

#if __CUDA_ARCH__ >= 900
// Hides how a value was made, so that it stays in a register instead of being made anew at each use in a hot loop.
__device__ __forceinline__ u32 in_register(u32 value) {
  asm volatile("mov.u32 %0, %0;" : "+r"(value));
  return value;
}

// Each CTA has kGroups independent groups: kConsumerWarps warps that add, one that loads, and a ring of kSlots slots.
// A slot holds one row's chunk, so rows of one token may lie in any slots; they come in ascending rank.
//   full[s]   one arrival (the loader's expect_tx) and the chunk's bytes    loader -> consumers   (H1)
//   empty[s]  kConsumerWarps arrivals, each after its lanes' proxy fences   consumers -> loader   (H3)
class TmaGather {
 public:
  __device__ TmaGather(u8* smem, u32 epoch) : epoch_(epoch), warp_(threadIdx.x / 32 % kGroupWarps) {
    group_ = threadIdx.x / 32 / kGroupWarps;
    u64* barriers = reinterpret_cast<u64*>(smem + cfg::kGroups * cfg::kSlots * cfg::kSlotBytes);
    full_ = barriers + group_ * 2 * cfg::kSlots;
    empty_ = full_ + cfg::kSlots;
    ring_ = smem + group_ * cfg::kSlots * cfg::kSlotBytes;
    if (group_ < cfg::kGroups && warp_ == 0 && threadIdx.x % 32 == 0) {
      for (u32 slot = 0; slot < cfg::kSlots; ++slot) {
        ptx::mbarrier_init(full_ + slot, 1);
        ptx::mbarrier_init(empty_ + slot, cfg::kConsumerWarps);
      }
      ptx::fence_mbarrier_init_release_cluster();  // H6; the CTA barriers of wait_posts follow
    }
  }

  __device__ __forceinline__ void run(const PullParams& p, const Sources& from) {
    if (warp_ == cfg::kConsumerWarps) load(p, from);
    else add(p);
  }

 private:
  static constexpr u32 kGroupWarps = cfg::kConsumerWarps + 1;
  static constexpr u32 kThreads = cfg::kConsumerWarps * 32;
  static constexpr int kPerVec = kElements<cfg::kDType, 16>;
  static constexpr bool kExact = cfg::kSlotBytes == cfg::kVecsPerThread * kThreads * 16 && cfg::kRowBytes % cfg::kSlotBytes == 0;

  // The chunks of this group: index = token * kNumChunks + chunk.
  __device__ __forceinline__ u32 first() const { return blockIdx.x * cfg::kGroups + group_; }
  __device__ __forceinline__ u32 stride() const { return gridDim.x * cfg::kGroups; }

  __device__ __forceinline__ static u32 chunk_bytes(u32 offset) {
    if constexpr (cfg::kNumChunks == 1) return cfg::kRowBytes;
    const u32 left = cfg::kRowBytes - offset;
    return left < cfg::kChunkBytes ? left : cfg::kChunkBytes;
  }

  // A whole warp waits for a phase. False, in all lanes: leave.
  __device__ __forceinline__ bool wait(const PullParams& p, const u64* barrier, u32 phase) const {
    Patience patience;
    bool stay = true;
    while (!ptx::mbarrier_try_wait_parity(barrier, phase) && stay) {
      stay = !patience.exhausted(p.sync, cfg::kOperationPull, p.sync.rank, epoch_);
    }
    return __all_sync(~0u, stay);
  }

  __device__ __forceinline__ void load(const PullParams& p, const Sources& from) {
    const u32 lane = threadIdx.x % 32, total = p.num_tokens * cfg::kNumChunks;
    u32 slot = 0, phase = 1, issued = 0;  // phase of empty[]: the first lap waits for nobody
    bool stop = false;
    int next[kRankWords];  // the next token's places: read ahead, their latency would cost as much as a row
#pragma unroll
    for (u32 word = 0; word < kRankWords; ++word) next[word] = order_at(p, first() / cfg::kNumChunks, word * 32 + lane);
    for (u32 index = first(); index < total && !stop; index += stride()) {
      const u32 offset = index % cfg::kNumChunks * cfg::kChunkBytes, bytes = chunk_bytes(offset);
#pragma unroll
      for (u32 word = 0; word < kRankWords; ++word) {
        const int order = stop ? -1 : next[word];
        next[word] = order_at(p, (index + stride()) / cfg::kNumChunks, word * 32 + lane);
        for (u32 left = __ballot_sync(~0u, order >= 0); left != 0; left &= left - 1) {
          if (!wait(p, empty_ + slot, phase)) {
            stop = true;
            break;
          }
          if (lane == __ffs(left) - 1) {
            // sync(row.load) H5: our posts' acquire and proxy fence were in wait_posts.
            ptx::mbarrier_arrive_expect_tx(full_ + slot, bytes);
            ptx::cp_async_bulk_g2s(ring_ + slot * cfg::kSlotBytes,
                                   from.rows[word * 32 + lane] + static_cast<u64>(order) * cfg::kRowBytes + offset, bytes,
                                   full_ + slot);
          }
          __syncwarp();
          ++issued;
          if (++slot == cfg::kSlots) slot = 0, phase ^= 1;
        }
      }
    }
    // Drain: after an abort nobody else waits for these, and they must not land in shared memory that is no longer ours.
    for (u32 back = 0; back < cfg::kSlots && back < issued; ++back) {
      const u32 use = issued - 1 - back;
      while (!ptx::mbarrier_try_wait_parity(full_ + use % cfg::kSlots, use / cfg::kSlots & 1)) {
      }
    }
  }

  // A thread's wait for a row. Once it has to leave it waits no more and adds what it finds: nobody will see the sums,
  // and the warp stays together without a vote per row.
  __device__ __forceinline__ void wait_or_leave(const PullParams& p, u32 barrier, u32 phase, bool& leaving) const {
    Patience patience;
    while (!ptx::mbarrier_try_wait_parity(barrier, phase) && !leaving) {
      leaving = patience.exhausted(p.sync, cfg::kOperationPull, p.sync.rank, epoch_);
    }
  }

  __device__ __forceinline__ void add(const PullParams& p) {
    const u32 lane = in_register(threadIdx.x % 32), thread = warp_ * 32 + lane, total = p.num_tokens * cfg::kNumChunks;
    const u32 full = in_register(ptx::smem_addr(full_)), vec = in_register(ptx::smem_addr(ring_) + thread * 16);
    u32 slot = 0, phase = 0;
    bool leaving = false;
    int next[kRankWords];  // as in load
#pragma unroll
    for (u32 word = 0; word < kRankWords; ++word) next[word] = order_at(p, first() / cfg::kNumChunks, word * 32 + lane);
    for (u32 index = first(); index < total; index += stride()) {
      const u32 token = index / cfg::kNumChunks, offset = index % cfg::kNumChunks * cfg::kChunkBytes;
      const u32 num_vecs = chunk_bytes(offset) / 16;
      u32 num_rows = 0;
#pragma unroll
      for (u32 word = 0; word < kRankWords; ++word) {
        num_rows += __popc(__ballot_sync(~0u, next[word] >= 0));
        next[word] = order_at(p, (index + stride()) / cfg::kNumChunks, word * 32 + lane);
      }
      float sums[cfg::kVecsPerThread][kPerVec] = {};
      for (u32 row = 0; row < num_rows; ++row) {
        wait_or_leave(p, full + slot * 8, phase, leaving);  // H1
        VecOf<16> vecs[cfg::kVecsPerThread];
#pragma unroll
        for (u32 j = 0; j < cfg::kVecsPerThread; ++j) {
          if (kExact || thread + j * kThreads < num_vecs) {
            const uint4 words = ptx::ld_shared_v4(vec + slot * cfg::kSlotBytes + j * kThreads * 16);
            vecs[j] = {words.x, words.y, words.z, words.w};
          }
        }
        // sync(slot.empty) H3: all lanes have read the slot; each fences, then one arrives. Pairs with empty in load.
        ptx::fence_proxy_async_shared_cta();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(full + (cfg::kSlots + slot) * 8);
        if (++slot == cfg::kSlots) slot = 0, phase ^= 1;
#pragma unroll
        for (u32 j = 0; j < cfg::kVecsPerThread; ++j) {
          if (kExact || thread + j * kThreads < num_vecs) accumulate<cfg::kDType>(sums[j], vecs[j]);
        }
      }
      u8* out = reinterpret_cast<u8*>(p.out) + static_cast<u64>(token) * cfg::kRowBytes + offset;
#pragma unroll
      for (u32 j = 0; j < cfg::kVecsPerThread; ++j) {
        if (kExact || thread + j * kThreads < num_vecs) {
          reinterpret_cast<VecOf<16>*>(out)[thread + j * kThreads] = rounded<cfg::kDType, 16>(sums[j]);
        }
      }
    }
  }

  u32 epoch_, warp_, group_;
  u8* ring_;
  u64 *full_, *empty_;
};
#endif

// One token per warp at a time; each lane adds its vectors of kVecBytes, kBatch at once, straight from the peers.
class VectorGather {
 public:
  __device__ VectorGather(u8*, u32) {}

  __device__ __forceinline__ void run(const PullParams& p, const Sources& from) {
    constexpr u32 kBatch = 4, kNumVecs = cfg::kRowBytes / cfg::kVecBytes;
    constexpr int kPerVec = kElements<cfg::kDType, cfg::kVecBytes>;
    const u32 lane = threadIdx.x % 32, num_warps = blockDim.x / 32 - 1;
    for (u32 token = threadIdx.x / 32 * gridDim.x + blockIdx.x; token < p.num_tokens; token += num_warps * gridDim.x) {
      if (aborted(p.sync)) return;
      int orders[kRankWords];
#pragma unroll
      for (u32 word = 0; word < kRankWords; ++word) orders[word] = order_at(p, token, word * 32 + lane);
      for (u32 start = 0; start < kNumVecs; start += 32 * kBatch) {
        float sums[kBatch][kPerVec] = {};
#pragma unroll
        for (u32 word = 0; word < kRankWords; ++word) {
          for (u32 left = __ballot_sync(~0u, orders[word] >= 0); left != 0; left &= left - 1) {
            const u32 owner = __ffs(left) - 1;
            const u64 row = static_cast<u64>(__shfl_sync(~0u, orders[word], owner)) * cfg::kRowBytes;
            const Vec* vecs = reinterpret_cast<const Vec*>(from.rows[word * 32 + owner] + row);
            Vec batch[kBatch];
#pragma unroll
            for (u32 j = 0; j < kBatch; ++j) {
              if (start + 32 * j + lane < kNumVecs) batch[j] = vecs[start + 32 * j + lane];
            }
#pragma unroll
            for (u32 j = 0; j < kBatch; ++j) {
              if (start + 32 * j + lane < kNumVecs) accumulate<cfg::kDType>(sums[j], batch[j]);
            }
          }
        }
        Vec* out = reinterpret_cast<Vec*>(reinterpret_cast<u8*>(p.out) + static_cast<u64>(token) * cfg::kRowBytes);
#pragma unroll
        for (u32 j = 0; j < kBatch; ++j) {
          if (start + 32 * j + lane < kNumVecs) {
            out[start + 32 * j + lane] = rounded<cfg::kDType, cfg::kVecBytes>(sums[j]);
          }
        }
      }
    }
  }
};

template <int kMover>
struct GatherOf {
  using Type = VectorGather;
};
#if __CUDA_ARCH__ >= 900
template <>
struct GatherOf<cfg::kMoverTma> {
  using Type = TmaGather;
};
#endif
using Gather = GatherOf<cfg::kMover>::Type;

}  // namespace cupyep
