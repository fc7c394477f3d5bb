// PUSH: our rows into their final places at every destination. Any number of CTAs, kWarps independent warps each.
//
//   in    x [num_tokens][kRowBytes]; order and routing from COUNT; scales [num_tokens][kScaleBytes] if these are not 0;
//         topk_idx and topk_weights, or 0
//   out   at each destination's block: rows, and beside them scales, local expert ids and weights (side rows)
//   sync  post (H7: the block may be written), done (H4, H8, H9)
//   moves each row once from memory and once to each destination: the SM's store port is the limit
//
// TMA mover, per warp: a ring of kStages slots of kChunkBytes. Lane 0 loads a chunk of a row (mbarrier), and every lane
// whose rank gets the token issues one bulk store from the slot. A slot is refilled when the group of stores before the
// newest has read it (wait_group.read 1: stage i - 1 is free while stage i is being read).
//   slot    load .. full | stores read .. free | load ...
// Vector mover: the same walk with registers in place of the slot.
#include <cupyep/mover.cuh>

using namespace cupyep;

constexpr u32 kGroups = (cfg::kNumRanks + 31) / 32;
constexpr u32 kScaleVecs = cfg::kScaleBytes / cfg::kScaleVecBytes;  // of a token
using ScaleVec = VecOf<cfg::kScaleVecBytes>;

// Where rows go at each destination, from the posts; in shared memory.
struct Destinations {
  u8* rows[cfg::kNumRanks];
  u8* idx[cfg::kNumRanks];
  float* weights[cfg::kNumRanks];
  ScaleVec* scales[cfg::kNumRanks];
  u32 base[cfg::kNumRanks];      // our first row there
  u32 capacity[cfg::kNumRanks];  // rows that the block holds
};

// What a warp needs to know of a token. It is read one turn ahead: its latency would cost as much as a short row.
struct Token {
  int order[kGroups];  // of rank group * 32 + lane: place among our tokens for that rank, or -1
  long long id;        // of column `lane`
  float weight;
  const ScaleVec* scales;
  ScaleVec scale;  // the vector number `lane` of scales

  __device__ __forceinline__ void read(const PushParams& p, u32 token, u32 lane) {
#pragma unroll
    for (u32 group = 0; group < kGroups; ++group) {
      const u32 rank = group * 32 + lane;
      const int* orders = reinterpret_cast<const int*>(p.order) + static_cast<u64>(token) * cfg::kNumRanks;
      order[group] = rank < cfg::kNumRanks ? orders[rank] : -1;
    }
    if (p.topk_idx != 0 && lane < p.post.num_topk) {
      const u64 at = static_cast<u64>(token) * p.post.num_topk + lane;
      id = p.post.flags & cfg::kFlagIdx64 ? reinterpret_cast<const long long*>(p.topk_idx)[at]
                                          : reinterpret_cast<const int*>(p.topk_idx)[at];
      if (p.topk_weights != 0) weight = reinterpret_cast<const float*>(p.topk_weights)[at];
    }
    if constexpr (kScaleVecs > 0) {
      scales = reinterpret_cast<const ScaleVec*>(p.scales) + static_cast<u64>(token) * kScaleVecs;
      if (lane < kScaleVecs) scale = scales[lane];
    }
  }
};

// A row at or past the capacity is never written; the whole group leaves (cannot happen unless memory was corrupted).
__device__ __forceinline__ bool within(const PushParams& p, const Destinations& to, int row, u32 rank, u32 epoch) {
  if (static_cast<u32>(row) < to.capacity[rank]) return true;
  abort_all(p.sync, abort_record(p.sync, cfg::kAbortOverflow, cfg::kOperationPush, rank, epoch), epoch);
  return false;
}

