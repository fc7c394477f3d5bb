"""Ranks that stall, raise, leave or die: the others get the error that names them within the deadline; nobody hangs."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time

import pytest
from cases import Case
from multirank import checks, launch

import cupyep
from cupyep import errors

CASE = Case(num_ranks=3, hidden=16, tokens=6, num_local_experts=4, seed=901)
CULPRIT = 1
TIMEOUTS_S = {"numpy": 2.0, "cuda": 4.0}  # room for a busy machine; a GPU takes its time to start
SLACK_S = 1.0  # on top of the deadline, for a busy machine


def outcome(call):
    """(what `call` raised or None, seconds until then)."""
    start = time.monotonic()
    try:
        checks.complete(call())
    except Exception as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def verbs(buffer, rank, backend):
    """The collective calls by name, ready to be made; a dispatch has been done already."""
    x, topk_idx, weights = (checks.place(part, "contiguous", backend) for part in CASE.inputs(rank))
    result = checks.check_dispatch(buffer, CASE, rank, backend)
    return {
        "dispatch": lambda: buffer.dispatch(x, topk_idx, weights, num_experts=CASE.num_experts),
        "combine": lambda: buffer.combine(result.recv_x, result.handle),
        "barrier": buffer.barrier,
        "close": buffer.close,
    }


def stall(comm, backend, verb):
    """The culprit comes to `verb` long after the deadline. Returns its outcome, a later call's, and close()'s."""
    buffer = cupyep.Buffer(comm, backend=backend, timeout_s=TIMEOUTS_S[backend])
    calls = verbs(buffer, comm.rank, backend)
    if comm.rank == CULPRIT:
        time.sleep(TIMEOUTS_S[backend] + SLACK_S)
    return outcome(calls[verb]), outcome(calls["dispatch"]), outcome(buffer.close)


@pytest.mark.parametrize("verb", ["dispatch", "combine", "barrier"])
def test_a_rank_that_stalls(run_ranks, backend, verb):
    results = run_ranks(3, stall, backend, verb)
    told = set()
    for rank, ((error, seconds), (later, later_s), (closing, close_s)) in enumerate(results):
        assert isinstance(error, cupyep.PeerTimeoutError), f"rank {rank}: {error!r}"
        assert (error.operation, error.peer) == (verb, CULPRIT) and error.rank != CULPRIT
        told.add((error.operation, error.rank, error.peer, error.epoch))
        if rank == CULPRIT:  # the others left long ago
            assert seconds < SLACK_S
        else:
            assert 0.9 * TIMEOUTS_S[backend] <= seconds <= TIMEOUTS_S[backend] + SLACK_S
            assert 0.9 * TIMEOUTS_S[backend] <= error.waited_s <= TIMEOUTS_S[backend] + SLACK_S
        assert isinstance(later, cupyep.StateError) and later_s < SLACK_S, f"rank {rank}: {later!r}"
        assert closing is None and close_s < SLACK_S, f"rank {rank}: {closing!r}"
    assert len(told) == 1  # all name the same culprit in the same operation


def come_one_by_one(comm, backend):
    """The culprit's neighbour comes shortly before the deadline, the culprit itself after all have left."""
    timeout_s, late = TIMEOUTS_S[backend], (comm.rank - CULPRIT) % comm.size
    buffer = cupyep.Buffer(comm, backend=backend, timeout_s=timeout_s)
    calls = verbs(buffer, comm.rank, backend)
    time.sleep({0: timeout_s + SLACK_S, 1: 0, 2: 0.7 * timeout_s}[late])
    return outcome(calls["dispatch"]), outcome(buffer.close)


def test_one_deadline_for_all_peers(run_ranks, backend):
    for rank, ((error, seconds), _) in enumerate(run_ranks(3, come_one_by_one, backend)):
        assert isinstance(error, cupyep.PeerTimeoutError) and error.peer == CULPRIT, f"rank {rank}: {error!r}"
        assert seconds <= TIMEOUTS_S[backend] + 0.4


