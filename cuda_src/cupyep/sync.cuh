#pragma once
// The handshake of one channel on the device: posts, done words, deadlines, abort and revoke. Its twin on the CPU is
// cupyep/backends/numpy/sync.py, where next_epoch and begin are one step; the protocol is the same word for word.
//
// One operation of epoch e, seen from one rank:
//   next_epoch   every thread: e = the channel's epoch + 1. The epoch advances when the rank's last CTA is through.
//   begin        CTA 0: no other operation of this channel runs
//   post         CTA 0: our Post to every rank, slot [e % 2][us]; the epoch word last, with release (H8)
//   wait_posts   every CTA: until slot [e % 2][s] of our own control block says e, for EVERY rank s (H5, H7)
//   ...          rows move
//   arrive_last  every CTA: true in the one that comes last (H9)
//   finish       the last CTA: done = e at every rank (H4, H8), then until every rank's done word here has reached e (H5)
//
// Whoever waits past the deadline, or sees the abort word, leaves: issue nothing more, drain own copies, exit.
#include <cupyep/ptx/fence.cuh>
#include <cupyep/ptx/ld_st.cuh>
#include <cupyep/ptx/warp.cuh>

namespace cupyep {

using ptx::u32;
using ptx::u64;
using u8 = unsigned char;
using u16 = unsigned short;

constexpr u32 kAll = ~0u;   // lanes of a warp
constexpr u32 kNone = ~0u;  // in place of an index
constexpr u32 kRankWords = (cfg::kNumRanks + 31) / 32;  // of 32 ranks each

constexpr u32 kPostEpochWord = cfg::kPostEpochOffset / 4;
constexpr u32 kPostWords = sizeof(Post) / 4;

// --- addresses -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u8* arena(const Sync& sync, u32 rank) {
  return reinterpret_cast<u8*>(rank == sync.rank ? sync.own : reinterpret_cast<const u64*>(sync.peers)[rank]);
}

__device__ __forceinline__ u8* channel(const Sync& sync, u32 rank) {
  return arena(sync, rank) + cfg::kChannelsOffset + static_cast<u64>(sync.channel) * cfg::kChannelBytes;
}

__device__ __forceinline__ ChannelState* channel_state(const Sync& sync) {
  return reinterpret_cast<ChannelState*>(channel(sync, sync.rank) + cfg::kStateOffset);
}

// The channel's epoch and, above it, busy: one word, so that begin's thread finds both as it has read them, or overlap.
__device__ __forceinline__ u64* turn(const Sync& sync) { return reinterpret_cast<u64*>(&channel_state(sync)->epoch); }

// What `sender` told `owner` about epoch `epoch`: in owner's memory.
__device__ __forceinline__ Post* post_slot(const Sync& sync, u32 owner, u32 epoch, u32 sender) {
  return reinterpret_cast<Post*>(channel(sync, owner) + cfg::kPostsOffset) + (epoch & 1) * cfg::kNumRanks + sender;
}

__device__ __forceinline__ u32* done_word(const Sync& sync, u32 owner, u32 sender) {
  return reinterpret_cast<u32*>(channel(sync, owner) + cfg::kDoneOffset) + sender;
}

__device__ __forceinline__ u64* abort_word(const Sync& sync, u32 owner) {
  return reinterpret_cast<u64*>(arena(sync, owner) + cfg::kAbortOffset);
}

__device__ __forceinline__ u8* host_record(const Sync& sync, u32 index) {
  return reinterpret_cast<u8*>(sync.host) + index * cfg::kHostRecordBytes;
}

// --- abort -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool aborted(const Sync& sync) { return ptx::ld_relaxed_sys(abort_word(sync, sync.rank)) != 0; }

// Leaves for good. Our posts are revoked first; then rank 0's abort word arbitrates: the first record there is the
// verdict of all ranks, and whoever got that far tells everyone.
__device__ __noinline__ void abort_all(const Sync& sync, u64 record, u32 epoch) {
  for (u32 rank = 0; rank < cfg::kNumRanks; ++rank) {
    ptx::st_relaxed_sys(&post_slot(sync, rank, epoch, sync.rank)->status, static_cast<u32>(cfg::kStatusRevoked));
  }
  ptx::fence_acq_rel_sys();
  const u64 first = ptx::atom_acq_rel_sys_cas(abort_word(sync, 0), 0ULL, record);
  const u64 verdict = first == 0 ? record : first;
  for (u32 rank = 0; rank < cfg::kNumRanks; ++rank) ptx::st_release_sys(abort_word(sync, rank), verdict);
}

