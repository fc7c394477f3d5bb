"""The low-latency verbs against the oracle: shapes, options, overlap, masks, misuse, peers that do not come."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest
from cases import Case
from multirank import launch, low_latency
from multirank.checks import asnumpy, assert_bits, namespace
from multirank.low_latency import Job, open_buffer

import cupyep


def case(**fields):
    return Case(**{"num_local_experts": 3, "hidden": 128, "dtype": "bfloat16", "num_topk": 4, "tokens": 9, **fields})


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
    with pytest.raises(Exception, match="an arena block of"):
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


def both_open(comm, backend):
    jobs = [replace(JOBS["ue8m0"], case=replace(JOBS["ue8m0"].case, seed=seed)) for seed in range(4)]
    with open_buffer(comm, backend) as buffer:
        low_latency.run_job(buffer, jobs[0], backend)
        first, second = (low_latency.dispatch(buffer, job, backend) for job in jobs[:2])
        if comm.rank:  # in another order than the others: each half has its own channel
            low_latency.finish(second)
        with pytest.raises(cupyep.StateError, match="2 earlier calls still wait for their hooks"):
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


# --- masks ------------------------------------------------------------------------------------------------------------

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
        if comm.rank != 2:
            buffer.set_mask_on_timeout(True, 0.5)
            assert asnumpy(buffer.query_masks()).tolist() == [0, 0, 0]
            start = time.monotonic()
            low_latency.run_job(buffer, job, backend)
            assert 0.4 < time.monotonic() - start < 20
            assert asnumpy(buffer.query_masks()).tolist() == [0, 0, 1]
            low_latency.run_job(buffer, job, backend)


def test_a_late_rank_is_masked(run_ranks, backend):
    run_ranks(3, without_the_last, backend)


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


# --- misuse -----------------------------------------------------------------------------------------------------------


def misuse(comm, backend):
    xp = namespace(backend)
    with open_buffer(comm, backend) as buffer:
        x, idx, weights = (xp.asarray(array) for array in case(tokens=4).inputs(comm.rank))
        handle = buffer.low_latency_dispatch(x, idx, 4, 6, use_fp8=False).handle
        y = xp.zeros((3, 8, 128), x.dtype)
        dispatches = [
            (
                {"num_max_dispatch_tokens_per_rank": 3},
                "num_tokens: expected at most num_max_dispatch_tokens_per_rank = 3, got 4",
            ),
            (
                {"num_max_dispatch_tokens_per_rank": 5000},
                "num_max_dispatch_tokens_per_rank: expected 1..4096, got 5000",
            ),
            ({"num_experts": 7}, "num_experts: expected a multiple of the 2 ranks, got 7"),
            ({"x": x[:, :100]}, "hidden: expected a multiple of 128 for these scales, got 100"),
            ({"use_ue8m0": True, "round_scale": True}, "hidden: expected a multiple of 512 for these scales, got 128"),
            ({"use_ue8m0": True}, "use_ue8m0: expected use_fp8=True and round_scale=True"),
            ({"use_fp8": 1}, "use_fp8: expected a bool, got 1"),
            ({"topk_weights": weights[:2]}, r"topk_weights: expected shape \(4, 4\), got \(2, 4\)"),
            ({"cumulative_local_expert_recv_stats": xp.zeros(3, np.int64)}, r"stats: expected int32 \(3,\), got int64"),
            ({"cumulative_local_expert_recv_stats": [0, 0, 0]}, "stats: expected an array of the"),
            ({"num_sms": 0}, "num_sms: expected at least 1, got 0"),
            ({"async_finish": True, "return_recv_hook": True}, "async_finish: expected False with return_recv_hook"),
        ]
        usual = {"x": x, "topk_idx": idx, "num_max_dispatch_tokens_per_rank": 4, "num_experts": 6}
        for change, message in dispatches:
            with pytest.raises((ValueError, TypeError), match=message):
                buffer.low_latency_dispatch(**{**usual, **change})
        combines = [
            ({"x": y[:, :7]}, r"x: expected shape \(3, 8, 128\), got \(3, 7, 128\)"),
            ({"x": y.astype(np.int32)}, "x: expected float32, float16 or bfloat16, got int32"),
            ({"topk_weights": None}, "topk_weights: expected an array, as none went with the dispatch, got None"),
            ({"topk_idx": idx[:2]}, r"topk_idx: expected shape \(4, 4\), got \(2, 4\)"),
            ({"use_logfmt": True}, "use_logfmt: expected False, got True"),
            ({"zero_copy": True}, "x: expected the array of get_next_low_latency_combine_buffer"),
            ({"handle": None}, "handle: expected one from low_latency_dispatch, got NoneType"),
            ({"out": xp.empty((4, 128), np.float32)}, r"out: expected bfloat16 \(4, 128\), got float32"),
        ]
        usual = {"x": y, "topk_idx": idx, "topk_weights": weights, "handle": handle}
        for change, message in combines:
            with pytest.raises((ValueError, TypeError), match=message):
                buffer.low_latency_combine(**{**usual, **change})
        for call, argument in ((buffer.mask_rank, comm.rank), (buffer.unmask_rank, 2), (buffer.set_mask_on_timeout, 1)):
            with pytest.raises((ValueError, TypeError), match=r"rank: expected|enabled: expected"):
                call(argument)
        buffer.clean_low_latency_buffer(4, 128, 6)
        low_latency.run_job(buffer, Job(case(tokens=4)), backend)  # nobody is out of step
    created = "low_latency_mode: expected a Buffer that was created with True"
    with cupyep.Buffer(comm, backend=backend) as buffer, pytest.raises(cupyep.StateError, match=created):
        buffer.low_latency_dispatch(x, idx, 4, 6)


def test_misuse(run_ranks, backend):
    run_ranks(2, misuse, backend)


def bad_ids(comm, backend):
    xp = namespace(backend)
    with open_buffer(comm, backend) as buffer:
        x, idx, _ = (np.array(array) for array in case(tokens=4).inputs(comm.rank))
        idx[1, 2] = -1
        expected = asnumpy(
            buffer.low_latency_dispatch(xp.asarray(x), xp.asarray(idx), 4, 6, use_fp8=False).recv_x
        ).copy()
        if comm.rank:
            idx[1, 2] = 6
        result = buffer.low_latency_dispatch(xp.asarray(x), xp.asarray(idx), 4, 6, use_fp8=False)
        if comm.rank:
            with pytest.raises(ValueError, match=r"topk_idx: expected ids in -1\.\.5, got 6"):
                result.event.synchronize()
        for expert, count in enumerate(asnumpy(result.recv_count).tolist()):
            assert_bits("recv_x", asnumpy(result.recv_x)[expert, :count], expected[expert, :count])
        low_latency.run_job(buffer, Job(case(tokens=4)), backend)


def test_bad_ids_count_as_none_and_are_told(run_ranks, backend):
    run_ranks(2, bad_ids, backend)


def differ(comm, backend):
    shapes = [Job(case(num_ranks=2), fp8=fp8) for fp8 in ("", "plain")]
    try:
        with open_buffer(comm, backend, timeout_s=20) as buffer:
            for job in shapes:
                low_latency.run_job(buffer, job, backend)
            low_latency.finish(low_latency.dispatch(buffer, shapes[comm.rank], backend))
    except cupyep.PeerError as error:
        return error.reason


def test_ranks_that_differ(run_ranks, backend):
    """Both shapes are known, so nothing but the words themselves can tell."""
    reason = "gave other arguments (shape, types, num_topk, num_experts or options)"
    assert run_ranks(2, differ, backend) == [reason] * 2


def differ_at_first(comm, backend):
    with open_buffer(comm, backend) as buffer:
        with pytest.raises(cupyep.MismatchError, match="max_tokens: rank 0 has 10, rank 1 has 11"):
            low_latency.run_job(buffer, Job(case(), extra=1 + comm.rank), backend)
        low_latency.run_job(buffer, Job(case()), backend)


def test_ranks_that_differ_at_a_first_call(run_ranks, backend):
    run_ranks(2, differ_at_first, backend)
