#pragma once
// Who gets which token of a low-latency dispatch. Every CTA reads all ids, a few KB, and finds the places that it needs by
// ballots over earlier tokens, so that no CTA waits for another one's routing.
#include <cupyep/low_latency.cuh>

namespace cupyep {

using u16 = unsigned short;
constexpr u16 kNoExpert = 0xffff;

// What every CTA knows of the ids; in shared memory.
struct Ids {
  u16* experts;  // [num_tokens][num_topk], or kNoExpert
  u32* ranks;    // [num_tokens][kRankWords]: bits of the ranks that get the token
  u32* listed;   // [num_experts]: tokens that list the expert; the first CTA's business

  __device__ Ids(const LowLatencyDispatchParams& p, u8* smem) {
    listed = reinterpret_cast<u32*>(smem);
    ranks = listed + p.ll.num_local_experts * cfg::kNumRanks;
    experts = reinterpret_cast<u16*>(ranks + p.ll.num_tokens * kRankWords);
  }
  __device__ __forceinline__ bool goes(u32 token, u32 rank) const {
    return ranks[token * kRankWords + rank / 32] >> rank % 32 & 1;
  }
};

// How many rows of `sender` each of `owner`'s experts gets, in owner's memory.
__device__ __forceinline__ u32* counts_of(const LowLatencyDispatchParams& p, u32 owner, u32 sender) {
  return reinterpret_cast<u32*>(channel(p.sync, owner) + cfg::kCountsOffset) + sender * cfg::kCountsWords + cfg::kNumRanks;
}

// All threads: the ids into shared memory. totals[rank]: rows that we send there.
__device__ void read_ids(const LowLatencyDispatchParams& p, const Ids& ids, const bool* goes, u32* totals) {
  const u32 num_ids = p.ll.num_tokens * p.ll.num_topk, num_experts = p.ll.num_local_experts * cfg::kNumRanks;
  for (u32 i = threadIdx.x; i < p.ll.num_tokens * kRankWords; i += blockDim.x) ids.ranks[i] = 0;
  __syncthreads();
  for (u32 i = threadIdx.x; i < num_ids; i += blockDim.x) {
    const long long id = p.ll.idx64 ? reinterpret_cast<const long long*>(p.topk_idx)[i] : reinterpret_cast<const int*>(p.topk_idx)[i];
    const bool is_expert = id >= 0 && id < num_experts;
    ids.experts[i] = is_expert ? static_cast<u16>(id) : kNoExpert;
    if (is_expert) {
      const u32 rank = static_cast<u32>(id) / p.ll.num_local_experts;
      if (goes[rank]) atomicOr(ids.ranks + i / p.ll.num_topk * kRankWords + rank / 32, 1u << rank % 32);
    } else if (id != -1 && blockIdx.x == 0) {
      HostRecord* host = reinterpret_cast<HostRecord*>(host_record(p.sync, 0));
      host->bad_id = id;  // any of them will do
      host->has_bad_id = 1;
    }
  }
  __syncthreads();
  for (u32 rank = threadIdx.x / 32; rank < cfg::kNumRanks; rank += blockDim.x / 32) {
    u32 total = 0;
    for (u32 base = 0; base < p.ll.num_tokens; base += 32) {
      const u32 token = base + threadIdx.x % 32;
      total += __popc(__ballot_sync(kAll, token < p.ll.num_tokens && ids.goes(token, rank)));
    }
    if (threadIdx.x % 32 == 0) totals[rank] = total;
  }
}

// The first CTA, all threads: to each peer that rows go to how many of our tokens each of its experts gets (published
// later, H8), and for our own combine which ranks a token goes to. A token that lists an expert twice counts once.
__device__ void send_counts(const LowLatencyDispatchParams& p, const Ids& ids, const bool* goes) {
  const u32 num_local = p.ll.num_local_experts, num_topk = p.ll.num_topk, num_experts = num_local * cfg::kNumRanks;
  for (u32 expert = threadIdx.x; expert < num_experts; expert += blockDim.x) ids.listed[expert] = 0;
  __syncthreads();
  for (u32 i = threadIdx.x; i < p.ll.num_tokens * num_topk; i += blockDim.x) {
    bool is_new = ids.experts[i] != kNoExpert;
    for (u32 j = i - i % num_topk; j < i; ++j) is_new &= ids.experts[j] != ids.experts[i];
    if (is_new) atomicAdd(ids.listed + ids.experts[i], 1u);
  }
  __syncthreads();
  for (u32 expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
    const u32 owner = expert / num_local;
    if (goes[owner]) counts_of(p, owner, p.sync.rank)[expert % num_local] = ids.listed[expert];
  }
  u32* token_ranks = reinterpret_cast<u32*>(p.tables.token_ranks);
  for (u32 i = threadIdx.x; i < p.ll.num_tokens * kRankWords; i += blockDim.x) token_ranks[i] = ids.ranks[i];
}

// All lanes; lane k has column k of the token. How many earlier tokens list this lane's expert.
__device__ __forceinline__ u32 place_at_expert(const LowLatencyDispatchParams& p, const Ids& ids, u32 token, u16 expert) {
  const u32 lane = threadIdx.x % 32, num_topk = p.ll.num_topk;
  u32 place = 0;
  for (u32 column = 0; column < num_topk; ++column) {
    const u32 wanted = __shfl_sync(kAll, static_cast<u32>(expert), column);
    u32 earlier = 0;
    for (u32 base = 0; base < token; base += 32) {
      bool lists = false;
      for (u32 k = 0; k < num_topk && base + lane < token; ++k) lists |= ids.experts[(base + lane) * num_topk + k] == wanted;
      earlier += __popc(__ballot_sync(kAll, lists));
    }
    if (lane == column) place = earlier;
  }
  return place;
}

// How many earlier tokens go to this lane's rank, for the lanes of `leaders`.
__device__ __forceinline__ u32 place_at_rank(const Ids& ids, u32 token, u32 rank, u32 leaders) {
  const u32 lane = threadIdx.x % 32;
  u32 place = 0;
  for (u32 left = leaders; left != 0; left &= left - 1) {
    const u32 owner = __ffs(left) - 1, wanted = __shfl_sync(kAll, rank, owner);
    u32 earlier = 0;
    for (u32 base = 0; base < token; base += 32) {
      earlier += __popc(__ballot_sync(kAll, base + lane < token && ids.goes(base + lane, wanted)));
    }
    if (lane == owner) place = earlier;
  }
  return place;
}

}  // namespace cupyep
