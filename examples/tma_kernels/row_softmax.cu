// Row softmax of float32 `[num_rows, kColumns]`. One warp loads, eight warps compute a row each; full and empty mbarriers.
//
// Row i of a CTA goes to warp i % kWarps and lies in slot i % kSlots, and kWarps divides kSlots: a slot is always the
// same warp's, which so sees every phase of its mbarriers.
//   loader  wait empty .. expect_tx, load -> full
//   warp    wait full .. row to registers, computed, back .. store .. store has read -> empty
// Launch: any number of CTAs of (1 + kWarps) * 32 threads, kSlots * (kRowBytes + 16) bytes of shared memory.
#include <cupyep/tma.cuh>

using namespace cupyep::tma;

constexpr int kColumns = 2048, kWarps = 8, kSlots = 24;
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

// The row in `slot`, in place, by all lanes of a warp.
__device__ __forceinline__ void softmax(float4* slot, int lane) {
  float4 row[kVecs];
  float most = __int_as_float(0xff800000);  // -infinity
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    row[j] = slot[lane + 32 * j];
    most = fmaxf(most, fmaxf(fmaxf(row[j].x, row[j].y), fmaxf(row[j].z, row[j].w)));
  }
  most = warp_max(most);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    float4& v = row[j];
    v = make_float4(__expf(v.x - most), __expf(v.y - most), __expf(v.z - most), __expf(v.w - most));
    sum += v.x + v.y + v.z + v.w;
  }
  const float scale = 1 / warp_sum(sum);
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const float4 v = row[j];
    slot[lane + 32 * j] = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
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
  const u64 count = num_rows > blockIdx.x ? (num_rows - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  const auto row_of = [&](u64 i) { return (blockIdx.x + i * gridDim.x) * kColumns; };
  if (warp == kWarps) {
    for (u64 i = 0; i < count && lane == 0; ++i) {
      const u32 slot = i % kSlots, use = i / kSlots;
      if (use > 0) mbarrier_wait(empty + slot, (use - 1) & 1);  // slots start empty: the first use waits for nothing
      mbarrier_arrive_and_expect_tx(full + slot, kRowBytes);
      tma_load_1d(smem + slot * kRowBytes, x + row_of(i), kRowBytes, full + slot);
    }
    return;
  }
  for (u64 i = warp; i < count; i += kWarps) {
    const u32 slot = i % kSlots;
    mbarrier_wait(full + slot, i / kSlots & 1);
    softmax(reinterpret_cast<float4*>(smem + slot * kRowBytes), lane);
    tma_store_fence();  // every lane, before the barrier: the store comes next, then the next load into this slot
    __syncwarp();
    if (lane == 0) {
      tma_store_1d(y + row_of(i), smem + slot * kRowBytes, kRowBytes);
      tma_store_commit();
      if (i >= kWarps) {
        tma_store_wait_read<1>();  // the store of this warp's last row has read its slot
        mbarrier_arrive(empty + (i - kWarps) % kSlots);
      }
    }
  }
  if (lane == 0) tma_store_wait<0>();
}
