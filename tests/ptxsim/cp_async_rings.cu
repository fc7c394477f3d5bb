// Kernels whose rows come into shared memory by cp.async, for test_cp_async.py.
#include <cupyep/ptx/bulk.cuh>
#include <cupyep/ptx/cp_async.cuh>
#include <cupyep/ptx/fence.cuh>
#include <cupyep/ptx/ld_st.cuh>
#include <cupyep/ptx/mbarrier.cuh>

using namespace cupyep;

constexpr unsigned kWarps = 2, kSlots = 3, kAhead = kSlots - 1;  // rows on their way while a warp adds one

// Sums of rows of 512 bytes: warp w of all warps adds rows w, w + warps, ... into sums[w]; each lane has 16 bytes.
extern "C" __global__ void sum_rows(int4* sums, int4* rows, unsigned num_rows) {
  __shared__ int4 ring[kWarps][kSlots][32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned first = blockIdx.x * kWarps + warp, stride = gridDim.x * kWarps;
  const unsigned num_turns = first < num_rows ? (num_rows - first - 1) / stride + 1 : 0;

  // Behind the last turn its row is copied again, and nobody looks: so every turn has a group, and the end a drain.
  auto copy = [&](unsigned turn) {
    char* to = reinterpret_cast<char*>(&ring[warp][turn % kSlots][lane]);
    int4* row = rows + (first + min(turn, num_turns - 1) * stride) * 32;
    const char* from = reinterpret_cast<const char*>(row + lane);
    ptx::cp_async_cg_16(to, from);
    ptx::cp_async_commit_group();
  };

  int4 sum = {0, 0, 0, 0};
  for (unsigned turn = 0; num_turns > 0 && turn < kAhead; ++turn) copy(turn);
  for (unsigned turn = 0; turn < num_turns; ++turn) {
    copy(turn + kAhead);
    ptx::cp_async_wait_group<kAhead>();
    const int4 value = ring[warp][turn % kSlots][lane];
    sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
  }
  ptx::cp_async_wait_group<0>();
  sums[first * 32 + lane] = sum;
}

// CTA 1 fills a row of 512 bytes, lends it to CTA 0, which copies it, and wipes it when that has told so.
extern "C" __global__ void lend_row(int4* to, int4* row, ptx::u32* words) {
  __shared__ int4 slot[32];
  const int lane = threadIdx.x;
  if (blockIdx.x == 1) {
    row[lane] = {lane, 1, 2, 3};
    __syncwarp();
    if (lane == 0) ptx::st_release_sys(words, 1);
    while (ptx::ld_acquire_sys(words + 1) == 0) continue;
    row[lane] = {0, 0, 0, 0};
    ptx::fence_acq_rel_sys();
    return;
  }
  while (ptx::ld_acquire_sys(words) == 0) continue;
  ptx::cp_async_cg_16(slot + lane, row + lane);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  __syncwarp();
  if (lane == 0) ptx::st_release_sys(words + 1, 1);
  to[lane] = slot[lane];
}

#if __CUDA_ARCH__ >= 900

// A row of 512 bytes by way of shared memory: in by cp.async of every lane, out by one bulk store.
extern "C" __global__ void pass_row(int4* to, const int4* from) {
  __shared__ alignas(16) int4 slot[32];
  ptx::cp_async_cg_16(slot + threadIdx.x, from + threadIdx.x);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  ptx::fence_proxy_async_shared_cta();
  __syncwarp();
  if (threadIdx.x == 0) {
    ptx::cp_async_bulk_s2g(to, slot, sizeof(slot));
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group<0>();
  }
}

#endif
