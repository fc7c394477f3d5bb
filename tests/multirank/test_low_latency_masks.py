"""Ranks that are masked, late or silent in the low-latency calls, and what the others get meanwhile."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from multirank import launch, low_latency
from multirank.checks import TIMEOUT_S, asnumpy
from multirank.low_latency import Job, open_buffer
from multirank.low_latency import small_case as case

import cupyep

MASKED = Job(case(num_ranks=3, tokens=12), fp8="plain", travel=False, masked=((0, 2), (1, 2)))


def test_masked_ranks_give_nothing(run_ranks, backend):
    """All mask rank 2, or each other crosswise; who is masked takes part and gets nothing, then is taken in again."""
    crosswise = replace(MASKED, travel=True, split=True, masked=((0, 1), (2, 0)))
    everyone = replace(MASKED, masked=())
    run_ranks(3, low_latency.run_jobs, (everyone, MASKED, everyone, crosswise, everyone), backend)


def without_the_last(comm, backend):
    job = replace(MASKED, masked=((0, 2), (1, 2)))
    with open_buffer(comm, backend) as buffer:
        low_latency.run_job(buffer, replace(MASKED, masked=()), backend)
        assert asnumpy(buffer.query_masks()).tolist() == [0, 0, 0]  # the first call loads a kernel, which takes long
        comm.allgather(None)
        if comm.rank != 2:
            buffer.set_mask_on_timeout(True, 0.5)
            start = time.monotonic()
            low_latency.run_job(buffer, job, backend)
            assert 0.4 < time.monotonic() - start < 20
            assert asnumpy(buffer.query_masks()).tolist() == [0, 0, 1]
            low_latency.run_job(buffer, job, backend)


def test_a_late_rank_is_masked(run_ranks, backend):
    run_ranks(3, without_the_last, backend)


def three_are_silent(comm, backend):
    with open_buffer(comm, backend) as buffer:
        job = Job(case(num_ranks=4), masked=((0, 1), (0, 2), (0, 3)))
        low_latency.run_job(buffer, replace(job, masked=()), backend)
        comm.allgather(None)
        if comm.rank:
            return 0
        buffer.set_mask_on_timeout(True, 1)
        start = time.monotonic()
        low_latency.check_dispatch(low_latency.dispatch(buffer, job, backend), job, 0)
        return time.monotonic() - start


def test_late_ranks_share_one_deadline(backend):
    assert 0.9 < launch.threads(4, three_are_silent, backend)[0] < 2


def late_and_alive(comm, backend):
    """Rank 2 makes its calls when those who have masked it are in the middle of a later one, of another shape."""
    small, large = (replace(MASKED, case=replace(MASKED.case, tokens=tokens)) for tokens in (4, 12))
    with open_buffer(comm, backend) as buffer:
        for job in (small, large):
            low_latency.run_job(buffer, replace(job, masked=()), backend)
        buffer.set_mask_on_timeout(True, TIMEOUT_S)  # on a GPU threads no longer meet before each launch
        comm.allgather(None)
        if comm.rank != 2:
            buffer.mask_rank(2)
            for _ in range(2):
                low_latency.run_job(buffer, small, backend)
            begun = low_latency.dispatch(buffer, replace(large, split=True), backend)
            comm.allgather(None)
            comm.allgather(None)
            low_latency.finish(begun)
            low_latency.check_dispatch(begun, large, comm.rank)
            answer = low_latency.combine(buffer, large, backend, begun.handle)
            low_latency.finish(answer)
            low_latency.check_combine(answer, large, comm.rank)
            buffer.unmask_rank(2)
        else:
            comm.allgather(None)
            run_along(buffer, small, backend)
            run_along(buffer, small, backend)
            comm.allgather(None)
            run_along(buffer, large, backend)
            assert asnumpy(buffer.query_masks()).tolist() == [0, 0, 0]
        comm.allgather(None)
        for job in (small, large):
            low_latency.run_job(buffer, replace(job, masked=()), backend)


def run_along(buffer, job, backend):
    """What a rank gets that others have masked is undefined; it must not hang."""
    result = low_latency.dispatch(buffer, job, backend)
    low_latency.finish(result)
    low_latency.finish(low_latency.combine(buffer, job, backend, result.handle))


def test_a_late_rank_that_lives_harms_nobody(run_ranks, backend):
    run_ranks(3, late_and_alive, backend)


def one_does_not_come(comm, backend, verb):
    with open_buffer(comm, backend, timeout_s=1) as buffer:
        job = replace(MASKED, masked=())
        low_latency.run_job(buffer, job, backend)
        if comm.rank == 1 and verb == "dispatch":
            time.sleep(3)
            return None
        try:
            result = low_latency.dispatch(buffer, job, backend)
            low_latency.finish(result)
            if comm.rank == 1:
                time.sleep(3)
                return None
            low_latency.finish(low_latency.combine(buffer, job, backend, result.handle))
        except cupyep.PeerTimeoutError as error:
            return error.operation, error.peer
    return "nothing was raised"


@pytest.mark.parametrize("verb", ["dispatch", "combine"])
def test_a_rank_that_does_not_come(verb, run_ranks, backend):
    def quiet(results):
        return [result for rank, result in enumerate(results) if rank != 1]

    try:
        results = quiet(run_ranks(3, leave_quietly, one_does_not_come, backend, verb))
    except AssertionError as error:
        pytest.fail(str(error))
    assert results == [(f"low_latency_{verb}", 1)] * 2


def leave_quietly(comm, function, *args):
    """A rank that was late meets the others' record when it closes."""
    try:
        return function(comm, *args)
    except cupyep.PeerError:
        return None
