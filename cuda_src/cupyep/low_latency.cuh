#pragma once
// What the two low-latency kernels share: who is waited for, how peers are told, where a row comes from.
// The whole flow, with its words and tags, is in docs/low-latency.md. Seen from one rank, one channel, epoch e:
//
//   next_epoch      e = the channel's epoch + 1, in either half
//   begin           the send half: no other operation of this channel runs
//   await_consumed  every CTA: until each peer's done word here says e - 1: it has read what we sent last (H7)
//   ...             rows, by plain stores, into our part of the peers' receive regions
//   publish         the rank's last CTA: one 8-byte word to each peer, data and epoch at once (H8, H9)
//   await_arrivals  every CTA: until each peer's word here says e (H5)
//   ...             rows out of our own region
//   leave           the last CTA: done word e to each peer; the channel's epoch becomes e
//
// A masked rank is not waited for; it is sent no rows, but words, so that it does not hang either. Whoever meets a word
// that is ahead of these is the masked one: the peer has gone on, takes no rows of ours and has none for us.
#include <cupyep/ids.cuh>
#include <cupyep/sync.cuh>
#include <cupyep/vec.cuh>

namespace cupyep {

// --- words -----------------------------------------------------------------------------------------------------------

// What `sender` told `owner`: bits 32..63 epoch, 16..31 signature, 0..15 a count, 0 for nothing. In owner's memory.
__device__ __forceinline__ u64* arrival_word(const Sync& sync, u32 owner, u32 sender, u32 kind) {
  return reinterpret_cast<u64*>(channel(sync, owner) + cfg::kArrivalsOffset) + kind * cfg::kNumRanks + sender;
}

__device__ __forceinline__ u32 epoch_of(u32 word) { return word; }
__device__ __forceinline__ u32 epoch_of(u64 word) { return static_cast<u32>(word >> 32); }

// The receive region of this channel at `rank`.
__device__ __forceinline__ u8* region(const Sync& sync, const LowLatency& ll, u32 rank) { return arena(sync, rank) + ll.region; }

// --- masks -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool is_masked(const LowLatency& ll, u32 peer) {
  return ptx::ld_relaxed_gpu(reinterpret_cast<const u32*>(ll.masks) + peer) != 0;
}

__device__ __forceinline__ void mask(const LowLatency& ll, u32 peer) {
  ptx::st_relaxed_gpu(reinterpret_cast<u32*>(ll.masks) + peer, 1u);
}

enum Outcome : u32 { kCame, kMissing, kLeft };

// One thread: until the peer's word has reached `epoch`; `seen` is the word then. kMissing: the peer is masked, or is to
// be, because it is late. kLeft: all leave.
template <class Word>
__device__ inline Outcome await_word(const Sync& sync, const LowLatency& ll, const Word* word, u32 operation, u32 peer,
                                     u32 epoch, Word& seen) {
  const bool masked = is_masked(ll, peer);
  u64 start = 0;
  for (u32 tries = 1;; ++tries) {
    seen = ptx::ld_acquire_sys(word);
    if (masked) return kMissing;  // asked here, so that both loads are under way together
    if (static_cast<int>(epoch_of(seen) - epoch) >= 0) return kCame;
    if (tries % 32 != 0) continue;
    start = ll.masks_on_timeout ? glance(sync, start) : look(sync, start, operation, peer, epoch);
    if (start == kLeave) return kLeft;
    if (start == kExpired) return kMissing;
  }
}

// All CTAs must take the same ranks for missing, or they would place rows differently. The first to know decides for
// this epoch; what it has seen, the others will see.
__device__ inline Outcome settle(const LowLatency& ll, u32 peer, u32 epoch, Outcome outcome) {
  u64* fate = reinterpret_cast<u64*>(ll.fates) + peer;
  u64 seen = ptx::ld_acquire_gpu(fate);
  if (epoch_of(seen) != epoch) {
    const u64 before = ptx::atom_acq_rel_gpu_cas(fate, seen, static_cast<u64>(epoch) << 32 | outcome);
    if (before == seen) {
      if (outcome == kMissing) mask(ll, peer);
      return outcome;
    }
    seen = before;
  }
  return static_cast<Outcome>(static_cast<u32>(seen));
}

// --- the steps -------------------------------------------------------------------------------------------------------

