// Row softmax of float32 `[num_rows, kColumns]`. One warp loads, kWarps compute a row each; full and empty mbarriers.
//
// Row i of a CTA goes to warp i % kWarps and lies in slot i % kSlots, and kWarps divides kSlots: a slot is always the
// same warp's, which so sees every phase of its mbarriers.
//   loader  wait empty .. expect_tx, load -> full
//   warp    wait full .. row to registers, computed, back .. store .. store has read -> empty
// Launch: any number of CTAs of (1 + kWarps) * 32 threads, kSlots * (kRowBytes + 16) bytes of shared memory.
#include <cupyep/tma.cuh>

using namespace cupyep::tma;

constexpr int kColumns = 2048, kWarps = 12, kSlots = 24;
constexpr u32 kRowBytes = kColumns * 4;
constexpr int kVecs = kColumns / 4 / 32;  // float4 of a row per lane
static_assert(kColumns % 128 == 0 && kSlots % kWarps == 0);

__device__ __forceinline__ float warp_max(float value) {
  for (int distance = 16; distance > 0; distance /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}

__device__ __forceinline__ float warp_sum(float value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

// The row in `slot`, in place, by all lanes of a warp. It is read once and stays in registers.
__device__ __forceinline__ void softmax(float4* slot, int lane) {
  constexpr float kLog2E = 1.4426950408889634f;
  float4 row[kVecs];
  float most = __int_as_float(0xff800000);  // -infinity
#pragma unroll
  for (int j = 0; j < kVecs; ++j) row[j] = slot[lane + 32 * j];
#pragma unroll
  for (int j = 0; j < kVecs; ++j) most = fmaxf(most, fmaxf(fmaxf(row[j].x, row[j].y), fmaxf(row[j].z, row[j].w)));
  const float shift = -warp_max(most) * kLog2E;
  const auto exp_of = [&](float x) { return exp2f(fmaf(x, kLog2E, shift)); };  // e^(x - max) in two instructions
  float4 sums = {};
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    row[j] = make_float4(exp_of(row[j].x), exp_of(row[j].y), exp_of(row[j].z), exp_of(row[j].w));
    sums = make_float4(sums.x + row[j].x, sums.y + row[j].y, sums.z + row[j].z, sums.w + row[j].w);
  }
  const float scale = 1 / warp_sum(sums.x + sums.y + sums.z + sums.w);
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    slot[lane + 32 * j] = make_float4(row[j].x * scale, row[j].y * scale, row[j].z * scale, row[j].w * scale);
  }
}

extern "C" __global__ void __launch_bounds__((1 + kWarps) * 32, 1) row_softmax(float* y, const float* x, u64 num_rows) {
  extern __shared__ __align__(128) unsigned char smem[];
  u64* full = reinterpret_cast<u64*>(smem + kSlots * kRowBytes);
  u64* empty = full + kSlots;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      mbarrier_init(full + slot, 1);   // the loader's arrival, and the bytes
      mbarrier_init(empty + slot, 1);  // the computing warp's lane 0
    }
    fence_barrier_init();
  }
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 count = num_rows > blockIdx.x ? static_cast<u32>((num_rows - blockIdx.x + gridDim.x - 1) / gridDim.x) : 0;
  const auto row_of = [&](u32 i) { return (blockIdx.x + static_cast<u64>(i) * gridDim.x) * kColumns; };
  if (warp == kWarps) {
    for (u32 i = 0; i < count && lane == 0; ++i) {
      const u32 slot = i % kSlots, use = i / kSlots;
      if (use > 0) mbarrier_wait(empty + slot, (use - 1) & 1);  // slots start empty: the first use waits for nothing
      mbarrier_arrive_and_expect_tx(full + slot, kRowBytes);
      tma_load_1d(smem + slot * kRowBytes, x + row_of(i), kRowBytes, full + slot);
    }
    return;
  }
  for (u32 i = warp; i < count; i += kWarps) {
    const u32 slot = i % kSlots;
    mbarrier_wait(full + slot, i / kSlots & 1);
    softmax(reinterpret_cast<float4*>(smem + slot * kRowBytes), lane);
    tma_store_fence();  // every lane, before the barrier: the store comes next, then the next load into this slot
    __syncwarp();
    if (lane == 0) {
      tma_store_1d(y + row_of(i), smem + slot * kRowBytes, kRowBytes);
      tma_store_commit();
      tma_store_wait_read<0>();  // the store has read the slot: the next row may come
      mbarrier_arrive(empty + slot);
    }
  }
  if (lane == 0) tma_store_wait<0>();
}
