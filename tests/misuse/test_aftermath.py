"""After an error: who may go on, who may try again, and who is told at once."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from cases import Case
from multirank import checks, launch

import cupyep

CASE = Case(num_ranks=3, hidden=16, tokens=6, num_local_experts=4, seed=902)
LONG_S = 60.0  # a deadline that must not be what ends a wait


def attempt(comm, backend, timeout_s, **options):
    try:
        cupyep.Buffer(comm, backend=backend, timeout_s=timeout_s, **options).close()
    except cupyep.CupyepError as error:
        return type(error).__name__
    return "ok"


def come_late_once(comm, backend):
    """Creation fails because a rank is late; the next attempts, with all ranks there, must not suffer from it."""
    if comm.rank == 1:
        time.sleep(2.5)
    first = attempt(comm, backend, 1)
    comm.allgather(None)
    return [first] + [attempt(comm, backend, LONG_S) for _ in range(3)]


def test_creation_can_be_tried_again(run_ranks, backend):
    if backend == "cuda":
        pytest.skip("a GPU's context may take longer to start than the deadline that is to pass here")
    for outcomes in run_ranks(2, come_late_once, backend):
        assert outcomes[1:] == ["ok"] * 3


def fail_alike_often(comm, backend):
    return {attempt(comm, backend, LONG_S, num_nvl_bytes=128 * comm.rank) for _ in range(100)}


def test_a_failed_creation_gives_its_communicator_back(run_ranks, backend):
    assert run_ranks(2, fail_alike_often, backend) == [{"MismatchError"}] * 2


def fill_the_arena(comm, backend):
    kept = []
    try:
        with cupyep.Buffer(comm, 1 << 14, backend=backend, max_tokens_per_rank=8, timeout_s=LONG_S) as buffer:
            for _ in range(100):
                kept.append(checks.check_dispatch(buffer, CASE, comm.rank, backend))
    except cupyep.CupyepError as error:
        return type(error).__name__


def test_a_full_arena_is_told_alike_also_when_it_ends_a_with_block(run_ranks, backend):
    assert run_ranks(3, fill_the_arena, backend) == ["ArenaExhaustedError"] * 3


def break_in_the_middle(comm, backend):
    """Something that is none of cupyep's errors happens to one rank within an operation."""
    with cupyep.Buffer(comm, backend=backend, timeout_s=LONG_S) as buffer:
        result = checks.check_dispatch(buffer, CASE, comm.rank, backend)
        start = time.monotonic()
        if comm.rank == 1:
            buffer._backend.combine = out_of_memory
        try:
            checks.complete(buffer.combine(result.recv_x, result.handle))
        except (MemoryError, cupyep.PeerError) as error:
            first = type(error).__name__
        try:
            buffer.barrier()
        except cupyep.StateError as error:
            return first, str(error), time.monotonic() - start


def out_of_memory(*args, **kwargs):
    raise MemoryError("no memory for the result")


def test_an_error_within_an_operation_ends_the_buffer_for_all(run_ranks, backend):
    for rank, (first, later, seconds) in enumerate(run_ranks(3, break_in_the_middle, backend)):
        assert first == ("MemoryError" if rank == 1 else "PeerError") and seconds < LONG_S / 4
        assert "broken by an earlier error" in later and (rank != 1 or "no memory for the result" in later)


def raise_while_others_close(comm, backend):
    try:
        with cupyep.Buffer(comm, backend=backend, timeout_s=LONG_S):
            start = time.monotonic()
            if comm.rank == 1:
                time.sleep(0.5)
                raise KeyError("the program's own error")
    except (KeyError, cupyep.PeerError) as error:
        return type(error).__name__, time.monotonic() - start


def test_processes_that_close_are_told_of_one_that_raises(backend):
    for rank, (name, seconds) in enumerate(launch.mpi(3, raise_while_others_close, backend)):
        assert (name, seconds < LONG_S / 4) == ("KeyError" if rank == 1 else "PeerError", True)


def test_too_small_num_rdma_bytes_says_what_suffices():
    x, topk_idx = np.ones((4, 128), np.float32), np.zeros((4, 2), np.int64)
    with (
        cupyep.Buffer(backend="numpy", num_rdma_bytes=1 << 12, low_latency_mode=True) as buffer,
        pytest.raises(cupyep.ArenaExhaustedError, match=r"num_rdma_bytes: expected at least .*, got 4,096") as caught,
    ):
        buffer.low_latency_dispatch(x, topk_idx, 4, 4, use_fp8=False)
    enough = caught.value.needed
    with cupyep.Buffer(backend="numpy", num_rdma_bytes=enough, low_latency_mode=True) as buffer:
        buffer.low_latency_dispatch(x, topk_idx, 4, 4, use_fp8=False)


def test_rows_that_no_word_can_count_are_refused():
    with (
        cupyep.Buffer(backend="numpy") as buffer,
        pytest.raises(ValueError, match="x: expected rows of less than 2 GiB"),
    ):
        buffer.dispatch(np.empty((0, 2**30), np.float32), np.empty((0, 1), np.int64), num_experts=1)


@pytest.mark.parametrize("shape", [-1, (-1, 8), 4.0, None, "ab"])
def test_shapes_that_empty_refuses(shape):
    with (
        cupyep.Buffer(backend="numpy", max_tokens_per_rank=8) as buffer,
        pytest.raises((TypeError, ValueError), match="shape: expected"),
    ):
        buffer.empty(shape, np.float32)


FORKED = """
import os, numpy as np, cupyep
x, idx = np.ones((4, 8), np.float32), np.zeros((4, 1), np.int64)
with cupyep.Buffer(backend="numpy", timeout_s=5) as buffer:
    if (child := os.fork()) == 0:
        try:
            with buffer:
                buffer.barrier()
        except cupyep.StateError as error:
            print(error, flush=True)
        buffer.close()
        os._exit(0)
    os.waitpid(child, 0)
    print(buffer.dispatch(x, idx, num_experts=1).recv_x.shape)
"""


def test_a_forked_child_leaves_its_parents_buffer_alone():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    first, last = done.stdout.splitlines()
    assert first.startswith("barrier: this Buffer is that of process ") and last == "(4, 8)", done.stderr


def test_masked_arrays_are_refused():
    with cupyep.Buffer(backend="numpy") as buffer:
        masked = np.ma.masked_less(np.zeros((4, 8), np.float32), 0)
        with pytest.raises(TypeError, match="x: expected an array, got a MaskedArray"):
            buffer.dispatch(masked, np.zeros((4, 1), np.int64), num_experts=1)
    with pytest.raises(TypeError, match="src: expected an array, got a MaskedArray"):
        cupyep.tma.copy(np.zeros((4, 8), np.float32), masked)
