"""tma.copy, copy_rows and reduce_add on a GPU, against NumPy: sizes, alignments, hints, SM budgets, both paths."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from gpu_helpers import cupy

from cupyep import tma
from cupyep.tma import launch
from cupyep.tma.copies import ADD

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
GUARD = 256


@pytest.fixture(params=["auto", "vector"], autouse=True)
def mover(request, monkeypatch):
    monkeypatch.setenv("CUPYEP_MOVER", request.param)
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng()


def poisoned(num_bytes, offset):
    """(the whole, the part of num_bytes that starts `offset` bytes off 256, with poison around it)."""
    whole = cupy.full(num_bytes + 2 * GUARD + 256, 0xCB, cupy.uint8)
    start = GUARD + offset
    return whole, whole[start : start + num_bytes]


@pytest.mark.parametrize("num_bytes", [1, 15, 16, 1000, 4096, 70_001, 1 << 20, (1 << 24) + 13])
def test_copy(num_bytes, rng):
    content = rng.integers(0, 256, num_bytes, np.uint8)
    sizes = [1, 3, 8, launch.target().num_sms]
    for (to, of), num_sms in itertools.product([(0, 0), (16, 48), (3, 19), (4, 0), (1, 0), (8, 2)], sizes):
        whole, dst = poisoned(num_bytes, to)
        _, src = poisoned(num_bytes, of)
        src.set(content)
        tma.copy(dst, src, num_sms=num_sms)
        got = whole.get()
        assert np.array_equal(got[GUARD + to : GUARD + to + num_bytes], content), (to, of, num_sms)
        got[GUARD + to : GUARD + to + num_bytes] = 0xCB
        assert (got == 0xCB).all(), (to, of, num_sms)


def test_rows_between_each_other(rng):
    both = cupy.asarray(rng.standard_normal((6, 64)).astype(np.float32))
    odd = both[1::2].get()
    tma.copy_rows(both[::2], None, both[1::2], None)
    assert np.array_equal(both[::2].get(), odd)
    with pytest.raises(ValueError, match="dst: expected memory apart from src's"):
        tma.copy_rows(both[::2], None, both[2::2], None)


@pytest.mark.parametrize("hint", ["none", "evict_first", "evict_last"])
def test_hints_streams_and_events(hint, rng):
    content = rng.standard_normal((333, 1000)).astype(np.float32)
    src, dst, stream = cupy.asarray(content), cupy.zeros((333, 1000), np.float32), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    event = tma.copy(dst, src, stream=stream, load_hint=hint, store_hint=hint)
    event.current_stream_wait()
    assert np.array_equal(dst.get(), content)
    event.synchronize()


def test_more_than_four_gigabytes():
    num = (5 << 30) // 8
    if cupy.cuda.runtime.memGetInfo()[0] < 12 << 30:
        pytest.skip("needs 12 GB of GPU memory")
    src, dst = cupy.arange(num, dtype=np.int64), cupy.zeros(num, np.int64)
    tma.copy(dst, src, num_sms=launch.target().num_sms)
    assert bool((dst == src).all())


@pytest.mark.parametrize(
    "row", [(7168, "u2"), (1024, "u1"), (520, "u1"), (24, "u1"), (9, "u2"), (40_000, "f4"), (1, "i8")]
)
def test_copy_rows(row, rng):
    width, dtype = row
    num_dst, num_src, num_rows = 300, 200, 250
    content = rng.integers(0, 100, (num_src, width)).astype(dtype)
    to, of = rng.permutation(num_dst)[:num_rows], rng.integers(-1, num_src, num_rows)
    dst = cupy.full((num_dst, width), 77, dtype)
    expected = dst.get()
    there = of >= 0
    expected[to[there]] = content[of[there]]
    for index in (np.int32, np.int64):
        dst[...] = 77
        tma.copy_rows(dst, cupy.asarray(to.astype(index)), cupy.asarray(content), cupy.asarray(of), num_sms=5)
        assert np.array_equal(dst.get(), expected)
    gathered = cupy.empty((num_rows, width), dtype)
    tma.copy_rows(gathered, None, cupy.asarray(content), np.abs(of))
    assert np.array_equal(gathered.get(), content[np.abs(of)])


def test_rows_outside_are_skipped(rng):
    dst, src = cupy.zeros((4, 64), np.float32), cupy.ones((3, 64), np.float32)
    tma.copy_rows(dst, cupy.array([0, 9, -5, 2]), src, cupy.array([2, 0, 1, 3]))
    assert dst.get()[:, 0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("dtype", ADD, ids=str)
@pytest.mark.parametrize("num, offset", [(100_000, 0), (99_999, 3), (5, 1)])
def test_reduce_add(dtype, num, offset, rng):
    ours, theirs = (rng.standard_normal(num) * 100 for _ in range(2))
    ours, theirs = ours.astype(dtype), theirs.astype(dtype)
    kind = np.uint16 if dtype == ml_dtypes.bfloat16 else dtype
    dst, src = cupy.zeros(num + offset, kind), cupy.asarray(theirs.view(kind))
    dst[offset:] = cupy.asarray(ours.view(kind))
    tma.reduce_add(dst[offset:].view(dtype), src.view(dtype))
    expected = ours.copy()
    tma.reduce_add(expected, theirs)
    assert np.array_equal(dst[offset:].get().view(f"u{dtype.itemsize}"), expected.view(f"u{dtype.itemsize}"))
    assert not dst[:offset].any()


def test_many_streams_add_to_one_array():
    dst, streams = cupy.zeros(100_000, np.int32), [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    src = cupy.arange(100_000, dtype=np.int32)
    cupy.cuda.Device().synchronize()
    for event in [tma.reduce_add(dst, src, stream=stream, num_sms=4) for stream in streams * 5]:
        event.synchronize()
    assert bool((dst == 20 * src).all())


def test_num_sms_is_bounded():
    x = cupy.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"num_sms: expected 1\.\."):
        tma.copy(x.copy(), x, num_sms=10_000)
