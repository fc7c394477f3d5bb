#pragma once
// TMA by the names most kernels use: bulk loads and stores, of runs of bytes and of tiles, and the mbarrier that a load
// reports to.
//
// A correct kernel, in words. One thread initialises the mbarrier, fences the initialisation and meets the others at a
// CTA barrier. For each load one elected thread first announces the bytes, then issues the copy; every thread that
// reads the data waits for the phase and then flips its own phase bit. Threads that wrote shared memory fence *before*
// the barrier after which one thread issues the store. The thread that issued stores commits and waits for them. A
// buffer that was only read is fenced alike (tma_store_fence, then a barrier) before the next load overwrites it.
//
//   __shared__ alignas(128) unsigned char buffer[4096];
//   __shared__ alignas(8) unsigned long long mbar;
//   if (threadIdx.x == 0) { mbarrier_init(&mbar, 1); fence_barrier_init(); }   // 1 = arrivals per phase
//   __syncthreads();
//   unsigned phase = 0;
//   for (unsigned i = 0; i < num_rows; ++i) {
//     if (threadIdx.x < 32 && elect_one_sync()) {                              // one warp, whole: elect.sync needs it
//       tma_store_wait_read<0>();                                              // the last store has read the buffer
//       mbarrier_arrive_and_expect_tx(&mbar, 4096);
//       tma_load_1d(buffer, src + 4096 * i, 4096, &mbar);
//     }
//     mbarrier_wait(&mbar, phase); phase ^= 1;                                 // every thread that reads
//     change(buffer);
//     tma_store_fence(); __syncthreads();                                      // each writer fences, then the barrier
//     if (threadIdx.x < 32 && elect_one_sync()) { tma_store_1d(dst + 4096 * i, buffer, 4096); tma_store_commit(); }
//   }
//   if (threadIdx.x < 32 && elect_one_sync()) tma_store_wait<0>();             // written; then a peer may be told
//
// elect.sync picks the same lane each time, so the lane that commits is the lane that waits. Needs sm_90.
#include <cupyep/ptx/bulk.cuh>
#include <cupyep/ptx/fence.cuh>
#include <cupyep/ptx/mbarrier.cuh>
#include <cupyep/ptx/tensor.cuh>
#include <cupyep/ptx/warp.cuh>

