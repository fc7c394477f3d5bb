#pragma once
// How a warp copies by TMA what never passes through registers: a ring of slots, loaded and stored by one lane.
//
// A Job says what the units are: `Unit take(i)` by all lanes together; `load(unit, slot, full)` announces the unit's
// bytes on the mbarrier and issues the load, or arrives where there is nothing to load; `store(unit, slot)` issues the
// store. Slot i % kStages is refilled when the group of stores before the newest has read it:
//   slot    load .. full | store reads .. free | load ...
// No proxy fence: a slot passes from bulk load to bulk store and back, and no thread touches it.
#include <cupyep/ptx/bulk.cuh>
#include <cupyep/ptx/fence.cuh>
#include <cupyep/ptx/mbarrier.cuh>

namespace cupyep {

// A slot's mbarrier, and what is in the slot; all of it is the issuing lane's own business.
template <class Unit>
struct Slot {
  ptx::u64 full;
  Unit unit;
};

// Units 0..count-1 of this warp's Job. Shared memory: kWarps x kStages slots of kSlotBytes, then as many Slots.
template <class Job>
__device__ __forceinline__ void copy_ring(Job& job, ptx::u32 count, unsigned char* smem) {
  using Slots = Slot<typename Job::Unit>;
  static_assert(sizeof(Slots) <= cfg::kSlotStateBytes && cfg::kStages >= 2);
  const ptx::u32 warp = threadIdx.x / 32;
  const bool issues = threadIdx.x % 32 == 0;
  unsigned char* ring = smem + warp * cfg::kStages * cfg::kSlotBytes;
  Slots* slots = reinterpret_cast<Slots*>(smem + cfg::kWarps * cfg::kStages * cfg::kSlotBytes) + warp * cfg::kStages;
  if (issues) {
    for (ptx::u32 stage = 0; stage < cfg::kStages; ++stage) ptx::mbarrier_init(&slots[stage].full, 1);
    ptx::fence_mbarrier_init_release_cluster();  // H6; no other thread touches them
  }
  ptx::u32 taken = 0;
  const auto load_next = [&] {
    const typename Job::Unit unit = job.take(taken);
    const ptx::u32 stage = taken++ % cfg::kStages;
    if (!issues) return;
    slots[stage].unit = unit;
    job.load(unit, ring + stage * cfg::kSlotBytes, &slots[stage].full);
  };
  while (taken < cfg::kStages && taken < count) load_next();
  for (ptx::u32 i = 0; i < count; ++i) {
    if (issues) {
      const ptx::u32 stage = i % cfg::kStages;
      // H1: by the one thread that goes on with the data. A load from global memory always lands.
      while (!ptx::mbarrier_try_wait_parity(&slots[stage].full, i / cfg::kStages & 1)) {
      }
      job.store(slots[stage].unit, ring + stage * cfg::kSlotBytes);
      ptx::cp_async_bulk_commit_group();
      if (i > 0) ptx::cp_async_bulk_wait_group_read<1>();  // unit i - 1 has left its slot
    }
    if (i > 0 && taken < count) load_next();
  }
  ptx::cp_async_bulk_wait_group<0>();
}

}  // namespace cupyep
