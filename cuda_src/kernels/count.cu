// COUNT: who gets which token. One CTA of 32 warps.
//
//   in    topk_idx [num_tokens][num_topk], i32 or i64
//   out   order [num_tokens][ranks] i32: the token's place among our tokens for that rank, or -1
//         routing: base[rank] = our first row at that rank; skip = 1 if the push launched behind us must not run
//         received: rows that come to us and listings of our experts; the caller's statistics, or 0
//         to every peer: our counts (rows for each rank, listings of each of its experts), with our post
//         to the host: rows from each rank, listings of our experts, most tokens of any rank, a bad id, and the first
//         rank that would get more rows than the capacity it has posted
//   sync  post (H8 / H5); no done word: counts are double-buffered and every rank waits for all
//   moves num_tokens * num_topk ids twice from L2, ranks + experts words to each peer
//
// Each warp owns a contiguous stretch of tokens. It counts it once; a scan over warps gives its first place for every
// rank; on the second pass ballots number the tokens of a warp's 32 lanes.
#include <cupyep/sync.cuh>

using namespace cupyep;

constexpr u32 kWarps = 32;
constexpr u32 kGroups = (cfg::kNumRanks + 31) / 32;  // of 32 ranks: one word of a lane's rank mask each

struct RankMask {
  u32 words[kGroups];
};

__device__ __forceinline__ long long id_at(const CountParams& p, u64 at) {
  return p.post.flags & cfg::kFlagIdx64 ? reinterpret_cast<const long long*>(p.topk_idx)[at]
                                        : reinterpret_cast<const int*>(p.topk_idx)[at];
}

// The ranks that own an expert of token `token`. Ids outside [-1, experts) count as -1; where the first is, is noted.
__device__ __forceinline__ RankMask ranks_of(const CountParams& p, u32 token, u32 num_local, u32* histogram, u64* bad_at) {
  RankMask mask = {};
  for (u32 k = 0; k < p.post.num_topk; ++k) {
    const u64 at = static_cast<u64>(token) * p.post.num_topk + k;
    const long long id = id_at(p, at);
    if (id >= 0 && id < p.post.num_experts) {
      const u32 rank = static_cast<u32>(id) / num_local;
#pragma unroll
      for (u32 group = 0; group < kGroups; ++group) {
        mask.words[group] |= rank / 32 == group ? 1u << (rank % 32) : 0u;
      }
      if (histogram != nullptr) atomicAdd(histogram + id, 1u);
    } else if (id != -1 && bad_at != nullptr) {
      atomicMin(bad_at, at);
    }
  }
  return mask;
}

