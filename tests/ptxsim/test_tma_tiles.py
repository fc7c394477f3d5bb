"""tma.load_tile, store_tile and copy_tensor: the kernels as NVRTC compiles them, ranks 1 to 5, against NumPy."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from cupyep.tma import TensorMap, swizzled, tiles
from cupyep.tma.copies import Ring
from ptxsim.memory import POISON
from ptxsim.scheduler import SimulationError
from ptxsim.tensor_copies import describe
from ptxsim.toolkit import HOPPER, Gpu

SEEDS = range(int(os.environ.get("CUPYEP_PTXSIM_SEEDS", "3")))
SHAPES = {  # array, box: odd extents, several tiles
    1: ((77,), (32,)),
    2: ((13, 40), (4, 16)),
    3: ((3, 5, 20), (2, 3, 8)),
    4: ((2, 3, 4, 12), (1, 2, 3, 8)),
    5: ((2, 2, 3, 2, 8), (2, 1, 2, 2, 4)),
}


def content(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 1 << 30, shape).astype(np.int32)


def padded(array: np.ndarray) -> np.ndarray:
    """The same with a last axis that is longer in memory, so that every stride is a multiple of 16 bytes."""
    whole = np.full((*array.shape[:-1], -(-array.shape[-1] // 4) * 4 + 4), -1, array.dtype)
    view = whole[..., : array.shape[-1]]
    view[...] = array
    return view


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rank", SHAPES)
def test_copy_tensor(rank: int, seed: int) -> None:
    shape, box = SHAPES[rank]
    gpu, src = Gpu(), padded(content(shape, seed))
    larger = tuple(size + 1 for size in shape)  # dst reaches beyond src: filled with 0
    dst = padded(np.zeros(larger, np.int32))
    maps = [TensorMap(array, box) for array in (dst, src)]
    to, of = gpu.empty(dst.base.nbytes), gpu.array(src.base)
    descriptors = (describe(maps[0], to), describe(maps[1], of))
    ring = Ring(2, 2, -(-maps[0].tile_bytes // 128) * 128)
    gpu.run(tiles.plan_copy_tensor(HOPPER, maps[0], descriptors, 2, ring), seed)
    expected = np.full(dst.base.shape, POISON * 0x01010101, np.uint32).view(np.int32)  # beyond dst: dropped
    expected[..., : larger[-1]] = 0
    expected[tuple(map(slice, shape))] = src
    assert np.array_equal(gpu.read(to, dst.base), expected)


def run_tile(function: str, tensor_map: TensorMap, corner: tuple[int, ...], array, tile, seed: int, raw: bool = False):
    """(array, tile) after loading or storing one tile."""
    gpu = Gpu()
    if function == "store_tile":
        if (left := tiles.from_zero(tensor_map, corner, tile)) is None:
            return array, tile
        tensor_map, corner, tile = left
    at, own = gpu.array(array), gpu.array(tile)
    launch = tiles.plan_tile(function, HOPPER, tensor_map, describe(tensor_map, at), corner, own, raw)
    gpu.run(launch, seed)
    return gpu.read(at, array), gpu.read(own, tile)


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("corner", [0, 3, -2])
def test_load_and_store_tile(rank: int, corner: int) -> None:
    shape, box = SHAPES[rank]
    array = padded(content(shape, rank))
    tensor_map, at = TensorMap(array, box), (*(corner,) * (rank - 1), 4 * corner)
    _, got = run_tile("load_tile", tensor_map, at, array.base, np.zeros(box, np.int32), rank)
    assert np.array_equal(got, tiles.gather(tensor_map, at))
    tile = content(box, rank + 1)
    stored, _ = run_tile("store_tile", tensor_map, at, array.base, tile, rank)
    tiles.scatter(tensor_map, at, tile)
    assert np.array_equal(stored, array.base)


@pytest.mark.parametrize("swizzle", ["32B", "64B", "128B"])
def test_swizzled_tiles(swizzle: str) -> None:
    columns = int(swizzle[:-1]) // 4
    array = content((40, columns * 2), 3)
    tensor_map, at = TensorMap(array, (16, columns), swizzle=swizzle), (20, columns)
    for raw in (False, True):
        tile = np.zeros((16, columns), np.int32)
        _, got = run_tile("load_tile", tensor_map, at, array, tile, 1, raw)
        flat = got.reshape(-1).view(np.uint8)
        order = swizzled(np.arange(flat.size), swizzle) if raw else np.arange(flat.size)
        assert np.array_equal(flat[order].view(np.int32).reshape(tile.shape), array[20:36, columns:])
        assert np.array_equal(flat, tiles.load_tile(tensor_map, at, raw=raw).reshape(-1).view(np.uint8))


@pytest.mark.parametrize("swizzle", ["32B", "64B"])
def test_a_swizzled_tile_that_ends_within_a_line(swizzle: str) -> None:
    """A line has 128 bytes. Nothing is touched behind the tile."""
    columns = int(swizzle[:-1]) // 4
    array, box = content((60, columns), 7), (57, columns)
    tensor_map = TensorMap(array, box, swizzle=swizzle)
    _, got = run_tile("load_tile", tensor_map, (1, 0), array, np.zeros(box, np.int32), 1)
    assert np.array_equal(got, array[1:58])
    tile = content(box, 8)
    stored, _ = run_tile("store_tile", tensor_map, (2, 0), array, tile, 1)
    tiles.scatter(tensor_map, (2, 0), tile)
    assert np.array_equal(stored, array)


def test_element_strides() -> None:
    array = content((30, 16), 5)
    tensor_map = TensorMap(array, (12, 8), element_strides=(3, 1))
    _, got = run_tile("load_tile", tensor_map, (2, 4), array, np.zeros((4, 8), np.int32), 0)
    assert np.array_equal(got, array[2:14:3, 4:12])


KERNEL = "kernels/tma_tiles.cu"


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("load_tile", "  tma::mbarrier_wait(full, 0);", "  //"),
        ("load_tile", "tma::fence_barrier_init();", ""),
        ("load_tile", "__syncthreads();              // the", "//"),
        ("store_tile", "tma::tma_store_fence();", ""),
        ("store_tile", "the barrier\n  __syncthreads();", "the barrier"),
        ("store_tile", "tma::tma_store_wait<0>();", ""),
    ],
)
def test_a_fault_is_seen(function: str, old: str, new: str) -> None:
    array, seen = content((16, 16), 1), 0
    tensor_map, tile = TensorMap(array, (16, 16)), content((16, 16), 2)
    for seed in range(20):
        gpu = Gpu()
        at, own = gpu.array(array), gpu.array(tile)
        launch = tiles.plan_tile(function, HOPPER, tensor_map, describe(tensor_map, at), (0, 0), own)
        try:
            gpu.run(launch, seed, ((KERNEL, old, new),))
            assert np.array_equal(gpu.read(at, array), gpu.read(own, array))
        except (SimulationError, AssertionError):
            seen += 1
    assert seen
