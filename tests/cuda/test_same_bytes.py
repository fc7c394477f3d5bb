"""The interpreter of tests/ptxsim and the GPU give the same bytes for the same small cases.

The interpreter runs plans made small, two warps and two slots; the GPU runs the backend's own. Both are held against
the oracle, or NumPy, bit by bit, so whoever is wrong is named.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from gpu_helpers import child, cupy
from multirank import checks, launch
from multirank import low_latency as verbs

import cupyep
from cupyep import tma
from cupyep.tma import launch as launches

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


def jobs(mover):
    from ptxsim.test_kernels import JOBS

    return {name: job for name, job in JOBS.items() if job.mover == mover}


def interpreted_and_run(mover):
    """Every job of `mover`, with ranks as threads; returns how many there were."""
    from ptxsim import harness

    os.environ["CUPYEP_MOVER"] = {"tma": "auto"}.get(mover, mover)
    for name, job in jobs(mover).items():
        group = harness.run(job, seed=1)  # compares what the interpreter has made
        try:
            launch.threads(job.case.num_ranks, on_gpu, group)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return len(jobs(mover))


def on_gpu(comm, group):
    case, rank, job = group.job.case, comm.rank, group.job
    x, topk_idx, weights = (None if part is None else cupy.asarray(part) for part in case.inputs(rank))
    expected, (y, y_weights) = group.received[rank], group.answers[rank]
    if job.scale_bytes:
        x = x, cupy.asarray(group.scales[rank])
    with cupyep.Buffer(comm, backend="cuda", timeout_s=30) as buffer:
        for _ in range(job.rounds):
            result = buffer.dispatch(x, topk_idx, weights, num_experts=case.num_experts)
            recv_x, scales = result.recv_x if job.scale_bytes else (result.recv_x, None)
            checks.assert_bits("recv_x", recv_x, expected.x)
            checks.assert_bits("recv_topk_idx", result.recv_topk_idx, expected.topk_idx)
            if scales is not None:
                checks.assert_bits("scales", scales, group.received_scales[rank])
            if weights is not None:
                checks.assert_bits("recv_topk_weights", result.recv_topk_weights, expected.topk_weights)
            back = (cupy.asarray(y), result.handle, None if y_weights is None else cupy.asarray(y_weights))
            combined = buffer.combine(*back, bias=tuple(map(cupy.asarray, group.biases[rank])) or None)
            checks.assert_bits("combined_x", combined.combined_x, group.combined[rank])
            if group.combined_weights is not None:
                checks.assert_bits("weights", combined.combined_topk_weights, group.combined_weights[rank])


@pytest.mark.parametrize("mover", ["tma", "vector"])
def test_interpreter_and_gpu(mover):
    assert child(interpreted_and_run, mover, timeout_s=140, is_fresh=True) == len(jobs(mover)) > 0


# --- low latency ------------------------------------------------------------------------------------------------------


def low_latency_jobs(num_ranks):
    """(jobs in one Buffer, what the interpreter runs for them)."""
    from ptxsim.test_low_latency import RUNS

    runs = [run for run in RUNS.values() if run.job.case.num_ranks == num_ranks]
    return tuple(dict.fromkeys(run.job for run in runs)), runs


def interpret_low_latency(num_ranks):
    """Returns the jobs that the interpreter has run well."""
    from ptxsim import low_latency

    chosen, runs = low_latency_jobs(num_ranks)
    for run in runs:
        low_latency.run(replace(run, rounds=1), seed=1)
    return chosen


def low_latency_interpreted_and_run(num_ranks):
    chosen = interpret_low_latency(num_ranks)
    first = tuple(replace(job, masked=()) for job in chosen if job.masked)  # a shape's first call is everybody's step
    launch.threads(num_ranks, verbs.run_jobs, (*first, *chosen), "cuda")
    return len(chosen)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_low_latency(num_ranks):
    assert child(low_latency_interpreted_and_run, num_ranks, timeout_s=140) == len(low_latency_jobs(num_ranks)[0]) > 0


# --- the TMA toolkit --------------------------------------------------------------------------------------------------


@pytest.fixture
def needs_tma():
    if launches.target().compute_capability < 90:
        pytest.skip("needs compute capability 9.0")


def interpret_copies():
    """(how far dst and src are off, what was copied) of every small copy."""
    from ptxsim import test_tma_copy as small

    for num_bytes, *offsets in small.COPIES:
        small.copy_bytes(num_bytes, *offsets, seed=1)
        yield offsets, small.random_bytes(num_bytes, 1)


def interpret_sums():
    """(ours, theirs, their sums) of every type that reductions take."""
    from ptxsim import test_tma_copy as small

    return (small.add(dtype, small.HOPPER, 1) for dtype in small.copies.ADD)


def interpret_tiles():
    """(memory, shape, box, corner, tile) of ranks 1 to 5, within the array and over its edges."""
    from ptxsim import test_tma_tiles as small

    for rank, (shape, box) in small.SHAPES.items():
        array = small.padded(small.content(shape, rank))
        for corner in (0, 3, -2):
            at, tensor_map = (*(corner,) * (rank - 1), 4 * corner), tma.TensorMap(array, box)
            _, tile = small.run_tile("load_tile", tensor_map, at, array.base, np.zeros(box, np.int32), rank)
            yield array.base, shape, box, at, tile


def interpret_pipelines():
    """(pipeline, x, y) of 3 * x - 7, with several stages and groups."""
    from ptxsim import test_tma_pipeline as small

    x = small.numbers(1300, 1)
    for stages, groups in ((1, 1), (2, 2), (4, 2)):
        pipeline = small.line(stages, groups)
        yield pipeline, x, small.run(pipeline, x, x, 1, a=3, b=-7)


def bytes_on_gpu(array, offset):
    """The bytes of `array`, `offset` behind an aligned address."""
    whole = cupy.zeros(array.nbytes + offset, cupy.uint8)
    whole[offset:] = cupy.asarray(array.view(np.uint8).ravel())
    return whole[offset:]


def test_copies():
    for (to, of), content in interpret_copies():
        dst = bytes_on_gpu(np.zeros_like(content), to)
        tma.copy(dst, bytes_on_gpu(content, of)).synchronize()
        checks.assert_bits(f"{content.size} bytes, off by {to} and {of}", dst, content)


def test_sums():
    for ours, theirs, sums in interpret_sums():
        dst, src = (bytes_on_gpu(part, ours.itemsize) for part in (ours, theirs))
        tma.reduce_add(dst.view(ours.dtype), src.view(ours.dtype)).synchronize()
        checks.assert_bits(str(ours.dtype), dst, sums.view(np.uint8))


def test_tiles(needs_tma):
    for memory, shape, box, corner, tile in interpret_tiles():
        device = cupy.asarray(memory)[..., : shape[-1]]
        checks.assert_bits(f"tile at {corner}", tma.load_tile(tma.TensorMap(device, box), corner), tile)


def test_pipelines(needs_tma):
    for pipeline, x, expected in interpret_pipelines():
        y = cupy.zeros(x.shape, x.dtype)
        pipeline(y, cupy.asarray(x), a=3, b=-7).synchronize()
        checks.assert_bits(f"{pipeline.stages} stages", y, expected)
