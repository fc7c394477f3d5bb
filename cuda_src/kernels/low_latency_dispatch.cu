// LOW_LATENCY_DISPATCH: each token once to every rank of its experts, and there to every one of its experts' rows.
//
//   in    x [num_tokens][kRowBytes], topk_idx, topk_weights or 0
//   send  a token's row, cast to e4m3 if kFp8, into our part of each peer's region; beside it scales and meta words:
//           meta[0] the token, meta[1 + k] kNone or place << 10 | local expert, then num_topk weights if they travel;
//         place: how many earlier tokens of ours that expert gets; to each peer also how many in all (counts)
//   out   recv_x [experts][ranks * max_tokens], rows by (source rank, source token); scales, counts, layout; tables for
//         the combine: where a row's experts have it, its token and weights
//   sync  await_consumed (H7), publish (H8, H9), await_arrivals (H5), leave: see low_latency.cuh
//   moves a row once from memory, once over the link per rank, once out of the region, once to memory per expert
//
// One launch does both halves, or two launches one each. Every warp takes shares of rows.
#include <cupyep/fp8.cuh>
#include <cupyep/low_latency_ids.cuh>

using namespace cupyep;
using Params = LowLatencyDispatchParams;

using WireVec = VecOf<cfg::kWireVecBytes>;

__device__ __forceinline__ u32* meta_of(const Params& p, u8* region, u64 row) {
  return reinterpret_cast<u32*>(region + p.ll.side_offset) + row * (1 + 2 * p.ll.num_topk);
}

// A share of a row, as it is, to the rows `to` of the lanes of `leaders`.
__device__ __forceinline__ void send_part(const u8* x, u32 part, u64 row, u32 leaders) {
  WireVec batch[kBatch];
  load_part<cfg::kWireVecBytes, cfg::kWireBytes>(batch, x, part);
  for (u32 left = leaders; left != 0; left &= left - 1) {
    const u64 to = __shfl_sync(kAll, row, __ffs(left) - 1);
    store_part<cfg::kWireVecBytes, cfg::kWireBytes>(batch, reinterpret_cast<u8*>(to), part);
  }
}

// The same, cast: a lane has 16 values, eight lanes a group of 128 and its scale.
__device__ __forceinline__ void send_part_fp8(const u8* x, u32 part, u64 row, u64 scales, u32 leaders) {
  constexpr u32 kVecs = 16 / kElements<cfg::kDType, 16>;
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (u32 j = 0; j < kBatch; ++j) {
    const u32 step = part * kBatch + j, at = step * 32 + lane;  // in units of 16 values
    const bool inside = at < cfg::kHidden / 16;
    float values[16] = {}, amax = 0.0f;
    if (inside) {
#pragma unroll
      for (u32 v = 0; v < kVecs; ++v) {
        const VecOf<16> vec = reinterpret_cast<const VecOf<16>*>(x)[at * kVecs + v];
        widened<cfg::kDType>(values + v * (16 / kVecs), vec);
      }
    }
#pragma unroll
    for (u32 i = 0; i < 16; ++i) amax = fmaxf(amax, fabsf(values[i]));
#pragma unroll
    for (u32 distance = 1; distance < 8; distance *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAll, amax, distance));
    const Scale scale = scale_of<cfg::kRoundScale>(amax);
#pragma unroll
    for (u32 i = 0; i < 16; ++i) values[i] = __fmul_rn(values[i], scale.inverse);
    const uint4 codes = {packed_e4m3<4>(values), packed_e4m3<4>(values + 4), packed_e4m3<4>(values + 8), packed_e4m3<4>(values + 12)};
    u32 word = __float_as_uint(scale.value);
    if constexpr (cfg::kUe8m0) {  // four exponents, of lanes 0, 8, 16, 24, into one word
      word = (word >> 23) << lane / 8 * 8;
      word |= __shfl_xor_sync(kAll, word, 8);
      word |= __shfl_xor_sync(kAll, word, 16);
    }
    const u32 index = cfg::kUe8m0 ? step : at / 8;
    const bool writes = lane % (cfg::kUe8m0 ? 32 : 8) == 0 && index < cfg::kScaleWords;
    for (u32 left = leaders; left != 0; left &= left - 1) {
      const u64 to = __shfl_sync(kAll, row, __ffs(left) - 1), to_scales = __shfl_sync(kAll, scales, __ffs(left) - 1);
      if (inside) reinterpret_cast<uint4*>(to)[at] = codes;
      if (writes) reinterpret_cast<u32*>(to_scales)[index] = word;
    }
  }
}

