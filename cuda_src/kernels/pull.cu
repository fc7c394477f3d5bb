// PULL: each of our tokens becomes the sum of its rows at the ranks that it was sent to.
//
//   in    order and routing from COUNT; every rank's posted block: rows and, if they travel, weights
//         bias: up to two addends [num_tokens][kRowBytes], or 0
//   out   out [num_tokens][kRowBytes], out_weights [num_tokens][num_topk] f32, or 0: our own memory, nobody else's
//   sync  post (H5: the rows may be read), done (H9: the blocks may be reused)
//   moves each row once over the link into shared memory; the sum, in fp32 by ascending rank, once to memory
//
// warps 0 ..          Gather: groups of consumers and a loader (TMA), or a token each (vector)
// the last warp       weights: a lane per column, 32 / num_topk tokens side by side
#include <cupyep/gather.cuh>

using namespace cupyep;

// Loads under a condition would wait for each other: past the end the last token is taken again, and where a token has
// no row, a word of our own is loaded and not used.
__device__ __forceinline__ void pull_weights(const PullParams& p, const Sources& from) {
  constexpr u32 kBatch = 8;  // tokens that a lane has under way
  const u32 lane = threadIdx.x % 32, num_topk = p.post.num_topk, per_turn = 32 / num_topk;
  const u32 column = lane % num_topk;
  const int* orders = reinterpret_cast<const int*>(p.order);
  float* out = reinterpret_cast<float*>(p.out_weights);
  if (lane >= per_turn * num_topk) return;
  for (u32 turn = blockIdx.x * per_turn * kBatch; turn < p.num_tokens; turn += gridDim.x * per_turn * kBatch) {
    if (aborted(p.sync)) return;
    u32 tokens[kBatch];
    float sums[kBatch] = {};
#pragma unroll
    for (u32 j = 0; j < kBatch; ++j) tokens[j] = min(turn + j * per_turn + lane / num_topk, p.num_tokens - 1);
#pragma unroll 2
    for (u32 rank = 0; rank < cfg::kNumRanks; ++rank) {
      int order[kBatch];
      float weights[kBatch];
#pragma unroll
      for (u32 j = 0; j < kBatch; ++j) order[j] = orders[static_cast<u64>(tokens[j]) * cfg::kNumRanks + rank];
#pragma unroll
      for (u32 j = 0; j < kBatch; ++j) {
        const float* there = from.weights[rank] + static_cast<u64>(static_cast<u32>(order[j])) * num_topk + column;
        weights[j] = *(order[j] >= 0 ? there : reinterpret_cast<const float*>(orders));
      }
#pragma unroll
      for (u32 j = 0; j < kBatch; ++j) sums[j] = order[j] >= 0 ? __fadd_rn(sums[j], weights[j]) : sums[j];
    }
#pragma unroll
    for (u32 j = 0; j < kBatch; ++j) out[static_cast<u64>(tokens[j]) * num_topk + column] = sums[j];
  }
}

extern "C" __global__ void __launch_bounds__(cfg::kPullThreads, 1) pull(const __grid_constant__ PullParams p) {
  extern __shared__ __align__(128) u8 smem[];
  __shared__ Sources from;
  const Routing* routing = reinterpret_cast<const Routing*>(p.routing);
  const u32 epoch = next_epoch(p.sync);
  // What is ours is read before we wait for peers, and none of it waits for another.
  for (u32 rank = threadIdx.x; rank < cfg::kNumRanks; rank += blockDim.x) {
    const u64 base = reinterpret_cast<const int*>(routing + 1)[rank];
    u8* start = arena(p.sync, rank);
    from.rows[rank] = start + base * cfg::kRowBytes;
    from.weights[rank] = reinterpret_cast<float*>(start) + base * p.post.num_topk;
  }
  if (routing->skip) return;  // nor did PUSH run, on any rank
  begin(p.sync, cfg::kOperationPull, epoch);
  if (blockIdx.x == 0) post(p.sync, p.post, epoch);  // before all else: peers wait for it
  Gather gather(smem, p);
  u32 verdict = wait_posts(p.sync, cfg::kOperationPull, epoch);
  for (u32 rank = threadIdx.x; rank < cfg::kNumRanks; rank += blockDim.x) {
    const Post& theirs = *post_slot(p.sync, p.sync.rank, epoch, rank);
    from.rows[rank] += theirs.rows_offset;
    from.weights[rank] += theirs.weights_offset / sizeof(float);
  }
  __syncthreads();

  if (verdict == cfg::kVerdictDone) {
    if (threadIdx.x / 32 == blockDim.x / 32 - 1) {
      if (p.out_weights != 0) pull_weights(p, from);
    } else {
      gather.run(p, from);
    }
  }
  if (!arrive_last(p.sync)) return;
  if (verdict == cfg::kVerdictDone && !exchange_done(p.sync, cfg::kOperationPull, epoch)) verdict = cfg::kVerdictAborted;
  end(p.sync, 1, epoch, verdict);
}
