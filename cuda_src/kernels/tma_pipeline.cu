// PIPELINE: load -> compute -> store of tiles, around code of the user's. Needs sm_90. Any number of CTAs.
//
//   in    x, num_rows rows of kRowElements In; a tile is kTileRows of them
//   out   y, as many rows of kOutRowElements Out
//   roles warp 0 loads; kGroups groups of kGroupWarps warps compute, each on every kGroups-th tile, and store
//   sync  none: stream order
//
// Tile i of a CTA lies in input slot i % kStages:
//   load    wait empty .. expect_tx, load -> full
//   group   wait full .. compute .. fence, barrier -> empty .. store
// and its result in one of the group's two output slots, which is written again when the store before has read it.
// kGroups divides kStages: a slot is always the same group's, which so sees each of its phases. Had another group seen
// the phase between, a wait by parity would take the one before it for the one awaited.
#include <cupyep/tma.cuh>

using namespace cupyep;
using ptx::u32;
using ptx::u64;
using u8 = unsigned char;

constexpr u32 kInBytes = cfg::kTileRows * cfg::kRowElements * sizeof(In);
constexpr u32 kOutBytes = cfg::kTileRows * cfg::kOutRowElements * sizeof(Out);
constexpr u32 kOutSlots = 2;
static_assert(cfg::kStages % cfg::kGroups == 0);

__device__ __forceinline__ constexpr u32 lines(u32 bytes) { return (bytes + 127) / 128 * 128; }

// The CTA's shared memory.
struct Slots {
  u8* base;
  __device__ u8* in(u32 stage) const { return base + stage * lines(kInBytes); }
  __device__ u8* out(u32 slot) const { return base + cfg::kStages * lines(kInBytes) + slot * lines(kOutBytes); }
  __device__ u64* full(u32 stage) const { return reinterpret_cast<u64*>(out(cfg::kGroups * kOutSlots)) + stage; }
  __device__ u64* empty(u32 stage) const { return full(cfg::kStages) + stage; }
};

// Tile i of this CTA: which rows.
struct Span {
  u64 first;
  u32 count;
  __device__ Span(const PipelineParams& p, u32 i)
      : first((blockIdx.x + static_cast<u64>(i) * gridDim.x) * cfg::kTileRows) {
    const u64 left = p.num_rows - first;
    count = left < cfg::kTileRows ? static_cast<u32>(left) : cfg::kTileRows;
  }
};

__device__ __forceinline__ void load_tiles(const PipelineParams& p, const Slots& slots, u32 num_tiles) {
  for (u32 i = 0; i < num_tiles; ++i) {
    const u32 stage = i % cfg::kStages, use = i / cfg::kStages;
    const Span span(p, i);
    const u32 bytes = span.count * cfg::kRowElements * static_cast<u32>(sizeof(In));
    // sync(tile.empty) ACQUIRE.cta: the slot's readers have fenced (H3). Pairs with RELEASE in work. Slots start empty.
    if (use > 0) tma::mbarrier_wait(slots.empty(stage), (use - 1) & 1);
    tma::mbarrier_arrive_and_expect_tx(slots.full(stage), bytes);
    const In* from = reinterpret_cast<const In*>(p.x) + span.first * cfg::kRowElements;
    tma::tma_load_1d(slots.in(stage), from, bytes, slots.full(stage));
  }
}

__device__ __forceinline__ void work(const PipelineParams& p, const Slots& slots, u32 num_tiles) {
  const u32 worker = threadIdx.x - 32, group = worker / Tile::num_threads, thread = worker % Tile::num_threads;
  for (u32 i = group, turn = 0; i < num_tiles; i += cfg::kGroups, ++turn) {
    const u32 stage = i % cfg::kStages;
    const Span span(p, i);
    u8* result = slots.out(group * kOutSlots + turn % kOutSlots);
    tma::mbarrier_wait(slots.full(stage), i / cfg::kStages & 1);  // H1: each reader
    const In* in = reinterpret_cast<const In*>(slots.in(stage));
    const Tile tile = {in, reinterpret_cast<Out*>(result), span.count, span.first, thread, group};
    compute(tile, p.scalars);
    tma::tma_store_fence();  // H2: each writer of the result; H3: each reader of the slot
    if (thread == 0) tma::tma_store_wait_read<kOutSlots - 2>();  // the other output slot may be written again
    tile.sync();
    if (thread == 0) {
      // sync(tile.empty) RELEASE.cta: all readers have fenced and passed the barrier (H3). Read by: load_tiles.
      tma::mbarrier_arrive(slots.empty(stage));
      Out* to = reinterpret_cast<Out*>(p.y) + span.first * cfg::kOutRowElements;
      tma::tma_store_1d(to, result, span.count * cfg::kOutRowElements * static_cast<u32>(sizeof(Out)));
      tma::tma_store_commit();
    }
  }
  if (thread == 0) tma::tma_store_wait<0>();  // its shared memory must stay until then
}

extern "C" __global__ void __launch_bounds__((1 + cfg::kGroups * cfg::kGroupWarps) * 32, 1)
pipeline(const __grid_constant__ PipelineParams p) {
  extern __shared__ __align__(128) u8 smem[];
  const Slots slots = {smem};
  if (threadIdx.x == 0) {
    for (u32 stage = 0; stage < cfg::kStages; ++stage) {
      tma::mbarrier_init(slots.full(stage), 1);
      tma::mbarrier_init(slots.empty(stage), 1);
    }
    tma::fence_barrier_init();  // H6, then the barrier
  }
  __syncthreads();
  const u32 num_tiles = p.num_tiles > blockIdx.x ? (p.num_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  if (threadIdx.x >= 32) work(p, slots, num_tiles);
  else if (threadIdx.x == 0) load_tiles(p, slots, num_tiles);
}