// Every CTA, all threads, before it writes to peers: goes[peer] says whether rows may go there. False: leave. CTAs agree
// on it unless one of the two is masked just now; then the peer does not read what we send.
__device__ inline bool await_consumed(const Sync& sync, const LowLatency& ll, u32 operation, u32 epoch, bool* goes) {
  bool well = true;
  for (u32 peer = threadIdx.x; peer < cfg::kNumRanks; peer += blockDim.x) {
    u32 seen;
    // sync(done) ACQUIRE.sys: pairs with RELEASE in tell_done, at the peer: it has read our last rows (H7).
    const Outcome outcome = await_word(sync, ll, done_word(sync, sync.rank, peer), operation, peer, epoch - 1, seen);
    if (outcome == kMissing) mask(ll, peer);
    goes[peer] = outcome == kCame && seen == epoch - 1;
    well &= outcome != kLeft;
  }
  return __syncthreads_and(well);
}

// Every CTA, all threads, behind its last store to peers. The last CTA tells each peer `counts[peer]`, or 1 if null.
__device__ inline void publish(const Sync& sync, const LowLatency& ll, u32 kind, u32 epoch, const u32* counts) {
  static_assert(cfg::kNumRanks <= cfg::kThreads);
  u32* sent = &channel_state(sync)->sent;
  if (!arrive_last(sent)) return;
  const u32 peer = threadIdx.x;
  const bool gone = aborted(sync), masked = peer < cfg::kNumRanks && is_masked(ll, peer);  // both loads at once
  if (__syncthreads_or(gone)) return;
  if (threadIdx.x == 0) ptx::st_relaxed_gpu(sent, 0u);
  __syncthreads();
  if (peer < cfg::kNumRanks) {
    const u32 count = masked ? 0 : counts == nullptr ? 1 : counts[peer];
    const u64 word = static_cast<u64>(epoch) << 32 | ll.signature << 16 | count;
    // sync(arrival) RELEASE.sys: rows, their meta, counts and weights of all CTAs (H8, H9). Read by: await_arrivals.
    ptx::st_release_sys(arrival_word(sync, peer, sync.rank, kind), word);
  }
}

// Every CTA, all threads: counts[peer] of every rank's word, 0 where the rank is masked or has gone on without us.
// False: leave. CTAs may disagree on a peer that has masked us meanwhile; what they then make of its rows is undefined.
__device__ inline bool await_arrivals(const Sync& sync, const LowLatency& ll, u32 kind, u32 operation, u32 epoch, u32* counts) {
  bool well = true;
  for (u32 peer = threadIdx.x; peer < cfg::kNumRanks; peer += blockDim.x) {
    const u64* word = arrival_word(sync, sync.rank, peer, kind);
    u64 seen = 0;
    // sync(arrival) ACQUIRE.sys: pairs with RELEASE in publish, at the peer; the barrier below hands it on (H5).
    Outcome outcome = await_word(sync, ll, word, operation, peer, epoch, seen);
    if (ll.masks_on_timeout && outcome != kLeft) {
      const Outcome decided = settle(ll, peer, epoch, outcome);
      if (decided == kCame && outcome == kMissing) seen = ptx::ld_acquire_sys(word);
      outcome = decided;
    }
    if (outcome == kCame && epoch_of(seen) != epoch) {
      seen = 0;  // another call's word: its count and signature are not for us
    } else if (outcome == kCame && (static_cast<u32>(seen) >> 16) != ll.signature) {
      abort_all(sync, abort_record(sync, cfg::kAbortMismatch, operation, peer, epoch), epoch);
      outcome = kLeft;
    }
    counts[peer] = outcome == kCame ? static_cast<u32>(seen) & 0xffffu : 0;
    well &= outcome != kLeft;
  }
  return __syncthreads_and(well);
}

// Every CTA, all threads, at the kernel's end. The last CTA of a receive half tells the peers that we have read their
// rows, and ends the operation.
__device__ inline void leave(const Sync& sync, const LowLatency& ll, u32 index, u32 epoch) {
  if (!arrive_last(sync)) return;
  if (ll.phases & cfg::kPhaseReceive) {
    end(sync, index, epoch, tell_done(sync, epoch) ? cfg::kVerdictDone : cfg::kVerdictAborted);
  } else if (__syncthreads_or(aborted(sync))) {
    end(sync, index, epoch, cfg::kVerdictAborted);
  } else if (threadIdx.x == 0) {
    ptx::st_relaxed_gpu(&channel_state(sync)->arrived, 0u);
  }
}

