"""Tensor maps: the driver's rules, named by argument and axis; tiles and tensors by NumPy; the call of the driver."""

from __future__ import annotations

import ctypes
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cupyep
from cupyep import tma
from cupyep.tma import encode, tiles
from cupyep.tma.launch import Target
from cupyep.tma.tensor_map import SWIZZLE_BYTES

HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))
HOPPER = Target(90, 227 * 1024, 132)


def aligned(shape, dtype=np.float32, offset=0):
    """Zeros whose address is `offset` bytes behind a multiple of 128."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(num_bytes + 256, np.uint8)
    start = -raw.ctypes.data % 128 + offset
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


X = aligned((8, 16))
X3 = aligned((4, 8, 16))


@pytest.mark.parametrize(
    ("array", "box", "options", "message"),
    [
        (np.float32(1), (), {}, "array: expected a NumPy or a CUDA array, got float32"),
        (np.zeros((), "f4"), (), {}, r"array\.ndim: expected 1\.\.5, got 0"),
        (np.zeros((1,) * 6, "f4"), (4,) * 6, {}, r"array\.ndim: expected 1\.\.5, got 6"),
        (aligned((4, 4), np.complex128), (4, 4), {}, "array: expected elements of 1, 2, 4 or 8 bytes, got complex128"),
        (np.zeros((0, 4), "f4"), (4, 4), {}, r"array\.shape\[0\]: expected 1\.\.4294967296, got 0"),
        (aligned(16, offset=8), (4,), {}, "array: expected an address that is a multiple of 16, got 0x"),
        (aligned((4, 18)), (4, 4), {}, r"array\.strides\[0\]: expected a positive multiple of 16 bytes .*, got 72"),
        (X[::-1], (4, 4), {}, r"array\.strides\[0\]: expected a positive multiple of 16 bytes .*, got -64"),
        (X[:, ::2], (4, 4), {}, r"array\.strides\[1\]: expected 4 \(contiguous along the last axis\), got 8"),
        (X.T, (4, 4), {}, r"array\.strides\[1\]: expected 4 \(contiguous along the last axis\), got 64"),
        (X, (4,), {}, "box: expected 2 values, one per axis of array, got 1"),
        (X, None, {}, "box: expected a sequence of ints, got None"),
        (X, 16, {}, "box: expected a sequence of ints, got 16"),
        (aligned((4, 4), np.int64).astype(object), (4, 4), {}, "array: expected elements of .* bytes, got object"),
        (X, (4, 4), {"element_strides": 0}, "element_strides: expected a sequence of ints, got 0"),
        (X, (4, 4), {"element_strides": np.array([9, 1])}, r"element_strides\[0\]: expected 1\.\.8, got 9"),
        (X, (0, 4), {}, r"box\[0\]: expected 1\.\.256, got 0"),
        (X, (257, 4), {}, r"box\[0\]: expected 1\.\.256, got 257"),
        (X, (4, 3), {}, r"box\[1\]: expected a multiple of 16 bytes, got 12 bytes"),
        (X, (4, 4), {"element_strides": (9, 1)}, r"element_strides\[0\]: expected 1\.\.8, got 9"),
        (X, (4, 8), {"element_strides": (1, 2)}, r"element_strides\[1\]: expected 1, got 2"),
        (X, (4, 12), {"swizzle": "32B"}, r"box\[1\]: expected 32B with swizzle 32B, got 48B"),
        (X, (4, 8), {"swizzle": "64B"}, r"box\[1\]: expected 64B with swizzle 64B, got 32B"),
        (X, (4, 4), {"swizzle": "16B"}, "swizzle: expected none, 32B, 64B, 128B, got '16B'"),
        (X, (4, 4), {"interleave": "16B"}, "interleave: expected none below rank 3, got 16B for rank 2"),
        (X3, (4, 4, 8), {"interleave": "32B"}, "swizzle: expected 32B with interleave 32B, got none"),
        (
            aligned((4, 8, 16), offset=16),
            (4, 4, 8),
            {"interleave": "32B", "swizzle": "32B"},
            "array: expected an address that is a multiple of 32",
        ),
        (X, (4, 4), {"l2_promotion": "32B"}, "l2_promotion: expected none, 64B, 128B, 256B, got '32B'"),
        (X, (4, 4), {"oob_fill": "ones"}, "oob_fill: expected zeros, nan, got 'ones'"),
        (X.view(np.int32), (4, 4), {"oob_fill": "nan"}, "oob_fill: expected zeros for int32, got nan"),
    ],
)
def test_rules(array, box, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        tma.TensorMap(array, box, **options)


def test_an_axis_of_one_element_may_have_any_stride():
    one = np.lib.stride_tricks.as_strided(X, (1, 8, 1, 4), (3, 64, 7, 4))
    assert tma.TensorMap(one, (1, 2, 1, 4)).strides == (512, 64, 16, 4)


@pytest.mark.parametrize("offset", [16.0, [16], "16", None, np.zeros(2)], ids=str)
def test_swizzled_wants_ints(offset):
    with pytest.raises(TypeError, match="offset: expected an int or an array of ints"):
        tma.swizzled(offset, "32B")


@pytest.mark.parametrize("swizzle", SWIZZLE_BYTES)
def test_swizzle_permutes_pieces_within_lines(swizzle):
    offset = np.arange(4096)
    image = tma.swizzled(offset, swizzle)
    assert np.array_equal(np.sort(image), offset) and np.array_equal(tma.swizzled(image, swizzle), offset)
    assert np.array_equal(image // 128, offset // 128) and np.array_equal(image % 16, offset % 16)
    span = SWIZZLE_BYTES[swizzle]
    if span:  # one column of pieces over rows of `span` bytes meets every piece of a 128-byte line
        column = image[:: max(span, 1)][:8] if span == 128 else image[:1024:128]
        assert len(set(column % 128 // 16)) == span // 16
    else:
        assert np.array_equal(image, offset)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float64])
def test_tiles_by_numpy(dtype):
    array = aligned((5, 7, 48), dtype)[..., :40]
    array[...] = np.arange(array.size).reshape(array.shape) % 100
    tensor_map = tma.TensorMap(array, (2, 3, 16))
    tile = tma.load_tile(tensor_map, (4, 5, 32))
    expected = np.zeros((2, 3, 16), dtype)
    expected[:1, :2, :8] = array[4:, 5:, 32:]
    assert np.array_equal(tile.view(np.uint8), expected.view(np.uint8))
    before = array.copy()
    tma.store_tile(tensor_map, (-1, 0, 32), tile).synchronize()
    before[0, :3, 32:] = tile[1, :, :8]
    assert np.array_equal(array.view(np.uint8), before.view(np.uint8))


@pytest.mark.parametrize("corner", [(-1, -2, -4), (-1, 3, 8), (0, 0, -12), (2, -2, 40), (0, 1, 4)])
def test_a_store_without_what_lies_before_the_array(corner):
    array, tile = aligned((3, 5, 48)), aligned((2, 3, 16))
    tile[...] = np.arange(96).reshape(2, 3, 16) + 1
    whole = tma.TensorMap(array, (2, 3, 16), swizzle="64B")
    tiles.scatter(whole, corner, tile)
    expected = array.copy()
    array[...] = 0
    assert tiles.from_zero(whole, (*corner[:2], -16), tile) is None
    part_map, part_corner, part = tiles.from_zero(whole, corner, tile)
    assert min(part_corner) >= 0 and part.shape == part_map.tile_shape and part.flags.c_contiguous
    assert (part_map is whole) == (min(corner) >= 0)
    tiles.scatter(part_map, part_corner, part)
    assert np.array_equal(array, expected) and array.any()


@pytest.mark.parametrize("dtype", ["V4", "S4", "M8[s]", [("a", "f4"), ("b", "i4")]])
def test_the_fill_is_zero_bytes_whatever_the_type(dtype):
    array = aligned(64, np.uint8).view(dtype)
    tile = tma.load_tile(tma.TensorMap(array, (array.size,)), (array.size,))
    assert tile.tobytes() == bytes(64)


def test_nan_fill_and_element_strides():
    array = aligned((6, 8))
    array[...] = 1
    tensor_map = tma.TensorMap(array, (5, 8), element_strides=(2, 1), oob_fill="nan")
    tile = tma.load_tile(tensor_map, (3, 4))
    assert tile.shape == (3, 8)
    assert np.array_equal(np.isnan(tile), [[False] * 4 + [True] * 4] * 2 + [[True] * 8])
    with pytest.raises(ValueError, match=r"tensor_map\.element_strides: expected all 1, got \(2, 1\)"):
        tma.store_tile(tensor_map, (0, 0), tile)


def test_a_swizzled_image_ends_with_its_rows():
    array = aligned((16, 8))
    array[...] = np.arange(128).reshape(16, 8)
    tensor_map = tma.TensorMap(array, (9, 8), swizzle="32B")
    image = tma.load_tile(tensor_map, (0, 0), raw=True).view(np.float32).reshape(9, 2, 4)
    for row, pieces in enumerate(image):  # every fifth to eighth row has its two pieces in the other order
        assert np.array_equal(pieces.reshape(8) if row % 8 < 4 else pieces[::-1].reshape(8), array[row])
    launch = tiles.plan_tile("load_tile", HOPPER, tensor_map, np.zeros(128, np.uint8), (0, 0), 0)
    assert launch.smem_bytes == 9 * 32 + 16


def test_copy_tensor_pads_crops_and_packs():
    src, dst = aligned((9, 20)), aligned((11, 28))[:, :24]
    src[...] = np.arange(180).reshape(9, 20) + 1
    dst[...] = -1
    tma.copy_tensor(tma.TensorMap(dst, (4, 16)), tma.TensorMap(src, (4, 16))).synchronize()
    assert np.array_equal(dst[:9, :20], src) and not dst[9:].any() and not dst[:, 20:].any()
    cropped = aligned((4, 8))
    tma.copy_tensor(tma.TensorMap(cropped, (2, 8)), tma.TensorMap(src, (2, 8)))
    assert np.array_equal(cropped, src[:4, :8])
    tma.copy_tensor(tma.TensorMap(src[:, 12:], (4, 8)), tma.TensorMap(src[:, :8], (4, 8)))  # halves of one array
    assert np.array_equal(src[:, 12:], src[:, :8])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: tma.load_tile(X, (0, 0)), "tensor_map: expected a TensorMap, got ndarray"),
        (lambda m: tma.load_tile(m, (0,)), "coordinates: expected 2 values, one per axis of array, got 1"),
        (lambda m: tma.load_tile(m, (0, 1.5)), r"coordinates\[1\]: expected an int, got 1\.5"),
        (lambda m: tma.load_tile(m, (1, 6)), r"coordinates\[1\]: expected a multiple of 4 \(16 bytes\), got 6"),
        (lambda m: tma.store_tile(m, (0, 0), np.zeros((4, 4), "f4")), r"tile: expected shape \(4, 8\), got \(4, 4\)"),
        (lambda m: tma.load_tile(m, 3), "coordinates: expected a sequence of ints, got 3"),
        (lambda m: tma.load_tile(m, (0, 0), stream="x"), "stream: expected a CuPy stream or None, got 'x'"),
        (lambda m: tma.copy_tensor(m, m, num_sms=-1), "num_sms: expected at least 1, got -1"),
        (lambda m: tma.store_tile(m, (0, 0), aligned((4, 8), offset=4)), "tile: expected an address that is a multi"),
        (
            lambda m: tma.store_tile(tma.TensorMap(np.broadcast_to(X, X.shape), (4, 8)), (0, 0), aligned((4, 8))),
            r"tensor_map\.array: expected an array that can be written, got a read-only one",
        ),
        (lambda m: tma.store_tile(m, (0, 0), np.zeros((4, 8))), "tile: expected float32 where the map's array is"),
        (lambda m: tma.copy_tensor(m, tma.TensorMap(X3, (1, 4, 8))), r"src_map\.box: expected \(4, 8\) as dst_map has"),
        (
            lambda m: tma.copy_tensor(m, tma.TensorMap(aligned((8, 16)), (4, 8), swizzle="32B")),
            r"src_map\.swizzle: expected none as dst_map has, got 32B",
        ),
        (lambda m: tma.copy_tensor(m, m), "dst: expected memory apart from src's"),
        (
            lambda m: tma.load_tile(tma.TensorMap(X3, (1, 4, 8), interleave="16B"), (0, 0, 0)),
            r"tensor_map\.interleave: expected none here, got 16B",
        ),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(tma.TensorMap(X, (4, 8)))


def test_large_tiles_are_refused_before_a_launch():
    tensor_map = tma.TensorMap(aligned((256, 256)), (256, 256))
    descriptor = np.zeros(128, np.uint8)
    with pytest.raises(ValueError, match="box: expected a tile of at most 232,432 bytes, got 262,144"):
        tiles.plan_tile("load_tile", HOPPER, tensor_map, descriptor, (0, 0), 0)
    tensor_map = tma.TensorMap(aligned((256, 256)), (128, 256))
    with pytest.raises(ValueError, match="box: expected a tile of at most 116,160 bytes, got 131,072"):
        tiles.plan_copy_tensor(HOPPER, tensor_map, (descriptor, descriptor), 8)


@pytest.mark.parametrize("box", [(1, 4), (8, 16), (64, 64), (112, 256), (256, 4)])
def test_rings_fit(box):
    tensor_map = tma.TensorMap(aligned((256, 256)), box)
    for target in (HOPPER, Target(120, 99 * 1024, 84)):
        if 2 * tensor_map.tile_bytes + 64 <= target.smem_limit:
            launch = tiles.plan_copy_tensor(target, tensor_map, (np.zeros(128, np.uint8),) * 2, 8)
            assert 2 * tensor_map.tile_bytes < launch.smem_bytes <= target.smem_limit


@pytest.mark.skipif(HAS_GPU, reason="for machines without a GPU")
def test_a_descriptor_needs_a_gpu():
    with pytest.raises(cupyep.UnsupportedDeviceError, match=r"needs compute capability 9\.0, found no"):
        _ = tma.TensorMap(X, (4, 4)).descriptor


def test_what_the_driver_is_told(monkeypatch):
    """Innermost axis first, strides without the innermost, and memory aligned for 128 bytes."""
    driver = pytest.importorskip("cuda.bindings.driver")
    calls = []

    def entry(out, kind, rank, address, shape, strides, box, element_strides, *modes):
        lists = [list(values) for values in (shape, strides, box, element_strides)]
        calls.append((out % 128, kind, rank, address, *lists, modes))
        ctypes.memset(out, 7, 128)
        return 0

    monkeypatch.setattr(encode, "_entry", lambda: entry)
    monkeypatch.setattr(tma.tensor_map.launches, "require", lambda what: None)
    monkeypatch.setattr(tma.tensor_map.arrays, "is_numpy", lambda array: False)
    monkeypatch.setattr(tma.tensor_map.arrays, "address", lambda array: array.ctypes.data)
    array = aligned((3, 5, 64), ml_dtypes.bfloat16)
    tensor_map = tma.TensorMap(
        array, (2, 4, 64), element_strides=(1, 2, 1), swizzle="128B", l2_promotion="256B", oob_fill="nan"
    )
    assert tensor_map.descriptor.size == 1 and tensor_map.descriptor.tobytes() == b"\7" * 128
    modes = (
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
        int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA),
    )
    kind = int(driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16)
    assert calls == [(0, kind, 3, array.ctypes.data, [64, 5, 3], [128, 640], [64, 4, 2], [1, 2, 1], modes)]
