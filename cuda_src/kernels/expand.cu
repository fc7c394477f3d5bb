// EXPAND: received rows (or their scales) to the places that arrange gave them, grouped by expert. Waits for nobody.
//
//   in    rows [capacity][kRowBytes] in the rank layout; row_map, offsets from arrange; received
//   out   expanded [..][kRowBytes]; zeros between one expert's rows and the next's, if asked for
//   moves each row once out of memory, and into memory once per listing
#include <cupyep/mover.cuh>

using namespace cupyep;

extern "C" __global__ void __launch_bounds__(cfg::kWarps * 32) expand(const __grid_constant__ ExpandParams p) {
  const u32 lane = threadIdx.x % 32, num_rows = min(*reinterpret_cast<const u32*>(p.received), p.capacity);
  const Walk walk(num_rows);
  VectorMover mover(nullptr, walk, reinterpret_cast<const u8*>(p.rows));
  u8* expanded = reinterpret_cast<u8*>(p.expanded);
  for (u32 i = 0; i < walk.count; ++i) {
    const Unit unit = walk.unit(i);
    const u64 entry = static_cast<u64>(unit.token) * p.num_topk + lane;
    const int row = lane < p.num_topk ? reinterpret_cast<const int*>(p.row_map)[entry] : -1;
    mover.store(row >= 0 ? expanded + static_cast<u64>(row) * cfg::kRowBytes : nullptr, unit);
  }
  if (p.zero_gaps == 0) return;
  const u32 *offsets = reinterpret_cast<const u32*>(p.offsets), *listings = reinterpret_cast<const u32*>(p.received) + 1;
  for (u32 expert = blockIdx.x; expert < p.num_local_experts; expert += gridDim.x) {
    constexpr u32 kVecs = cfg::kRowBytes / cfg::kVecBytes;
    const u64 first = static_cast<u64>(offsets[expert] + listings[expert]) * kVecs, last = static_cast<u64>(offsets[expert + 1]) * kVecs;
    for (u64 vec = first + threadIdx.x; vec < last; vec += blockDim.x) reinterpret_cast<Vec*>(expanded)[vec] = Vec{};
  }
}