// Ids, weights and scales of one token to the ranks of one group, of which `row` is this lane's; lane k carries column k.
// They are plain stores: done tells of them (H8).
__device__ __forceinline__ void push_side_rows(const PushParams& p, const Destinations& to, const Token& token, int row,
                                               u32 group, u32 lane) {
  const u32 num_topk = p.post.num_topk;
  for (u32 left = __ballot_sync(~0u, row >= 0); left != 0; left &= left - 1) {
    const u32 owner = __ffs(left) - 1, rank = group * 32 + owner;
    const u64 there = static_cast<u64>(__shfl_sync(~0u, row, owner)), column = there * num_topk + lane;
    if constexpr (kScaleVecs > 0) {
      ScaleVec* scales = to.scales[rank] + there * kScaleVecs;
      if (lane < kScaleVecs) scales[lane] = token.scale;
      for (u32 vec = lane + 32; vec < kScaleVecs; vec += 32) scales[vec] = token.scales[vec];
    }
    if (p.topk_idx != 0 && lane < num_topk) {
      const long long local = token.id - static_cast<long long>(rank) * p.num_local_experts;
      const bool here = local >= 0 && local < p.num_local_experts;
      const long long sent = here ? local : -1;
      if (p.post.flags & cfg::kFlagIdx64) reinterpret_cast<long long*>(to.idx[rank])[column] = sent;
      else reinterpret_cast<int*>(to.idx[rank])[column] = static_cast<int>(sent);
      if (p.topk_weights != 0) to.weights[rank][column] = here ? token.weight : 0.0f;
    }
  }
}

extern "C" __global__ void __launch_bounds__(cfg::kWarps * 32, 1) push(const __grid_constant__ PushParams p) {
  extern __shared__ __align__(128) u8 smem[];
  __shared__ Destinations to;
  const Routing* routing = reinterpret_cast<const Routing*>(p.routing);
  if (routing->skip) return;  // COUNT found that no rank may push: no epoch, no post
  const u32 lane = threadIdx.x % 32;
  const u32 epoch = begin(p.sync, cfg::kOperationPush);
  const Walk walk(p.num_tokens);
  Mover mover(smem, walk, reinterpret_cast<const u8*>(p.x));  // starts to load: x is ours, no peer is involved

  if (blockIdx.x == 0) post(p.sync, p.post, epoch);
  u32 verdict = wait_posts(p.sync, cfg::kOperationPush, epoch);
  for (u32 rank = threadIdx.x; rank < cfg::kNumRanks; rank += blockDim.x) {
    const Post& theirs = *post_slot(p.sync, p.sync.rank, epoch, rank);
    u8* block = arena(p.sync, rank);
    to.rows[rank] = block + theirs.rows_offset;
    to.idx[rank] = block + theirs.idx_offset;
    to.weights[rank] = reinterpret_cast<float*>(block + theirs.weights_offset);
    to.scales[rank] = reinterpret_cast<ScaleVec*>(block + theirs.scales_offset);
    to.base[rank] = reinterpret_cast<const int*>(routing + 1)[rank];
    to.capacity[rank] = theirs.capacity;
  }
  __syncthreads();

  bool leave = verdict != cfg::kVerdictDone, stop = false;
  Token next = {};
  if (walk.count > 0) next.read(p, walk.unit(0).token, lane);
  for (u32 i = 0; i < walk.count && !leave; ++i) {
    const Unit unit = walk.unit(i);
    const Token token = next;
    bool fits = true;
    if (i + 1 < walk.count) next.read(p, walk.unit(i + 1).token, lane);
    mover.wait(i);
#pragma unroll
    for (u32 group = 0; group < kGroups; ++group) {
      const u32 rank = group * 32 + lane;
      const int row = token.order[group] < 0 ? -1 : token.order[group] + static_cast<int>(to.base[rank]);
      const bool goes = row >= 0 && (fits &= within(p, to, row, rank, epoch));
      mover.store(goes ? to.rows[rank] + static_cast<u64>(row) * cfg::kRowBytes : nullptr, unit);
      if (unit.chunk == 0 && (p.topk_idx != 0 || kScaleVecs > 0)) push_side_rows(p, to, token, goes ? row : -1, group, lane);
    }
    mover.next(i);
    leave = __any_sync(~0u, stop || !fits);
    stop = aborted(p.sync);  // looked at one turn later, so that its latency is hidden
  }
  mover.drain();  // H4: every store is complete before this rank says so
  if (!arrive_last(p.sync)) return;
  if (verdict == cfg::kVerdictDone && !exchange_done(p.sync, cfg::kOperationPush, epoch)) verdict = cfg::kVerdictAborted;
  end(p.sync, 1, epoch, verdict);
}
