// REDUCE: the local half of a combine in the expert layout. Waits for nobody.
//
//   in    expanded [..][hidden] of kDType, the experts' outputs; row_map from arrange; weights [capacity][num_topk], or 0
//   out   rows [capacity][hidden] of kWireDType: weight * row summed over a token's listings, in fp32 from +0 by
//         ascending column, rounded once; rows that did not come are left alone
//   moves each row of an expert once, and writes one row per token, which PULL then sends over the link
#include <cupyep/vec.cuh>

using namespace cupyep;
using ptx::u32;
using ptx::u64;

constexpr int kPerVec = kElements<cfg::kDType, cfg::kVecBytes>;
constexpr int kWireVecBytes = kPerVec * (cfg::kWireDType == cfg::kDTypeFloat32 ? 4 : 2);
constexpr u32 kNumVecs = cfg::kHidden / kPerVec, kBatch = 4;  // vectors that a lane has under way

extern "C" __global__ void __launch_bounds__(256, 2) reduce(const __grid_constant__ ReduceParams p) {
  const u32 lane = threadIdx.x % 32, num_warps = blockDim.x / 32 * gridDim.x;
  const u32 num_rows = min(*reinterpret_cast<const u32*>(p.received), p.capacity);
  const Vec* expanded = reinterpret_cast<const Vec*>(p.expanded);
  VecOf<kWireVecBytes>* rows = reinterpret_cast<VecOf<kWireVecBytes>*>(p.rows);
  for (u32 row = threadIdx.x / 32 * gridDim.x + blockIdx.x; row < num_rows; row += num_warps) {
    const u64 entry = static_cast<u64>(row) * p.num_topk + lane;
    int place = -1;
    float weight = 1.0f;
    if (lane < p.num_topk) {
      place = reinterpret_cast<const int*>(p.row_map)[entry];
      if (p.weights != 0) weight = reinterpret_cast<const float*>(p.weights)[entry];
    }
    const u32 listed = __ballot_sync(~0u, place >= 0);
    for (u32 start = lane; start < kNumVecs + lane; start += 32 * kBatch) {  // the same number of turns in every lane
      float sums[kBatch][kPerVec] = {};
      for (u32 left = listed; left != 0; left &= left - 1) {
        const u64 from = static_cast<u64>(__shfl_sync(~0u, place, __ffs(left) - 1)) * kNumVecs;
        const float factor = __shfl_sync(~0u, weight, __ffs(left) - 1);
        Vec batch[kBatch];
#pragma unroll
        for (u32 j = 0; j < kBatch; ++j) {
          if (start + 32 * j < kNumVecs) batch[j] = expanded[from + start + 32 * j];
        }
#pragma unroll
        for (u32 j = 0; j < kBatch; ++j) {
          if (start + 32 * j >= kNumVecs) continue;
          float values[kPerVec];
#pragma unroll
          for (int i = 0; i < kPerVec; ++i) values[i] = -0.0f;  // -0 plus a value is that value, -0 included
          accumulate<cfg::kDType>(values, batch[j]);
#pragma unroll
          for (int i = 0; i < kPerVec; ++i) sums[j][i] = __fadd_rn(sums[j][i], __fmul_rn(factor, values[i]));
        }
      }
#pragma unroll
      for (u32 j = 0; j < kBatch; ++j) {
        if (start + 32 * j < kNumVecs) {
          rows[static_cast<u64>(row) * kNumVecs + start + 32 * j] = rounded<cfg::kWireDType, kWireVecBytes>(sums[j]);
        }
      }
    }
  }
}
