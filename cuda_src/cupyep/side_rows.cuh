#pragma once
// What travels beside PUSH's rows: local expert ids, weights and scales, each in an array of its own at the destination.
// kSideWarps warps of every CTA store them, while the others move rows. Tokens that go to one rank lie there in their order,
// so what the lanes store at once lies together. Plain stores: done tells of them (H8).
#include <cupyep/sync.cuh>
#include <cupyep/vec.cuh>

namespace cupyep {

constexpr u32 kScaleVecs = cfg::kScaleBytes / cfg::kScaleVecBytes;  // of a token
using ScaleVec = VecOf<cfg::kScaleVecBytes>;

// Where rows go at each destination, from the posts; in shared memory. Until these are here, rows are the ranks' arenas.
struct Destinations {
  u8* rows[cfg::kNumRanks];
  u8* idx[cfg::kNumRanks];
  float* weights[cfg::kNumRanks];
  ScaleVec* scales[cfg::kNumRanks];
  u32 base[cfg::kNumRanks];      // our first row there
  u32 capacity[cfg::kNumRanks];  // rows that the block holds
};

constexpr u32 kSideBatch = cfg::kMover == cfg::kMoverTma ? 8 : 4;  // tokens that a lane has under way

// All of our warp's tokens, `per_turn` side by side: this lane takes number `mine` of each turn (per_turn: none). Calls
// load(j, token) for kSideBatch tokens, then store(j, rank, row) for every rank that gets one of them. Past the end the
// last token is loaded again: loads under a condition would wait for each other.
template <typename Load, typename Store>
__device__ __forceinline__ void for_each_side_row(const PushParams& p, const Destinations& to, u32 per_turn, u32 mine,
                                                  Load load, Store store) {
  if (mine >= per_turn) return;
  const u32 warp = (threadIdx.x / 32 - cfg::kWarps) * gridDim.x + blockIdx.x, size = per_turn * kSideBatch;
  for (u32 turn = warp * size; turn < p.num_tokens; turn += cfg::kSideWarps * gridDim.x * size) {
    if (aborted(p.sync)) return;
    u32 tokens[kSideBatch];
#pragma unroll
    for (u32 j = 0; j < kSideBatch; ++j) {
      tokens[j] = min(turn + j * per_turn + mine, p.num_tokens - 1);
      load(j, tokens[j]);
    }
#pragma unroll 2
    for (u32 rank = 0; rank < cfg::kNumRanks; ++rank) {
      int orders[kSideBatch];
#pragma unroll
      for (u32 j = 0; j < kSideBatch; ++j) {
        orders[j] = reinterpret_cast<const int*>(p.order)[static_cast<u64>(tokens[j]) * cfg::kNumRanks + rank];
      }
#pragma unroll
      for (u32 j = 0; j < kSideBatch; ++j) {
        const u32 row = to.base[rank] + static_cast<u32>(orders[j]);
        const bool ours = turn + j * per_turn + mine < p.num_tokens && orders[j] >= 0;
        if (ours && row < to.capacity[rank]) store(j, rank, row);
      }
    }
  }
}

// A lane per column of ids and weights.
__device__ __forceinline__ void push_columns(const PushParams& p, const Destinations& to) {
  const u32 lane = threadIdx.x % 32, num_topk = p.post.num_topk, column = lane % num_topk;
  const bool wide = p.post.flags & cfg::kFlagIdx64;
  long long ids[kSideBatch];
  float weights[kSideBatch];
  for_each_side_row(
      p, to, 32 / num_topk, lane / num_topk,
      [&](u32 j, u32 token) {
        const u64 at = static_cast<u64>(token) * num_topk + column;
        ids[j] = wide ? reinterpret_cast<const long long*>(p.topk_idx)[at] : reinterpret_cast<const int*>(p.topk_idx)[at];
        if (p.topk_weights != 0) weights[j] = reinterpret_cast<const float*>(p.topk_weights)[at];
      },
      [&](u32 j, u32 rank, u32 row) {
        const u64 at = static_cast<u64>(row) * num_topk + column;
        const long long local = ids[j] - static_cast<long long>(rank) * p.num_local_experts;
        const bool here = local >= 0 && local < p.num_local_experts;
        if (wide) reinterpret_cast<long long*>(to.idx[rank])[at] = here ? local : -1;
        else reinterpret_cast<int*>(to.idx[rank])[at] = here ? static_cast<int>(local) : -1;
        if (p.topk_weights != 0) to.weights[rank][at] = here ? weights[j] : 0.0f;
      });
}

// A lane per vector of a token's scales, or of 32 of them at a time.
__device__ __forceinline__ void push_scales(const PushParams& p, const Destinations& to) {
  if constexpr (kScaleVecs > 0) {
    constexpr u32 kWidth = kScaleVecs < 32 ? kScaleVecs : 32;
    const u32 lane = threadIdx.x % 32;
    const ScaleVec* from = reinterpret_cast<const ScaleVec*>(p.scales);
    ScaleVec scales[kSideBatch];
    for (u32 vec = lane % kWidth; vec < kScaleVecs; vec += kWidth) {
      for_each_side_row(
          p, to, 32 / kWidth, lane / kWidth,
          [&](u32 j, u32 token) { scales[j] = from[static_cast<u64>(token) * kScaleVecs + vec]; },
          [&](u32 j, u32 rank, u32 row) { to.scales[rank][static_cast<u64>(row) * kScaleVecs + vec] = scales[j]; });
    }
  }
}

}  // namespace cupyep
