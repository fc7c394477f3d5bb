"""tma.copy, copy_rows and reduce_add: the kernel as NVRTC compiles it, under many schedules, against NumPy."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from cupyep import abi
from cupyep.tma import copies
from cupyep.tma.copies import Ring, Rows, plan_copy, run_of_bytes
from ptxsim.memory import POISON
from ptxsim.scheduler import SimulationError
from ptxsim.toolkit import AMPERE, HOPPER, Gpu

SEEDS = range(int(os.environ.get("CUPYEP_PTXSIM_SEEDS", "4")))
SMALL = Ring(2, 2, 1024)  # few warps: the interpreter is slow
GUARD = 64  # bytes beside the destination that must keep their poison
COPIES = [  # bytes, and how far dst and src are off
    (12_288, 0, 0), (9_999, 0, 0), (5_003, 3, 19), (4_097, 8, 4), (1_001, 1, 0), (3, 0, 0), (1, 7, 0), (130, 16, 0)
]  # fmt: skip
KERNEL, RING = "kernels/tma_copy.cu", "cupyep/copy_ring.cuh"


def random_bytes(num_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def copy_bytes(num_bytes: int, dst_offset: int, src_offset: int, seed: int, target=HOPPER, patch=(), **options) -> None:
    gpu, content = Gpu(), random_bytes(num_bytes, seed)
    src, dst = gpu.array(content, src_offset), gpu.empty(num_bytes + 2 * GUARD, dst_offset) + GUARD
    launch = plan_copy(target, run_of_bytes(dst, src, num_bytes), 2, ring=SMALL, **options)
    gpu.run(launch, seed, patch)
    assert np.array_equal(gpu.read(dst, content), content)
    assert gpu.is_poison(dst - GUARD, GUARD) and gpu.is_poison(dst + num_bytes, GUARD)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("num_bytes", "dst_offset", "src_offset"), COPIES)
def test_copy(num_bytes: int, dst_offset: int, src_offset: int, seed: int) -> None:
    copy_bytes(num_bytes, dst_offset, src_offset, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_copy_with_hints(seed: int) -> None:
    copy_bytes(8_192, 0, 0, seed, load_hint=abi.Hint.EVICT_FIRST, store_hint=abi.Hint.EVICT_LAST)


@pytest.mark.parametrize(("num_bytes", "dst_offset", "src_offset"), [(9_999, 0, 0), (4_097, 8, 4)])
def test_copy_before_hopper(num_bytes: int, dst_offset: int, src_offset: int) -> None:
    copy_bytes(num_bytes, dst_offset, src_offset, 0, AMPERE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("row_bytes, pitch", [(1040, 1040), (2304, 2560), (20, 36), (6, 10)])
@pytest.mark.parametrize("which", ["gather", "scatter", "both"])
def test_rows(row_bytes: int, pitch: int, which: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_dst, num_src, num_rows = 11, 9, 9
    content = random_bytes(num_src * pitch, seed).reshape(num_src, pitch)
    to = rng.permutation(num_dst)[:num_rows] if which != "gather" else np.arange(num_rows)
    of = rng.integers(-1, num_src + 2, num_rows) if which != "scatter" else np.arange(num_rows)
    gpu = Gpu()
    dst, src = gpu.empty(num_dst * pitch), gpu.array(content)
    rows = Rows(
        dst,
        src,
        row_bytes,
        num_rows,
        pitch,
        pitch,
        dst_rows=gpu.array(to.astype(np.int32)) if which != "gather" else 0,
        src_rows=gpu.array(of.astype(np.int32)) if which != "scatter" else 0,
        num_dst_rows=num_dst,
        num_src_rows=num_src,
        idx_bytes=4,
    )
    gpu.run(plan_copy(HOPPER, rows, 2, ring=SMALL), seed)
    expected = np.full((num_dst, pitch), POISON, np.uint8)
    for i in range(num_rows):
        if 0 <= of[i] < num_src:
            expected[to[i], :row_bytes] = content[of[i], :row_bytes]
    assert np.array_equal(gpu.read(dst, expected), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("dtype", "target"),
    [(d, target) for d in copies.ADD for target in (HOPPER, AMPERE) if target is HOPPER or d != ml_dtypes.bfloat16],
    ids=lambda value: value.name if isinstance(value, np.dtype) else value.arch,
)
def test_reduce_add(dtype: np.dtype, target, seed: int) -> None:  # bfloat16 for sm_80: a loop of NVIDIA's headers
    add(dtype, target, seed)


def add(dtype: np.dtype, target, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What was added to what, and the sums, which are NumPy's."""
    rng = np.random.default_rng(seed)
    ours, theirs = (rng.integers(-99, 99, 2_021).astype(dtype) for _ in range(2))
    gpu = Gpu()
    dst, src = gpu.array(ours, dtype.itemsize), gpu.array(theirs, dtype.itemsize)
    rows = run_of_bytes(dst, src, ours.nbytes)
    gpu.run(plan_copy(target, rows, 2, ring=SMALL, add=copies.ADD[dtype]), seed)
    sums = gpu.read(dst, ours)
    assert sums.tobytes() == (ours + theirs).astype(dtype).tobytes()
    return ours, theirs, sums


FAULTS = {
    "no wait for the load": (RING, "while (!ptx::mbarrier_try_wait", "while (false && !ptx::mbarrier_try_wait"),
    "no phase flip": (RING, "i / cfg::kStages & 1", "0"),
    "no wait before a refill": (RING, "if (i > 0) ptx::cp_async_bulk_wait_group_read<1>();", ""),
    "no mbarrier fence": (RING, "ptx::fence_mbarrier_init_release_cluster();", ""),
    "not drained": (RING, "  ptx::cp_async_bulk_wait_group<0>();\n", ""),
    "too few bytes expected": (KERNEL, "expect_tx(full, unit.bytes)", "expect_tx(full, unit.bytes - 16)"),
    "no tail": (KERNEL, "p.tail_bytes, threadIdx.x", "0, threadIdx.x"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    seen = 0
    for seed in range(12):
        try:
            copy_bytes(9_999, 0, 0, seed, patch=(FAULTS[fault],))
        except (SimulationError, AssertionError):
            seen += 1
    assert seen
