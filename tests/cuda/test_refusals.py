"""Calls that are refused for what the GPU, its streams, its memory or one rank's data allow: on whom, and what then."""

from __future__ import annotations

import os
from contextlib import nullcontext

import numpy as np
import pytest
from gpu_helpers import (
    CULPRIT,
    Traffic,
    assert_same,
    check,
    check_alone,
    cupy,
    fill,
    free_bytes,
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

TOO_MANY = 100_000  # SMs


def wrong_num_sms(comm):
    traffic = Traffic(1)
    with open_buffer(comm, traffic) as buffer:
        result = check(buffer, traffic)
        x, topk_idx, weights = traffic.inputs(0)
        for call in (
            lambda n: buffer.dispatch(x, topk_idx, weights, num_experts=traffic.num_experts, num_sms=n),
            lambda n: buffer.dispatch(x, handle=result.handle, num_sms=n),
            lambda n: buffer.combine(result.recv_x, result.handle, num_sms=n),
        ):
            with pytest.raises(ValueError, match=rf"num_sms: expected 1\.\.\d+, got {TOO_MANY}"):
                call(TOO_MANY)
            call(1)
        check(buffer, traffic)


def test_num_sms_above_the_budget():
    launch.threads(1, wrong_num_sms)


def too_many_sms(comm, ranks):
    """`ranks` ask for more SMs than there are: creation fails everywhere, and works once they ask for fewer."""
    if comm.rank in ranks:
        cupyep.Buffer.set_num_sms(TOO_MANY)
    error, _ = outcome(open_buffer, comm, Traffic(comm.size))
    cupyep.Buffer.set_num_sms(None)
    check_alone(comm, Traffic(comm.size))
    return error


@pytest.mark.parametrize(
    ("run", "ranks"), [(threads, (0, 1)), (mpi, (0, 1)), (mpi, (1,))], ids=["threads", "mpi", "mpi-one-rank"]
)
def test_more_sms_than_the_gpu_has(run, ranks):
    for error in run(2, too_many_sms, ranks):
        assert isinstance(error, cupyep.StateError), repr(error)
        assert "num_sms: expected at most" in str(error) and f"got {TOO_MANY}" in str(error)


def wrong_streams(comm):
    """Rank 1 on a default stream, then both ranks on one stream: refused on both, before anything is launched."""
    traffic, errors = Traffic(2), []
    shared = comm.allgather(cupy.cuda.Stream(non_blocking=True), operation="share")[0]
    with open_buffer(comm, traffic) as buffer:
        dispatch = verbs(buffer, traffic)["dispatch"]
        for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream.ptds, shared):
            with stream if stream is shared or comm.rank == 1 else nullcontext():
                errors.append(outcome(dispatch)[0])
            check(buffer, traffic)
    return errors


def test_streams_that_would_make_threads_wait_for_themselves():
    for errors in threads(2, wrong_streams):
        for error, words in zip(errors, ("default stream", "default stream", "shared by two"), strict=True):
            assert isinstance(error, cupyep.StateError) and words in str(error), repr(error)


def handle_does_not_open(comm):
    """One rank cannot open a peer's memory. Returns (its error, bytes and SMs that are lost by it)."""
    from cupyep.backends.cuda import devices

    def refuse(*_):
        raise runtime.CUDARuntimeError(1)

    def level():
        comm.Barrier()
        now = free_bytes(), sum(claim.num_sms for claim in devices._claims)
        comm.Barrier()  # all have looked
        return now

    runtime, traffic = cupy.cuda.runtime, Traffic(comm.size)
    real = runtime.ipcOpenMemHandle
    check_alone(comm, traffic)
    before = level()
    if comm.rank == CULPRIT:
        runtime.ipcOpenMemHandle = refuse
    error, _ = outcome(lambda: open_buffer(comm, traffic, num_nvl_bytes=256 << 20))
    runtime.ipcOpenMemHandle = real
    after = level()
    check_alone(comm, traffic)
    return error, before[0] - after[0], after[1] - before[1]


@pytest.mark.alone
def test_processes_that_cannot_open_memory():
    for rank, (error, lost_bytes, lost_sms) in enumerate(mpi(3, handle_does_not_open)):
        assert isinstance(error, cupyep.TopologyError), f"rank {rank}: {error!r}"
        assert error.matrix[CULPRIT][0] is not None and error.matrix[0] == [None] * 3
        assert lost_bytes < 64 << 20, f"rank {rank}: {lost_bytes:,}"
        assert lost_sms == 0, f"rank {rank}: {lost_sms}"


def other_host(comm):
    os.environ["CUPYEP_HOST_ID"] = f"host {comm.rank}"
    error, _ = outcome(open_buffer, comm, Traffic(comm.size))
    del os.environ["CUPYEP_HOST_ID"]
    check_alone(comm, Traffic(comm.size))
    return error


def test_processes_of_several_hosts():
    for error in mpi(2, other_host):
        assert isinstance(error, cupyep.TopologyError) and "another host" in str(error), repr(error)
        assert [[why is None for why in row] for row in error.matrix] == [[True, False], [False, True]]


def bad_id(comm):
    """One rank names no expert: it alone is told, when all is done; to the others the id counts as -1."""
    traffic = Traffic(comm.size)
    words = rf"topk_idx: expected ids in -1\.\.{traffic.num_experts - 1}, got 99"
    with open_buffer(comm, traffic) as buffer:
        for _ in range(2):
            check(buffer, traffic)
            x, topk_idx, weights = traffic.inputs(comm.rank)
            if comm.rank == CULPRIT:
                topk_idx[tuple(np.argwhere(topk_idx.get() == -1)[0].tolist())] = 99
                with pytest.raises(ValueError, match=words):
                    buffer.dispatch(x, topk_idx, weights, num_experts=traffic.num_experts)
            else:
                result = buffer.dispatch(x, topk_idx, weights, num_experts=traffic.num_experts)
                assert_same("recv_x recv_topk_idx recv_topk_weights", result[:3], traffic.received(comm.rank))
        check(buffer, traffic)


def test_a_bad_id_of_one_rank(run_ranks):
    run_ranks(3, bad_id)


def full_arena(comm):
    """One rank's arena is full. What each rank is told by a dispatch, and by a combine of rows from elsewhere."""
    traffic, errors = Traffic(comm.size), []
    with open_buffer(comm, traffic, num_nvl_bytes=4 << 20) as buffer:
        calls = verbs(buffer, traffic)
        for verb in ("dispatch", "combine"):
            kept = fill(buffer) if comm.rank == CULPRIT else None
            errors.append(settled(calls[verb])[0])
            del kept
            check(buffer, traffic)
    return errors


def test_a_full_arena_of_one_rank(run_ranks):
    for told in zip(*run_ranks(3, full_arena), strict=True):
        for rank, error in enumerate(told):
            assert isinstance(error, cupyep.ArenaExhaustedError) and error.rank == CULPRIT, f"rank {rank}: {error!r}"
            assert error.needed > error.free >= 0
        assert len({str(error) for error in told}) == 1
