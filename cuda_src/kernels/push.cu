// PUSH: our rows into their final places at every destination. Any number of CTAs.
//
//   in    x [num_tokens][kRowBytes]; order and routing from COUNT; scales [num_tokens][kScaleBytes] if these are not 0;
//         topk_idx and topk_weights, or 0
//   out   at each destination's block: rows, and beside them scales, local expert ids and weights (side rows)
//   sync  post (H7: the block may be written), done (H4, H8, H9)
//   moves each row once from memory and once to each destination: the SM's store port is the limit
//
// warps 0 .. kWarps - 1   rows, each warp for itself
// the last kSideWarps     side rows
//
// TMA mover, per warp: a ring of kStages slots of kChunkBytes. Lane 0 loads a chunk of a row (mbarrier), and every lane
// whose rank gets the token issues one bulk store from the slot. A slot is refilled when the group of stores before the
// newest has read it (wait_group.read 1: stage i - 1 is free while stage i is being read).
//   slot    load .. full | stores read .. free | load ...
// Vector mover: the same walk with registers in place of the slot.
#include <cupyep/mover.cuh>
#include <cupyep/side_rows.cuh>

using namespace cupyep;

// The places of a token. They are read one turn ahead: their latency would cost as much as a short row.
struct Places {
  int order[kRankWords];  // of rank word * 32 + lane: place among our tokens for that rank, or -1

  __device__ __forceinline__ void read(const PushParams& p, u32 token, u32 lane) {
#pragma unroll
    for (u32 word = 0; word < kRankWords; ++word) {
      const u32 rank = word * 32 + lane;
      const int* orders = reinterpret_cast<const int*>(p.order) + static_cast<u64>(token) * cfg::kNumRanks;
      order[word] = rank < cfg::kNumRanks ? orders[rank] : -1;
    }
  }
};

// A row at or past the capacity is never written; the whole group leaves (cannot happen unless memory was corrupted).
__device__ __forceinline__ bool within(const PushParams& p, const Destinations& to, int row, u32 rank, u32 epoch) {
  if (static_cast<u32>(row) < to.capacity[rank]) return true;
  abort_all(p.sync, abort_record(p.sync, cfg::kAbortOverflow, cfg::kOperationPush, rank, epoch), epoch);
  return false;
}

extern "C" __global__ void __launch_bounds__(cfg::kPushThreads, 1) push(const __grid_constant__ PushParams p) {
  extern __shared__ __align__(128) u8 smem[];
  __shared__ Destinations to;
  const Routing* routing = reinterpret_cast<const Routing*>(p.routing);
  const u32 lane = threadIdx.x % 32, epoch = next_epoch(p.sync);
  // What is ours is read before we wait for peers, and none of it waits for another.
  for (u32 rank = threadIdx.x; rank < cfg::kNumRanks; rank += blockDim.x) {
    to.rows[rank] = arena(p.sync, rank);
    to.base[rank] = reinterpret_cast<const int*>(routing + 1)[rank];
  }
  if (routing->skip) return;  // COUNT found that no rank may push: no epoch, no post
  begin(p.sync, cfg::kOperationPush, epoch);
  if (blockIdx.x == 0) post(p.sync, p.post, epoch);  // before all else: peers wait for it
  const Walk walk(p.num_tokens);
  Mover mover(smem, walk, reinterpret_cast<const u8*>(p.x));  // starts to load
  Places next = {};
  if (walk.count > 0) next.read(p, walk.unit(0).token, lane);

  u32 verdict = wait_posts(p.sync, cfg::kOperationPush, epoch);
  for (u32 rank = threadIdx.x; rank < cfg::kNumRanks; rank += blockDim.x) {
    const Post& theirs = *post_slot(p.sync, p.sync.rank, epoch, rank);
    u8* block = to.rows[rank];
    to.rows[rank] = block + theirs.rows_offset;
    to.idx[rank] = block + theirs.idx_offset;
    to.weights[rank] = reinterpret_cast<float*>(block + theirs.weights_offset);
    to.scales[rank] = reinterpret_cast<ScaleVec*>(block + theirs.scales_offset);
    to.capacity[rank] = theirs.capacity;
  }
  __syncthreads();

  bool leave = verdict != cfg::kVerdictDone, stop = false;
  if (threadIdx.x / 32 >= cfg::kWarps && !leave) {
    if (p.topk_idx != 0) push_columns(p, to);
    push_scales(p, to);
  }
  for (u32 i = 0; i < walk.count && !leave; ++i) {
    const Unit unit = walk.unit(i);
    const Places places = next;
    bool fits = true;
    if (i + 1 < walk.count) next.read(p, walk.unit(i + 1).token, lane);
    mover.wait(i);
#pragma unroll
    for (u32 word = 0; word < kRankWords; ++word) {
      const u32 rank = word * 32 + lane;
      const int row = places.order[word] < 0 ? -1 : places.order[word] + static_cast<int>(to.base[rank]);
      const bool goes = row >= 0 && (fits &= within(p, to, row, rank, epoch));
      mover.store(goes ? to.rows[rank] + static_cast<u64>(row) * cfg::kRowBytes : nullptr, unit);
    }
    mover.next(i);
    leave = __any_sync(kAll, stop || !fits);
    stop = aborted(p.sync);  // looked at one turn later, so that its latency is hidden
  }
  mover.drain();  // H4: every store is complete before this rank says so
  if (!arrive_last(p.sync)) return;
  if (verdict == cfg::kVerdictDone && !exchange_done(p.sync, cfg::kOperationPush, epoch)) verdict = cfg::kVerdictAborted;
  end(p.sync, 1, epoch, verdict);
}
