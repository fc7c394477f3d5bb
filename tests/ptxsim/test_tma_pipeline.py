"""tma.Pipeline: the kernel around three computations, under many schedules, against NumPy; and without its parts."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from cupyep.tma import Pipeline, bench, overlap
from ptxsim.scheduler import SimulationError
from ptxsim.toolkit import HOPPER, Gpu

SEEDS = range(int(os.environ.get("CUPYEP_PTXSIM_SEEDS", "4")))
KERNEL = "kernels/tma_pipeline.cu"
SUMS = """
__device__ void compute(const cupyep::Tile& tile, const Scalars& scalars) {  // 4 partial sums of each row, reversed
  __shared__ int seen[128];
  for (unsigned row = 0; row < tile.num_rows; ++row) {
    if (tile.thread < 4) seen[64 * tile.group + tile.thread] = 0;
    tile.sync();
    const int value = tile.thread < cfg::kRowElements ? tile.in[row * cfg::kRowElements + tile.thread] : 0;
    atomicAdd(&seen[64 * tile.group + tile.thread % 4], value);
    tile.sync();
    if (tile.thread < 4) tile.out[4 * row + tile.thread] = seen[64 * tile.group + 3 - tile.thread] + scalars.add;
    tile.sync();
  }
}
"""


def run(pipeline: Pipeline, x: np.ndarray, y: np.ndarray, seed: int, patch: Any = (), **scalars: float) -> np.ndarray:
    gpu = Gpu()
    to, of = gpu.empty(y.nbytes + 64), gpu.array(x)
    gpu.run(pipeline.plan(HOPPER, to, of, len(x), 2, scalars), seed, patch)
    assert gpu.is_poison(to + y.nbytes, 64)
    return gpu.read(to, y)


def line(stages: int, groups: int = 2) -> Pipeline:
    return Pipeline(stages, (128,), "float32", "a * x + b", scalars=("a", "b"), groups=groups, warps_per_group=1)


def numbers(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-99, 99, size).astype(np.float32)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stages, groups", [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (3, 3)])
def test_expression(stages: int, groups: int, seed: int) -> None:
    x = numbers(1300, seed)
    assert np.array_equal(run(line(stages, groups), x, x, seed, a=3, b=-7), 3 * x - 7)


@pytest.mark.parametrize("seed", SEEDS)
def test_expression_by_batches(seed: int) -> None:
    """Five vectors per thread: a batch of four and one more; fewer in the last tile."""
    x = numbers(2800, seed)
    pipeline = Pipeline(2, (640,), "float32", "a * x", scalars=("a",), warps_per_group=1)
    assert np.array_equal(run(pipeline, x, x, seed, a=3), 3 * x)


@pytest.mark.parametrize("seed", SEEDS)
def test_conversion_to_fp8(seed: int) -> None:
    x = (np.random.default_rng(seed).standard_normal((3, 1280)) * 200).astype(ml_dtypes.bfloat16)
    pipeline = Pipeline(2, (1, 1280), "bfloat16", "x", out_dtype="float8_e4m3fn", warps_per_group=1)
    y = run(pipeline, x, np.zeros(x.shape, np.uint8), seed)
    assert np.array_equal(y, np.clip(x.astype("f4"), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("seed", SEEDS)
def test_softmax(seed: int) -> None:
    """The benchmark's."""
    x = np.random.default_rng(seed).standard_normal((7, 256)).astype(np.float32)
    pipeline = Pipeline(2, (2, 256), "float32", bench.SOFTMAX, warps_per_group=2)
    assert np.allclose(run(pipeline, x, x, seed), bench.softmax(x.astype(np.float64)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_conversion(seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((9, 64)).astype(np.float32)
    pipeline = Pipeline(2, (2, 64), "float32", "x", out_dtype="bfloat16", warps_per_group=1)
    y = run(pipeline, x, np.zeros(x.shape, ml_dtypes.bfloat16), seed)
    assert np.array_equal(y.view(np.uint16), x.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize("seed", SEEDS)
def test_function(seed: int) -> None:
    x = np.random.default_rng(seed).integers(-99, 99, (7, 24)).astype(np.int32)
    pipeline = Pipeline(2, (2, 24), "int32", SUMS, out_row_shape=(4,), scalars={"add": "i32"}, warps_per_group=1)
    y = run(pipeline, x, np.zeros((7, 4), np.int32), seed, add=5)
    assert np.array_equal(y, x.reshape(7, 6, 4).sum(1)[:, ::-1] + 5)


def test_adjustable_work() -> None:
    """What tma.Overlap runs: four of the threads write, all do the chain."""
    x = np.random.default_rng(3).integers(-9, 9, (5, 160)).astype(np.float32)
    pipeline = Pipeline(2, (1, 160), "float32", overlap.COMPUTE, out_row_shape=(4,), scalars={"work": "u32"}, groups=1)
    y = run(pipeline, x, np.zeros((5, 4), np.float32), 3, work=2)
    expected = x[:, :4] + x[:, 128:132]  # a group has 128 threads
    for _ in range(2):
        expected = expected * np.float32(0.999) + np.float32(0.001)
    assert np.allclose(y, expected, rtol=1e-6)


FAULTS = {
    "no wait for full": ("    tma::mbarrier_wait(slots.full(stage), i / cfg::kStages & 1);", "    //"),
    "no flip of full": ("slots.full(stage), i / cfg::kStages & 1", "slots.full(stage), 0"),
    "no wait for empty": ("if (use > 0) tma::mbarrier_wait(slots.empty(stage), (use - 1) & 1);", ""),
    "no flip of empty": ("slots.empty(stage), (use - 1) & 1", "slots.empty(stage), 0"),
    "slot never given back": ("tma::mbarrier_arrive(slots.empty(stage));", ""),
    "no fence of the readers and writers": ("tma::tma_store_fence();", ""),
    "no barrier before the store": ("    tile.sync();\n    if (thread == 0) {", "    if (thread == 0) {"),
    "output slot written too early": ("if (thread == 0) tma::tma_store_wait_read<kOutSlots - 2>();", ""),
    "not drained": ("if (thread == 0) tma::tma_store_wait<0>();", ""),
    "no commit": ("tma::tma_store_commit();", ""),
    "too few bytes expected": ("expect_tx(slots.full(stage), bytes);", "expect_tx(slots.full(stage), bytes - 16);"),
    "no mbarrier fence": ("tma::fence_barrier_init();", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    x = numbers(1300, 1)
    for seed in range(25):
        try:
            y = run(line(2), x, x, seed, ((KERNEL, *FAULTS[fault]),), a=2, b=1)
        except (SimulationError, AssertionError):
            return
        if not np.array_equal(y, 2 * x + 1):
            return
    pytest.fail("not seen under any of 25 schedules")