// What the receivers need to know of the token, to the lanes of `leaders`; lane k has column k.
__device__ void send_meta(const Params& p, const Ids& ids, u32 token, u16 expert, u32 rank, u64 meta, u32 leaders) {
  const u32 lane = threadIdx.x % 32, num_topk = p.ll.num_topk;
  const u32 entry = place_at_expert(ids, token, expert) << cfg::kExpertBits | expert % p.ll.num_local_experts;
  float weight = 0.0f;
  if (p.ll.with_weights && lane < num_topk) weight = reinterpret_cast<const float*>(p.topk_weights)[token * num_topk + lane];
  for (u32 left = leaders; left != 0; left &= left - 1) {
    const u32 owner = __ffs(left) - 1, theirs = __shfl_sync(kAll, rank, owner);
    u32* to = reinterpret_cast<u32*>(__shfl_sync(kAll, meta, owner));
    if (lane == 0) to[0] = token;
    if (lane < num_topk) to[1 + lane] = rank == theirs ? entry : kNone;
    if (p.ll.with_weights && lane < num_topk) to[1 + num_topk + lane] = __float_as_uint(weight);
  }
}

// The send half, every CTA, all threads. False: leave.
__device__ bool send(const Params& p, u8* smem, u32 epoch) {
  __shared__ bool goes[cfg::kNumRanks];
  __shared__ u32 totals[cfg::kNumRanks];
  const Ids ids(p, smem);
  const u32 lane = threadIdx.x % 32, num_topk = p.ll.num_topk;
  read_ids(p, ids);  // before the wait, which they are not for
  if (!await_consumed(p.sync, p.ll, cfg::kOperationLowLatencyDispatch, epoch, goes)) return false;
  leave_out(p, ids, goes, totals);
  if (blockIdx.x == 0) send_counts(p, ids, goes);

  const Range shares(p.ll.num_tokens * cfg::kParts);  // neighbours: a token's places serve for many shares of its row
  for (u32 share = shares.begin; share < shares.end;) {
    const u32 token = share / cfg::kParts, first = share % cfg::kParts;
    const u32 last = min(first + shares.end - share, static_cast<u32>(cfg::kParts));
    const u16 expert = lane < num_topk ? ids.experts[token * num_topk + lane] : kNoExpert;
    const u32 rank = expert != kNoExpert ? expert / p.ll.num_local_experts : kNone;
    const bool leads = is_first(rank, rank != kNone && goes[rank]);
    const u32 leaders = __ballot_sync(kAll, leads);
    const u64 row = static_cast<u64>(p.sync.rank) * p.ll.max_tokens + (leads ? place_at_rank(ids, token, rank) : 0);
    u8* to = leads ? region(p.sync, p.ll, rank) : nullptr;
    const u8* x = reinterpret_cast<const u8*>(p.x) + static_cast<u64>(token) * cfg::kRowBytes;
    const u64 wire_row = reinterpret_cast<u64>(to) + row * cfg::kWireBytes;
    if (first == 0) send_meta(p, ids, token, expert, rank, reinterpret_cast<u64>(meta_of(p, to, row)), leaders);
    for (u32 part = first; part < last; ++part) {
      if constexpr (cfg::kFp8) {
        send_part_fp8(x, part, wire_row, reinterpret_cast<u64>(to) + p.ll.scales_offset + row * (4 * cfg::kScaleWords), leaders);
      } else {
        send_part(x, part, wire_row, leaders);
      }
    }
    share += last - first;
  }
  publish(p.sync, p.ll, cfg::kArrivalRows, epoch, totals);
  return true;
}

// All threads: begin[source][expert] = rows of the expert that come from earlier sources. The first CTA also tells the
// user and the combine.
__device__ void read_counts(const Params& p, const u32* num_rows, u32* begin) {
  const u32 num_local = p.ll.num_local_experts;
  for (u32 expert = threadIdx.x; expert < num_local; expert += blockDim.x) {
    u32 sum = 0;
    for (u32 source = 0; source < cfg::kNumRanks; ++source) {
      const u32 told = counts_of(p, p.sync.rank, source)[expert], count = num_rows[source] != 0 ? told : 0;
      begin[source * num_local + expert] = sum;
      if (blockIdx.x == 0) {
        reinterpret_cast<u64*>(p.layout_range)[expert * cfg::kNumRanks + source] = static_cast<u64>(sum) << 32 | count;
      }
      sum += count;
    }
    if (blockIdx.x == 0) {
      reinterpret_cast<u32*>(p.recv_count)[expert] = sum;
      if (p.stats != 0) reinterpret_cast<u32*>(p.stats)[expert] += sum;
    }
  }
  for (u32 rank = threadIdx.x; blockIdx.x == 0 && rank < cfg::kNumRanks; rank += blockDim.x) {
    reinterpret_cast<u32*>(p.tables.num_rows)[rank] = num_rows[rank];
  }
  __syncthreads();
}

constexpr u32 kScaleRounds = cfg::kFp8 ? (cfg::kScaleWords + 31) / 32 : 1;  // of a warp, to move a row's scales

// A share of a row that has come: this lane's vectors, in lane k the entry of column k of its meta words, and the scales
// if it is the row's first share.
struct Share {
  WireVec batch[kBatch];
  u32 source, row, part, entry, token, weight, scales[kScaleRounds];
};

