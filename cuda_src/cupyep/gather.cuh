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

// Where our rows lie at each rank, from the routing and, once these are here, the posts; in shared memory.
struct Sources {
  u8* rows[cfg::kNumRanks];
  float* weights[cfg::kNumRanks];
};

// The row of `token` at `rank`, counted from our first row there, or -1.
__device__ __forceinline__ int order_at(const PullParams& p, u32 token, u32 rank) {
  if (token >= p.num_tokens || rank >= cfg::kNumRanks) return -1;
  return reinterpret_cast<const int*>(p.order)[static_cast<u64>(token) * cfg::kNumRanks + rank];
}

// Sums start with the bias at byte `at` of the output: our own memory, read before we wait for peers' rows.
template <int kBytes>
__device__ __forceinline__ void add_bias(const PullParams& p, u64 at, float* sums) {
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    if (p.bias[i] != 0) accumulate<cfg::kDType>(sums, *reinterpret_cast<const VecOf<kBytes>*>(p.bias[i] + at));
  }
}

#if __CUDA_ARCH__ >= 900
// Hides how a value was made, so that it stays in a register instead of being made anew at each use in a hot loop.
__device__ __forceinline__ u32 in_register(u32 value) {
  asm volatile("mov.u32 %0, %0;" : "+r"(value));
  return value;
}

// Each CTA has kGroups independent groups: kConsumerWarps warps that add, one that loads, and a ring of kSlots slots.
// A slot takes the chunks of up to kRowsPerSlot rows of one token, by ascending rank; a token takes as many as it needs.
//   full[s]   one arrival (the loader's) and the chunks' bytes              loader -> consumers   (H1)
//   kind[s]   rows in slot s, and whether it ends its unit                  loader -> consumers, with full
//   empty[s]  kConsumerWarps arrivals, each after its lanes' proxy fences   consumers -> loader   (H3)
// Within a CTA nobody waits for a peer, so these waits need no deadline. After an abort the loader hands out slots
// without rows, and everybody runs dry with the barriers in step and no load under way.
class TmaGather {
 public:
  __device__ TmaGather(u8* smem, const PullParams& p)
      : warp_(threadIdx.x / 32 % kGroupWarps), group_(threadIdx.x / 32 / kGroupWarps) {
    u64* barriers = reinterpret_cast<u64*>(smem + cfg::kGroups * cfg::kSlots * kStageBytes);
    u32* kinds = reinterpret_cast<u32*>(barriers + cfg::kGroups * 2 * cfg::kSlots);
    full_ = barriers + group_ * 2 * cfg::kSlots;
    kind_ = kinds + group_ * cfg::kSlots;
    ring_ = smem + group_ * cfg::kSlots * kStageBytes;
    if (group_ < cfg::kGroups && warp_ == 0 && threadIdx.x % 32 == 0) {
      for (u32 slot = 0; slot < cfg::kSlots; ++slot) {
        ptx::mbarrier_init(full_ + slot, 1);
        ptx::mbarrier_init(full_ + cfg::kSlots + slot, cfg::kConsumerWarps);
      }
      ptx::fence_mbarrier_init_release_cluster();  // H6; the CTA barriers of wait_posts follow
    }
    const u32 total = p.num_tokens * cfg::kNumChunks, first = index_of(0);
    num_units_ = total > first ? (total - first - 1) / (gridDim.x * cfg::kGroups) + 1 : 0;
    if (warp_ == cfg::kConsumerWarps) read_next(p, 0);
  }

  __device__ __forceinline__ void run(const PullParams& p, const Sources& from) {
    if (warp_ == cfg::kConsumerWarps) load(p, from);
    else add(p);
  }

 private:
  static constexpr u32 kGroupWarps = cfg::kConsumerWarps + 1;
  static constexpr u32 kThreads = cfg::kConsumerWarps * 32;
  static constexpr int kPerVec = kElements<cfg::kDType, 16>;
  static constexpr u32 kStageBytes = cfg::kRowsPerSlot * cfg::kSlotBytes;
  static constexpr bool kExact = cfg::kSlotBytes == cfg::kVecsPerThread * kThreads * 16 && cfg::kRowBytes % cfg::kSlotBytes == 0;
  static constexpr u32 kLast = 1u << 31;  // of kind; the other bits are the number of rows
  static constexpr u32 kBatch = cfg::kNumRanks <= 32 ? 32 / cfg::kNumRanks : 1;  // units whose ranks fit into a warp

  // A unit is a chunk of a token, index token * kNumChunks + chunk; this is the group's unit number `unit`.
  __device__ __forceinline__ u32 index_of(u32 unit) const {
    return (unit * gridDim.x + blockIdx.x) * cfg::kGroups + group_;
  }

