"""The low-latency verbs against the oracle: shapes, options, overlap, masks, peers that do not come."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from multirank import launch, low_latency
from multirank.checks import assert_bits, namespace
from multirank.low_latency import Job, open_buffer
from multirank.low_latency import small_case as case

import cupyep

JOBS = {
    "fp8": Job(case(), fp8="plain"),
    "bf16": Job(case(), travel=False),
    "round": Job(case(hidden=384, tokens="uneven", seed=1), fp8="round", split=True),
    "ue8m0": Job(case(hidden=1024, tokens=(0, 5), seed=2), fp8="ue8m0", travel=False, split=True),
    "float16": Job(
        case(hidden=256, dtype="float16", tokens=(3, 12), memory="strided", seed=3), fp8="plain", zero_copy=True
    ),
    "float32": Job(
        case(hidden=128, dtype="float32", idx_dtype="int32", seed=4), fp8="round", give_out=True, travel=False
    ),
    "odd rows": Job(case(hidden=7, dtype="float16", num_topk=32, num_local_experts=32, seed=5), async_finish=True),
    "nowhere": Job(case(routing="nowhere", seed=6), fp8="plain"),
    "one rank": Job(case(routing="one rank", tokens=33, seed=7), travel=False),
    "duplicates": Job(case(routing="duplicates", tokens=40, num_topk=8, seed=8), fp8="plain", split=True),
    "no tokens": Job(case(tokens="none", seed=9), fp8="plain", travel=False),
    "room": Job(case(hidden=2880, tokens="uneven", routing="some -1", seed=10), extra=5, num_sms=2, split=True),
    "long": Job(
        case(hidden=7168, tokens=(10, 3), num_topk=8, num_local_experts=8, seed=11), fp8="plain", async_finish=True
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks(name, backend):
    launch.threads(2, low_latency.run_jobs, (JOBS[name],) * 3, backend)


def many(num_ranks: int) -> tuple[Job, ...]:
    """All jobs for another number of ranks, in random order and with fresh data: shapes change between calls."""
    rng = random.Random(num_ranks)
    jobs = []
    for job in rng.sample(list(JOBS.values()), len(JOBS)):
        tokens = (
            tuple(rng.randrange(20) for _ in range(num_ranks))
            if isinstance(job.case.tokens, tuple)
            else job.case.tokens
        )
        local = max(job.case.num_local_experts, -(-job.case.num_topk // num_ranks))
        changed = {"num_ranks": num_ranks, "tokens": tokens, "num_local_experts": local, "seed": rng.randrange(1 << 30)}
        jobs.append(replace(job, case=replace(job.case, **changed)))
    return tuple(jobs)


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_shapes_that_change(num_ranks, run_ranks, backend):
    run_ranks(num_ranks, low_latency.run_jobs, many(num_ranks), backend)


def test_eight_ranks(backend):
    job = Job(case(num_ranks=8, tokens=16, num_topk=8, num_local_experts=8), fp8="plain", travel=False)
    launch.mpi(8, low_latency.run_jobs, (job,) * 3, backend)


def test_an_arena_of_the_hinted_size(backend):
    hint = cupyep.Buffer.get_low_latency_rdma_size_hint(9, 128, 2, 6)
    launch.threads(2, low_latency.run_jobs, (JOBS["fp8"], JOBS["bf16"]), backend, hint)
    with pytest.raises(Exception, match="num_rdma_bytes: expected at least"):
        launch.threads(2, low_latency.run_jobs, (JOBS["long"],), backend, hint)


def test_epochs_wrap(monkeypatch, backend):
    """Twelve operations of each channel, from five before 2^32 on."""
    monkeypatch.setattr("cupyep.layout.INITIAL_EPOCH", 2**32 - 5)
    launch.threads(2, low_latency.run_jobs, (JOBS["fp8"], JOBS["bf16"]) * 12, backend)


def test_nothing_is_written_behind_the_last_row(monkeypatch, backend):
    """Results are filled with 0xFF before each dispatch; what the oracle does not expect must stay so."""
    monkeypatch.setenv("CUPYEP_POISON", "1")
    jobs = (JOBS["fp8"], JOBS["room"], JOBS["ue8m0"], JOBS["one rank"], JOBS["odd rows"])
    launch.threads(2, low_latency.run_jobs, jobs * 2, backend)


# --- what may be in flight together -----------------------------------------------------------------------------------


def overlap(comm, backend):
    """Two micro-batches: the dispatch of one is under way while the other's combine is. Results live for two calls."""
    batches = [
        Job(case(num_ranks=3, tokens=(7, 0, 12), seed=seed), fp8="round", split=True) for seed in range(100, 108)
    ]
    with open_buffer(comm, backend) as buffer:
        result, answer = low_latency.dispatch(buffer, batches[0], backend), None
        for batch, following in zip(batches, [*batches[1:], None], strict=True):
            low_latency.finish(result)
            coming = low_latency.dispatch(buffer, following, backend) if following else None
            low_latency.check_dispatch(result, batch, buffer.rank)
            before, answer = answer, low_latency.combine(buffer, batch, backend, result.handle)
            low_latency.finish(answer)
            low_latency.check_combine(answer, batch, buffer.rank)
            if before is not None:
                low_latency.check_combine(before[0], before[1], buffer.rank)
            answer, result = (answer, batch), coming


