"""Ranks that fail with the GPU in the middle of it: who is told what and when, and that all can go on afterwards.

Ranks that differ in their host's timing alone, on both backends, are in tests/misuse/test_peers.py.
"""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from gpu_helpers import (
    CULPRIT,
    Traffic,
    busy,
    check_alone,
    child,
    cupy,
    mpi,
    open_buffer,
    outcome,
    settled,
    threads,
    verbs,
)
from multirank import launch

import cupyep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

TIMEOUT_S = 1.0  # of Buffers that a rank lets down
SLACK_S = 1.0  # on top of it
VERBS = ("dispatch", "combine", "barrier")


def computes():
    """Whether CuPy still works in this process, cuBLAS aside, which need not be installed."""
    ones = cupy.ones((64, 64))
    return int(cupy.arange(1000).sum()) == 499_500 and bool(((ones[:, :, None] * ones).sum(axis=1) == 64).all())


def stall(comm, where):
    """In each verb the culprit is late, its host or its GPU. Per verb: outcomes of it, of a later call, of two closes.

    Each verb has a Buffer of its own, so the ranks must be able to go on after an error.
    """
    traffic, results = Traffic(comm.size), {}
    assert computes()
    check_alone(comm, traffic)
    for verb in VERBS:
        buffer = open_buffer(comm, traffic, timeout_s=TIMEOUT_S)
        calls = verbs(buffer, traffic)
        if comm.rank == CULPRIT:
            (time.sleep if where == "host" else busy)(2 * TIMEOUT_S)
        first, later = settled(calls[verb]), settled(calls["dispatch"])
        results[verb] = first, later, outcome(buffer.close), outcome(buffer.close)
        assert computes()
        check_alone(comm, traffic)
    return results


STALLS = [
    pytest.param(threads, "gpu", id="threads-gpu"),
    pytest.param(mpi, "gpu", id="mpi-gpu"),
    pytest.param(mpi, "host", id="mpi-host"),
]


@pytest.mark.parametrize(("run", "where"), STALLS)
def test_a_rank_that_stalls(run, where):
    results = run(3, stall, where)
    for verb in VERBS:
        told = set()
        for rank, result in enumerate(results):
            (error, seconds), (later, later_s), (closing, close_s), (again, _) = result[verb]
            assert isinstance(error, cupyep.PeerTimeoutError), f"{verb}: rank {rank}: {error!r}"
            assert (error.operation, error.peer) == (verb, CULPRIT) and error.rank != CULPRIT, f"rank {rank}: {error!r}"
            told.add((error.rank, error.epoch))
            if rank != CULPRIT:
                assert 0.9 * TIMEOUT_S <= seconds <= TIMEOUT_S + SLACK_S, f"{verb}: rank {rank}"
            assert isinstance(later, (cupyep.StateError, cupyep.PeerTimeoutError)), f"{verb}: rank {rank}: {later!r}"
            assert closing is None or isinstance(closing, cupyep.PeerTimeoutError), f"{verb}: rank {rank}: {closing!r}"
            assert again is None and later_s < SLACK_S and close_s < SLACK_S
        assert len(told) == 1, f"{verb}: {told}"


def raise_within(comm):
    """The culprit's part of a combine is still queued when its program raises; the others wait for it on the GPU."""

    def program():
        with open_buffer(comm, traffic) as buffer:
            combine = verbs(buffer, traffic)["combine"]
            if comm.rank != CULPRIT:
                return combine().synchronize()
            busy(3 * SLACK_S)
            combine()
            raise KeyError("the program's own error")

    traffic = Traffic(comm.size)
    assert computes()
    check_alone(comm, traffic)
    error, seconds = outcome(program)
    cupy.cuda.Device().synchronize()  # what was queued ends, and has found its memory
    assert computes()
    check_alone(comm, traffic)
    return error, seconds


def test_a_rank_that_raises_releases_the_others(run_ranks):
    for rank, (error, seconds) in enumerate(run_ranks(3, raise_within)):
        if rank == CULPRIT:
            assert type(error) is KeyError
        else:
            assert type(error) is cupyep.PeerError and error.peer == CULPRIT, f"rank {rank}: {error!r}"
            assert error.reason == "raised an exception" and seconds < 3 * SLACK_S


def raise_before_a_launch():
    """The other thread meets the culprit's error on the host, before the two have launched anything."""

    def program(comm):
        with open_buffer(comm, traffic) as buffer:
            dispatch = verbs(buffer, traffic)["dispatch"]
            if comm.rank == CULPRIT:
                raise KeyError("the program's own error")
            outcomes.append(settled(dispatch))
            raise outcomes[0][0]

    traffic, outcomes = Traffic(2), []
    with pytest.raises(KeyError, match="the program's own error"):
        launch.threads(2, program)
    return outcomes


def test_a_thread_that_raises_releases_the_others():
    ((error, seconds),) = child(raise_before_a_launch)
    assert isinstance(error, cupyep.PeerError) and error.peer == CULPRIT and seconds < SLACK_S, repr(error)
    assert not isinstance(error, cupyep.PeerTimeoutError)


def use_three_streams(comm):
    """Of three low-latency dispatches on streams that do not wait for each other the third needs the first slot."""

    def program():
        with cupyep.Buffer(comm, low_latency_mode=True, backend="cuda", timeout_s=20) as buffer:
            inputs = cupy.ones((64, 1024), np.float32), cupy.arange(64)[:, None] % comm.size, 64, comm.size
            buffer.low_latency_dispatch(*inputs, use_fp8=False).event.synchronize()
            buffer.barrier().synchronize()
            comm.Barrier()
            if comm.rank == CULPRIT:
                time.sleep(TIMEOUT_S)  # the others' first two wait for us
                return buffer.low_latency_dispatch(*inputs, use_fp8=False).event.synchronize()
            results = []
            for _ in range(3):
                with cupy.cuda.Stream(non_blocking=True):
                    results.append(buffer.low_latency_dispatch(*inputs, use_fp8=False))
            return results[-1].event.synchronize()

    return outcome(program), computes()


def test_processes_whose_streams_are_not_ordered():
    for (error, seconds), works in mpi(2, use_three_streams):
        assert type(error) is cupyep.PeerError and "two operations of one channel at once" in str(error), repr(error)
        assert works and seconds < 15  # with all that a first call compiles; the Buffer's deadline is later


def kill(comm):
    """The culprit's process is killed with kernels queued and running."""
    traffic = Traffic(comm.size)
    assert computes()
    check_alone(comm, traffic)
    buffer = open_buffer(comm, traffic, timeout_s=3 * TIMEOUT_S)
    barrier = verbs(buffer, traffic)["barrier"]
    if comm.rank == CULPRIT:
        busy(TIMEOUT_S)
        barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return settled(barrier), outcome(buffer.close), computes()


@pytest.mark.no_mps
def test_a_process_that_is_killed():
    results = mpi(3, kill, may_lose_ranks=True)
    assert results.pop(CULPRIT) is None
    for (error, seconds), (_, close_s), works in results:
        assert isinstance(error, cupyep.PeerTimeoutError) and error.peer == CULPRIT, repr(error)
        assert seconds <= 3 * TIMEOUT_S + SLACK_S and close_s < SLACK_S and works
