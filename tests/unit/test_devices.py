"""What Buffers have taken of a GPU, among threads that come and go. The GPU itself is left out."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest

pytest.importorskip("cupy", reason="devices are chosen through CuPy", exc_type=ImportError)

from cupyep import model
from cupyep.backends.cuda import devices
from cupyep.comm.local import run_threads, single
from cupyep.errors import StateError


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    """Of 132 SMs, with nothing taken."""
    monkeypatch.setattr(devices, "_claims", [])
    monkeypatch.setattr(devices, "_describe", lambda device, comm: (0, "bus", 132))
    monkeypatch.setattr(devices, "_check_peers", lambda device, rank, bus_ids: None)
    monkeypatch.setattr(devices, "machine", lambda device: model.Machine())


def groups_of(*sizes, then=lambda comm, claim: None):
    """Group behind group: each chooses, and ends without giving anything back. The SMs of each one's ranks."""

    def program(comm):
        claim = devices.choose(comm, None, None, 10)
        then(comm, claim)
        return claim.num_sms

    return [run_threads(program, size, (), 10, lambda rank: nullcontext()) for size in sizes]


def test_threads_that_ended_hold_nothing():
    """A later group's threads have the idents of an earlier one's: neither its SMs nor the GPU count as taken."""
    alone = groups_of(3)
    devices._claims.clear()
    assert groups_of(2, 2, 3, 1, 3)[2::2] == alone * 2
    assert devices.claims(0) == []


def test_a_second_group_is_refused_and_a_rank_of_the_first_alone_is_not():
    def inner(comm, claim):
        if comm.rank == 0:
            devices.release(devices.choose(single(), None, None, 10))
            with pytest.raises(StateError, match="one group of threads at a time"):
                groups_of(2)
        comm.barrier(operation="test", timeout_s=10)

    groups_of(2, then=inner)


def test_a_caller_of_run_local_may_have_a_buffer_open():
    claim = devices.choose(single(), None, None, 10)
    (after,) = groups_of(2)
    devices.release(claim)
    assert groups_of(2)[0] > after  # its SMs were taken


def test_ranks_that_choose_before_their_caller_waits(monkeypatch):
    """It is a caller from the moment that the first thread starts."""
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (start(thread), thread.join(0.2)))
    devices.choose(single(), None, None, 10)
    groups_of(2)


def test_a_caller_with_several_buffers_and_groups_in_groups():
    """Each gets less of what is left. Ranks that wait in run_local count as callers when all of their group do."""
    mine = [devices.choose(single(), None, None, 10) for _ in range(3)]
    meeting = threading.Barrier(2)

    def inner(comm, claim):
        if comm.rank == 1:
            with pytest.raises(StateError, match="one group of threads at a time"):
                groups_of(2)  # rank 0 is at the GPU
        meeting.wait(10)
        run_threads(lambda inside: outer_waits(inside, comm.rank), 2, (), 10, lambda rank: nullcontext())

    def outer_waits(inside, outer_rank):
        if inside.rank == 0:
            meeting.wait(10)  # both ranks of the outer group wait now
        inside.barrier(operation="test", timeout_s=10)
        if outer_rank == 0:
            devices.release(devices.choose(inside, None, 1, 10))

    groups_of(2, then=inner)
    assert sum(claim.num_sms for claim in mine) < 132


def test_a_group_that_its_caller_has_given_up_still_holds_the_gpu():
    """Its threads may go on; the caller is no longer one that only waits."""
    claim, goes_on = devices.choose(single(), None, None, 10), threading.Event()

    def program(comm):
        devices.choose(comm, None, None, 10)
        goes_on.wait(10)

    with pytest.raises(TimeoutError, match="still running"):
        run_threads(program, 2, (), 0.5, lambda rank: nullcontext())
    with pytest.raises(StateError, match="one group of threads at a time"):
        devices.choose(single(), None, None, 10)
    goes_on.set()
    devices.release(claim)


@pytest.mark.timeout(20)
def test_a_buffer_that_is_collected_while_claims_are_looked_at(monkeypatch):
    """The garbage collector runs where it likes, also in the thread that has the lock."""
    dropped, claims = devices.choose(single(), None, 1, 10), devices.claims
    monkeypatch.setattr(devices, "claims", lambda device: (devices.release(dropped), claims(device))[1])
    assert devices.claims(0) == []
    devices.release(devices.choose(single(), None, 1, 10))
