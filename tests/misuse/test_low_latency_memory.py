"""The low-latency mode's memory: how much it takes, when there is not enough, and for whose handles it is given."""

from __future__ import annotations

import threading

import pytest
from multirank import launch, low_latency
from multirank.low_latency import Job, open_buffer
from multirank.low_latency import small_case as case

import cupyep
from cupyep.backends.numpy import memory


def test_the_hint_has_an_end():
    with pytest.raises(ValueError, match=r"hidden: expected 1\.\.1073741823, got 1000000000000"):
        cupyep.Buffer.get_low_latency_rdma_size_hint(128, 10**12, 8, 256)
    assert cupyep.Buffer.get_low_latency_rdma_size_hint(1024, 2**30 - 1, 256, 256) > 2**50


def growth_that_fails(comm, fails):
    small, large = (Job(case(tokens=tokens), fp8="") for tokens in (2, 40))
    with open_buffer(comm, "numpy") as buffer:
        low_latency.run_job(buffer, small, "numpy")
        arena = buffer._backend.low_latency._arena
        fails.set()
        with pytest.raises(cupyep.ArenaExhaustedError):
            low_latency.run_job(buffer, large, "numpy")
        assert buffer._backend.low_latency._arena is arena
        low_latency.run_job(buffer, small, "numpy")
        comm.allgather(None)
        fails.clear()
        low_latency.run_job(buffer, large, "numpy")


def test_a_growth_that_fails_leaves_all_as_it_was(monkeypatch):
    fails, block = threading.Event(), memory.Arena.block

    def of_one_rank(arena, num_bytes):
        if fails.is_set() and arena._rank == 1:
            raise cupyep.ArenaExhaustedError(num_bytes, 0, 1)
        return block(arena, num_bytes)

    monkeypatch.setattr(memory.Arena, "block", of_one_rank)
    launch.threads(2, growth_that_fails, fails)


def others_handles(comm):
    with open_buffer(comm, "numpy") as buffer, cupyep.Buffer(low_latency_mode=True, backend="numpy") as other:
        x, idx, _ = case(tokens=4).inputs(comm.rank)
        handles = [buffer.low_latency_dispatch(x, idx, 4, 6, use_fp8=False).handle for _ in range(3)]
        alone = other.low_latency_dispatch(x, idx, 4, 6, use_fp8=False).handle
        for handle, message in ((alone, "another Buffer's"), (handles[0], "one of the last 2 low-latency dispatches")):
            with pytest.raises(cupyep.StateError, match=message):
                buffer.get_next_low_latency_combine_buffer(handle)


def test_memory_for_a_handle_that_is_not_valid():
    launch.threads(2, others_handles)