def stall_host_step(comm, backend, step):
    """As above, in a collective of the host: creation or close()."""
    if step == "close":
        buffer = cupyep.Buffer(comm, backend=backend, timeout_s=TIMEOUTS_S[backend])
    if comm.rank == CULPRIT:
        time.sleep(TIMEOUTS_S[backend] + SLACK_S)
    if step == "close":
        return outcome(buffer.close)
    return outcome(lambda: cupyep.Buffer(comm, backend=backend, timeout_s=TIMEOUTS_S[backend]))


@pytest.mark.parametrize("step", ["creation", "close"])
def test_a_rank_that_stalls_in_a_host_step(run_ranks, backend, step):
    for rank, (error, seconds) in enumerate(run_ranks(3, stall_host_step, backend, step)):
        assert seconds <= TIMEOUTS_S[backend] + SLACK_S
        if rank != CULPRIT:
            assert isinstance(error, cupyep.PeerTimeoutError) and error.peer == CULPRIT, f"rank {rank}: {error!r}"
            assert error.rank == rank


def raise_within(comm, backend):
    """The culprit's program raises inside `with Buffer`, the others are in a dispatch with a long deadline."""
    with cupyep.Buffer(comm, backend=backend, timeout_s=60) as buffer:
        calls = verbs(buffer, comm.rank, backend)
        if comm.rank == CULPRIT:
            time.sleep(0.2)
            raise KeyError("the program's own error")
        calls["dispatch"]()


def raise_and_catch(comm, backend):
    return outcome(lambda: raise_within(comm, backend))


def test_a_rank_that_raises(run_ranks, backend):
    for rank, (error, seconds) in enumerate(run_ranks(3, raise_and_catch, backend)):
        assert seconds < 8
        if rank == CULPRIT:
            assert type(error) is KeyError  # its own error, not one of the buffer's
        else:
            assert type(error) is cupyep.PeerError and error.peer == CULPRIT, f"rank {rank}: {error!r}"
            assert (error.operation, error.reason) == ("dispatch", "raised an exception")


def raise_bare(comm, backend, seen):
    """As above, with nothing that closes the Buffer: run_local itself must release the others."""
    buffer = cupyep.Buffer(comm, backend=backend, timeout_s=60)
    calls = verbs(buffer, comm.rank, backend)
    if comm.rank == CULPRIT:
        buffer._backend = None  # or its __del__ would rightly complain
        raise KeyError("the program's own error")
    try:
        calls["dispatch"]()
    except cupyep.PeerError as error:
        seen.append((comm.rank, error.peer))
        raise
    finally:
        buffer.close()


def test_run_local_raises_the_cause_and_releases_the_others(backend):
    seen, start = [], time.monotonic()
    with pytest.raises(KeyError, match="the program's own error"):
        launch.threads(3, raise_bare, backend, seen)
    assert sorted(seen) == [(0, CULPRIT), (2, CULPRIT)] and time.monotonic() - start < 8


def leave_early(comm, backend):
    """The culprit closes its Buffer, or does something else, while the others dispatch."""
    buffer = cupyep.Buffer(comm, backend=backend, timeout_s=TIMEOUTS_S[backend])
    calls = verbs(buffer, comm.rank, backend)
    return outcome(calls["close" if comm.rank == CULPRIT else "dispatch"]), outcome(buffer.close)


def test_a_rank_that_closes_early(run_ranks, backend):
    for rank, ((error, seconds), (closing, close_s)) in enumerate(run_ranks(3, leave_early, backend)):
        assert seconds <= TIMEOUTS_S[backend] + SLACK_S and closing is None and close_s < SLACK_S
        assert isinstance(error, cupyep.PeerError), f"rank {rank}: {error!r}"
        if rank != CULPRIT:
            assert (error.operation, error.peer) == ("dispatch", CULPRIT)


def other_channel(comm, backend):
    buffer = cupyep.Buffer(comm, backend=backend, timeout_s=TIMEOUTS_S[backend])
    calls = verbs(buffer, comm.rank, backend)
    return outcome(calls["barrier" if comm.rank == CULPRIT else "combine"]), outcome(buffer.close)


