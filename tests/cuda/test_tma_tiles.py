"""Tensor maps on a GPU: tiles and tensors of ranks 1 to 5, all types, swizzles and fills, against NumPy slicing."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gpu_helpers import cupy

from cupyep import tma
from cupyep.tma import launch, tiles

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
SHAPES = {  # array, box: odd extents, several tiles
    1: ((1003,), (256,)),
    2: ((133, 208), (16, 64)),
    3: ((7, 33, 80), (2, 8, 32)),
    4: ((3, 5, 9, 48), (1, 2, 4, 16)),
    5: ((3, 2, 5, 6, 32), (2, 1, 2, 4, 16)),
}
DTYPES = [np.uint8, np.int32, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int64]


@pytest.fixture(autouse=True)
def needs_tma():
    if launch.target().compute_capability < 90:
        pytest.skip("needs compute capability 9.0")


def random(shape, dtype):
    """On the CPU, in memory whose rows are padded to 16 bytes and one more vector."""
    itemsize = np.dtype(dtype).itemsize
    row = -(-shape[-1] * itemsize // 16) * 16 // itemsize + 16 // itemsize
    whole = np.random.default_rng().integers(0, 100, (*shape[:-1], row)).astype(dtype)
    return whole[..., : shape[-1]]


def on_gpu(array):
    """The same on the GPU, with the same padding."""
    return cupy.asarray(array.base.reshape(*array.shape[:-1], -1))[..., : array.shape[-1]]


def same(got, expected):
    bits = f"u{expected.dtype.itemsize}"
    return np.array_equal(got.get().view(bits), np.ascontiguousarray(expected).view(bits))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("rank", SHAPES)
def test_load_and_store_tile(rank, dtype):
    shape, box = SHAPES[rank]
    array = random(shape, dtype)
    device = on_gpu(array)
    ours, theirs = tma.TensorMap(array, box), tma.TensorMap(device, box)
    vector = 16 // array.itemsize  # coordinates along the last axis come in these
    last = shape[-1] // vector * vector
    for outer, inner in (
        (0, 0),
        (-2, -vector),
        (-1, 0),
        (0, -vector),
        (-500, -5120),
        (1, vector),
        (2, last - vector),
        (shape[0] - 1, last),
        (5000, 5120),
    ):
        corner = (*(outer,) * (rank - 1), inner)
        tile = tma.load_tile(ours, corner)
        assert same(tma.load_tile(theirs, corner), tile), corner
        tile = np.ascontiguousarray(random(box, dtype))
        tma.store_tile(ours, corner, tile)
        tma.store_tile(theirs, corner, cupy.asarray(tile)).synchronize()
        assert same(device, array), corner


@pytest.mark.parametrize("num_sms", [1, 8])
@pytest.mark.parametrize("rank", SHAPES)
def test_copy_tensor(rank, num_sms):
    shape, box = SHAPES[rank]
    src, dst = random(shape, np.float32), random(tuple(size + 5 for size in shape), np.float32)
    device = on_gpu(dst)
    tma.copy_tensor(tma.TensorMap(device, box), tma.TensorMap(on_gpu(src), box), num_sms=num_sms)
    tma.copy_tensor(tma.TensorMap(dst, box), tma.TensorMap(src, box))
    assert same(device, dst)
    assert np.array_equal(device.base.get().reshape(-1)[-1], dst.base.reshape(-1)[-1])  # the padding


@pytest.mark.parametrize("l2_promotion", ["none", "64B", "128B", "256B"])
def test_l2_promotion(l2_promotion):
    src = random((100, 128), np.float32)
    dst = cupy.zeros((100, 128), np.float32)
    maps = [tma.TensorMap(array, (16, 32), l2_promotion=l2_promotion) for array in (dst, on_gpu(src))]
    tma.copy_tensor(*maps)
    assert same(dst, src)


@pytest.mark.parametrize("swizzle, row_bytes", [("32B", 32), ("64B", 64), ("128B", 128)])
def test_swizzles(swizzle, row_bytes):
    array = random((72, 128), np.uint16)
    device = on_gpu(array)
    box = (24, row_bytes // 2)
    ours, theirs = (tma.TensorMap(of, box, swizzle=swizzle) for of in (array, device))
    for corner in ((0, 0), (8, 16), (60, 120)):
        assert same(tma.load_tile(theirs, corner), tma.load_tile(ours, corner))
        assert same(tma.load_tile(theirs, corner, raw=True), tma.load_tile(ours, corner, raw=True))
    tile = np.ascontiguousarray(random(box, np.uint16))
    tma.store_tile(ours, (50, 104), tile)
    tma.store_tile(theirs, (50, 104), cupy.asarray(tile))
    assert same(device, array)
    copied = cupy.zeros((72, 128), np.uint16)
    tma.copy_tensor(tma.TensorMap(copied, box, swizzle=swizzle), theirs)
    assert same(copied, array)


@pytest.mark.parametrize("swizzle", ["32B", "64B"])
def test_a_swizzled_tile_that_ends_within_a_line(swizzle):
    array = random((72, 64), np.uint16)
    device, box = on_gpu(array), (57, int(swizzle[:-1]) // 2)
    ours, theirs = (tma.TensorMap(of, box, swizzle=swizzle) for of in (array, device))
    assert same(tma.load_tile(theirs, (8, 16)), tma.load_tile(ours, (8, 16)))
    tile = np.ascontiguousarray(random(box, np.uint16))
    tma.store_tile(ours, (20, 40), tile)
    tma.store_tile(theirs, (20, 40), cupy.asarray(tile))
    assert same(device, array)


@pytest.mark.parametrize("stride", [2, 3, 8])
def test_element_strides(stride):
    array = random((100, 20, 32), np.float32)
    device = on_gpu(array)
    for strides in ((1, stride, 1), (stride, 1, 1), (stride, stride, 1)):
        ours, theirs = (tma.TensorMap(of, (16, 8, 16), element_strides=strides) for of in (array, device))
        for corner in ((0, 0, 0), (91, 17, 24), (-3, -1, -4)):
            assert same(tma.load_tile(theirs, corner), tma.load_tile(ours, corner)), (strides, corner)


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=lambda d: np.dtype(d).name
)
def test_nan_fill(dtype):
    array = random((10, 32), dtype)
    ours, theirs = (tma.TensorMap(of, (8, 16), oob_fill="nan") for of in (array, on_gpu(array)))
    expected = tma.load_tile(ours, (6, 24)).astype(np.float64)
    assert np.array_equal(tma.load_tile(theirs, (6, 24)).get().astype(np.float64), expected, equal_nan=True)
    assert np.isnan(expected).any() and not np.isnan(expected).all()


def test_the_largest_tiles():
    array = random((256, 512), np.float32)
    device = on_gpu(array)
    for box in ((220, 256), (256, 224)):
        ours, theirs = (tma.TensorMap(of, box) for of in (array, device))
        assert same(tma.load_tile(theirs, (10, 100)), tma.load_tile(ours, (10, 100)))
    copied = cupy.zeros((256, 512), np.float32)
    tma.copy_tensor(tma.TensorMap(copied, (112, 256)), tma.TensorMap(device, (112, 256)))
    assert same(copied, array)


def test_a_map_of_a_stream():
    array, stream = random((64, 64), np.float32), cupy.cuda.Stream(non_blocking=True)
    device = on_gpu(array)
    cupy.cuda.Device().synchronize()
    tile = tma.load_tile(tma.TensorMap(device, (16, 16)), (16, 16), stream=stream)
    stream.synchronize()
    assert same(tile, tiles.gather(tma.TensorMap(array, (16, 16)), (16, 16)))


def test_a_map_in_a_kernel_of_ones_own():
    """The page's, which CuPy compiles and which takes the descriptor by value."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "tma.md").read_text()
    for source in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[-1:]:
        exec(source, {"np": np, "tma": tma})