// Share `index` of all those that this rank receives.
__device__ __forceinline__ void fetch(const Params& p, const u32* starts, u8* from, u32 index, Share& share) {
  const u32 lane = threadIdx.x % 32, number = index / cfg::kParts;
  share.part = index % cfg::kParts;
  share.source = source_of(starts, number);
  share.row = share.source * p.ll.max_tokens + number - starts[share.source];
  load_part<cfg::kWireVecBytes, cfg::kWireBytes>(share.batch, from + static_cast<u64>(share.row) * cfg::kWireBytes, share.part);
  const u32* meta = meta_of(p, from, share.row);
  share.entry = lane < p.ll.num_topk ? meta[1 + lane] : kNone;
  if (share.part != 0) return;
  share.token = meta[0];
  if (lane < p.ll.num_topk && p.ll.with_weights) share.weight = meta[1 + p.ll.num_topk + lane];
  const u32* scales = reinterpret_cast<const u32*>(from + p.ll.scales_offset) + static_cast<u64>(share.row) * cfg::kScaleWords;
#pragma unroll
  for (u32 i = 0; i < kScaleRounds; ++i) {
    if (i * 32 + lane < cfg::kScaleWords) share.scales[i] = scales[i * 32 + lane];
  }
}

// A share that has come, to the rows of its token's experts; the row's first share takes scales and tables along.
// begin[source][expert]: see read_counts.
__device__ __forceinline__ void distribute(const Params& p, const u32* begin, const Share& share) {
  const u32 lane = threadIdx.x % 32, num_topk = p.ll.num_topk, num_local = p.ll.num_local_experts;
  const u32 expert_rows = cfg::kNumRanks * p.ll.max_tokens;
  const u32 expert = share.entry & ((1u << cfg::kExpertBits) - 1);
  u32 place = 0, position = kNone;  // at the expert; among all rows of recv_x
  if (share.entry != kNone && expert < num_local) {
    place = begin[share.source * num_local + expert] + (share.entry >> cfg::kExpertBits);
    if (place < expert_rows) position = expert * expert_rows + place;  // else of a region in pieces
  }
  const u32 leaders = __ballot_sync(kAll, is_first(position, position != kNone));
  for (u32 left = leaders; left != 0; left &= left - 1) {
    const u32 owner = __ffs(left) - 1;
    const u64 to = __shfl_sync(kAll, position, owner);
    u8* row = reinterpret_cast<u8*>(p.recv_x) + to * cfg::kWireBytes;
    store_part<cfg::kWireVecBytes, cfg::kWireBytes>(share.batch, row, share.part);
    if (cfg::kFp8 && share.part == 0) {  // scales of an expert: [kScaleWords][expert_rows], as grouped GEMMs load them
      const u64 theirs = __shfl_sync(kAll, expert, owner), column = __shfl_sync(kAll, place, owner);
#pragma unroll
      for (u32 i = 0; i < kScaleRounds; ++i) {
        const u32 word = i * 32 + lane;
        if (word >= cfg::kScaleWords) break;
        reinterpret_cast<u32*>(p.recv_scales)[(theirs * cfg::kScaleWords + word) * expert_rows + column] = share.scales[i];
      }
    }
  }
  if (share.part != 0) return;
  const u64 at = static_cast<u64>(share.row) * num_topk + lane;
  if (lane == 0) reinterpret_cast<u32*>(p.tables.tokens)[share.row] = share.token;
  if (lane < num_topk) reinterpret_cast<u32*>(p.tables.positions)[at] = position;
  if (lane < num_topk && p.ll.with_weights) reinterpret_cast<u32*>(p.tables.weights)[at] = share.weight;
  if (leaders >> lane & 1) reinterpret_cast<u32*>(p.src_info)[position] = share.token;
}

// The receive half, every CTA, all threads. False: leave.
__device__ bool receive(const Params& p, u8* smem, u32 epoch) {
  __shared__ u32 num_rows[cfg::kNumRanks], starts[cfg::kNumRanks + 1], drawn;
  if (threadIdx.x == 0) drawn = 0;
  u32* begin = reinterpret_cast<u32*>(smem);  // [ranks][num_local_experts]
  if (!await_arrivals(p.sync, p.ll, cfg::kArrivalRows, cfg::kOperationLowLatencyDispatch, epoch, num_rows)) return false;
  sum_up(num_rows, starts);
  read_counts(p, num_rows, begin);

  u8* from = region(p.sync, p.ll, p.sync.rank);
  for_items<Share>(
      &drawn, starts[cfg::kNumRanks] * cfg::kParts, [&](u32 number, Share& share) { fetch(p, starts, from, number, share); },
      [&](const Share& share) { distribute(p, begin, share); });
  return true;
}

extern "C" __global__ void __launch_bounds__(cfg::kThreads, 2) low_latency_dispatch(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) u8 smem[];
  const u32 epoch = next_epoch(p.sync);
  bool well = true;
  if (p.ll.phases & cfg::kPhaseSend) {
    begin(p.sync, cfg::kOperationLowLatencyDispatch, epoch);
    well = send(p, smem, epoch);
  }
  if (well && p.ll.phases & cfg::kPhaseReceive) receive(p, smem, epoch);
  leave(p.sync, p.ll, 0, epoch);
}
