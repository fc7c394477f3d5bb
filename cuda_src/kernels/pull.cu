// PULL: each of our tokens becomes the sum of its rows at the ranks that it was sent to.
//
//   in    order and routing from COUNT; every rank's posted block: rows and, if they travel, weights
//   out   out [num_tokens][kRowBytes], out_weights [num_tokens][num_topk] f32, or 0: our own memory, nobody else's
//   sync  post (H5: the rows may be read), done (H9: the blocks may be reused)
//   moves each row once over the link into shared memory; the sum, in fp32 by ascending rank, once to memory
//
// warps 0 ..          Gather: groups of consumers and a loader (TMA), or a token each (vector)
// the last warp       weights: 32 / num_topk tokens at a time, a lane per column
#include <cupyep/gather.cuh>

using namespace cupyep;

__device__ __forceinline__ void pull_weights(const PullParams& p, const Sources& from) {
  const u32 lane = threadIdx.x % 32, num_topk = p.post.num_topk, per_turn = 32 / num_topk;
  const u32 column = lane % num_topk;
  float* out = reinterpret_cast<float*>(p.out_weights);
  for (u32 turn = blockIdx.x * per_turn; turn < p.num_tokens; turn += gridDim.x * per_turn) {
    const u32 token = turn + lane / num_topk;
    if (aborted(p.sync)) return;
    if (lane / num_topk >= per_turn || token >= p.num_tokens) continue;
    const int* order = reinterpret_cast<const int*>(p.order) + static_cast<u64>(token) * cfg::kNumRanks;
    float sum = 0;
#pragma unroll 8
    for (u32 rank = 0; rank < cfg::kNumRanks; ++rank) {
      if (order[rank] >= 0) sum = __fadd_rn(sum, from.weights[rank][static_cast<u64>(order[rank]) * num_topk + column]);
    }
    out[static_cast<u64>(token) * num_topk + column] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(cfg::kPullThreads, 1) pull(const __grid_constant__ PullParams p) {
  extern __shared__ __align__(128) u8 smem[];
  __shared__ Sources from;
  const u32 epoch = begin(p.sync, cfg::kOperationPull);
  Gather gather(smem, epoch);
  if (blockIdx.x == 0) post(p.sync, p.post, epoch);
  u32 verdict = wait_posts(p.sync, cfg::kOperationPull, epoch);
  for (u32 rank = threadIdx.x; rank < cfg::kNumRanks; rank += blockDim.x) {
    const Post& theirs = *post_slot(p.sync, p.sync.rank, epoch, rank);
    const u64 base = reinterpret_cast<const int*>(reinterpret_cast<const Routing*>(p.routing) + 1)[rank];
    from.rows[rank] = arena(p.sync, rank) + theirs.rows_offset + base * cfg::kRowBytes;
    from.weights[rank] = reinterpret_cast<float*>(arena(p.sync, rank) + theirs.weights_offset) + base * p.post.num_topk;
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
