"""tma.copy, copy_rows and reduce_add: NumPy arrays, bad arguments, and how work is cut. Needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyep import UnsupportedDeviceError, tma
from cupyep.tma import arrays, copies, launch
from cupyep.tma.launch import Target

HOPPER, AMPERE, SMALL_SM = Target(90, 227 * 1024, 132), Target(80, 163 * 1024, 108), Target(120, 99 * 1024, 84)
HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))
rng = np.random.default_rng()


def random(shape, dtype=np.float32):
    return rng.integers(-99, 99, shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, ml_dtypes.bfloat16, np.complex128, bool])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_copy(shape, dtype):
    src, dst = random(shape, dtype), np.zeros(shape, dtype)
    tma.copy(dst, src, num_sms=1, load_hint="evict_first").synchronize()
    assert np.array_equal(dst, src)


def test_copy_rows():
    src = random((9, 4))
    for to, of in (
        ([1, 0, 4], [8, 8, 2]),
        (None, [3, 1]),
        (None, range(4, 8)),
        (np.array([4, 2], np.int32), None),
        (None, None),
    ):
        dst = np.full((5, 4), 1000, np.float32)
        expected = dst.copy()
        num_rows = len(to if to is not None else of if of is not None else dst)
        for i in range(num_rows):
            expected[i if to is None else to[i]] = src[i if of is None else of[i]]
        tma.copy_rows(dst, to, src, of).current_stream_wait()
        assert np.array_equal(dst, expected)


def test_copy_rows_skips_minus_one():
    src, dst = random((3, 2)), np.zeros((4, 2), np.float32)
    tma.copy_rows(dst, [-1, 0, 1], src, [0, -1, 2])
    assert np.array_equal(dst, [[0, 0], src[2], [0, 0], [0, 0]])


def test_rows_may_be_strided():
    src, dst = random((6, 8))[::2, 4:], np.zeros((3, 4), np.float32)
    tma.copy_rows(dst, None, src, None)
    assert np.array_equal(dst, src)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32])
def test_reduce_add(dtype):
    dst, src = random((5, 7), dtype), random((5, 7), dtype)
    expected = dst + src
    tma.reduce_add(dst, src)
    assert np.array_equal(dst, expected)


@pytest.mark.filterwarnings("error")
def test_reduce_add_makes_inf_and_nan_silently():
    dst = np.array([np.inf, 3e38], np.float32)
    tma.reduce_add(dst, np.array([-np.inf, 3e38], np.float32))
    assert np.isnan(dst[0]) and dst[1] == np.inf


def test_reduce_add_by_threads_at_once_loses_nothing():
    dst, one, together = np.zeros(1 << 18, np.float32), np.ones(1 << 18, np.float32), threading.Barrier(4)

    def add():
        together.wait()
        for _ in range(20):
            tma.reduce_add(dst, one)

    adders = [threading.Thread(target=add) for _ in range(4)]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    assert np.array_equal(dst, np.full_like(dst, 80))


def test_arrays_may_lie_between_each_other():
    both = np.zeros((6, 4), np.float32)
    both[1::2] = random((3, 4))
    tma.copy_rows(both[::2], None, both[1::2], None)
    assert np.array_equal(both[::2], both[1::2]) and both.any()


def test_overlap_of_arrays_that_the_host_cannot_read():
    def cuda(offset, rows, columns, pitch=32):
        where = SimpleNamespace(ptr=(1 << 47) + offset)
        return SimpleNamespace(shape=(rows, columns), strides=(pitch, 4), size=rows * columns, itemsize=4, data=where)

    arrays.apart("dst", cuda(0, 4, 4), "src", cuda(16, 4, 4))
    arrays.apart("dst", cuda(0, 0, 4), "src", cuda(0, 4, 4))
    for other in (cuda(0, 4, 4), cuda(12, 4, 4), cuda(96, 1, 1)):
        with pytest.raises(ValueError, match="dst: expected memory apart from src's, got arrays that overlap"):
            arrays.apart("dst", cuda(0, 4, 4), "src", other)


X = np.zeros((4, 4), np.float32)
FIXED = np.zeros((4, 4), np.float32)
FIXED.flags.writeable = False


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tma.copy([1], X), TypeError, "dst: expected a NumPy or a CUDA array, got list"),
        (lambda: tma.copy(X, X.astype("f2")), TypeError, "src: expected dtype float32 as dst has, got float16"),
        (lambda: tma.copy(X, np.zeros(16, "f4")), ValueError, r"src: expected shape \(4, 4\) as dst has, got \(16,\)"),
        (lambda: tma.copy(X, X), ValueError, "dst: expected memory apart from src's"),
        (
            lambda: tma.copy(X, np.zeros((4, 8), "f4")[:, ::2]),
            ValueError,
            "src: expected a C-contiguous array, got str",
        ),
        (lambda: tma.copy(X.copy(), X, load_hint="x"), ValueError, "load_hint: expected none, evict_first, evict_last"),
        (lambda: tma.copy(X.copy(), X, store_hint=[]), ValueError, r"store_hint: expected none, .*, got \[\]"),
        (lambda: tma.copy(X.copy(), X, num_sms=0), ValueError, "num_sms: expected at least 1, got 0"),
        (lambda: tma.copy(X.copy(), X, stream="x"), TypeError, "stream: expected a CuPy stream or None, got 'x'"),
        (lambda: tma.reduce_add(X.copy(), X, num_sms="x"), TypeError, "num_sms: expected an int, got 'x'"),
        (lambda: tma.copy_rows(X.copy(), None, X, None, stream=3), TypeError, "stream: expected a CuPy stream"),
        (lambda: tma.reduce_add(X.astype("f8"), X.astype("f8")), TypeError, "dst: expected float32, .*, got float64"),
        (lambda: tma.copy_rows(X.copy(), [0, 4], X, [0, 1]), ValueError, r"dst_rows: expected -1\.\.3, got 4 at 1"),
        (lambda: tma.copy_rows(X.copy(), [0], X, [-2]), ValueError, r"src_rows: expected -1\.\.3, got -2 at 0"),
        (lambda: tma.copy_rows(X.copy(), [0], X, [0, 1]), ValueError, "src_rows: expected 1 indices as dst_rows has"),
        (lambda: tma.copy_rows(X.copy(), None, X, [0] * 5), ValueError, "dst: expected at least 5 rows without dst_r"),
        (lambda: tma.copy_rows(X.copy(), None, X[:2].copy(), None), ValueError, "src: expected at least 4 rows witho"),
        (lambda: tma.copy_rows(X.copy(), np.array([0.5]), X, [0]), TypeError, "dst_rows: expected one dimension of i"),
        (lambda: tma.copy_rows(X.copy(), [1.7, 0.2], X, [0, 1]), TypeError, "dst_rows: expected .* got 1 of float64"),
        (lambda: tma.copy_rows(X.copy(), [0], X, [True]), TypeError, "src_rows: expected .* got 1 of bool"),
        (
            lambda: tma.copy_rows(X.copy(), [[1], [2, 3]], X, [0]),
            TypeError,
            r"dst_rows: expected .* got \[\[1\], \[2, 3\]\]",
        ),
        (
            lambda: tma.copy_rows(X.copy(), None, X, None, stream=SimpleNamespace(ptr=0)),
            TypeError,
            "stream: expected a CuPy stream or None, got namespace",
        ),
        (lambda: tma.copy_rows(X.copy(), ["1"], X, [0]), TypeError, "dst_rows: expected .* got 1 of <U1"),
        (lambda: tma.copy(FIXED, X), ValueError, "dst: expected an array that can be written, got a read-only one"),
        (lambda: tma.reduce_add(FIXED, X), ValueError, "dst: expected an array that can be written"),
        (lambda: tma.copy_rows(FIXED, None, X, None), ValueError, "dst: expected an array that can be written"),
        (lambda: tma.copy_rows(X.copy(), None, X[:, :2].copy(), None), ValueError, r"src: expected rows of shape \(4,"),
        (
            lambda: tma.copy_rows(X.copy(), None, np.zeros((4, 8), "f4")[:, ::2], None),
            ValueError,
            "expected contiguous",
        ),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_works_where_cupy_is_missing():
    code = """
