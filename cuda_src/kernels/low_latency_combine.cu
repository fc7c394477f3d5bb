// LOW_LATENCY_COMBINE: each of our tokens becomes the weighted sum of its experts' rows.
//
//   in    x [experts][ranks * max_tokens] rows, the experts' outputs; the tables of the dispatch; topk_weights if they did
//         not travel with the dispatch, else 0
//   send  first our weights to every peer, if they have to travel, and the wait for theirs; then for each token that we
//         received: sum over its experts here, by ascending column, of weight * row, in fp32, rounded once to kDType: one
//         row per token and rank, into the token's place of our part of its home's region
//   out   out [num_tokens]: sum of a token's rows in fp32 by ascending rank, from +0, rounded once
//   sync  await_consumed (H7), publish (H8, H9), await_arrivals (H5), leave: see low_latency.cuh
//   moves a row once from memory per expert, once over the link per rank, once out of the region
//
// One launch does both halves, or two launches one each.
#include <cupyep/share_ring.cuh>

using namespace cupyep;
using Params = LowLatencyCombineParams;

constexpr int kPerVec = kElements<cfg::kDType, cfg::kVecBytes>;
constexpr u32 kOperation = cfg::kOperationLowLatencyCombine;

// What a row on its way is for: its factor, and where the sum of this row and those before goes, or nullptr if another
// row of the same sum follows.
struct Term {
  u8* sum;
  float weight;
};

// A warp's sums, one after the other, whose rows come through a ring: weight * row in fp32 in the order of add.
template <bool kWeighted>
class Sums {
 public:
  __device__ __forceinline__ explicit Sums(u8* smem) : ring_(smem) {}

  // All lanes: part `part` of `row` is one more term, and the last one if `sum` tells where to.
  __device__ __forceinline__ void add(const u8* row, u32 part, float weight, u8* sum) {
    const auto note = [&](Term& term) {
      if (threadIdx.x % 32 == 0) term = {sum, weight};
    };
    ring_.push(row, part, note, [&](const Term& term, u32 of, const Vec* batch) { use(term, of, batch); });
  }

  // All lanes: a sum of nothing.
  __device__ __forceinline__ static void add_none(u32 part, u8* sum) {
    const Vec zeros[kBatch] = {};
    store_part<cfg::kVecBytes, cfg::kRowBytes>(zeros, sum, part);
  }

  __device__ __forceinline__ void drain() {
    ring_.drain([&](const Term& term, u32 of, const Vec* batch) { use(term, of, batch); });
  }

 private:
  __device__ __forceinline__ void use(const Term& term, u32 part, const Vec* batch) {
#pragma unroll
    for (u32 j = 0; j < kBatch; ++j) {
      if constexpr (kWeighted) accumulate_weighted<cfg::kDType>(sums_[j], batch[j], term.weight);
      else accumulate<cfg::kDType>(sums_[j], batch[j]);
    }
    if (term.sum == nullptr) return;
    Vec result[kBatch];
#pragma unroll
    for (u32 j = 0; j < kBatch; ++j) {
      result[j] = rounded<cfg::kDType, cfg::kVecBytes>(sums_[j]);
#pragma unroll
      for (float& sum : sums_[j]) sum = 0.0f;
    }
    store_part<cfg::kVecBytes, cfg::kRowBytes>(result, term.sum, part);
  }

  ShareRing<Term> ring_;
  float sums_[kBatch][kPerVec] = {};
};

// The weights of `source`'s tokens in our region, by token.
__device__ __forceinline__ float* weights_of(const Params& p, u8* region, u32 source) {
  return reinterpret_cast<float*>(region + p.ll.side_offset) + static_cast<u64>(source) * p.ll.max_tokens * p.ll.num_topk;
}

// Every CTA, all threads: our weights to every peer, then until theirs are here. False: leave.
__device__ bool exchange_weights(const Params& p, const bool* goes, u32 epoch) {
  __shared__ u32 came[cfg::kNumRanks];
  const u32 num_words = p.ll.num_tokens * p.ll.num_topk;
  for (u32 peer = 0; peer < cfg::kNumRanks; ++peer) {
    float* to = weights_of(p, region(p.sync, p.ll, peer), p.sync.rank);
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < num_words && goes[peer]; i += gridDim.x * blockDim.x) {
      to[i] = reinterpret_cast<const float*>(p.topk_weights)[i];
    }
  }
  publish(p.sync, p.ll, cfg::kArrivalWeights, epoch, nullptr);
  return await_arrivals(p.sync, p.ll, cfg::kArrivalWeights, kOperation, epoch, came);
}

// A share of a token's sum: lane k has column k of the token, where the row of its expert is, and the weight.
struct Share {
  u32 home, token, part, position;
  float weight;
};

// Share number `unit` of all those that this rank sends; one that may not be sent has no token. Where a peer masked us
// during the dispatch the tables may be in pieces: nothing in them leads out of x or out of our part of a region.
__device__ __forceinline__ void look_up(const Params& p, const u32* starts, const bool* goes, u8* ours, u32 unit, Share& share) {
  const u32 lane = threadIdx.x % 32, num_topk = p.ll.num_topk, number = unit / cfg::kParts;
  const u32 home = source_of(starts, number), row = home * p.ll.max_tokens + number - starts[home];
  share = {home, kNone, unit % cfg::kParts, kNone, 0.0f};
  if (!goes[home]) return;
  share.token = reinterpret_cast<const u32*>(p.tables.tokens)[row];
  if (lane < num_topk) {
    const u64 at = static_cast<u64>(row) * num_topk + lane;
    share.position = reinterpret_cast<const u32*>(p.tables.positions)[at];
    share.weight = p.ll.with_weights ? weights_of(p, ours, home)[min(share.token, p.ll.max_tokens - 1) * num_topk + lane]
                                     : reinterpret_cast<const float*>(p.tables.weights)[at];
  }
}

