// What the hardware can do, without any protocol: the kernels behind `cupyep.bench ceilings` and the ceiling columns.
// Any number of CTAs; a unit is kChunkBytes. Warps are independent, and with TMA only lane 0 of each works.
//
//   fan     loads a unit into a ring slot and stores it to `writes` places: PUSH without order, ids, weights, posts
//   mix     `reads` loads into the ring and `writes` stores out of a fixed slot, which do not wait for each other: loads
//           alone, stores alone, or the traffic of PULL without its additions
//   copy    `reads` = 1, `writes` = 1 by 128-bit loads and stores
//
// Sources and destinations are lists of arrays, which units use in turn: unit u takes src[u % num_src], then the next.
// So each rank can be given its even share of a unit's traffic.
#include <cupyep/ptx/ld_st.cuh>
#if __CUDA_ARCH__ >= 900
#include <cupyep/ptx/bulk.cuh>
#include <cupyep/ptx/fence.cuh>
#include <cupyep/ptx/mbarrier.cuh>
#endif

using namespace cupyep;
using ptx::u32;
using ptx::u64;
using u8 = unsigned char;

// A warp's units, one after the other.
struct Units {
  u32 index, stride, end;
  __device__ explicit Units(const CeilingParams& p)
      : index(threadIdx.x / 32 * gridDim.x + blockIdx.x), stride(blockDim.x / 32 * gridDim.x), end(p.num_units) {}
  __device__ bool left() const { return index < end; }
  __device__ u64 offset() const { return static_cast<u64>(index) * cfg::kChunkBytes; }
  __device__ void next() { index += stride; }
};

__device__ __forceinline__ u32 after(u32 turn, u32 count) { return turn + 1 == count ? 0 : turn + 1; }

extern "C" __global__ void __launch_bounds__(cfg::kWarps * 32, 1) copy(const __grid_constant__ CeilingParams p) {
  constexpr u32 kVecs = cfg::kChunkBytes / 16, kBatch = 8;
  for (Units unit(p); unit.left(); unit.next()) {
    const u8* from = reinterpret_cast<const u8*>(p.src[unit.index % p.num_src]) + unit.offset();
    u8* to = reinterpret_cast<u8*>(p.dst[unit.index % p.num_dst]) + unit.offset();
    for (u32 i = threadIdx.x % 32; i < kVecs; i += 32 * kBatch) {
      uint4 batch[kBatch];
#pragma unroll
      for (u32 j = 0; j < kBatch; ++j) {
        if (i + 32 * j < kVecs) batch[j] = ptx::ld_global_v4(from + (i + 32 * j) * 16);
      }
#pragma unroll
      for (u32 j = 0; j < kBatch; ++j) {
        if (i + 32 * j < kVecs) ptx::st_global_v4(to + (i + 32 * j) * 16, batch[j]);
      }
    }
  }
}

#if __CUDA_ARCH__ >= 900
// One warp's ring and the loads that fill it: `reads` for each unit, each into the next slot.
class Ring {
 public:
  __device__ Ring(const CeilingParams& p, u8* smem) : p_(p), unit_(p) {
    const u32 warp = threadIdx.x / 32;
    slots_ = smem + warp * cfg::kStages * cfg::kSlotBytes;
    full_ = reinterpret_cast<u64*>(smem + (cfg::kWarps * cfg::kStages + 1) * cfg::kSlotBytes) + warp * cfg::kStages;
    for (u32 stage = 0; stage < cfg::kStages; ++stage) ptx::mbarrier_init(full_ + stage, 1);
    ptx::fence_mbarrier_init_release_cluster();  // H6; nobody but this thread waits
    source_ = unit_.index % p.num_src;
    for (u32 stage = 0; stage < cfg::kStages; ++stage) load();
  }

  // Until the oldest load is in its slot (H1), which is returned.
  __device__ __forceinline__ u8* wait() {
    while (!ptx::mbarrier_try_wait_parity(full_ + stage_, phase_)) {
    }
    u8* slot = slots_ + stage_ * cfg::kSlotBytes;
    if (++stage_ == cfg::kStages) stage_ = 0, phase_ ^= 1;
    return slot;
  }

  // The next load, into the slot that was waited for longest ago. Nobody has touched it but copies that are complete.
  __device__ __forceinline__ void load() {
    if (p_.reads == 0 || !unit_.left()) return;
    ptx::mbarrier_arrive_expect_tx(full_ + refill_, cfg::kChunkBytes);
    ptx::cp_async_bulk_g2s(slots_ + refill_ * cfg::kSlotBytes, reinterpret_cast<const u8*>(p_.src[source_]) + unit_.offset(),
                           cfg::kChunkBytes, full_ + refill_);
    refill_ = after(refill_, cfg::kStages);
    source_ = after(source_, p_.num_src);
    if (++read_ == p_.reads) {
      read_ = 0;
      unit_.next();
      source_ = unit_.index % p_.num_src;
    }
  }

 private:
  const CeilingParams& p_;
  Units unit_;
  u8* slots_;
  u64* full_;
  u32 stage_ = 0, phase_ = 0, refill_ = 0, read_ = 0, source_ = 0;
};

// `writes` stores of one unit out of `slot`, as one group.
__device__ __forceinline__ void store(const CeilingParams& p, const Units& unit, const u8* slot) {
  u32 place = unit.index % p.num_dst;
  for (u32 write = 0; write < p.writes; ++write, place = after(place, p.num_dst)) {
    ptx::cp_async_bulk_s2g(reinterpret_cast<u8*>(p.dst[place]) + unit.offset(), slot, cfg::kChunkBytes);
  }
  ptx::cp_async_bulk_commit_group();
}

extern "C" __global__ void __launch_bounds__(cfg::kWarps * 32, 1) fan(const __grid_constant__ CeilingParams p) {
  extern __shared__ __align__(128) u8 smem[];
  if (threadIdx.x % 32 != 0) return;
  Ring ring(p, smem);
  bool first = true;
  for (Units unit(p); unit.left(); unit.next(), first = false) {
    store(p, unit, ring.wait());
    if (first) continue;
    ptx::cp_async_bulk_wait_group_read<1>();  // the slot of the unit before is free
    ring.load();
  }
  ptx::cp_async_bulk_wait_group<0>();
}

extern "C" __global__ void __launch_bounds__(cfg::kWarps * 32, 1) mix(const __grid_constant__ CeilingParams p) {
  extern __shared__ __align__(128) u8 smem[];
  u8* fixed = smem + cfg::kWarps * cfg::kStages * cfg::kSlotBytes;
  for (u32 i = threadIdx.x; i < cfg::kSlotBytes; i += blockDim.x) fixed[i] = cfg::kFill;
  ptx::fence_proxy_async_shared_cta();  // H2
  __syncthreads();
  if (threadIdx.x % 32 != 0) return;
  Ring ring(p, smem);
  for (Units unit(p); unit.left(); unit.next()) {
    for (u32 read = 0; read < p.reads; ++read) {
      ring.wait();
      ring.load();
    }
    store(p, unit, fixed);
    ptx::cp_async_bulk_wait_group_read<6>();  // stores that one warp has under way
  }
  ptx::cp_async_bulk_wait_group<0>();
}
#endif