namespace cupyep::tma {

using ptx::u32;
using ptx::u64;

// True in one lane, the same one each time. All 32 lanes of the warp call it together.
__device__ __forceinline__ bool elect_one_sync() { return ptx::elect_sync(); }

// --- mbarriers -------------------------------------------------------------------------------------------------------

// One thread; `count` arrivals complete a phase. Follow with fence_barrier_init and a CTA barrier.
__device__ __forceinline__ void mbarrier_init(u64* mbar, u32 count) { ptx::mbarrier_init(mbar, count); }

// The initialising thread, after its last mbarrier_init: makes the barriers visible to the copy engine (H6).
__device__ __forceinline__ void fence_barrier_init() { ptx::fence_mbarrier_init_release_cluster(); }

// One arrival; releases what the thread wrote to the threads that wait for the phase.
__device__ __forceinline__ void mbarrier_arrive(u64* mbar) { ptx::mbarrier_arrive(mbar); }

// One arrival that also announces `bytes` of loads to come in this phase. Call it before tma_load_1d.
__device__ __forceinline__ void mbarrier_arrive_and_expect_tx(u64* mbar, u32 bytes) {
  ptx::mbarrier_arrive_expect_tx(mbar, bytes);
}

// One try: true when the phase of parity `phase` has completed, and then its loads may be read (H1). May suspend the
// thread for a moment.
__device__ __forceinline__ bool mbarrier_try_wait(const u64* mbar, u32 phase) {
  return ptx::mbarrier_try_wait_parity(mbar, phase);
}

// Until the phase of parity `phase` has completed; the caller then flips its phase bit. There is no deadline: a load
// that never lands hangs the kernel. The library's own kernels wait with a deadline instead (sync.cuh).
__device__ __forceinline__ void mbarrier_wait(const u64* mbar, u32 phase) {
  while (!mbarrier_try_wait(mbar, phase)) {
  }
}

// --- copies: one thread, 16-byte aligned addresses, `bytes` a multiple of 16 -----------------------------------------

// Global (also a peer's) to shared memory; completes `bytes` of the phase of `mbar`.
__device__ __forceinline__ void tma_load_1d(void* dst_smem, const void* src_gmem, u32 bytes, u64* mbar) {
  ptx::cp_async_bulk_g2s(dst_smem, src_gmem, bytes, mbar);
}

// Every thread that wrote shared memory which a store will read (H2), or read shared memory which a load will overwrite
// (H3); then a barrier; then one thread issues the copy.
__device__ __forceinline__ void tma_store_fence() { ptx::fence_proxy_async_shared_cta(); }

// Shared to global memory (also a peer's). Joins the thread's open group; commit it.
__device__ __forceinline__ void tma_store_1d(void* dst_gmem, const void* src_smem, u32 bytes) {
  ptx::cp_async_bulk_s2g(dst_gmem, src_smem, bytes);
}

// --- tiles: one thread, shared memory 128-byte aligned, coordinates in elements, innermost axis first ----------------

// A tile of a tensor map to shared memory; completes the whole tile's bytes of the phase of `mbar`, also where it lies
// outside of the tensor and is filled.
template <int kRank>
__device__ __forceinline__ void tma_load_tile(void* dst_smem, const void* tensor_map, const int* c, u64* mbar) {
  static_assert(kRank >= 1 && kRank <= 5);
  if constexpr (kRank == 1) ptx::cp_async_bulk_tensor_1d_g2s(dst_smem, tensor_map, c[0], mbar);
  if constexpr (kRank == 2) ptx::cp_async_bulk_tensor_2d_g2s(dst_smem, tensor_map, c[0], c[1], mbar);
  if constexpr (kRank == 3) ptx::cp_async_bulk_tensor_3d_g2s(dst_smem, tensor_map, c[0], c[1], c[2], mbar);
  if constexpr (kRank == 4) ptx::cp_async_bulk_tensor_4d_g2s(dst_smem, tensor_map, c[0], c[1], c[2], c[3], mbar);
  if constexpr (kRank == 5) ptx::cp_async_bulk_tensor_5d_g2s(dst_smem, tensor_map, c[0], c[1], c[2], c[3], c[4], mbar);
}

// A tile in shared memory to the tensor; what lies outside of it is dropped. Joins the thread's open group; commit it.
template <int kRank>
__device__ __forceinline__ void tma_store_tile(const void* tensor_map, const int* c, const void* src_smem) {
  static_assert(kRank >= 1 && kRank <= 5);
  if constexpr (kRank == 1) ptx::cp_async_bulk_tensor_1d_s2g(tensor_map, c[0], src_smem);
  if constexpr (kRank == 2) ptx::cp_async_bulk_tensor_2d_s2g(tensor_map, c[0], c[1], src_smem);
  if constexpr (kRank == 3) ptx::cp_async_bulk_tensor_3d_s2g(tensor_map, c[0], c[1], c[2], src_smem);
  if constexpr (kRank == 4) ptx::cp_async_bulk_tensor_4d_s2g(tensor_map, c[0], c[1], c[2], c[3], src_smem);
  if constexpr (kRank == 5) ptx::cp_async_bulk_tensor_5d_s2g(tensor_map, c[0], c[1], c[2], c[3], c[4], src_smem);
}

// --- bulk groups: stores of either kind ------------------------------------------------------------------------------

// Closes the thread's open group of stores.
__device__ __forceinline__ void tma_store_commit() { ptx::cp_async_bulk_commit_group(); }

// Until at most N of the thread's groups are unfinished: all older stores are written, and a peer may be told (H4).
template <int N>
__device__ __forceinline__ void tma_store_wait() {
  ptx::cp_async_bulk_wait_group<N>();
}

// Until at most N of the thread's groups still read shared memory: older sources are free, the writes may be under way.
template <int N>
__device__ __forceinline__ void tma_store_wait_read() {
  ptx::cp_async_bulk_wait_group_read<N>();
}

}  // namespace cupyep::tma
