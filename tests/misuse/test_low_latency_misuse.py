"""The low-latency verbs with arguments that are wrong, or that differ between ranks."""

from __future__ import annotations

import numpy as np
import pytest
from multirank import low_latency
from multirank.checks import asnumpy, assert_bits, namespace
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
            ({"num_experts": 7}, "num_experts: expected a multiple of the 2 ranks, got 7"),
            ({"x": x[:, :100]}, "hidden: expected a multiple of 128 for these scales, got 100"),
            ({"use_ue8m0": True, "round_scale": True}, "hidden: expected a multiple of 512 for these scales, got 128"),
            ({"use_ue8m0": True}, "use_ue8m0: expected use_fp8=True and round_scale=True"),
            ({"use_fp8": 1}, "use_fp8: expected a bool, got 1"),
            ({"topk_weights": weights[:2]}, r"topk_weights: expected shape \(4, 4\), got \(2, 4\)"),
            ({"cumulative_local_expert_recv_stats": xp.zeros(3, np.int64)}, r"stats: expected int32 \(3,\), got int64"),
            ({"cumulative_local_expert_recv_stats": [0, 0, 0]}, "stats: expected an array of the"),
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
