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

// All lanes: for each of the parts [part, last) add(b, batch) for each bit b of `bits`, lowest first, with this lane's
// share of the row at row(b), then done(part). The next share is on its way while one is added.
template <class Row, class Add, class Done>
__device__ __forceinline__ void add_rows(u32 bits, u32 part, u32 last, Row row, Add add, Done done) {
  if (bits == 0) {
    for (; part < last; ++part) done(part);
    return;
  }
  u32 left = bits, ahead = bits, part_ahead = part;
  const auto load = [&](Vec* batch) {
    if (part_ahead == last) return;
    load_part<cfg::kVecBytes, cfg::kRowBytes>(batch, row(__ffs(ahead) - 1), part_ahead);
    ahead &= ahead - 1;
    if (ahead == 0) ahead = bits, ++part_ahead;
  };
  const auto use = [&](const Vec* batch) {
    add(__ffs(left) - 1, batch);
    left &= left - 1;
    if (left == 0) done(part), left = bits, ++part;
  };
  Vec even[kBatch] = {}, odd[kBatch] = {};
  load(even);
  while (part < last) {
    load(odd);
    use(even);
    if (part == last) break;
    load(even);
    use(odd);
  }
}

// Stores this lane's sums, and begins new ones.
__device__ __forceinline__ void store_sums(float (&sums)[kBatch][kPerVec], u8* row, u32 part) {
  Vec batch[kBatch];
#pragma unroll
  for (u32 j = 0; j < kBatch; ++j) {
    batch[j] = rounded<cfg::kDType, cfg::kVecBytes>(sums[j]);
#pragma unroll
    for (float& sum : sums[j]) sum = 0.0f;
  }
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

// A token's sum here: lane k has column k of the token, where the row of its expert is, and the weight.
struct Sum {
  u32 home, token, position;
  float weight;
};

// Sum `number` of all those that this rank sends; one that may not be sent has no token. Where a peer masked us during the
// dispatch the tables may be in pieces: nothing in them leads out of x or out of our part of a region.
__device__ __forceinline__ void look_up(const Params& p, const u32* starts, const bool* goes, u8* ours, u32 number, Sum& sum) {
  const u32 lane = threadIdx.x % 32, num_topk = p.ll.num_topk;
  const u32 home = source_of(starts, number), row = home * p.ll.max_tokens + number - starts[home];
  sum = {home, kNone, kNone, 0.0f};
  if (!goes[home]) return;
  sum.token = reinterpret_cast<const u32*>(p.tables.tokens)[row];
  if (lane < num_topk) {
    const u64 at = static_cast<u64>(row) * num_topk + lane;
    sum.position = reinterpret_cast<const u32*>(p.tables.positions)[at];
    sum.weight = p.ll.with_weights ? weights_of(p, ours, home)[min(sum.token, p.ll.max_tokens - 1) * num_topk + lane]
                                   : reinterpret_cast<const float*>(p.tables.weights)[at];
  }
}

// Parts [first, last) of a sum, to the token's place of our part of its home's region.
__device__ __forceinline__ void send_sum(const Params& p, const Sum& sum, u32 first, u32 last) {
  if (sum.token >= p.ll.max_tokens) return;
  const u32 num_positions = p.ll.num_local_experts * cfg::kNumRanks * p.ll.max_tokens;  // rows of x
  float sums[kBatch][kPerVec] = {};
  const auto row = [&](u32 column) {
    return reinterpret_cast<const u8*>(p.x) + static_cast<u64>(__shfl_sync(kAll, sum.position, column)) * cfg::kRowBytes;
  };
  const auto add = [&](u32 column, const Vec* batch) {
    const float factor = __shfl_sync(kAll, sum.weight, column);
#pragma unroll
    for (u32 j = 0; j < kBatch; ++j) accumulate_weighted<cfg::kDType>(sums[j], batch[j], factor);
  };
  const u64 there = static_cast<u64>(p.sync.rank) * p.ll.max_tokens + sum.token;
  u8* to = region(p.sync, p.ll, sum.home) + there * cfg::kRowBytes;
  const u32 columns = __ballot_sync(kAll, sum.position < num_positions);
  add_rows(columns, first, last, row, add, [&](u32 part) { store_sums(sums, to, part); });
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
  for_rows<Sum>(
      Range(starts[cfg::kNumRanks] * cfg::kParts),
      [&](u32 number, Sum& sum) { look_up(p, starts, goes, ours, number, sum); },
      [&](u32, u32 first, u32 last, const Sum& sum) { send_sum(p, sum, first, last); });
  publish(p.sync, p.ll, cfg::kArrivalRows, epoch, num_rows);
  return true;
}

// Which ranks a token went to.
struct Went {
  u32 ranks[kRankWords];
};

// The receive half, every CTA, all threads. False: leave.
__device__ bool receive(const Params& p, u32 epoch) {
  __shared__ u32 came[cfg::kNumRanks];
  if (!await_arrivals(p.sync, p.ll, cfg::kArrivalRows, kOperation, epoch, came)) return false;
  u8* ours = region(p.sync, p.ll, p.sync.rank);
  const auto load = [&](u32 token, Went& went) {
#pragma unroll
    for (u32 word = 0; word < kRankWords; ++word) {
      const u32 rank = word * 32 + threadIdx.x % 32;
      went.ranks[word] = reinterpret_cast<const u32*>(p.tables.token_ranks)[token * kRankWords + word];
      went.ranks[word] &= __ballot_sync(kAll, rank < cfg::kNumRanks && came[rank]);
    }
  };
  for_rows<Went>(Range(p.ll.num_tokens * cfg::kParts), load, [&](u32 token, u32 first, u32 last, const Went& went) {
    u8* out = reinterpret_cast<u8*>(p.out) + static_cast<u64>(token) * cfg::kRowBytes;
    float sums[kBatch][kPerVec] = {};
    const auto add = [&](u32, const Vec* batch) {
#pragma unroll
      for (u32 j = 0; j < kBatch; ++j) accumulate<cfg::kDType>(sums[j], batch[j]);
    };
    const u32 step = kRankWords == 1 ? last - first : 1;  // a part's sum takes the words in their order
    for (u32 part = first; part < last; part += step) {
#pragma unroll
      for (u32 word = 0; word < kRankWords; ++word) {
        const auto row = [&](u32 bit) {
          return ours + (static_cast<u64>(word * 32 + bit) * p.ll.max_tokens + token) * cfg::kRowBytes;
        };
        add_rows(went.ranks[word], part, part + step, row, add, [&](u32 done) {
          if (word + 1 == kRankWords) store_sums(sums, out, done);
        });
      }
    }
  });
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