def test_dispatch_and_combine_overlap(run_ranks, backend):
    """Tokens are equal in all batches, so that one shape serves all."""
    run_ranks(3, overlap, backend)


def both_modes(comm, backend):
    """A normal dispatch behind the event of a low-latency one whose combine is yet to come."""
    xp, jobs = namespace(backend), [replace(JOBS["bf16"], async_finish=late) for late in (True, False)]
    with open_buffer(comm, backend) as buffer:
        for job in (*jobs, *jobs):
            inputs = [job.inputs(rank) for rank in range(comm.size)]
            x, idx, weights = (xp.asarray(array) for array in inputs[comm.rank])
            sent = low_latency.dispatch(buffer, job, backend)
            received = buffer.dispatch(x, idx, weights, num_experts=job.case.num_experts, previous_event=sent.event)
            received.event.synchronize()
            rows = [x[(idx // job.case.num_local_experts == comm.rank).any(1)] for x, idx, _ in inputs]
            assert_bits("recv_x of the normal mode", received.recv_x, np.concatenate(rows))
            low_latency.check_dispatch(sent, job, comm.rank)
            answer = low_latency.combine(buffer, job, backend, sent.handle)
            low_latency.finish(answer)
            low_latency.check_combine(answer, job, comm.rank)


def test_both_modes_in_one_buffer(run_ranks, backend):
    run_ranks(2, both_modes, backend)


def both_open(comm, backend):
    jobs = [replace(JOBS["ue8m0"], case=replace(JOBS["ue8m0"].case, seed=seed)) for seed in range(4)]
    with open_buffer(comm, backend) as buffer:
        low_latency.run_job(buffer, jobs[0], backend)
        first, second = (low_latency.dispatch(buffer, job, backend) for job in jobs[:2])
        if comm.rank:  # in another order than the others: each half has its own channel
            low_latency.finish(second)
        with pytest.raises(cupyep.StateError, match="the call before the last one still waits for its hook"):
            low_latency.dispatch(buffer, jobs[2], backend)
        with pytest.raises(cupyep.StateError, match="its dispatch is not complete"):
            low_latency.combine(buffer, jobs[0], backend, first.handle)
        low_latency.finish(first)
        with pytest.raises(cupyep.StateError, match="called a second time"):
            first.hook()
        if not comm.rank:
            low_latency.finish(second)
        for result, job in ((first, jobs[0]), (second, jobs[1])):
            low_latency.check_dispatch(result, job, buffer.rank)
        third = low_latency.dispatch(buffer, jobs[2], backend)
        low_latency.finish(third)
        with pytest.raises(cupyep.StateError, match="expected one of the last 2 low-latency dispatches"):
            low_latency.combine(buffer, jobs[0], backend, first.handle)
        low_latency.check_dispatch(second, jobs[1], buffer.rank)


def test_two_open_dispatches_and_old_handles(backend):
    launch.threads(2, both_open, backend)


def open_combines(comm, backend):
    """A combine whose hook has not been called needs its dispatch's tables, whatever comes meanwhile."""
    jobs = [replace(JOBS["bf16"], case=replace(JOBS["bf16"].case, seed=seed)) for seed in range(3)]
    with open_buffer(comm, backend) as buffer:
        sent = low_latency.dispatch(buffer, jobs[0], backend)
        answers = [low_latency.combine(buffer, replace(jobs[0], split=True), backend, sent.handle) for _ in range(2)]
        low_latency.check_dispatch(low_latency.dispatch(buffer, jobs[1], backend), jobs[1], buffer.rank)
        for answer in answers:
            with pytest.raises(cupyep.StateError, match="would write over the tables of the dispatch before the last"):
                low_latency.dispatch(buffer, jobs[2], backend)
            low_latency.finish(answer)
            low_latency.check_combine(answer, jobs[0], buffer.rank)
        low_latency.run_job(buffer, jobs[2], backend)


def test_tables_stay_while_a_combine_needs_them(run_ranks, backend):
    run_ranks(2, open_combines, backend)
