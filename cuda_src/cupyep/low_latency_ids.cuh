#pragma once
// Who gets which token of a low-latency dispatch. Every CTA reads all ids, a few KB, and makes a bit of each listing: the
// bits before a token's own are its place, so that no CTA waits for another one's routing.
#include <cupyep/low_latency.cuh>

namespace cupyep {

constexpr u16 kNoExpert = 0xffff;
constexpr u32 kIdLoads = 4;  // of a thread, under way together

// What every CTA knows of the ids; in shared memory.
struct Ids {
  u32 words;     // of 32 tokens each
  u32* listing;  // [num_experts][words]: bits of the tokens that list the expert
  u32* going;    // [ranks][words]: bits of the tokens that go to the rank
  u16* experts;  // [num_tokens][num_topk], or kNoExpert

  __device__ Ids(const LowLatencyDispatchParams& p, u8* smem) : words((p.ll.num_tokens + 31) / 32) {
    listing = reinterpret_cast<u32*>(smem);
    going = listing + p.ll.num_local_experts * cfg::kNumRanks * words;
    experts = reinterpret_cast<u16*>(going + cfg::kNumRanks * words);
  }
};

// How many of the first `num_tokens` bits are set.
__device__ __forceinline__ u32 count_bits(const u32* bits, u32 num_tokens) {
  u32 count = 0;
  for (u32 word = 0; word < num_tokens / 32; ++word) count += __popc(bits[word]);
  if (num_tokens % 32 != 0) count += __popc(bits[num_tokens / 32] & ((1u << num_tokens % 32) - 1));
  return count;
}

// How many rows of `sender` each of `owner`'s experts gets, in owner's memory.
__device__ __forceinline__ u32* counts_of(const LowLatencyDispatchParams& p, u32 owner, u32 sender) {
  return reinterpret_cast<u32*>(channel(p.sync, owner) + cfg::kCountsOffset) + sender * cfg::kCountsWords + cfg::kNumRanks;
}

// Id number `i` of the caller's.
__device__ __forceinline__ void note_id(const LowLatencyDispatchParams& p, const Ids& ids, u32 i, long long id) {
  const bool is_expert = id >= 0 && id < p.ll.num_local_experts * cfg::kNumRanks;
  ids.experts[i] = is_expert ? static_cast<u16>(id) : kNoExpert;
  if (is_expert) {
    const u32 expert = static_cast<u32>(id), rank = expert / p.ll.num_local_experts, token = i / p.ll.num_topk;
    atomicOr(ids.listing + expert * ids.words + token / 32, 1u << token % 32);  // once, though it be listed twice
    atomicOr(ids.going + rank * ids.words + token / 32, 1u << token % 32);
  } else if (id != -1 && blockIdx.x == 0) {
    HostRecord* host = reinterpret_cast<HostRecord*>(host_record(p.sync, 0));
    host->bad_id = id;  // any of them will do
    host->has_bad_id = 1;
  }
}

// All threads: the ids into shared memory; a barrier has to follow.
__device__ void read_ids(const LowLatencyDispatchParams& p, const Ids& ids) {
  const u32 num_ids = p.ll.num_tokens * p.ll.num_topk, num_experts = p.ll.num_local_experts * cfg::kNumRanks;
  for (u32 i = threadIdx.x; i < (num_experts + cfg::kNumRanks) * ids.words; i += blockDim.x) ids.listing[i] = 0;  // both
  __syncthreads();
  for (u32 first = 0; first < num_ids; first += kIdLoads * blockDim.x) {
    long long batch[kIdLoads];
    load_ids(batch, p.topk_idx, p.ll.idx64, 0, first + threadIdx.x, blockDim.x, num_ids);
#pragma unroll
    for (u32 j = 0; j < kIdLoads; ++j) {
      const u32 i = first + j * blockDim.x + threadIdx.x;
      if (i < num_ids) note_id(p, ids, i, batch[j]);
    }
  }
}

// All threads, afterwards: nothing goes where it may not. totals[rank]: rows that we send there.
__device__ void leave_out(const LowLatencyDispatchParams& p, const Ids& ids, const bool* goes, u32* totals) {
  for (u32 i = threadIdx.x; i < cfg::kNumRanks * ids.words; i += blockDim.x) {
    if (!goes[i / ids.words]) ids.going[i] = 0;
  }
  __syncthreads();
  for (u32 rank = threadIdx.x; rank < cfg::kNumRanks; rank += blockDim.x) {
    totals[rank] = count_bits(ids.going + rank * ids.words, p.ll.num_tokens);
  }
}

// The first CTA, all threads: to each peer that rows go to how many of our tokens each of its experts gets (published
// later, H8), and for our own combine which ranks a token goes to.
__device__ void send_counts(const LowLatencyDispatchParams& p, const Ids& ids, const bool* goes) {
  const u32 num_local = p.ll.num_local_experts;
  for (u32 expert = threadIdx.x; expert < num_local * cfg::kNumRanks; expert += blockDim.x) {
    const u32 owner = expert / num_local, count = count_bits(ids.listing + expert * ids.words, p.ll.num_tokens);
    if (goes[owner]) counts_of(p, owner, p.sync.rank)[expert % num_local] = count;
  }
  u32* token_ranks = reinterpret_cast<u32*>(p.tables.token_ranks);
  for (u32 i = threadIdx.x; i < p.ll.num_tokens * kRankWords; i += blockDim.x) {
    const u32 token = i / kRankWords, first = i % kRankWords * 32;
    u32 ranks = 0;
    for (u32 rank = first; rank < min(first + 32, cfg::kNumRanks); ++rank) {
      ranks |= (ids.going[rank * ids.words + token / 32] >> token % 32 & 1) << (rank - first);
    }
    token_ranks[i] = ranks;
  }
}

// How many earlier tokens list the expert, 0 for none; how many go to the rank.
__device__ __forceinline__ u32 place_at_expert(const Ids& ids, u32 token, u16 expert) {
  return expert != kNoExpert ? count_bits(ids.listing + expert * ids.words, token) : 0;
}
__device__ __forceinline__ u32 place_at_rank(const Ids& ids, u32 token, u32 rank) {
  return count_bits(ids.going + rank * ids.words, token);
}

}  // namespace cupyep
