"""The worked kernels of examples/tma_kernels: right under many schedules, and wrong without any of their parts."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from ptxsim.scheduler import SimulationError
from ptxsim.sources import text
from ptxsim.toolkit import Gpu

SEEDS = range(int(os.environ.get("CUPYEP_PTXSIM_SEEDS", "3")))
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "tma_kernels"
SMALLER = {  # constants of each kernel that are made smaller: the interpreter is slow
    "scale_shift": (("kWarps = 8, kStages = 3, kSlotBytes = 8192", "kWarps = 2, kStages = 2, kSlotBytes = 1024"),),
    "row_softmax": (("kColumns = 2048, kWarps = 12, kSlots = 24", "kColumns = 128, kWarps = 2, kSlots = 4"),),
    "cast_fp8": (
        ("kWarps = 16, kStages = 2, kElements = 2048", "kWarps = 2, kStages = 2, kElements = 512"),
        ("kBatch = 8", "kBatch = 2"),
    ),
}
SHAPE = {"scale_shift": (64, 2 * 2 * 1032), "row_softmax": (96, 4 * (512 + 16)), "cast_fp8": (64, 2 * (3072 + 16))}


def run(name: str, seed: int, y: np.ndarray, x: np.ndarray, *scalars: np.generic, fault: tuple = ()) -> np.ndarray:
    gpu = Gpu()
    to, of = gpu.empty(y.nbytes + 64), gpu.array(x)
    arguments = (np.uint64(to), np.uint64(of), *scalars)
    gpu.run_text(text(FOLDER / f"{name}.cu", name, (*SMALLER[name], *fault)), arguments, 2, *SHAPE[name], seed)
    assert gpu.is_poison(to + y.nbytes, 64)
    return gpu.read(to, y)


def scale_shift(seed: int, **options: tuple) -> bool:
    x = np.random.default_rng(seed).integers(-99, 99, 2900).astype(np.float32)
    y = run("scale_shift", seed, x, x, np.uint64(x.nbytes), np.float32(3), np.float32(-5), **options)
    return np.array_equal(y, 3 * x - 5)


def row_softmax(seed: int, **options: tuple) -> bool:
    x = np.random.default_rng(seed).standard_normal((21, 128)).astype(np.float32)
    y = run("row_softmax", seed, x, x, np.uint64(len(x)), **options)
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    return np.allclose(y, e / e.sum(1, keepdims=True), rtol=1e-5, atol=0)


def cast_fp8(seed: int, **options: tuple) -> bool:
    x = (np.random.default_rng(seed).standard_normal(5_008) * 300).astype(ml_dtypes.bfloat16)
    y = run("cast_fp8", seed, np.zeros(x.size, np.uint8), x, np.uint64(x.size), np.float32(0.75), **options)
    return np.array_equal(y, np.clip(x.astype("f4") * 0.75, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


KERNELS = {check.__name__: check for check in (scale_shift, row_softmax, cast_fp8)}
FAULTS = [
    ("scale_shift", "mbarrier_wait(full + i % kStages, i / kStages & 1);", ""),
    ("scale_shift", "i / kStages & 1", "0"),
    ("scale_shift", "tma_store_wait_read<1>();", ""),
    ("scale_shift", "tma_store_fence();", ""),
    ("scale_shift", "before the barrier\n    __syncwarp();", ""),
    ("scale_shift", "fence_barrier_init();", ""),
    ("scale_shift", "tma_store_commit();", ""),
    ("scale_shift", "tma_store_wait<0>();", ";"),
    ("row_softmax", "if (use > 0) mbarrier_wait(empty + slot, (use - 1) & 1);", ""),
    ("row_softmax", "(use - 1) & 1", "1"),
    ("row_softmax", "mbarrier_wait(full + slot, i / kSlots & 1);", ""),
    ("row_softmax", "tma_store_fence();", ""),
    ("row_softmax", "tma_store_wait_read<0>();", ""),
    ("row_softmax", "mbarrier_arrive(empty + slot);", ""),
    ("row_softmax", "  __syncthreads();\n", ""),
    ("row_softmax", "mbarrier_arrive_and_expect_tx(full + slot, kRowBytes);", "mbarrier_arrive(full + slot);"),
    ("cast_fp8", "mbarrier_wait(full + i % kStages, i / kStages & 1);", ""),
    ("cast_fp8", "tma_store_fence();", ""),
    ("cast_fp8", "if (lane == 0) tma_store_wait_read<0>();", ""),
    ("cast_fp8", "    __syncwarp();\n", ""),
    ("cast_fp8", "tma_store_wait<0>();", ";"),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name: str, seed: int) -> None:
    assert KERNELS[name](seed)


@pytest.mark.parametrize("name, old, new", FAULTS)
def test_a_fault_is_seen(name: str, old: str, new: str) -> None:
    for seed in range(25):
        try:
            if not KERNELS[name](seed, fault=((old, new),)):
                return
        except (SimulationError, AssertionError):
            return
    pytest.fail("not seen under any of 25 schedules")
