// quantize_fp8 and dequantize_fp8: between kDType and e4m3 codes with one scale per kBlock elements of a token.
//
//   wide    [num_tokens][hidden] of kDType
//   codes   [num_tokens][hidden] u8
//   scales  [num_tokens][blocks] f32, or (kUe8m0) biased exponents, a byte each, rows padded to 4 bytes
//
// A warp takes a block: kElems elements per lane and vector of kVecBytes. Both kernels wait for nobody, and move each byte once.
#include <cupyep/fp8.cuh>
#include <cupyep/vec.cuh>

using namespace cupyep;
using ptx::u32;
using ptx::u64;

constexpr u32 kItemBytes = cfg::kDType == cfg::kDTypeFloat32 ? 4 : 2, kElems = cfg::kVecBytes / kItemBytes;
constexpr u32 kVecsPerLane = (cfg::kBlock + 32 * kElems - 1) / (32 * kElems);
using Codes = VecOf<kElems>;

struct Block {
  u64 first;   // element, counted over all tokens
  u32 length;  // elements: the last block of a token may be short
  u64 scale;   // its scale's index: in floats, or (kUe8m0) in bytes

  __device__ __forceinline__ Block(const QuantizeParams& p, u64 index, u32 num_blocks) {
    const u64 token = index / num_blocks;
    const u32 block = static_cast<u32>(index % num_blocks), start = block * cfg::kBlock;
    first = token * p.hidden + start;
    length = p.hidden - start < cfg::kBlock ? p.hidden - start : cfg::kBlock;
    scale = token * (cfg::kUe8m0 ? (num_blocks + 3) / 4 * 4 : num_blocks) + block;
  }
};

// `work(block)` for every block that is this warp's.
template <typename Work>
__device__ __forceinline__ void for_each_block(const QuantizeParams& p, Work work) {
  const u32 num_blocks = (p.hidden + cfg::kBlock - 1) / cfg::kBlock;
  const u64 total = static_cast<u64>(p.num_tokens) * num_blocks, stride = static_cast<u64>(gridDim.x) * (blockDim.x / 32);
  for (u64 i = static_cast<u64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; i < total; i += stride) {
    work(Block(p, i, num_blocks));
  }
}

extern "C" __global__ void quantize_fp8(const __grid_constant__ QuantizeParams p) {
  const u32 lane = threadIdx.x % 32;
  for_each_block(p, [&](const Block& block) {
    const Vec* wide = reinterpret_cast<const Vec*>(p.wide + block.first * kItemBytes);
    float values[kVecsPerLane][kElems], most = 0.0f;
#pragma unroll
    for (u32 j = 0; j < kVecsPerLane; ++j) {
      const u32 vec = j * 32 + lane;
#pragma unroll
      for (u32 i = 0; i < kElems; ++i) values[j][i] = -0.0f;  // -0 plus a value is that value, -0 included
      if (vec * kElems < block.length) accumulate<cfg::kDType>(values[j], wide[vec]);
#pragma unroll
      for (u32 i = 0; i < kElems; ++i) most = fmaxf(most, fabsf(values[j][i]));  // NaN does not count
    }
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
    const Scale scale = scale_of<cfg::kRoundScale>(most);
    Codes* codes = reinterpret_cast<Codes*>(p.codes + block.first);
#pragma unroll
    for (u32 j = 0; j < kVecsPerLane; ++j) {
      const u32 vec = j * 32 + lane;
#pragma unroll
      for (u32 i = 0; i < kElems; ++i) values[j][i] = __fmul_rn(values[j][i], scale.inverse);
      if (vec * kElems < block.length) codes[vec].words[0] = packed_e4m3<kElems>(values[j]);
    }
    if (lane == 0 && cfg::kUe8m0) reinterpret_cast<unsigned char*>(p.scales)[block.scale] = __float_as_uint(scale.value) >> 23;
    if (lane == 0 && !cfg::kUe8m0) reinterpret_cast<float*>(p.scales)[block.scale] = scale.value;
  });
}

extern "C" __global__ void dequantize_fp8(const __grid_constant__ QuantizeParams p) {
  const u32 lane = threadIdx.x % 32;
  for_each_block(p, [&](const Block& block) {
    const float scale = cfg::kUe8m0 ? from_e8m0(reinterpret_cast<const unsigned char*>(p.scales)[block.scale])
                                    : reinterpret_cast<const float*>(p.scales)[block.scale];
    const Codes* codes = reinterpret_cast<const Codes*>(p.codes + block.first);
    Vec* wide = reinterpret_cast<Vec*>(p.wide + block.first * kItemBytes);
    for (u32 vec = lane; vec * kElems < block.length; vec += 32) {
      const u32 packed = codes[vec].words[0];
      float values[kElems];
#pragma unroll
      for (u32 i = 0; i < kElems; ++i) values[i] = __fmul_rn(from_e4m3(packed >> (8 * i) & 0xff), scale);
      wide[vec] = rounded<cfg::kDType, cfg::kVecBytes>(values);
    }
  });
}
