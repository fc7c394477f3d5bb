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
//   moves num_tokens * num_topk ids from L2, the order twice, ranks + experts words to each peer
//
// Each warp owns a contiguous stretch of tokens. It counts it once and leaves each token's ranks where its places will be;
// a scan over warps gives its first place for every rank; on the second pass ballots number its tokens.
#include <cupyep/ids.cuh>
#include <cupyep/sync.cuh>

using namespace cupyep;

constexpr u32 kWarps = 32;
constexpr u32 kLoads = 8;  // of a lane, under way together
constexpr u32 kScratchWords = cfg::kNumRanks < 16 * kLoads ? 16 * kLoads : cfg::kNumRanks;

struct RankMask {
  u32 words[kRankWords];
};

constexpr u32 kPlaces = cfg::kNumRanks % 4 == 0 ? 4 : cfg::kNumRanks % 2 == 0 ? 2 : 1;  // stored at once

struct alignas(4 * kPlaces) Places {
  int of[kPlaces];
};

// All lanes: the ranks that own an expert of this lane's token, of `num_tokens` from `token` on. Their ids are loaded as
// they lie and change lanes in `ranks`. What names no expert counts for one behind the last, of a rank behind the last;
// where the first id outside [-1, experts) is, is noted.
// inverse: 2^31 / experts of a rank, rounded up: the upper half of (2 id + 1) * inverse is id / experts of a rank, as that
// adds half of the smallest fraction, and rounding far less: ids have 15 bits.
__device__ __forceinline__ RankMask ranks_of(const CountParams& p, u32 token, u32 num_tokens, u32 inverse, u16* ranks, u32* histogram, u64* bad_at) {
  const u32 lane = threadIdx.x % 32, num_topk = p.post.num_topk, count = num_tokens * num_topk;
  const u64 first = static_cast<u64>(token) * num_topk;
  const bool idx64 = p.post.flags & cfg::kFlagIdx64;
  long long ids[kLoads];
  load_ids(ids, p.topk_idx, idx64, first, lane, 32, count);
  u32 bad = kNone;
  __syncwarp();  // all lanes have read the ranks of the tokens before
#pragma unroll
  for (u32 j = 0; j < kLoads; ++j) {
    const u32 i = j * 32 + lane;
    const bool is_there = i < count, is_expert = static_cast<u64>(ids[j]) < p.post.num_experts;
    const u32 expert = is_there && is_expert ? static_cast<u32>(ids[j]) : p.post.num_experts;
    ranks[i] = __umulhi(2 * expert + 1, inverse);
    atomicAdd(histogram + expert, 1u);
    if (is_there && !is_expert && ids[j] != -1) bad = min(bad, i);
  }
  if (bad != kNone) atomicMin(bad_at, first + bad);
  __syncwarp();
  RankMask mask = {};
  for (u32 k = 0; k < num_topk && lane < num_tokens; ++k) {
    const u32 rank = ranks[lane * num_topk + k];
#pragma unroll
    for (u32 word = 0; word < kRankWords; ++word) mask.words[word] |= rank / 32 == word ? 1u << rank % 32 : 0;
  }
  return mask;
}

