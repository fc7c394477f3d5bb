"""The interpreter of tests/ptxsim and the GPU give the same bytes for the same small cases.

The interpreter runs plans made small, two warps and two slots; the GPU runs the backend's own. Both are held against
the oracle bit by bit, so whoever is wrong is named.
"""

from __future__ import annotations

import os

import pytest
from gpu_helpers import child, cupy
from multirank import checks, launch

import cupyep

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
    assert child(interpreted_and_run, mover, timeout_s=140) == len(jobs(mover)) > 0