extern "C" __global__ void __launch_bounds__(kWarps * 32, 1) count(const __grid_constant__ CountParams p) {
  extern __shared__ u32 histogram[];  // [experts]
  __shared__ u32 warp_start[kWarps][cfg::kNumRanks];
  __shared__ u32 totals[cfg::kNumRanks];
  __shared__ u64 bad_at;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 num_tokens = p.post.num_tokens, num_experts = p.post.num_experts, num_local = num_experts / cfg::kNumRanks;
  const u32 stretch = (num_tokens + kWarps * 32 - 1) / (kWarps * 32) * 32;
  const u32 first = min(warp * stretch, num_tokens), last = min(first + stretch, num_tokens);
  const u32 epoch = begin(p.sync, cfg::kOperationCount);

  for (u32 expert = threadIdx.x; expert < num_experts; expert += blockDim.x) histogram[expert] = 0;
  if (threadIdx.x == 0) bad_at = ~0ull;
  __syncthreads();

  // First pass: rows of this warp's stretch for each rank (in lane rank % 32), listings of each expert.
  u32 rows[kGroups] = {};
  for (u32 token = first; token < last; token += 32) {
    RankMask mask = {};
    if (token + lane < last) mask = ranks_of(p, token + lane, num_local, histogram, &bad_at);
#pragma unroll
    for (u32 rank = 0; rank < cfg::kNumRanks; ++rank) {
      const u32 ballot = __ballot_sync(~0u, mask.words[rank / 32] >> (rank % 32) & 1);
      if (lane == rank % 32) rows[rank / 32] += __popc(ballot);
    }
  }
#pragma unroll
  for (u32 group = 0; group < kGroups; ++group) {
    if (group * 32 + lane < cfg::kNumRanks) warp_start[warp][group * 32 + lane] = rows[group];
  }
  __syncthreads();
  for (u32 rank = threadIdx.x; rank < cfg::kNumRanks; rank += blockDim.x) {
    u32 sum = 0;
    for (u32 w = 0; w < kWarps; ++w) {
      const u32 mine = warp_start[w][rank];
      warp_start[w][rank] = sum;
      sum += mine;
    }
    totals[rank] = sum;
  }
  __syncthreads();

  // Counts to every peer, published by the post (H8).
  for (u32 peer = 0; peer < cfg::kNumRanks; ++peer) {
    u32* counts = reinterpret_cast<u32*>(channel(p.sync, peer) + cfg::kCountsOffset) +
                  ((epoch & 1) * cfg::kNumRanks + p.sync.rank) * cfg::kCountsWords;
    for (u32 rank = threadIdx.x; rank < cfg::kNumRanks; rank += blockDim.x) counts[rank] = totals[rank];
    for (u32 expert = threadIdx.x; expert < num_local; expert += blockDim.x) {
      counts[cfg::kNumRanks + expert] = histogram[peer * num_local + expert];
    }
  }
  post(p.sync, p.post, epoch);

  // Second pass, while the peers' posts are under way: every token's place.
  for (u32 token = first; token < last; token += 32) {
    RankMask mask = {};
    if (token + lane < last) mask = ranks_of(p, token + lane, num_local, nullptr, nullptr);
    int* order = reinterpret_cast<int*>(p.order) + static_cast<u64>(token + lane) * cfg::kNumRanks;
#pragma unroll
    for (u32 rank = 0; rank < cfg::kNumRanks; ++rank) {
      const bool goes = mask.words[rank / 32] >> (rank % 32) & 1;
      const u32 ballot = __ballot_sync(~0u, goes);
      const u32 place = warp_start[warp][rank] + __popc(ballot & ((1u << lane) - 1));
      if (token + lane < last) order[rank] = goes ? static_cast<int>(place) : -1;
      __syncwarp();
      if (lane == 0) warp_start[warp][rank] += __popc(ballot);
      __syncwarp();
    }
  }

  if (p.wait_stats != 0) {  // a thread per peer, and then the real wait, which is over at once
    const u64 start = ptx::globaltimer();
    for (u32 peer = threadIdx.x; peer < cfg::kNumRanks; peer += blockDim.x) {
      wait_word(p.sync, &post_slot(p.sync, p.sync.rank, epoch, peer)->epoch, epoch, cfg::kOperationCount, peer);
      reinterpret_cast<long long*>(p.wait_stats)[peer] += (ptx::globaltimer() - start) / 1000;
    }
  }
  u32 verdict = wait_posts(p.sync, cfg::kOperationCount, epoch);
  Routing* routing = reinterpret_cast<Routing*>(p.routing);
  int* base = reinterpret_cast<int*>(routing + 1);
  u8* record = host_record(p.sync, 0);
  __shared__ u32 most_tokens, failed_rank, failed_rows;
  if (threadIdx.x == 0) most_tokens = 0, failed_rank = cfg::kNumRanks, failed_rows = 0;
  __syncthreads();
  if (verdict == cfg::kVerdictDone) {
    // What the peers published with their posts; the acquire was in wait_posts (H8).
    const u32* counts = reinterpret_cast<const u32*>(channel(p.sync, p.sync.rank) + cfg::kCountsOffset) +
                        (epoch & 1) * cfg::kNumRanks * cfg::kCountsWords;
    u32* host_rows = reinterpret_cast<u32*>(record + cfg::kHostRowsOffset);
    u32* host_experts = reinterpret_cast<u32*>(record + cfg::kHostExpertsOffset);
    for (u32 rank = threadIdx.x; rank < cfg::kNumRanks; rank += blockDim.x) {
      const Post& theirs = *post_slot(p.sync, p.sync.rank, epoch, rank);
      u32 before = 0, all = 0;
      for (u32 source = 0; source < cfg::kNumRanks; ++source) {
        if (source == p.sync.rank) before = all;
        all += counts[source * cfg::kCountsWords + rank];
      }
      base[rank] = static_cast<int>(before);
      host_rows[rank] = counts[rank * cfg::kCountsWords + p.sync.rank];
      atomicMax(&most_tokens, theirs.num_tokens);
      if (all > theirs.capacity) atomicMin(&failed_rank, rank);
      if (rank == p.sync.rank) *reinterpret_cast<u32*>(p.received) = all;
    }
    for (u32 expert = threadIdx.x; expert < num_local; expert += blockDim.x) {
      u32 sum = 0;
      for (u32 source = 0; source < cfg::kNumRanks; ++source) {
        sum += counts[source * cfg::kCountsWords + cfg::kNumRanks + expert];
      }
      host_experts[expert] = sum;
      reinterpret_cast<u32*>(p.received)[1 + expert] = sum;
      if (p.expert_stats != 0) reinterpret_cast<u32*>(p.expert_stats)[expert] += sum;
    }
    __syncthreads();
    // All ranks have the same counts and posts, so all come to the same verdict.
    if (most_tokens > p.max_tokens) {
      verdict = cfg::kVerdictGrow;
    } else if (failed_rank < cfg::kNumRanks) {
      verdict = cfg::kVerdictFailed;
      if (threadIdx.x == 0) {
        for (u32 source = 0; source < cfg::kNumRanks; ++source) failed_rows += counts[source * cfg::kCountsWords + failed_rank];
      }
    }
  }
  if (threadIdx.x == 0) {
    routing->skip = verdict != cfg::kVerdictDone;
    HostRecord* host = reinterpret_cast<HostRecord*>(record);
    host->most_tokens = most_tokens;
    if (bad_at != ~0ull) host->has_bad_id = 1, host->bad_id = id_at(p, bad_at);  // the host clears it: replays of a graph add up
    host->failed_rank = failed_rank;
    host->failed_rows = failed_rows;
  }
  end(p.sync, 0, epoch, verdict);
}