__device__ __forceinline__ u64 abort_record(const Sync& sync, u32 kind, u32 operation, u32 peer, u32 epoch) {
  return static_cast<u64>(kind) << 60 | static_cast<u64>(operation) << 56 | static_cast<u64>(sync.rank) << 44 |
         static_cast<u64>(peer) << 32 | epoch;
}

constexpr u64 kLeave = ~0ULL, kExpired = ~1ULL;

// Looks at the abort word and at the clock, for a wait that began at `start` (0: at this very moment). Returns the start,
// kLeave or kExpired.
__device__ __forceinline__ u64 glance(const Sync& sync, u64 start) {
  if (aborted(sync)) return kLeave;
  const u64 now = ptx::globaltimer();
  if (start == 0) return now;
  return sync.timeout_ns == 0 || now - start < sync.timeout_ns ? start : kExpired;
}

// As glance; who waited too long makes all ranks leave. Out of line, because waits are in hot loops and this is not.
__device__ __noinline__ u64 look(const Sync& sync, u64 start, u32 operation, u32 peer, u32 epoch) {
  start = glance(sync, start);
  if (start != kExpired) return start;
  abort_all(sync, abort_record(sync, cfg::kAbortTimeout, operation, peer, epoch), epoch);
  return kLeave;
}

// A wait's patience: counts failed tries, and looks around after every 32nd.
struct Patience {
  u64 start = 0;
  u32 tries = 0;

  // True: leave. `peer` is the rank that we are waiting for.
  __device__ __forceinline__ bool exhausted(const Sync& sync, u32 operation, u32 peer, u32 epoch) {
    if (++tries % 32 == 0) start = look(sync, start, operation, peer, epoch);
    return start == kLeave;
  }
};

// Until *word has reached `epoch` (signed difference: epochs wrap). False: leave.
__device__ inline bool wait_word(const Sync& sync, const u32* word, u32 epoch, u32 operation, u32 peer) {
  Patience patience;
  while (static_cast<int>(ptx::ld_acquire_sys(word) - epoch) < 0) {
    if (patience.exhausted(sync, operation, peer, epoch)) return false;
  }
  return true;
}

// --- one operation ---------------------------------------------------------------------------------------------------

// Every thread: the epoch of the operation that is to begin, or of one whose first half has begun.
__device__ __forceinline__ u32 next_epoch(const Sync& sync) {
  return static_cast<u32>(ptx::ld_relaxed_gpu(turn(sync))) + 1;
}

// Every thread. Catches two operations of one channel at once, and orders nothing; the last thread does it, as the first
// ones have peers to wait for. Other threads that read another epoch, in the moment in which it advanced, go unnoticed.
__device__ inline void begin(const Sync& sync, u32 operation, u32 epoch) {
  if (blockIdx.x != 0 || threadIdx.x != blockDim.x - 1) return;
  const u64 idle = epoch - 1;
  if (ptx::atom_relaxed_gpu_cas(turn(sync), idle, idle | 1ULL << 32) != idle) {
    abort_all(sync, abort_record(sync, cfg::kAbortOverlap, operation, sync.rank, epoch), epoch);
  }
}

// CTA 0, all threads. What was stored before, by any of its threads, is published with the post (H8).
__device__ inline void post(const Sync& sync, const Post& mine, u32 epoch) {
  __syncthreads();
  const u32* words = reinterpret_cast<const u32*>(&mine);
  for (u32 peer = threadIdx.x; peer < cfg::kNumRanks; peer += blockDim.x) {
    u32* slot = reinterpret_cast<u32*>(post_slot(sync, peer, epoch, sync.rank));
#pragma unroll
    for (u32 word = 0; word < kPostWords; ++word) {
      if (word != kPostEpochWord) ptx::st_relaxed_sys(slot + word, words[word]);
    }
    // sync(post) RELEASE.sys: the words above, and counts stored before the barrier (H8). Read by: wait_posts.
    ptx::st_release_sys(slot + kPostEpochWord, epoch);
  }
}

