// COPY_TENSOR, LOAD_TILE, STORE_TILE: tiles of tensor maps through shared memory. Needs sm_90.
//
//   in    tensor maps of rank kRank
//   out   the other map's tensor, or a tile in memory of its own, rows one after the other
//   sync  none: stream order
//   moves tiles of src to the same coordinates of dst; outside of src they are filled, outside of dst they are dropped
#include <cupyep/copy_ring.cuh>
#include <cupyep/tma.cuh>

using namespace cupyep;
using ptx::u32;
using ptx::u64;
using u8 = unsigned char;

struct alignas(64) TensorMap {
  u8 bytes[128];
};

// Tiles number first, first + stride, ... of the grid of tiles.
class Tiles {
 public:
  struct Unit {
    int coordinates[5];
  };

  __device__ Tiles(const TensorMap& dst, const TensorMap& src, const TilesParams& p, u32 first, u32 stride)
      : dst_(dst), src_(src), p_(p), first_(first), stride_(stride) {}

  __device__ __forceinline__ Unit take(u32 i) const {
    Unit unit;
    u32 number = first_ + i * stride_;
#pragma unroll
    for (int axis = 0; axis < cfg::kRank; ++axis) {
      const u32 next = number / p_.num_tiles_along[axis];
      unit.coordinates[axis] = static_cast<int>(number - next * p_.num_tiles_along[axis]) * p_.box[axis];
      number = next;
    }
    return unit;
  }

  __device__ __forceinline__ void load(const Unit& unit, u8* slot, u64* full) const {
    tma::mbarrier_arrive_and_expect_tx(full, p_.tile_bytes);
    tma::tma_load_tile<cfg::kRank>(slot, &src_, unit.coordinates, full);
  }

  __device__ __forceinline__ void store(const Unit& unit, const u8* slot) const {
    tma::tma_store_tile<cfg::kRank>(&dst_, unit.coordinates, slot);
  }

 private:
  const TensorMap& dst_;
  const TensorMap& src_;
  const TilesParams& p_;
  const u32 first_, stride_;
};

extern "C" __global__ void __launch_bounds__(cfg::kWarps * 32, 1)
copy_tensor(const __grid_constant__ TensorMap dst, const __grid_constant__ TensorMap src,
            const __grid_constant__ TilesParams p) {
  extern __shared__ __align__(1024) u8 smem[];
  const u32 first = threadIdx.x / 32 * gridDim.x + blockIdx.x, stride = cfg::kWarps * gridDim.x;
  const u32 count = p.num_tiles > first ? (p.num_tiles - first + stride - 1) / stride : 0;
  Tiles tiles(dst, src, p, first, stride);
  copy_ring(tiles, count, smem);
}

// Where the tile's 16 bytes at `offset` lie in shared memory: bits 4.. are permuted by bits 7.., within a row. The tile
// starts at a multiple of 1,024 bytes, so that offsets have an address's low bits.
__device__ __forceinline__ u32 swizzled(u32 offset, u32 pieces) { return offset ^ (offset >> 3 & pieces << 4); }

extern "C" __global__ void load_tile(const __grid_constant__ TensorMap src, const __grid_constant__ TileParams p) {
  extern __shared__ __align__(1024) u8 smem[];
  u64* full = reinterpret_cast<u64*>(smem + p.tile_bytes);
  if (threadIdx.x == 0) {
    tma::mbarrier_init(full, 1);
    tma::fence_barrier_init();  // H6
    tma::mbarrier_arrive_and_expect_tx(full, p.tile_bytes);
    tma::tma_load_tile<cfg::kRank>(smem, &src, p.coordinates, full);
  }
  __syncthreads();              // the others may touch the mbarrier
  tma::mbarrier_wait(full, 0);  // H1: each reader
  for (u32 offset = 16 * threadIdx.x; offset < p.tile_bytes; offset += 16 * blockDim.x) {
    *reinterpret_cast<uint4*>(p.tile + offset) = *reinterpret_cast<const uint4*>(smem + swizzled(offset, p.swizzle_pieces));
  }
}

extern "C" __global__ void store_tile(const __grid_constant__ TensorMap dst, const __grid_constant__ TileParams p) {
  extern __shared__ __align__(1024) u8 smem[];
  for (u32 offset = 16 * threadIdx.x; offset < p.tile_bytes; offset += 16 * blockDim.x) {
    *reinterpret_cast<uint4*>(smem + swizzled(offset, p.swizzle_pieces)) = *reinterpret_cast<const uint4*>(p.tile + offset);
  }
  tma::tma_store_fence();  // H2: each writer, then the barrier
  __syncthreads();
  if (threadIdx.x == 0) {
    tma::tma_store_tile<cfg::kRank>(&dst, p.coordinates, smem);
    tma::tma_store_commit();
    tma::tma_store_wait<0>();
  }
}