// --- rows and warps --------------------------------------------------------------------------------------------------

// Every CTA, all threads: starts[s] = rows of the sources before s; starts[ranks] = all.
__device__ inline void sum_up(const u32* counts, u32* starts) {
  for (u32 rank = threadIdx.x; rank <= cfg::kNumRanks; rank += blockDim.x) {
    u32 sum = 0;
    for (u32 source = 0; source < rank; ++source) sum += counts[source];
    starts[rank] = sum;
  }
  __syncthreads();
}

// All lanes: the source of the row that is number `row` of all received ones.
__device__ __forceinline__ u32 source_of(const u32* starts, u32 row) {
  u32 source = 0;
#pragma unroll
  for (u32 word = 0; word < kRankWords; ++word) {
    const u32 rank = word * 32 + threadIdx.x % 32;
    source += __popc(__ballot_sync(kAll, rank < cfg::kNumRanks && starts[rank + 1] <= row));
  }
  return source;
}

// The first lane with this lane's value, of those where `valid`: it acts for all of them.
__device__ __forceinline__ bool is_first(u32 value, bool valid) {
  const u32 same = __match_any_sync(kAll, value);
  return valid && (same & ((1u << threadIdx.x % 32) - 1)) == 0;
}

// This warp's number among all warps of the grid, CTAs first, so that few units spread over many SMs.
__device__ __forceinline__ u32 warp_index() { return threadIdx.x / 32 * gridDim.x + blockIdx.x; }
__device__ __forceinline__ u32 num_warps() { return blockDim.x / 32 * gridDim.x; }

// Whole warps: load(i, &item), then use(item), for this CTA's share of all i below `end`. Warps draw them, as some take
// longer than others; CTAs take turns, so that few items spread over many SMs, and rows over all CTAs. The next item is
// on its way while one is used. `drawn`: in shared memory, 0 at first.
template <class Item, class Load, class Use>
__device__ __forceinline__ void for_items(u32* drawn, u32 end, Load load, Use use) {
  const auto draw = [&] {
    const u32 turn = threadIdx.x % 32 == 0 ? atomicAdd(drawn, 1u) : 0;
    return __shfl_sync(kAll, turn, 0) * gridDim.x + blockIdx.x;
  };
  Item next;
  u32 i = draw();
  if (i < end) load(i, next);
  while (i < end) {
    const Item item = next;  // here its loads are waited for
    i = draw();
    if (i < end) load(i, next);
    use(item);
  }
}

// This warp's part of `count` things that stand in a row: [begin, end). The first warps get one more.
struct Range {
  u32 begin, end;

  __device__ __forceinline__ explicit Range(u32 count) {
    const u32 warp = warp_index(), least = count / num_warps(), more = count % num_warps();
    begin = warp * least + min(warp, more);
    end = begin + least + (warp < more);
  }
};

// A warp's share of a row: kBatch vectors per lane. `part` numbers the shares.
constexpr u32 kBatch = cfg::kVecsPerLane;

// act(j, index in the row) for each of this lane's vectors.
template <int kBytes, u32 kRowBytes, class Act>
__device__ __forceinline__ void each_vector(u32 part, Act act) {
#pragma unroll
  for (u32 j = 0; j < kBatch; ++j) {
    const u32 at = (part * kBatch + j) * 32 + threadIdx.x % 32;
    if (at < kRowBytes / kBytes) act(j, at);
  }
}

template <int kBytes, u32 kRowBytes>
__device__ __forceinline__ void load_part(VecOf<kBytes>* batch, const u8* row, u32 part) {
  each_vector<kBytes, kRowBytes>(part, [&](u32 j, u32 at) { batch[j] = reinterpret_cast<const VecOf<kBytes>*>(row)[at]; });
}

template <int kBytes, u32 kRowBytes>
__device__ __forceinline__ void store_part(const VecOf<kBytes>* batch, u8* row, u32 part) {
  each_vector<kBytes, kRowBytes>(part, [&](u32 j, u32 at) { reinterpret_cast<VecOf<kBytes>*>(row)[at] = batch[j]; });
}

}  // namespace cupyep
