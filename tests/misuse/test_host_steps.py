"""Ranks that meet on the host for different calls: a MismatchError that names both, on all of them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from cases import Case
from multirank import checks

import cupyep

CASE = Case(num_ranks=3, hidden=128, tokens=6, num_local_experts=4, seed=903)
ODD_ONE = 1  # the rank that makes another call
LONG_S = 60.0  # a deadline that must not be what ends a wait


def calls(buffer, rank, backend):
    x, topk_idx, weights = (checks.place(part, "contiguous", backend) for part in CASE.inputs(rank))
    most = max(CASE.num_tokens)
    return {
        "prepare": lambda: buffer.prepare(4096, "float16"),
        "peer_arrays": lambda: buffer.peer_arrays(buffer.empty(4, np.int32)),
        "low_latency_dispatch": lambda: buffer.low_latency_dispatch(x, topk_idx, most, CASE.num_experts, use_fp8=False),
        "close": buffer.close,
        "dispatch": lambda: buffer.dispatch(x, topk_idx, weights, num_experts=CASE.num_experts),
    }


def outcome(call):
    try:
        checks.complete(call())
    except Exception as error:
        return error
    return None


def differ(comm, backend, common, odd):
    start = time.monotonic()
    with cupyep.Buffer(comm, backend=backend, low_latency_mode=True, timeout_s=LONG_S) as buffer:
        possible = calls(buffer, comm.rank, backend)
        error = outcome(possible[odd if comm.rank == ODD_ONE else common])
        if odd != "close":
            checks.run_case(comm, CASE, backend, buffer)
            return error, None, time.monotonic() - start
        later = outcome(possible["dispatch"])
        return error, later, time.monotonic() - start


@pytest.mark.parametrize(
    ("common", "odd"),
    [
        ("peer_arrays", "prepare"),
        ("prepare", "peer_arrays"),
        ("low_latency_dispatch", "prepare"),
        ("low_latency_dispatch", "close"),
        ("prepare", "close"),
    ],
)
def test_different_calls(run_ranks, backend, common, odd):
    for rank, (error, later, seconds) in enumerate(run_ranks(3, differ, backend, common, odd)):
        assert isinstance(error, cupyep.MismatchError), f"rank {rank}: {error!r}"
        assert (error.operation, error.rank) == (odd if rank == ODD_ONE else common, ODD_ONE)
        assert (error.field, error.expected, error.got) == ("operation", common, odd)
        assert seconds < LONG_S / 4
        if odd == "close":  # whoever has closed does not come back
            assert isinstance(later, cupyep.StateError), f"rank {rank}: {later!r}"
            assert "this Buffer is closed" in str(later) if rank == ODD_ONE else "rank 1 has 'close'" in str(later)


def fail_in_a_block(comm, backend):
    with cupyep.Buffer(comm, backend=backend, timeout_s=LONG_S) as buffer:
        if comm.rank == ODD_ONE:
            return None
        buffer.prepare(4096, "float16")


def test_a_block_ends_with_its_own_error_when_others_have_closed(run_ranks, backend):
    for error in run_ranks(3, outcome_of, fail_in_a_block, backend):
        assert isinstance(error, cupyep.MismatchError) and error.got == "close", repr(error)


def outcome_of(comm, function, backend):
    return outcome(lambda: function(comm, backend))


def three_calls(comm, backend):
    start = time.monotonic()
    with cupyep.Buffer(comm, backend=backend, timeout_s=LONG_S) as buffer:
        error = outcome(calls(buffer, comm.rank, backend)[("prepare", "peer_arrays", "close")[comm.rank]])
    return error, time.monotonic() - start


def test_of_three_different_calls_the_one_that_closes_is_told(run_ranks, backend):
    """Whoever has closed does not come back, so the Buffer ends everywhere, and nobody waits for it again."""
    for error, seconds in run_ranks(3, three_calls, backend):
        assert isinstance(error, cupyep.MismatchError) and error.got == "close" and seconds < LONG_S / 2, repr(error)


def test_an_interrupted_close_gives_back_what_it_has(monkeypatch):
    buffer, ended = cupyep.Buffer(backend="numpy"), []
    of_backend = buffer._backend.close

    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(buffer._comm, "barrier", interrupted)
    monkeypatch.setattr(buffer._backend, "close", lambda **how: (ended.append(how), of_backend(**how)))
    with pytest.raises(KeyboardInterrupt):
        buffer.close()
    assert ended == [{"collective": False}]