  __device__ __forceinline__ static u32 chunk_bytes(u32 offset) {
    if constexpr (cfg::kNumChunks == 1) return cfg::kRowBytes;
    const u32 left = cfg::kRowBytes - offset;
    return left < cfg::kChunkBytes ? left : cfg::kChunkBytes;
  }

  __device__ __forceinline__ static void wait(u32 barrier, u32 phase) {
    while (!ptx::mbarrier_try_wait_parity(barrier, phase)) {
    }
  }

  // All lanes of the loader. They leave together: once one of them hands the slot out, it may be empty again before a
  // lane that lags behind has looked, and would then seem never to become so.
  __device__ __forceinline__ static void wait_empty(u32 barrier, u32 phase) {
    wait(barrier, phase);
    __syncwarp();
  }

  // The loader's lanes stand for a batch of units, and within each for its ranks (of 32 at a time, if there are more).
  __device__ __forceinline__ static u32 lane_unit() { return kBatch > 1 ? threadIdx.x % 32 / cfg::kNumRanks : 0; }
  __device__ __forceinline__ static u32 lane_rank() { return threadIdx.x % 32 % (kBatch > 1 ? cfg::kNumRanks : 32); }

  // Places of the batch of units from `first` on, read a batch ahead.
  __device__ __forceinline__ void read_next(const PullParams& p, u32 first) {
    const u32 unit = first + lane_unit();
#pragma unroll
    for (u32 word = 0; word < kRankWords; ++word) {
      next_[word] = unit < num_units_ ? order_at(p, index_of(unit) / cfg::kNumChunks, word * 32 + lane_rank()) : -1;
    }
  }

  __device__ __forceinline__ void load(const PullParams& p, const Sources& from) {
    const u32 lane = threadIdx.x % 32, mine = lane_unit(), rank = lane_rank();
    const u32 full = ptx::smem_addr(full_), empty = full + cfg::kSlots * 8;
    u32 slot = 0, phase = 1;  // of empty: the first lap waits for nobody
    bool leave = false;
    for (u32 unit = 0; unit < num_units_; unit += kBatch) {
      int order[kRankWords];
      u32 goes[kRankWords];
#pragma unroll
      for (u32 word = 0; word < kRankWords; ++word) {
        order[word] = next_[word];
        goes[word] = __ballot_sync(kAll, order[word] >= 0 && !leave);
      }
      read_next(p, unit + kBatch);
      leave = __any_sync(kAll, aborted(p.sync));
#pragma unroll 1  // each copy of the body would have its own bulk load
      for (u32 j = 0; j < kBatch && unit + j < num_units_; ++j) {
        const u32 offset = index_of(unit + j) % cfg::kNumChunks * cfg::kChunkBytes, bytes = chunk_bytes(offset);
        constexpr u32 kOnes = cfg::kNumRanks < 32 ? (1u << (cfg::kNumRanks % 32)) - 1 : ~0u;  // a unit's ranks
        u32 num_left = 0;
#pragma unroll
        for (u32 word = 0; word < kRankWords; ++word) num_left += __popc(goes[word] >> (j * cfg::kNumRanks) & kOnes);
        bool none = num_left == 0;  // of a token that went nowhere: a slot without rows, so that zeros are written
#pragma unroll
        for (u32 word = 0; word < kRankWords; ++word) {
          for (u32 left = goes[word] >> (j * cfg::kNumRanks) & kOnes; left != 0 || none; none = false) {
            const u32 place = __popc(left & ((1u << (rank % 32)) - 1)), num_rows = min(__popc(left), cfg::kRowsPerSlot);
            const bool takes = mine == j && left >> (rank % 32) & 1 && place < cfg::kRowsPerSlot;
            num_left -= num_rows;
            // sync(slot.empty) ACQUIRE.cta: all consumers have read the slot (H3). Pairs with RELEASE in add.
            wait_empty(empty + slot * 8, phase);
            if (lane == 0) {
              kind_[slot] = num_left == 0 ? num_rows | kLast : num_rows;
              ptx::mbarrier_arrive_expect_tx(full_ + slot, num_rows * bytes);
            }
            __syncwarp();
            // sync(row.load) RELEASE.cluster: the copies' last acts complete the bytes of full (H1). Read by: add.
            if (takes) {  // the peer's row may be read: acquire and proxy fence were in wait_posts (H5)
              ptx::cp_async_bulk_g2s(ring_ + slot * kStageBytes + place * cfg::kSlotBytes,
                                     from.rows[rank + word * 32] + static_cast<u64>(order[word]) * cfg::kRowBytes + offset,
                                     bytes, full_ + slot);
            }
            if (++slot == cfg::kSlots) slot = 0, phase ^= 1;
#pragma unroll
            for (u32 row = 0; row < cfg::kRowsPerSlot; ++row) left &= left - 1;  // of 0: stays 0
          }
        }
      }
    }
  }

