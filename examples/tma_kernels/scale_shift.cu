// y = a * x + b, in float32. Every warp works alone, on a ring of slots that it computes in place.
//
// Per slot: load .. full | all lanes compute | store reads .. free | load ...
// Launch: any number of CTAs of kWarps * 32 threads, kWarps * kStages * (kSlotBytes + 8) bytes of shared memory;
// num_bytes a multiple of 16.
#include <cupyep/tma.cuh>

using namespace cupyep::tma;

constexpr int kWarps = 8, kStages = 3, kSlotBytes = 8192;

extern "C" __global__ void __launch_bounds__(kWarps * 32, 1)
scale_shift(float* y, const float* x, u64 num_bytes, float a, float b) {
  extern __shared__ __align__(128) unsigned char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned char* ring = smem + warp * kStages * kSlotBytes;
  u64* full = reinterpret_cast<u64*>(smem + kWarps * kStages * kSlotBytes) + warp * kStages;

  // Chunks of kSlotBytes, dealt to all warps of all CTAs in turn.
  const u64 num_chunks = (num_bytes + kSlotBytes - 1) / kSlotBytes;
  const u64 first = static_cast<u64>(warp) * gridDim.x + blockIdx.x, step = static_cast<u64>(kWarps) * gridDim.x;
  const u32 count = num_chunks > first ? static_cast<u32>((num_chunks - first + step - 1) / step) : 0;
  const auto offset = [&](u32 i) { return (first + i * step) * kSlotBytes; };
  const auto bytes = [&](u32 i) { return static_cast<u32>(min(num_bytes - offset(i), static_cast<u64>(kSlotBytes))); };
  const auto load = [&](u32 i) {  // by lane 0: announce the bytes first, then copy
    const u32 stage = i % kStages;
    mbarrier_arrive_and_expect_tx(full + stage, bytes(i));
    tma_load_1d(ring + stage * kSlotBytes, reinterpret_cast<const char*>(x) + offset(i), bytes(i), full + stage);
  };

  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(full + stage, 1);  // one arrival: lane 0's
    fence_barrier_init();                                                          // the copy engine sees them
    for (u32 i = 0; i < kStages && i < count; ++i) load(i);
  }
  __syncwarp();  // the other lanes see them: they are this warp's alone, so its barrier is enough

  for (u32 i = 0; i < count; ++i) {
    mbarrier_wait(full + i % kStages, i / kStages & 1);  // every lane that reads; the phase flips with each use
    float4* slot = reinterpret_cast<float4*>(ring + i % kStages * kSlotBytes);
    const u32 num_vecs = bytes(i) / 16;
#pragma unroll 8  // so many loads from shared memory wait together
    for (u32 j = lane; j < num_vecs; j += 32) {
      const float4 v = slot[j];
      slot[j] = make_float4(a * v.x + b, a * v.y + b, a * v.z + b, a * v.w + b);
    }
    tma_store_fence();  // every lane that wrote, before the barrier
    __syncwarp();
    if (lane == 0) {
      tma_store_1d(reinterpret_cast<char*>(y) + offset(i), slot, bytes(i));
      tma_store_commit();
      if (i > 0 && i - 1 + kStages < count) {
        tma_store_wait_read<1>();  // the store before this one has read its slot: load into it
        load(i - 1 + kStages);
      }
    }
  }
  if (lane == 0) tma_store_wait<0>();  // shared memory must live until it is read, and y is written
}
