// y = fp8(x * scale): bfloat16 to e4m3, rounded to nearest even, saturating at 448. Every warp works alone, with a ring
// of input slots and two output slots: the result has half the size, so it cannot lie in place.
//
//   input slot    load .. full | all lanes read, fence | load ...
//   output slot   all lanes write, fence | store reads .. free | ...
// Launch: any number of CTAs of kWarps * 32 threads, kWarps * (kWarpBytes + 8 * kStages) bytes of shared memory; num_elements a multiple of 16.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cupyep/tma.cuh>

using namespace cupyep::tma;

constexpr int kWarps = 8, kStages = 4, kElements = 2048;  // of a slot
constexpr u32 kInBytes = 2 * kElements, kOutBytes = kElements, kWarpBytes = kStages * kInBytes + 2 * kOutBytes;

// Two bfloat16, the lower one first, to two fp8.
__device__ __forceinline__ u32 cast_pair(u32 pair, float scale) {
  const float2 values = make_float2(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
  return __nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, __NV_E4M3);
}

extern "C" __global__ void __launch_bounds__(kWarps * 32, 1)
cast_fp8(unsigned char* y, const __nv_bfloat16* x, u64 num_elements, float scale) {
  extern __shared__ __align__(128) unsigned char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned char* in = smem + warp * kWarpBytes;
  unsigned char* out = in + kStages * kInBytes;
  u64* full = reinterpret_cast<u64*>(smem + kWarps * kWarpBytes) + warp * kStages;

  const u64 num_chunks = (num_elements + kElements - 1) / kElements;
  const u64 first = static_cast<u64>(warp) * gridDim.x + blockIdx.x, step = static_cast<u64>(kWarps) * gridDim.x;
  const u64 count = num_chunks > first ? (num_chunks - first + step - 1) / step : 0;
  const auto start = [&](u64 i) { return (first + i * step) * kElements; };
  const auto size = [&](u64 i) { return static_cast<u32>(min(num_elements - start(i), static_cast<u64>(kElements))); };
  const auto load = [&](u64 i) {
    mbarrier_arrive_and_expect_tx(full + i % kStages, 2 * size(i));
    tma_load_1d(in + i % kStages * kInBytes, x + start(i), 2 * size(i), full + i % kStages);
  };

  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(full + stage, 1);
    fence_barrier_init();
    for (u64 i = 0; i < kStages && i < count; ++i) load(i);
  }
  __syncwarp();

  for (u64 i = 0; i < count; ++i) {
    const uint4* from = reinterpret_cast<const uint4*>(in + i % kStages * kInBytes);
    uint2* to = reinterpret_cast<uint2*>(out + i % 2 * kOutBytes);
    mbarrier_wait(full + i % kStages, i / kStages & 1);
#pragma unroll 4
    for (u32 j = lane; j < size(i) / 8; j += 32) {
      const uint4 v = from[j];
      to[j] = make_uint2(cast_pair(v.x, scale) | cast_pair(v.y, scale) << 16,
                         cast_pair(v.z, scale) | cast_pair(v.w, scale) << 16);
    }
    tma_store_fence();  // every lane: it has written `to` for the store, and read `from` for good
    if (lane == 0) tma_store_wait_read<0>();  // the last store has read the other output slot, which the next turn writes
    __syncwarp();
    if (lane == 0) {
      tma_store_1d(y + start(i), to, size(i));
      tma_store_commit();
      if (i + kStages < count) load(i + kStages);  // into the slot that all lanes have read and fenced
    }
  }
  if (lane == 0) tma_store_wait<0>();
}