extern "C" __global__ void __launch_bounds__(kWarps * 32, 1) count(const __grid_constant__ CountParams p) {
  extern __shared__ u32 histogram[];  // [experts + 1]
  __shared__ u32 scratch[kWarps][kScratchWords];  // a warp's ranks of ids; then its first place for every rank
  __shared__ u32 totals[cfg::kNumRanks];
  __shared__ u64 bad_at;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 num_tokens = p.post.num_tokens, num_experts = p.post.num_experts, num_local = num_experts / cfg::kNumRanks;
  const u32 inverse = ((1u << 31) + num_local - 1) / num_local;
  const u32 step = min(32u, 32 * kLoads / p.post.num_topk);  // tokens that a warp takes at once
  const u32 stretch = (num_tokens + kWarps * step - 1) / (kWarps * step) * step;
  const u32 first = min(warp * stretch, num_tokens), last = min(first + stretch, num_tokens);
  const u32 epoch = next_epoch(p.sync);
  begin(p.sync, cfg::kOperationCount, epoch);

  for (u32 expert = threadIdx.x; expert <= num_experts; expert += blockDim.x) histogram[expert] = 0;
  if (threadIdx.x == 0) bad_at = ~0ull;
  __syncthreads();

  // First pass: each token's ranks; in lane rank % 32, tokens of this warp for each rank; listings of each expert.
  u32 places[kRankWords] = {};
  for (u32 token = first; token < last; token += step) {
    const u32 taken = min(step, last - token);
    const RankMask mask = ranks_of(p, token, taken, inverse, reinterpret_cast<u16*>(scratch[warp]), histogram, &bad_at);
    u32* order = reinterpret_cast<u32*>(p.order) + static_cast<u64>(token + lane) * cfg::kNumRanks;
#pragma unroll
    for (u32 word = 0; word < kRankWords; ++word) {
      if (lane < taken) order[word] = mask.words[word];
    }
#pragma unroll
    for (u32 word = 0; word < kRankWords; ++word) {
#pragma unroll 8
      for (u32 bit = 0; bit < min(cfg::kNumRanks - word * 32, 32u); ++bit) {
        const u32 ballot = __ballot_sync(kAll, mask.words[word] >> bit & 1);
        if (lane == bit) places[word] += __popc(ballot);
      }
    }
  }
  __syncwarp();  // all lanes have read the last ranks
#pragma unroll
  for (u32 word = 0; word < kRankWords; ++word) {
    if (word * 32 + lane < cfg::kNumRanks) scratch[warp][word * 32 + lane] = places[word];
  }
  __syncthreads();
  for (u32 rank = warp; rank < cfg::kNumRanks; rank += kWarps) {  // lane w: warp w's
    const u32 mine = scratch[lane][rank];
    u32 sum = mine;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
      const u32 before = __shfl_up_sync(kAll, sum, distance);
      if (lane >= distance) sum += before;
    }
    scratch[lane][rank] = sum - mine;
    if (lane == 31) totals[rank] = sum;
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
#pragma unroll
  for (u32 word = 0; word < kRankWords; ++word) {
    if (word * 32 + lane < cfg::kNumRanks) places[word] = scratch[warp][word * 32 + lane];
  }
  for (u32 token = first; token < last; token += step) {
    const bool is_ours = lane < min(step, last - token);
    u32* order = reinterpret_cast<u32*>(p.order) + static_cast<u64>(token + lane) * cfg::kNumRanks;
    RankMask mask = {};
#pragma unroll
    for (u32 word = 0; word < kRankWords; ++word) {
      if (is_ours) mask.words[word] = order[word];
    }
#pragma unroll
    for (u32 word = 0; word < kRankWords; ++word) {
#pragma unroll 2
      for (u32 bit = 0; bit < min(cfg::kNumRanks - word * 32, 32u); bit += kPlaces) {
        Places to;
#pragma unroll
        for (u32 i = 0; i < kPlaces; ++i) {
          const bool goes = mask.words[word] >> (bit + i) & 1;
          const u32 ballot = __ballot_sync(kAll, goes), start = __shfl_sync(kAll, places[word], bit + i);
          to.of[i] = goes ? static_cast<int>(start + __popc(ballot & ((1u << lane) - 1))) : -1;
          if (lane == bit + i) places[word] += __popc(ballot);
        }
        if (is_ours) reinterpret_cast<Places*>(order)[(word * 32 + bit) / kPlaces] = to;
      }
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
    if (bad_at != ~0ull) {  // the host clears it: replays of a graph add up
      host->has_bad_id = 1;
      host->bad_id = id_at(p.topk_idx, p.post.flags & cfg::kFlagIdx64, bad_at);
    }
    host->failed_rank = failed_rank;
    host->failed_rows = failed_rows;
  }
  end(p.sync, 0, epoch, verdict);
}
