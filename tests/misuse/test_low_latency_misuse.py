"""The low-latency verbs with arguments that are wrong, or that differ between ranks."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from multirank import low_latency
from multirank.checks import TIMEOUT_S, asnumpy, assert_bits, namespace
from multirank.low_latency import Job, open_buffer
from multirank.low_latency import small_case as case

import cupyep


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
            (
                {"num_max_dispatch_tokens_per_rank": 2049, "num_experts": 128},
                r"per_rank \* num_experts: expected at most 262144, got 2049 \* 128 \(2049 counts as 2080\)",
            ),
            ({"num_experts": 7}, "num_experts: expected a multiple of the 2 ranks, got 7"),
            ({"num_experts": [6]}, r"num_experts: expected an int, got \[6\]"),
            ({"num_experts": 6.0}, r"num_experts: expected an int, got 6\.0"),  # equal to what was right before
            ({"x": x[:, :100]}, "hidden: expected a multiple of 128 for these scales, got 100"),
            ({"use_ue8m0": True, "round_scale": True}, "hidden: expected a multiple of 512 for these scales, got 128"),
            ({"use_ue8m0": True}, "use_ue8m0: expected use_fp8=True and round_scale=True"),
            ({"use_fp8": 1}, "use_fp8: expected a bool, got 1"),
            ({"topk_weights": weights[:2]}, r"topk_weights: expected shape \(4, 4\), got \(2, 4\)"),
            ({"cumulative_local_expert_recv_stats": xp.zeros(3, np.int64)}, r"stats: expected int32 \(3,\), got int64"),
            ({"cumulative_local_expert_recv_stats": [0, 0, 0]}, "stats: expected an array of the"),
            ({"x": [x, weights]}, "x: expected an array, got list"),
            ({"use_fp8": False, "round_scale": True}, "round_scale: expected use_fp8=True beside it, got False"),
            ({"async_finish": "no"}, "async_finish: expected a bool, got 'no'"),
            ({"return_recv_hook": 0}, "return_recv_hook: expected a bool, got 0"),
            (
                {"cumulative_local_expert_recv_stats": xp.zeros(6, np.int32)[::2]},
                r"stats: .* strides \(8,\) of int32",
            ),
            ({"num_sms": 0}, r"num_sms: expected (at least 1|1\.\.\d+), got 0"),
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
            ({"topk_idx": asnumpy(idx)[:2].tolist()}, r"topk_idx: expected shape \(4, 4\), got \(2, 4\)"),
            ({"topk_idx": [[1], [1, 2]]}, "topk_idx: expected an array, got list"),
            ({"use_logfmt": True}, "use_logfmt: expected False, got True"),
            ({"use_logfmt": "no"}, "use_logfmt: expected a bool, got 'no'"),
            ({"zero_copy": 0}, "zero_copy: expected a bool, got 0"),
            ({"return_recv_hook": None}, "return_recv_hook: expected a bool, got None"),
            ({"out": xp.empty(4 * 128 + 4, x.dtype)[4:].reshape(4, 128)}, "out: .* multiple of 16 bytes, .* 8 behind"),
            ({"zero_copy": True}, "x: expected the array of get_next_low_latency_combine_buffer"),
            ({"handle": None}, "handle: expected one from low_latency_dispatch, got NoneType"),
            ({"out": xp.empty((4, 128), np.float32)}, r"out: expected bfloat16 \(4, 128\), got float32"),
        ]
        usual = {"x": y, "topk_idx": idx, "topk_weights": weights, "handle": handle}
        for change, message in combines:
            with pytest.raises((ValueError, TypeError), match=message):
                buffer.low_latency_combine(**{**usual, **change})
        for call, arguments, message in (
            (buffer.mask_rank, (comm.rank,), "rank: expected another rank"),
            (buffer.unmask_rank, (2,), r"rank: expected 0\.\.1, got 2"),
            (buffer.set_mask_on_timeout, (1,), "enabled: expected a bool, got 1"),
            (buffer.set_mask_on_timeout, (True, "1"), "timeout_s: expected a number of seconds or None, got '1'"),
            (buffer.set_mask_on_timeout, (True, True), "timeout_s: expected a number of seconds or None, got True"),
            (buffer.get_next_low_latency_combine_buffer, (handle, "bla"), "dtype: expected an element type, got 'bla'"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                call(*arguments)
        stats = xp.ones((2, 3), np.int32)[1]  # a layer's row: at a multiple of 4 bytes, no more
        received = buffer.low_latency_dispatch(x, idx, 4, 6, stats, use_fp8=False)
        received.event.synchronize()
        assert_bits("stats", stats, asnumpy(received.recv_count) + np.int32(1))
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
    reason = "gave other arguments (shape, types, num_topk, num_experts, topk_weights or none, options or handle)"
    assert run_ranks(2, differ, backend) == [reason] * 2


def differ_at_first(comm, backend):
    with open_buffer(comm, backend) as buffer:
        with pytest.raises(cupyep.MismatchError, match="num_max_dispatch_tokens_per_rank: rank 0 has 10, rank 1"):
            low_latency.run_job(buffer, Job(case(), extra=1 + comm.rank), backend)
        with pytest.raises(cupyep.MismatchError, match="topk_weights: rank 0 has 'some', rank 1 has 'none'"):
            low_latency.dispatch(buffer, Job(case(), travel=comm.rank == 0), backend)
        low_latency.run_job(buffer, Job(case()), backend)


def test_ranks_that_differ_at_a_first_call(run_ranks, backend):
    run_ranks(2, differ_at_first, backend)


def read_only(comm, backend):
    with open_buffer(comm, backend) as buffer:
        x, idx, weights = case(tokens=4).inputs(comm.rank)
        stats, out = np.zeros(3, np.int32), np.zeros((4, 128), x.dtype)
        stats.flags.writeable = out.flags.writeable = False
        with pytest.raises(ValueError, match=r"stats: expected an array that can be written to, got a read-only one"):
            buffer.low_latency_dispatch(x, idx, 4, 6, stats, use_fp8=False)
        received = buffer.low_latency_dispatch(x, idx, 4, 6, use_fp8=False)
        with pytest.raises(ValueError, match="out: expected an array that can be written to, got a read-only one"):
            buffer.low_latency_combine(received.recv_x, idx, weights, received.handle, out=out)
        low_latency.run_job(buffer, Job(case(tokens=4)), backend)


def test_read_only_results_are_refused_before_anything_is_sent(run_ranks, backend):
    if backend == "cuda":
        pytest.skip("CuPy's arrays can all be written to")
    run_ranks(2, read_only, backend)


def bad_id_at_last(comm, backend):
    xp = namespace(backend)
    x, idx, _ = (np.array(array) for array in case(tokens=4).inputs(comm.rank))
    if comm.rank:
        idx[1, 2] = 6
    try:
        with open_buffer(comm, backend) as buffer:
            buffer.low_latency_dispatch(xp.asarray(x), xp.asarray(idx), 4, 6, use_fp8=False)
    except ValueError as error:
        return str(error)


def test_close_tells_of_a_bad_id(run_ranks, backend):
    assert run_ranks(2, bad_id_at_last, backend) == [None, "topk_idx: expected ids in -1..5, got 6"]


def other_handles(comm, backend):
    job = Job(case(num_ranks=2))
    try:
        with open_buffer(comm, backend, timeout_s=20) as buffer:
            low_latency.run_job(buffer, job, backend)
            handles = [low_latency.dispatch(buffer, job, backend).handle for _ in range(2)]
            low_latency.finish(low_latency.combine(buffer, job, backend, handles[comm.rank]))
    except cupyep.PeerError as error:
        return error.reason


def test_ranks_that_combine_other_dispatches(run_ranks, backend):
    reason = "gave other arguments (shape, types, num_topk, num_experts, topk_weights or none, options or handle)"
    assert run_ranks(2, other_handles, backend) == [reason] * 2


# --- what only one rank can know --------------------------------------------------------------------------------------


def two_hooks_open(buffer, job, backend):
    results = [low_latency.dispatch(buffer, job, backend) for _ in range(2)]
    if not buffer.rank:
        low_latency.finish(results[0])
    results.append(low_latency.dispatch(buffer, job, backend))
    for result in results[1:]:
        low_latency.finish(result)


def hook_twice(buffer, job, backend):
    result = low_latency.dispatch(buffer, job, backend)
    low_latency.finish(result)
    if buffer.rank:
        result.hook()
    low_latency.dispatch(buffer, job, backend)


def fails_alone(comm, backend, fail):
    job = Job(case(num_ranks=2), split=True)
    start = time.monotonic()
    try:
        with open_buffer(comm, backend) as buffer:
            low_latency.run_job(buffer, job, backend)
            start = time.monotonic()  # the first call loads kernels
            fail(buffer, job, backend)
            low_latency.finish(low_latency.dispatch(buffer, job, backend))
    except cupyep.CupyepError as error:
        return type(error).__name__, time.monotonic() - start < TIMEOUT_S / 4


@pytest.mark.parametrize("fail", [two_hooks_open, hook_twice])
def test_peers_are_told_of_a_state_that_ends_one_rank(fail, run_ranks, backend):
    assert run_ranks(2, fails_alone, backend, fail) == [("PeerError", True), ("StateError", True)]


def larger_shape_behind_a_hook(comm, backend):
    """Rank 0 has a hook open when the regions have to grow; rank 1 waits for it without harm."""
    small, large = Job(case(num_ranks=2)), Job(case(num_ranks=2, tokens=40))
    with open_buffer(comm, backend) as buffer:
        received = low_latency.dispatch(buffer, small, backend)
        answer = low_latency.combine(buffer, replace(small, split=True), backend, received.handle)
        if not comm.rank:
            with pytest.raises(cupyep.StateError, match="needs all earlier hooks to have been called"):
                low_latency.dispatch(buffer, large, backend)
        low_latency.finish(answer)
        low_latency.check_combine(answer, small, comm.rank)
        low_latency.run_job(buffer, large, backend)


def test_a_larger_shape_behind_a_hook_can_be_tried_again(run_ranks, backend):
    run_ranks(2, larger_shape_behind_a_hook, backend)


def new_shape_beside_a_masked_rank(comm, backend):
    with open_buffer(comm, backend) as buffer:
        low_latency.run_job(buffer, Job(case(num_ranks=2)), backend)
        if not comm.rank:
            buffer.mask_rank(1)
            with pytest.raises(cupyep.StateError, match="first call is a step of all ranks, and rank 1 is masked here"):
                low_latency.dispatch(buffer, Job(case(num_ranks=2, tokens=40)), backend)
            buffer.unmask_rank(1)
        low_latency.run_job(buffer, Job(case(num_ranks=2, tokens=40)), backend)


def test_a_new_shape_beside_a_masked_rank(run_ranks, backend):
    run_ranks(2, new_shape_beside_a_masked_rank, backend)
