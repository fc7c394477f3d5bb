"""tma.Pipeline, the worked kernels and the overlap model on a GPU, against NumPy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gpu_helpers import cupy

from cupyep import model, tma
from cupyep.tma import bench, launch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def needs_tma():
    if launch.target().compute_capability < 90:
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize("num_sms", [1, 24])
@pytest.mark.parametrize("stages", [1, 2, 3, 6])
@pytest.mark.parametrize("num", [4, 1024, 1_000_004])
def test_expression(stages, num, num_sms):
    pipeline = tma.Pipeline(stages, (2048,), "float32", "a * x + b", scalars=("a", "b"))
    x = np.random.default_rng().integers(-999, 999, num).astype(np.float32)
    y = cupy.full(num, np.nan, np.float32)
    pipeline(y, cupy.asarray(x), num_sms=num_sms, a=2, b=-7).synchronize()
    assert np.array_equal(y.get(), 2 * x - 7)


@pytest.mark.parametrize("dtype, out_dtype", [("float32", "float16"), ("float16", "float32"), ("bfloat16", "bfloat16")])
def test_types(dtype, out_dtype):
    kinds = [np.dtype(getattr(ml_dtypes, name, name)) for name in (dtype, out_dtype)]
    x = np.random.default_rng().standard_normal((77, 320)).astype(kinds[0])
    y = cupy.zeros((77, 320), kinds[1])
    tma.Pipeline(4, (3, 320), dtype, "x * 3", out_dtype=out_dtype)(y, cupy.asarray(x))
    expected = (x.astype(np.float32) * 3).astype(kinds[1])
    assert np.array_equal(y.get().view(f"u{kinds[1].itemsize}"), expected.view(f"u{kinds[1].itemsize}"))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8(kind):
    x = (np.random.default_rng().standard_normal(100_000) * 100).astype(ml_dtypes.bfloat16)
    y = cupy.zeros(x.size, np.uint8)
    tma.Pipeline(4, (4096,), "bfloat16", "x", out_dtype=kind)(y, cupy.asarray(x))
    limit = float(ml_dtypes.finfo(getattr(ml_dtypes, kind)).max)
    expected = np.clip(x.astype(np.float32), -limit, limit).astype(getattr(ml_dtypes, kind))
    assert np.array_equal(y.get(), expected.view(np.uint8))
    back = cupy.zeros(x.size, np.float32)
    tma.Pipeline(4, (4096,), kind, "x", out_dtype="float32")(back, y)
    assert np.array_equal(back.get(), expected.astype(np.float32))


def test_softmax_of_rows():
    pipeline, _ = bench.pipelines()["row softmax"]
    x = np.random.default_rng().standard_normal((999, 1024)).astype(np.float32) * 5
    y = cupy.zeros(x.shape, np.float32)
    pipeline(y, cupy.asarray(x), num_sms=7)
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    assert np.allclose(y.get(), e / e.sum(1, keepdims=True), rtol=1e-4, atol=1e-9)


def test_a_function_with_barriers_and_its_own_row_shape():
    code = """
    __device__ void compute(const cupyep::Tile& tile, const Scalars& scalars) {  // sums of rows, four times
      __shared__ int sums[2][8];
      if (tile.thread < tile.num_rows) sums[tile.group][tile.thread] = scalars.start;
      tile.sync();
      for (unsigned i = tile.thread; i < tile.num_rows * cfg::kRowElements; i += tile.num_threads) {
        atomicAdd(&sums[tile.group][i / cfg::kRowElements], tile.in[i]);
      }
      tile.sync();
      const int* mine = sums[tile.group];
      for (unsigned i = tile.thread; i < 4 * tile.num_rows; i += tile.num_threads) tile.out[i] = mine[i / 4];
      tile.sync();
    }"""
    pipeline = tma.Pipeline(4, (8, 100), "int32", code, out_row_shape=(4,), scalars={"start": "i32"})
    x = np.random.default_rng().integers(-99, 99, (1003, 100)).astype(np.int32)
    y = cupy.zeros((1003, 4), np.int32)
    pipeline(y, cupy.asarray(x), num_sms=5, start=17)
    assert np.array_equal(y.get(), np.repeat(x.sum(1)[:, None] + 17, 4, 1))


def test_worked_kernels():
    command = [sys.executable, str(ROOT / "examples/tma_kernels/run.py"), "--mbytes", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 3


@pytest.mark.alone
def test_overlap_is_what_the_model_says():
    """Of loads alone; docs/overlap.md says what breaks with computations, and how far they then are off."""
    run = tma.Overlap(num_tiles=512)
    loads = model.compare(run, run.num_tiles, 0, stages=(2, 4, 8))
    assert loads.largest_error < 0.2, str(loads)
    work = model.compare(run, run.num_tiles, 64, stages=(2, 4, 8))
    assert work.t_load > 0 and work.t_compute > 0
    assert work.rows[-1].measured_s < work.rows[0].measured_s
