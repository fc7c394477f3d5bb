"""Ranks on GPUs of their own: which GPU a rank takes, and what happens to arrays of another."""

from __future__ import annotations

import os

import numpy as np
import pytest
from gpu_helpers import Traffic, check, child, cupy, mpi, open_buffer, threads
from multirank import launch

import cupyep

pytestmark = pytest.mark.gpu


def num_gpus():
    return cupy.cuda.runtime.getDeviceCount()


@pytest.fixture(autouse=True)
def several_gpus():
    if num_gpus() < 2:
        pytest.skip("needs two GPUs")


def own_gpu(comm):
    traffic = Traffic(comm.size)
    with open_buffer(comm, traffic) as buffer:
        check(buffer, traffic)
        result = check(buffer, traffic)
        assert cupy.zeros(1).device.id == result.recv_x.device.id  # the Buffer's GPU has become the current one
        return result.recv_x.device.id


@pytest.mark.parametrize("run", [threads, mpi])
def test_each_rank_has_a_gpu_of_its_own(run):
    assert run(num_gpus(), own_gpu) == list(range(num_gpus()))


def groups_of_two(comm):
    part = comm.Split(color=comm.rank // 2, key=comm.rank)
    return own_gpu(part)


@pytest.mark.parametrize("run", [threads, mpi])
def test_groups_of_a_job_do_not_take_the_same_gpus(run):
    assert run(num_gpus(), groups_of_two) == list(range(num_gpus()))


def array_elsewhere(comm):
    traffic = Traffic(comm.size)
    with open_buffer(comm, traffic) as buffer:
        x, topk_idx, weights = traffic.inputs(comm.rank)
        with cupy.cuda.Device(1):
            far = cupy.asarray(x.get())
        with pytest.raises(ValueError, match=r"x: expected an array on the Buffer's GPU 0, got GPU 1"):
            buffer.dispatch(far, topk_idx, weights, num_experts=traffic.num_experts)
        check(buffer, traffic)


def test_an_array_of_another_gpu_is_refused():
    launch.threads(1, array_elsewhere)


def chosen(comm):
    with cupyep.Buffer(comm, backend="cuda", device=1 - comm.rank, max_tokens_per_rank=16) as buffer:
        x = cupy.arange(16 * 8, dtype=np.float32).reshape(16, 8)
        topk_idx = cupy.full((16, 1), 1 - comm.rank)
        result = buffer.dispatch(x, topk_idx, num_experts=2)
        out = buffer.combine(result.recv_x, result.handle).combined_x
        return bool((out == x).all()), result.recv_x.device.id


def test_the_caller_chooses_the_gpu():
    assert mpi(2, chosen) == [(True, 1), (True, 0)]


def test_both_movers_between_gpus():
    for mover in ("tma", "vector"):
        child(several_shapes, num_gpus(), mover, timeout_s=90, is_fresh=True)


def several_shapes(num_ranks, mover):
    os.environ["CUPYEP_MOVER"] = mover
    launch.threads(num_ranks, large_and_small)


def large_and_small(comm):
    for hidden, num_tokens in ((7168, 2048), (8, 100), (100, 1)):
        traffic = Traffic(comm.size, num_tokens=num_tokens, hidden=hidden, dtype="bfloat16")
        with open_buffer(comm, traffic) as buffer:
            for _ in range(20):
                check(buffer, traffic)
