#pragma once
// A warp's ring of row shares in shared memory. Loads into registers keep too few bytes under way for memory that eight
// ranks share; here each lane has kSlots shares under way by cp.async, and reads only what it has copied itself.
#include <cupyep/low_latency.cuh>
#include <cupyep/ptx/cache_policy.cuh>
#include <cupyep/ptx/cp_async.cuh>

namespace cupyep {

// Shares of rows of kRowBytes. A Note goes with each, to tell at its end what it was for.
template <class Note>
class ShareRing {
 public:
  // All threads of the CTA, with the same `smem`; every warp takes its own part.
  __device__ __forceinline__ explicit ShareRing(u8* smem) : slots_(reinterpret_cast<Slot*>(smem) + threadIdx.x / 32 * cfg::kSlots) {}

  // All lanes: part `part` of `row` comes, and write(note) notes what for. If the ring is full, its oldest share is given
  // to use(note, part, batch) first.
  template <class Write, class Use>
  __device__ __forceinline__ void push(const u8* row, u32 part, Write write, Use use) {
    if (under_way_ == cfg::kSlots) take(next_, use);
    else ++under_way_;
    Slot& slot = slots_[next_];
    __syncwarp();  // all lanes have read the slot's last note
    if (threadIdx.x % 32 == 0) slot.part = part;
    write(slot.note);
    each_vector<cfg::kVecBytes, cfg::kRowBytes>(
        part, [&](u32 j, u32 at) { copy(&slot.batch[j][threadIdx.x % 32], row + at * cfg::kVecBytes); });
    ptx::cp_async_commit_group();
    next_ = next_ + 1 == cfg::kSlots ? 0 : next_ + 1;
  }

  // All lanes: uses what is left.
  template <class Use>
  __device__ __forceinline__ void drain(Use use) {
    ptx::cp_async_wait_group<0>();
#pragma unroll 1
    for (u32 i = cfg::kSlots + next_ - under_way_; i < cfg::kSlots + next_; ++i) take(i % cfg::kSlots, use);
    under_way_ = 0;
  }

 private:
  struct Slot {
    Vec batch[kBatch][32];
    Note note;
    u32 part;
  };
  static_assert(sizeof(Slot) == cfg::kSlotBytes);

  // The share in slot `index`, the oldest.
  template <class Use>
  __device__ __forceinline__ void take(u32 index, Use use) {
    const Slot& slot = slots_[index];
    ptx::cp_async_wait_group<cfg::kSlots - 1>();
    __syncwarp();  // the note is there for all lanes; the vectors are each lane's own
    const u32 part = slot.part;
    Vec batch[kBatch];
    each_vector<cfg::kVecBytes, cfg::kRowBytes>(part, [&](u32 j, u32) { batch[j] = slot.batch[j][threadIdx.x % 32]; });
    use(slot.note, part, batch);
  }

  __device__ __forceinline__ static void copy(Vec* to, const u8* from) {
    if constexpr (cfg::kVecBytes == 16) ptx::cp_async_cg_16_l2_cache_hint(to, from, ptx::createpolicy_fractional_evict_first());
    else if constexpr (cfg::kVecBytes >= 4) ptx::cp_async_ca<cfg::kVecBytes>(to, from);
    else *to = *reinterpret_cast<const Vec*>(from);  // too narrow to be copied asynchronously
  }

  Slot* slots_;
  u32 next_ = 0, under_way_ = 0;
};

}  // namespace cupyep
