// y = fp8(x * scale): bfloat16 to e4m3, rounded to nearest even, saturating at 448. Every warp works alone, with a ring
// of input slots and two output slots: the result has half the size, so it cannot lie in place.
//
//   input slot    load .. full | all lanes read, fence | load ...
//   output slot   all lanes write, fence | store reads .. free | ...
// Launch: any number of CTAs of kWarps * 32 threads, kWarps * (kWarpBytes + 8 * kStages) bytes of shared memory;
// num_elements a multiple of 16.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cupyep/tma.cuh>

using namespace cupyep::tma;

constexpr int kWarps = 16, kStages = 2, kElements = 2048;  // of a slot
constexpr u32 kInBytes = 2 * kElements, kOutBytes = kElements, kWarpBytes = kStages * kInBytes + 2 * kOutBytes;

// Two bfloat16, the lower one first, to two fp8.
__device__ __forceinline__ u32 cast_pair(u32 pair, float scale) {
  const float2 values = make_float2(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
  return __nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, __NV_E4M3);
}

// kBatch times eight elements of a lane. All are loaded before the first is stored: loads do not pass stores, so that
// one at a time would wait for shared memory each time.
template <int kBatch>
__device__ __forceinline__ void cast_vectors(uint2* to, const uint4* from, float scale) {
  uint4 v[kBatch];
#pragma unroll
  for (int k = 0; k < kBatch; ++k) v[k] = from[32 * k];
#pragma unroll
  for (int k = 0; k < kBatch; ++k) {
    to[32 * k] = make_uint2(cast_pair(v[k].x, scale) | cast_pair(v[k].y, scale) << 16,
                            cast_pair(v[k].z, scale) | cast_pair(v[k].w, scale) << 16);
  }
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
  const u32 count = num_chunks > first ? static_cast<u32>((num_chunks - first + step - 1) / step) : 0;
  const auto start = [&](u32 i) { return (first + i * step) * kElements; };
  const auto size = [&](u32 i) { return static_cast<u32>(min(num_elements - start(i), static_cast<u64>(kElements))); };
  const auto load = [&](u32 i) {
    mbarrier_arrive_and_expect_tx(full + i % kStages, 2 * size(i));
    tma_load_1d(in + i % kStages * kInBytes, x + start(i), 2 * size(i), full + i % kStages);
  };

  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(full + stage, 1);
    fence_barrier_init();
    for (u32 i = 0; i < kStages && i < count; ++i) load(i);
  }
  __syncwarp();

  for (u32 i = 0; i < count; ++i) {
    const uint4* from = reinterpret_cast<const uint4*>(in + i % kStages * kInBytes);
    uint2* to = reinterpret_cast<uint2*>(out + i % 2 * kOutBytes);
    mbarrier_wait(full + i % kStages, i / kStages & 1);
    constexpr u32 kBatch = 8;
    const u32 num_vecs = size(i) / 8;
    u32 j = lane;
    for (; j + 32 * (kBatch - 1) < num_vecs; j += 32 * kBatch) cast_vectors<kBatch>(to + j, from + j, scale);
    for (; j < num_vecs; j += 32) cast_vectors<1>(to + j, from + j, scale);
    tma_store_fence();  // every lane: it has written `to` for the store, and read `from` for good
    if (lane == 0) tma_store_wait_read<0>();  // the last store has read the other output slot, which comes next
    __syncwarp();
    if (lane == 0) {
      tma_store_1d(y + start(i), to, size(i));
      tma_store_commit();
      if (i + kStages < count) load(i + kStages);  // into the slot that all lanes have read and fenced
    }
  }
  if (lane == 0) tma_store_wait<0>();
}