// Every CTA, all threads; the same verdict in every thread of every CTA of every rank, but for kVerdictAborted.
// Afterwards any thread may read the posts of this epoch and any thread may issue bulk copies to the posted blocks.
__device__ inline u32 wait_posts(const Sync& sync, u32 operation, u32 epoch) {
  const Post* posts = post_slot(sync, sync.rank, epoch, 0);
  bool arrived = true;
  for (u32 peer = threadIdx.x; peer < cfg::kNumRanks; peer += blockDim.x) {
    // sync(post) ACQUIRE.sys: pairs with RELEASE in post; the proxy fence, because bulk copies follow (H5, H7).
    arrived &= wait_word(sync, &posts[peer].epoch, epoch, operation, peer);
  }
#if __CUDA_ARCH__ >= 900
  ptx::fence_proxy_async();
#endif
  if (!__syncthreads_and(arrived)) return cfg::kVerdictAborted;
  bool mismatch = false, failed = false, revoked = aborted(sync);
  for (u32 peer = threadIdx.x; peer < cfg::kNumRanks; peer += blockDim.x) {
    const u32* first = reinterpret_cast<const u32*>(posts);
    const u32* words = reinterpret_cast<const u32*>(posts + peer);
    for (u32 word = 0; word < cfg::kSignatureWords; ++word) mismatch |= words[word] != first[word];
    const u32 status = ptx::ld_relaxed_sys(&posts[peer].status);  // the one word that its sender may change later
    failed |= status == cfg::kStatusFailed;
    if (status == cfg::kStatusRevoked) {
      // The record follows at once. We leave with it, and our last CTA must see that we have left.
      Patience patience;
      while (!aborted(sync) && !patience.exhausted(sync, operation, peer, epoch)) {
      }
      revoked = true;
    }
  }
  if (__syncthreads_or(revoked)) return cfg::kVerdictAborted;
  if (__syncthreads_or(mismatch)) return cfg::kVerdictMismatch;
  return __syncthreads_or(failed) ? cfg::kVerdictFailed : cfg::kVerdictDone;
}

// Every CTA, all threads, after their last access to peers' memory: true in all threads of the last CTA to come, as the
// counter `arrived` tells, which somebody has to reset before the next use.
__device__ inline bool arrive_last(u32* arrived) {
  __shared__ bool last;
  // sync(arrive) ACQ_REL.gpu: every thread's stores and completed bulk copies, the barrier, then both sides in one
  // instruction of one thread (H9). The last CTA has acquired what all have released.
  __syncthreads();
  if (threadIdx.x == 0) {
    last = ptx::atom_acq_rel_gpu_add(arrived, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  return last;
}

__device__ inline bool arrive_last(const Sync& sync) { return arrive_last(&channel_state(sync)->arrived); }

// The last CTA: tells every rank that our part is complete. False: leave.
__device__ inline bool tell_done(const Sync& sync, u32 epoch) {
  if (__syncthreads_or(aborted(sync))) return false;  // some warp has left: our part is not complete
  for (u32 peer = threadIdx.x; peer < cfg::kNumRanks; peer += blockDim.x) {
    // sync(done) RELEASE.sys: all rows of this rank, handed over by arrive_last (H4, H8, H9). Read by: exchange_done, and
    // a low-latency send half.
    ptx::st_release_sys(done_word(sync, peer, sync.rank), epoch);
  }
  return true;
}

// The last CTA: tells, and waits until all ranks are complete. False: leave.
__device__ inline bool exchange_done(const Sync& sync, u32 operation, u32 epoch) {
  bool complete = true;
  if (!tell_done(sync, epoch)) return false;
  for (u32 peer = threadIdx.x; peer < cfg::kNumRanks; peer += blockDim.x) {
    // sync(done) ACQUIRE.sys: pairs with RELEASE in tell_done, at the peer; the kernel's end hands it on (H5).
    complete &= wait_word(sync, done_word(sync, sync.rank, peer), epoch, operation, peer);
  }
  return __syncthreads_and(complete);
}

// The last CTA, all threads: tells the host how it ended, unless well, and lets the channel's next operation begin.
__device__ inline void end(const Sync& sync, u32 index, u32 epoch, u32 verdict) {
  u8* record = host_record(sync, index);
  if (verdict != cfg::kVerdictDone) {
    const u32* posts = reinterpret_cast<const u32*>(post_slot(sync, sync.rank, epoch, 0));
    u32* copy = reinterpret_cast<u32*>(record + cfg::kHostPostsOffset);
    for (u32 word = threadIdx.x; word < kPostWords * cfg::kNumRanks; word += blockDim.x) copy[word] = posts[word];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    HostRecord* host = reinterpret_cast<HostRecord*>(record);
    if (verdict != cfg::kVerdictDone) {
      host->abort = ptx::ld_relaxed_sys(abort_word(sync, sync.rank));
      host->epoch = epoch;
      host->verdict = verdict;
      ptx::fence_acq_rel_sys();
    }
    ptx::st_relaxed_gpu(&channel_state(sync)->arrived, 0u);
    ptx::st_relaxed_gpu(turn(sync), static_cast<u64>(epoch));  // the kernel's end, or a barrier, orders both
  }
}

}  // namespace cupyep