import sys
sys.modules.update(dict.fromkeys(("cupy", "cuda")))  # None: they cannot be found
import numpy as np
from cupyep import model, tma
dst, src = np.zeros((4, 8), np.float32), np.ones((4, 8), np.float32)
tma.copy(dst, src); tma.reduce_add(dst, src); tma.copy_rows(dst, [0], src, [1])
print(tma.load_tile(tma.TensorMap(dst, (2, 8)), (0, 4))[:, 2:6].tolist())
class Cuda: __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (1 << 40, False), "version": 3}
for call in (tma.Overlap, lambda: tma.copy(Cuda(), Cuda()), lambda: tma.TensorMap(Cuda(), (4,))):
    try: call()
    except tma.launch.UnsupportedDeviceError as error: print(error)
"""
    skip = os.environ | {"CUPYEP_SKIP_IMPORT_COMPILE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=skip, capture_output=True, text=True, timeout=100)
    tile, *errors = done.stdout.splitlines()
    assert tile == "[[1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0]]", done.stderr
    for error, what in zip(errors, ("tma.Overlap", "dst: a CUDA array", "array: a CUDA array"), strict=True):
        assert error.startswith(f"{what}: needs compute capability 9.0, found no CuPy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tiles": 0}, "num_tiles: expected at least 1, got 0"),
        ({"tile_bytes": 40}, "tile_bytes: expected a multiple of 16, got 40"),
        ({"num_sms": 0}, "num_sms: expected at least 1, got 0"),
    ],
    ids=str,
)
def test_overlap_is_checked(options, message):
    with pytest.raises(ValueError, match=message):
        tma.Overlap(**options)


def test_num_sms_is_checked():
    assert launch.num_sms(HOPPER, 132) == 132
    with pytest.raises(ValueError, match=r"num_sms: expected 1\.\.132, got 133"):
        launch.num_sms(HOPPER, 133)


@pytest.mark.skipif(HAS_GPU, reason="for machines without a GPU")
def test_gpu_arrays_need_a_gpu():
    with pytest.raises(UnsupportedDeviceError, match=r"cupyep.tma: needs .*, found no"):
        launch.target()
    with pytest.raises(UnsupportedDeviceError, match=r"TensorMap: needs compute capability 9\.0, found 8\.0"):
        AMPERE.require_tma("TensorMap")
    cuda = SimpleNamespace(__cuda_array_interface__={"shape": (4,), "typestr": "<f4", "data": (1 << 40, False)})
    for call in (lambda: tma.reduce_add(cuda, cuda), lambda: tma.copy_rows(X.copy(), cuda, X, None)):
        with pytest.raises(UnsupportedDeviceError, match=r"dst(_rows)?: a CUDA array: needs .*, found no"):
            call()


addresses = st.integers(0, 4096).map(lambda offset: (1 << 30) + offset)


@given(addresses, addresses, st.integers(1, 1 << 40))
def test_a_run_is_covered_once_and_aligned(dst, src, num_bytes):
    rows = copies.run_of_bytes(dst, src, num_bytes)
    assert (rows.dst - rows.head_bytes, rows.src - rows.head_bytes) == (dst, src)
    assert rows.head_bytes + rows.row_bytes + rows.tail_bytes == num_bytes
    assert rows.head_bytes < 128 and rows.tail_bytes < 16 and rows.num_rows == (rows.row_bytes > 0)
    assert rows.row_bytes == 0 or rows.alignment == min(16, (dst - src) & -(dst - src) if dst != src else 16)


@given(
    st.sampled_from([HOPPER, AMPERE, SMALL_SM]),
    st.one_of(st.integers(0, 1 << 16), st.integers(0, 1 << 36)).map(lambda size: 16 * size),
    st.integers(0, 1 << 20),
    st.integers(1, 84),
)
def test_plans_fit(target, row_bytes, num_rows, num_sms):
    rows = copies.Rows(0, 0, row_bytes, num_rows, row_bytes, row_bytes)
    try:
        plan = copies.plan_copy(target, rows, num_sms)
    except ValueError as error:
        assert "pieces of rows" in str(error) and num_rows * -(-row_bytes // 14336) > 2**30
        return
    [params] = plan.arguments
    chunk, num_chunks = int(params["chunk_bytes"]), int(params["num_chunks"])
    assert (num_chunks - 1) * chunk < max(1, row_bytes) <= max(1, num_chunks * chunk)
    assert chunk % 16 == 0 and plan.num_threads <= 1024 and params["num_rows"] == (num_rows if row_bytes else 0)
    if plan.smem_bytes:
        slot = int(plan.request.prelude.split("kSlotBytes = ")[1].split(";")[0])
        assert chunk <= slot and 2 * slot < plan.smem_bytes <= target.smem_limit and slot % 128 == 0
    else:
        assert target is AMPERE


@pytest.mark.parametrize("num_sms, longest", [(1, 14336), (48, 14336), (64, 10880), (132, 5248)])
def test_many_sms_have_few_bytes_under_way(num_sms, longest):
    rows = copies.run_of_bytes(0, 0, 1 << 30)
    [params] = copies.plan_copy(HOPPER, rows, num_sms).arguments
    assert params["chunk_bytes"] == longest
    assert num_sms * 12 * longest <= copies.MOST_UNDER_WAY
    [params] = copies.plan_copy(HOPPER, rows, num_sms, ring=copies.RINGS[-1]).arguments
    assert params["chunk_bytes"] == 14336


def test_short_rows_are_not_cut_for_it():
    assert copies.Ring(16, 12, 1024).longest_unit(132) == 1024
    assert copies.Ring(8, 3, 8192).longest_unit(132) == copies.SHORTEST_UNIT
