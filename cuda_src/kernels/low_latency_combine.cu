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
#include <cupyep/low_latency.cuh>

using namespace cupyep;
using Params = LowLatencyCombineParams;

constexpr int kPerVec = kElements<cfg::kDType, cfg::kVecBytes>;
constexpr u32 kOperation = cfg::kOperationLowLatencyCombine;

// All lanes: add(b, batch) for each bit b of `bits`, lowest first, with this lane's share of the row at row(b). The next
// row is on its way while one is added.
template <class Row, class Add>
__device__ __forceinline__ void add_rows(u32 bits, u32 part, Row row, Add add) {
  const auto load = [&](Vec* batch) {  // of the lowest bit, if there is one; returns its number
    const u32 bit = __ffs(bits) - 1;
    if (bits != 0) load_part<cfg::kVecBytes, cfg::kRowBytes>(batch, row(bit), part);
    bits &= bits - 1;
    return bit;
  };
  Vec even[kBatch] = {}, odd[kBatch] = {};
  for (u32 first = load(even); first != kNone;) {
    const u32 second = load(odd);
    add(first, even);
    if (second == kNone) break;
    first = load(even);
    add(second, odd);
  }
}

__device__ __forceinline__ void store_sums(const float (&sums)[kBatch][kPerVec], u8* row, u32 part) {
  Vec batch[kBatch];
#pragma unroll
  for (u32 j = 0; j < kBatch; ++j) batch[j] = rounded<cfg::kDType, cfg::kVecBytes>(sums[j]);
  store_part<cfg::kVecBytes, cfg::kRowBytes>(batch, row, part);
}

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
__device__ __forceinline__ void send_sum(const Params& p, const Share& share) {
  if (share.token >= p.ll.max_tokens) return;
  const u32 num_positions = p.ll.num_local_experts * cfg::kNumRanks * p.ll.max_tokens;  // rows of x
  float sums[kBatch][kPerVec] = {};
  const auto row = [&](u32 column) {
    return reinterpret_cast<const u8*>(p.x) + static_cast<u64>(__shfl_sync(kAll, share.position, column)) * cfg::kRowBytes;
  };
  add_rows(__ballot_sync(kAll, share.position < num_positions), share.part, row, [&](u32 column, const Vec* batch) {
    const float factor = __shfl_sync(kAll, share.weight, column);
#pragma unroll
    for (u32 j = 0; j < kBatch; ++j) accumulate_weighted<cfg::kDType>(sums[j], batch[j], factor);
  });
  const u64 there = static_cast<u64>(p.sync.rank) * p.ll.max_tokens + share.token;
  store_sums(sums, region(p.sync, p.ll, share.home) + there * cfg::kRowBytes, share.part);
}

// The send half, every CTA, all threads. False: leave.
__device__ bool send(const Params& p, u32 epoch) {
  __shared__ bool goes[cfg::kNumRanks];
  __shared__ u32 num_rows[cfg::kNumRanks], starts[cfg::kNumRanks + 1];
  if (!await_consumed(p.sync, p.ll, kOperation, epoch, goes)) return false;
  if (p.ll.with_weights && !exchange_weights(p, goes, epoch)) return false;
  for (u32 rank = threadIdx.x; rank < cfg::kNumRanks; rank += blockDim.x) {
    num_rows[rank] = reinterpret_cast<const u32*>(p.tables.num_rows)[rank];
  }
  __syncthreads();
  sum_up(num_rows, starts);

  u8* ours = region(p.sync, p.ll, p.sync.rank);
  for_items<Share>(
      warp_index(), starts[cfg::kNumRanks] * cfg::kParts, num_warps(),
      [&](u32 unit, Share& share) { look_up(p, starts, goes, ours, unit, share); },
      [&](const Share& share) { send_sum(p, share); });
  publish(p.sync, p.ll, cfg::kArrivalRows, epoch, num_rows);
  return true;
}

// The receive half, every CTA, all threads. False: leave.
__device__ bool receive(const Params& p, u32 epoch) {
  __shared__ u32 came[cfg::kNumRanks];
  if (!await_arrivals(p.sync, p.ll, cfg::kArrivalRows, kOperation, epoch, came)) return false;
  u8* ours = region(p.sync, p.ll, p.sync.rank);
  for (u32 unit = warp_index(); unit < p.ll.num_tokens * cfg::kParts; unit += num_warps()) {
    const u32 token = unit / cfg::kParts, part = unit % cfg::kParts;
    float sums[kBatch][kPerVec] = {};
    for (u32 word = 0; word < kRankWords; ++word) {
      const u32 went = reinterpret_cast<const u32*>(p.tables.token_ranks)[token * kRankWords + word];
      const u32 rank = word * 32 + threadIdx.x % 32;
      const auto row = [&](u32 bit) {
        return ours + (static_cast<u64>(word * 32 + bit) * p.ll.max_tokens + token) * cfg::kRowBytes;
      };
      add_rows(went & __ballot_sync(kAll, rank < cfg::kNumRanks && came[rank]), part, row, [&](u32, const Vec* batch) {
#pragma unroll
        for (u32 j = 0; j < kBatch; ++j) accumulate<cfg::kDType>(sums[j], batch[j]);
      });
    }
    store_sums(sums, reinterpret_cast<u8*>(p.out) + static_cast<u64>(token) * cfg::kRowBytes, part);
  }
  return true;
}

extern "C" __global__ void __launch_bounds__(cfg::kThreads, 2) low_latency_combine(const __grid_constant__ Params p) {
  u32 epoch = ptx::ld_relaxed_gpu(&channel_state(p.sync)->epoch) + 1;
  bool well = true;
  if (p.ll.phases & cfg::kPhaseSend) {
    epoch = begin(p.sync, kOperation);
    well = send(p, epoch);
  }
  if (well && p.ll.phases & cfg::kPhaseReceive) receive(p, epoch);
  leave(p.sync, p.ll, 1, epoch);
}