def test_a_rank_that_waits_in_a_barrier_instead(run_ranks, backend):
    results = run_ranks(3, other_channel, backend)
    assert len({(error.operation, error.rank, error.peer) for (error, _), _ in results}) == 1
    for (error, seconds), (closing, _) in results:
        assert type(error) is cupyep.PeerTimeoutError and closing is None and seconds <= TIMEOUTS_S[backend] + SLACK_S


def wrong_first(comm, backend):
    """One rank's call is refused for its arguments, and made again: the others only wait."""
    with cupyep.Buffer(comm, backend=backend, timeout_s=60) as buffer:
        x, topk_idx, weights = (checks.place(part, "contiguous", backend) for part in CASE.inputs(comm.rank))
        if comm.rank == CULPRIT:
            with pytest.raises(ValueError, match="num_experts: expected"):
                buffer.dispatch(x, topk_idx, weights, num_experts=CASE.num_experts + 1)
        checks.run_case(comm, CASE, backend, buffer)


def test_a_refused_call_of_one_rank_costs_the_others_nothing(run_ranks, backend):
    run_ranks(3, wrong_first, backend)


def die(comm, backend, when):
    """The culprit's process ends without a word: before a call, or at a random moment of many."""
    if when == "before-creation" and comm.rank == CULPRIT:
        os._exit(7)
    if when == "before-creation":
        return outcome(lambda: cupyep.Buffer(comm, backend=backend, timeout_s=TIMEOUTS_S[backend]))
    buffer = cupyep.Buffer(comm, backend=backend, timeout_s=TIMEOUTS_S[backend])
    if comm.rank == CULPRIT:
        if when == "before-a-call":
            os._exit(7)
        threading.Timer(0.2 + os.getpid() % 50 / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        start = time.monotonic()
        try:
            checks.run_case(comm, CASE, backend, buffer)
        except AssertionError as error:  # run_case adds the case to what went wrong
            return error.__cause__, time.monotonic() - start


@pytest.mark.parametrize("when", ["before-creation", "before-a-call", "any-time"])
def test_a_process_that_dies(backend, when):
    if backend == "cuda":
        pytest.skip("a process killed with GPU work outstanding leaves other MPS clients undefined")
    results = launch.mpi(3, die, backend, when, timeout_s=30, may_lose_ranks=True)
    assert results[CULPRIT] is None
    for rank in (0, 2):
        error, seconds = results[rank]
        assert isinstance(error, cupyep.PeerTimeoutError), f"rank {rank}: {error!r}"
        assert error.peer == CULPRIT and seconds <= TIMEOUTS_S[backend] + SLACK_S


def test_the_rest_of_an_mpi_job_does_not_outlive_an_error(backend):
    start = time.monotonic()
    with pytest.raises(launch.RanksFailed, match=r"\[rank-1\] KeyError: .the program's own error"):
        launch.mpi(3, raise_within, backend)
    assert time.monotonic() - start < 15


ERRORS = [
    errors.CupyepError("what"),
    errors.StateError("dispatch: this Buffer is closed"),
    errors.MismatchError("dispatch", 2, "num_experts", 64, 32),
    errors.PeerError("combine", 17, 0, 3, "closed its buffer"),
    errors.PeerTimeoutError("dispatch", 4_294_967_295, 1, 2, 1.25),
    errors.ArenaExhaustedError(1024, 512, 3),
    errors.ArenaExhaustedError(1024, 512, 3, "num_rdma_bytes"),
    errors.TopologyError("no peer access", [[None, "another host"], ["another host", None]]),
    errors.CompileError("push.cu", "error: expected a ;"),
    errors.UnsupportedDeviceError("tma.copy", "9.0", "8.0"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and copy.args == error.args and str(copy) == str(error) != ""
    assert {**vars(copy)} == {**vars(error)}
    assert isinstance(copy, errors.CupyepError)


def test_every_error_class_is_in_the_table():
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert {type(error) for error in ERRORS} == classes
