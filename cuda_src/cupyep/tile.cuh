#pragma once
// What a Pipeline's own code sees: a tile in shared memory, and helpers to work on its elements.
//
// The prelude defines In and Out (element types), Scalars, and cfg::kRowElements and kOutRowElements. The code defines
//   __device__ void compute(const cupyep::Tile& tile, const Scalars& scalars);
// which all threads of a group call together.
#include <cupyep/ptx/warp.cuh>

namespace cupyep {

struct Tile {
  const In* in;            // [num_rows][kRowElements]
  Out* out;                // [num_rows][kOutRowElements], to be written whole
  ptx::u32 num_rows;       // the last tile may have fewer than the others
  ptx::u64 first_row;      // of the array
  ptx::u32 thread, group;  // thread: 0..num_threads-1
  static constexpr ptx::u32 num_threads = cfg::kGroupWarps * 32;

  // A barrier of the threads that share the tile.
  __device__ __forceinline__ void sync() const { ptx::bar_sync(1 + group, num_threads); }
};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

// Values rounded to elements, to nearest even; fp8 saturates, and is made by pairs: one instruction for two.
template <class Element, int kCount>
__device__ __forceinline__ void pack(Element* elements, const float* values) {
  constexpr bool kE4m3 = kSame<Element, __nv_fp8_e4m3>;
  if constexpr (kE4m3 || kSame<Element, __nv_fp8_e5m2>) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const float2 pair = make_float2(values[i], values[i + 1]);
      const auto bits = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, kE4m3 ? __NV_E4M3 : __NV_E5M2);
      memcpy(elements + i, &bits, 2);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) elements[i] = static_cast<Element>(values[i]);
  }
}

// So many elements in 16 bytes of the longer of both types.
constexpr int kVecElements = 16 / (sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));
template <class Element>
struct alignas(kVecElements * sizeof(Element)) ElementVec {
  Element at[kVecElements];
};

// Every num_threads-th of kBatch vectors. All loads come before the first store: a load cannot pass a store that might
// be to the same place, so that one at a time would wait for shared memory each time.
template <int kBatch, class F>
__device__ __forceinline__ void map_vectors(const ElementVec<In>* in, ElementVec<Out>* out, F f) {
  ElementVec<In> from[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) from[i] = in[i * Tile::num_threads];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    float values[kVecElements];
#pragma unroll
    for (int j = 0; j < kVecElements; ++j) values[j] = f(static_cast<float>(from[i].at[j]));
    ElementVec<Out> to;
    pack<Out, kVecElements>(to.at, values);
    out[i * Tile::num_threads] = to;
  }
}

// out = f(in), element by element, in fp32.
template <class F>
__device__ __forceinline__ void map_elements(const Tile& tile, F f) {
  static_assert(cfg::kRowElements == cfg::kOutRowElements);
  constexpr ptx::u32 kBatch = 4, kBatchThreads = kBatch * Tile::num_threads;
  const auto* in = reinterpret_cast<const ElementVec<In>*>(tile.in);
  auto* out = reinterpret_cast<ElementVec<Out>*>(tile.out);
  const ptx::u32 num_vecs = tile.num_rows * cfg::kRowElements / kVecElements;
  ptx::u32 i = tile.thread;
#pragma unroll 1
  for (; i + kBatchThreads - Tile::num_threads < num_vecs; i += kBatchThreads) map_vectors<kBatch>(in + i, out + i, f);
#pragma unroll 1
  for (; i < num_vecs; i += Tile::num_threads) map_vectors<1>(in + i, out + i, f);
}

}  // namespace cupyep