// The sum of a token's rows here, to its place of our part of its home's region.
__device__ __forceinline__ void send_sum(const Params& p, const Share& share, Sums<true>& sums) {
  if (share.token >= p.ll.max_tokens) return;
  const u32 num_positions = p.ll.num_local_experts * cfg::kNumRanks * p.ll.max_tokens;  // rows of x
  const u64 there = static_cast<u64>(p.sync.rank) * p.ll.max_tokens + share.token;
  u8* sum = region(p.sync, p.ll, share.home) + there * cfg::kRowBytes;
  u32 left = __ballot_sync(kAll, share.position < num_positions);
  if (left == 0) sums.add_none(share.part, sum);
  while (left != 0) {
    const u32 column = __ffs(left) - 1;
    left &= left - 1;
    const u64 row = __shfl_sync(kAll, share.position, column);
    const float weight = __shfl_sync(kAll, share.weight, column);
    sums.add(reinterpret_cast<const u8*>(p.x) + row * cfg::kRowBytes, share.part, weight, left == 0 ? sum : nullptr);
  }
}

// The send half, every CTA, all threads. False: leave.
__device__ bool send(const Params& p, u8* smem, u32 epoch) {
  __shared__ bool goes[cfg::kNumRanks];
  __shared__ u32 num_rows[cfg::kNumRanks], starts[cfg::kNumRanks + 1], drawn;
  if (threadIdx.x == 0) drawn = 0;
  for (u32 rank = threadIdx.x; rank < cfg::kNumRanks; rank += blockDim.x) {
    num_rows[rank] = reinterpret_cast<const u32*>(p.tables.num_rows)[rank];  // before the wait, which they are not for
  }
  if (!await_consumed(p.sync, p.ll, kOperation, epoch, goes)) return false;
  if (p.ll.with_weights && !exchange_weights(p, goes, epoch)) return false;
  sum_up(num_rows, starts);

  u8* ours = region(p.sync, p.ll, p.sync.rank);
  Sums<true> sums(smem);
  for_items<Share>(
      &drawn, starts[cfg::kNumRanks] * cfg::kParts,
      [&](u32 unit, Share& share) { look_up(p, starts, goes, ours, unit, share); },
      [&](const Share& share) { send_sum(p, share, sums); });
  sums.drain();
  publish(p.sync, p.ll, cfg::kArrivalRows, epoch, num_rows);
  return true;
}

// A share of one of our tokens, and the ranks that it went to.
struct Ours {
  u32 token, part, ranks[kRankWords];
};

// The receive half, every CTA, all threads. False: leave.
__device__ bool receive(const Params& p, u8* smem, u32 epoch) {
  __shared__ u32 came[cfg::kNumRanks], drawn;
  if (threadIdx.x == 0) drawn = 0;
  if (!await_arrivals(p.sync, p.ll, cfg::kArrivalRows, kOperation, epoch, came)) return false;
  u8* from = region(p.sync, p.ll, p.sync.rank);
  const auto look_up = [&](u32 unit, Ours& ours) {
    ours.token = unit / cfg::kParts, ours.part = unit % cfg::kParts;
#pragma unroll
    for (u32 word = 0; word < kRankWords; ++word) {
      ours.ranks[word] = reinterpret_cast<const u32*>(p.tables.token_ranks)[ours.token * kRankWords + word];
    }
  };
  Sums<false> sums(smem);
  for_items<Ours>(&drawn, p.ll.num_tokens * cfg::kParts, look_up, [&](const Ours& ours) {
    u8* sum = reinterpret_cast<u8*>(p.out) + static_cast<u64>(ours.token) * cfg::kRowBytes;
    u32 ranks[kRankWords], behind[kRankWords + 1];  // behind[w]: ranks of words w and later
    behind[kRankWords] = 0;
#pragma unroll
    for (u32 word = kRankWords; word-- > 0;) {
      const u32 rank = word * 32 + threadIdx.x % 32;
      ranks[word] = ours.ranks[word] & __ballot_sync(kAll, rank < cfg::kNumRanks && came[rank]);
      behind[word] = behind[word + 1] | ranks[word];
    }
    if (behind[0] == 0) sums.add_none(ours.part, sum);
#pragma unroll
    for (u32 word = 0; word < kRankWords; ++word) {
      for (u32 left = ranks[word]; left != 0;) {
        const u64 row = static_cast<u64>(word * 32 + __ffs(left) - 1) * p.ll.max_tokens + ours.token;
        left &= left - 1;
        sums.add(from + row * cfg::kRowBytes, ours.part, 1.0f, (left | behind[word + 1]) == 0 ? sum : nullptr);
      }
    }
  });
  sums.drain();
  return true;
}

extern "C" __global__ void __launch_bounds__(cfg::kThreads, 2) low_latency_combine(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) u8 smem[];
  const u32 epoch = next_epoch(p.sync);
  bool well = true;
  if (p.ll.phases & cfg::kPhaseSend) {
    begin(p.sync, kOperation, epoch);
    well = send(p, smem, epoch);
  }
  if (well && p.ll.phases & cfg::kPhaseReceive) receive(p, smem, epoch);
  leave(p.sync, p.ll, 1, epoch);
}
