// Where each listing of a received token goes when rows are grouped by expert: two kernels, which wait for nobody.
//
//   in    topk_idx [capacity][num_topk], local ids or -1; received: rows that came, listings of each of our experts
//   out   offsets [num_local + 1]: first row of each expert, a multiple of the alignment
//         row_map [capacity][num_topk]: the listing's row, or -1
//   moves the ids three times, out of L2
//
// A listing is an entry: (row, column) in row-major order, which is the order within an expert. CTAs own contiguous
// stretches of entries, and so do their warps. arrange_count leaves each CTA's listings per expert; arrange_place adds
// up those of the CTAs before it, then those of the warps before each warp, then numbers a warp's 32 lanes.
#include <cupyep/ptx/types.cuh>

using cupyep::ptx::u32;
using cupyep::ptx::u64;

extern __shared__ u32 smem[];

struct Stretch {
  u32 first, last;

  // Part `index` of `parts` of [first, last), in units of 32 entries.
  __device__ Stretch part(u32 index, u32 parts) const {
    const u32 length = ((last - first + parts - 1) / parts + 31) / 32 * 32;
    const u32 start = min(first + index * length, last);
    return {start, min(start + length, last)};
  }
};

__device__ __forceinline__ u32 num_rows(const ArrangeParams& p) {
  return min(*reinterpret_cast<const u32*>(p.received), p.capacity);
}

__device__ __forceinline__ Stretch of_cta(const ArrangeParams& p) {
  return Stretch{0, num_rows(p) * p.num_topk}.part(blockIdx.x, gridDim.x);
}

__device__ __forceinline__ int expert_of(const ArrangeParams& p, u32 entry) {
  return p.idx_bytes == 8 ? static_cast<int>(reinterpret_cast<const long long*>(p.topk_idx)[entry])
                          : reinterpret_cast<const int*>(p.topk_idx)[entry];
}

// One warp: aligned sums of listings.
__device__ void write_offsets(const ArrangeParams& p) {
  const u32 lane = threadIdx.x, *listings = reinterpret_cast<const u32*>(p.received) + 1;
  u32 *offsets = reinterpret_cast<u32*>(p.offsets), base = 0;
  for (u32 start = 0; start < p.num_local_experts; start += 32) {
    const u32 expert = start + lane;
    const u32 mine = expert < p.num_local_experts ? (listings[expert] + p.alignment - 1) / p.alignment * p.alignment : 0;
    u32 sum = mine;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
      const u32 before = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += before;
    }
    if (expert < p.num_local_experts) offsets[expert] = base + sum - mine;
    base += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) offsets[p.num_local_experts] = base;
}

extern "C" __global__ void __launch_bounds__(256, 1) arrange_count(const __grid_constant__ ArrangeParams p) {
  u32* histogram = smem;  // [num_local]
  if (blockIdx.x == 0 && threadIdx.x < 32) write_offsets(p);
  for (u32 expert = threadIdx.x; expert < p.num_local_experts; expert += blockDim.x) histogram[expert] = 0;
  __syncthreads();
  const Stretch cta = of_cta(p);
  for (u32 entry = cta.first + threadIdx.x; entry < cta.last; entry += blockDim.x) {
    const int expert = expert_of(p, entry);
    if (expert >= 0) atomicAdd(histogram + expert, 1u);
  }
  __syncthreads();
  u32* mine = reinterpret_cast<u32*>(p.histograms) + static_cast<u64>(blockIdx.x) * p.num_local_experts;
  for (u32 expert = threadIdx.x; expert < p.num_local_experts; expert += blockDim.x) mine[expert] = histogram[expert];
}

extern "C" __global__ void __launch_bounds__(256, 1) arrange_place(const __grid_constant__ ArrangeParams p) {
  const u32 warp = threadIdx.x / 32, num_warps = blockDim.x / 32, lane = threadIdx.x % 32;
  u32* next = smem + warp * p.num_local_experts;  // [num_local]: this warp's next row of each expert
  const Stretch cta = of_cta(p), ours = cta.part(warp, num_warps);
  for (u32 i = threadIdx.x; i < num_warps * p.num_local_experts; i += blockDim.x) smem[i] = 0;
  __syncthreads();
  for (u32 entry = ours.first + lane; entry < ours.last; entry += 32) {
    const int expert = expert_of(p, entry);
    if (expert >= 0) atomicAdd(next + expert, 1u);
  }
  __syncthreads();
  for (u32 expert = threadIdx.x; expert < p.num_local_experts; expert += blockDim.x) {
    u32 row = reinterpret_cast<const u32*>(p.offsets)[expert];
    for (u32 before = 0; before < blockIdx.x; ++before) {
      row += reinterpret_cast<const u32*>(p.histograms)[static_cast<u64>(before) * p.num_local_experts + expert];
    }
    for (u32 w = 0; w < num_warps; ++w) {
      const u32 listings = smem[w * p.num_local_experts + expert];
      smem[w * p.num_local_experts + expert] = row;
      row += listings;
    }
  }
  __syncthreads();
  int* row_map = reinterpret_cast<int*>(p.row_map);
  for (u32 start = ours.first; start < ours.last; start += 32) {
    const u32 entry = start + lane;
    const int expert = entry < ours.last ? expert_of(p, entry) : -1;
    const u32 same = __match_any_sync(~0u, expert), earlier = same & ((1u << lane) - 1);
    const u32 first = expert >= 0 ? next[expert] : 0;
    __syncwarp();
    if (expert >= 0 && earlier == 0) next[expert] = first + __popc(same);
    __syncwarp();
    if (entry < ours.last) row_map[entry] = expert >= 0 ? static_cast<int>(first + __popc(earlier)) : -1;
  }
  const u32 end = p.capacity * p.num_topk;  // rows that did not come
  for (u32 entry = num_rows(p) * p.num_topk + blockIdx.x * blockDim.x + threadIdx.x; entry < end; entry += gridDim.x * blockDim.x) {
    row_map[entry] = -1;
  }
}