  __device__ __forceinline__ void add(const PullParams& p) const {
    const u32 lane = in_register(threadIdx.x % 32), thread = warp_ * 32 + lane;
    const u32 full = in_register(ptx::smem_addr(full_)), vec = in_register(ptx::smem_addr(ring_) + thread * 16);
    u32 slot = 0, phase = 0;
    for (u32 unit = 0; unit < num_units_; ++unit) {
      const u32 token = index_of(unit) / cfg::kNumChunks, offset = index_of(unit) % cfg::kNumChunks * cfg::kChunkBytes;
      const u32 num_vecs = chunk_bytes(offset) / 16;
      const u64 place = static_cast<u64>(token) * cfg::kRowBytes + offset;
      float sums[cfg::kVecsPerThread][kPerVec] = {};
      if (p.bias[0] != 0) {
#pragma unroll
        for (u32 j = 0; j < cfg::kVecsPerThread; ++j) {
          const u32 at = thread + j * kThreads;
          if (kExact || at < num_vecs) add_bias<16>(p, place + at * 16, sums[j]);
        }
      }
      bool more = true;
      while (more) {
        // sync(row.load) ACQUIRE.cta: every lane observes the phase (H1). Pairs with RELEASE in load.
        wait(full + slot * 8, phase);
        const u32 kind = kind_[slot], num_rows = kind & ~kLast;
        more = !(kind & kLast);
        u32 row = 0, from = vec + slot * kStageBytes;
        do {
          VecOf<16> vecs[cfg::kVecsPerThread];
#pragma unroll
          for (u32 j = 0; j < cfg::kVecsPerThread; ++j) {
            if (kExact || thread + j * kThreads < num_vecs) {
              const uint4 words = ptx::ld_shared_v4(from + j * kThreads * 16);
              vecs[j] = {words.x, words.y, words.z, words.w};
            }
          }
          from += cfg::kSlotBytes;
          if (++row >= num_rows) {
            // sync(slot.empty) RELEASE.cta: all lanes have read it; each fences, then one arrives (H3). Read by: load.
            ptx::fence_proxy_async_shared_cta();
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(full + (cfg::kSlots + slot) * 8);
          }
          if (num_rows > 0) {
#pragma unroll
            for (u32 j = 0; j < cfg::kVecsPerThread; ++j) {
              if (kExact || thread + j * kThreads < num_vecs) accumulate<cfg::kDType>(sums[j], vecs[j]);
            }
          }
        } while (row < num_rows);
        if (++slot == cfg::kSlots) slot = 0, phase ^= 1;
      }
      u8* out = reinterpret_cast<u8*>(p.out) + place;
#pragma unroll
      for (u32 j = 0; j < cfg::kVecsPerThread; ++j) {
        if (kExact || thread + j * kThreads < num_vecs) {
          reinterpret_cast<VecOf<16>*>(out)[thread + j * kThreads] = rounded<cfg::kDType, 16>(sums[j]);
        }
      }
    }
  }

  u32 warp_, group_, num_units_;
  int next_[kRankWords] = {};
  u8* ring_;
  u64* full_;  // [kSlots], and empty behind them
  u32* kind_;
};
#endif

// One token per warp at a time; each lane adds its vectors of kVecBytes, kBatch at once, straight from the peers.
class VectorGather {
 public:
  __device__ VectorGather(u8*, const PullParams&) {}

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
        const u64 first = static_cast<u64>(token) * cfg::kRowBytes;
        for (u32 j = 0; p.bias[0] != 0 && j < kBatch; ++j) {
          const u32 at = start + 32 * j + lane;
          if (at < kNumVecs) add_bias<cfg::kVecBytes>(p, first + at * cfg::kVecBytes, sums[j]);
        }
#pragma unroll
        for (u32 word = 0; word < kRankWords; ++word) {
          for (u32 left = __ballot_sync(kAll, orders[word] >= 0); left != 0; left &= left - 1) {
            const u32 owner = __ffs(left) - 1;
            const u64 row = static_cast<u64>(__shfl_sync(kAll, orders[word], owner)) * cfg::kRowBytes;
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
        Vec* out = reinterpret_cast<Vec*>(reinterpret_cast<u8*>(p.out) + first);
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
