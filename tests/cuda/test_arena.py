"""Where memory comes from and that it goes back: whole Buffers, single blocks, large arenas, experts' outputs."""

from __future__ import annotations

import gc
import random
import time
from unittest import mock

import numpy as np
import pytest
from gpu_helpers import (
    Traffic,
    assert_same,
    busy,
    check,
    check_alone,
    child,
    cupy,
    differ,
    fill,
    free_bytes,
    is_in_arena,
    mpi,
    open_buffer,
    rows,
    threads,
)
from multirank import launch

import cupyep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

SLACK = 8 << 20  # bytes that CUDA may keep for itself; a single lost arena of each cycle below would be 400 MB


def cycles(comm, count):
    """Buffers that open, grow, work, and close while a result of theirs is still there."""
    kept = None
    for seed in range(count):
        with open_buffer(comm, Traffic(comm.size)) as buffer:
            kept = check(buffer, Traffic(comm.size, seed=seed))
    del kept
    with open_buffer(comm, Traffic(comm.size)):
        pass  # frees the arena that the last result has kept


def lost_by_threads(num_ranks):
    launch.threads(num_ranks, cycles, 5)
    before = free_bytes()
    launch.threads(num_ranks, cycles, 100)
    return before - free_bytes()


@pytest.mark.alone
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_hundred_buffers_of_threads_leave_nothing(num_ranks):
    assert child(lost_by_threads, num_ranks, timeout_s=90, is_fresh=True) < SLACK


def lost_by_processes(comm):
    cycles(comm, 5)
    levels = []
    for count in (100, 0):
        comm.Barrier()
        levels.append(free_bytes())
        comm.Barrier()  # all have looked
        if count:
            cycles(comm, count)
    return levels[0] - levels[1]


@pytest.mark.alone
def test_a_hundred_buffers_of_processes_leave_nothing():
    assert max(mpi(2, lost_by_processes, timeout_s=90)) < SLACK


def outlive_close(comm):
    traffic = Traffic(1, num_tokens=2000, hidden=4096)  # 32 MB of rows, so an arena of 100 MB
    check_alone(comm, traffic)
    expected = traffic.received(0)[0]
    open_buffer(comm, Traffic(1)).close()  # frees the arena that the results have kept
    before = free_bytes()
    buffer = open_buffer(comm, traffic)
    result = check(buffer, traffic)
    buffer.close()
    buffer.close()
    assert before - free_bytes() >= expected.nbytes
    assert not differ(result.recv_x, expected)
    result.recv_x[...] = 7
    view = result.recv_x[100:101, 2:5]
    del result, buffer
    open_buffer(comm, traffic).close()
    assert before - free_bytes() >= expected.nbytes and bool((view == 7).all())  # a view of one row keeps all of it
    del view
    open_buffer(comm, traffic).close()  # whoever comes next frees it
    assert abs(before - free_bytes()) < SLACK


@pytest.mark.alone
def test_arrays_outlive_close_and_then_the_arena_is_freed():
    launch.threads(1, outlive_close)


def free_in_arena(buffer):
    gc.collect()
    arena = buffer._backend._arena
    arena.drain()
    return arena.heap.total


def give_back(comm):
    """After every kind of use, and after errors, all bytes of the arena are free again."""
    traffic = Traffic(comm.size)
    check_alone(comm, traffic)
    with open_buffer(comm, traffic, num_nvl_bytes=4 << 20) as buffer:
        handle = check(buffer, traffic).handle
        x, topk_idx, weights = traffic.inputs(comm.rank)
        bad = topk_idx.copy()
        bad[3] = traffic.num_experts
        y = traffic.received(comm.rank)[0]

        def dispatch(ids=topk_idx, **options):
            return buffer.dispatch(x, ids, weights, num_experts=traffic.num_experts, **options)

        def bad_ids():
            with pytest.raises(ValueError, match="topk_idx: expected ids in"):
                dispatch(bad)

        def too_much():
            with pytest.raises(cupyep.ArenaExhaustedError):
                buffer.empty((1 << 30,), np.uint8)

        def in_allocator():
            with buffer.allocator():
                return y * 2

        uses = (
            dispatch,
            lambda: dispatch(copy=True),
            lambda: buffer.dispatch(x, handle=handle),
            lambda: buffer.combine(y, handle),
            lambda: buffer.combine(dispatch().recv_x, handle),
            buffer.barrier,
            lambda: buffer.empty((7, 9), np.float16),
            in_allocator,
            bad_ids,
            too_much,
            lambda: fill(buffer),
        )
        start = free_in_arena(buffer)
        for number, use in enumerate(uses):
            use()
            assert free_in_arena(buffer) == start, number
        kept = dispatch()
        assert free_in_arena(buffer) <= start - kept.recv_x.nbytes
        del kept
        assert free_in_arena(buffer) == start


def test_blocks_go_back():
    launch.threads(1, give_back)


def test_blocks_of_two_ranks_go_back():
    threads(2, give_back)


def beyond_4_gib(comm):
    """Rows past 2^31 bytes of an array, arrays past 2^32 bytes of an arena: there and back, in place."""
    num_rows = 188_000  # that every rank receives: 2.7 GB
    traffic = Traffic(
        comm.size, num_rows // comm.size, 7168, "bfloat16", num_topk=comm.size, num_local_experts=1, missing=0
    )
    x, topk_idx, _ = traffic.inputs(comm.rank)
    received = np.concatenate([traffic.numbers(source) for source in range(comm.size)])
    edge = 2**31 // (2 * traffic.hidden)

    def assert_rows(name, got, numbers, factor):
        for part in (slice(0, 40), slice(edge - 40, edge + 40), slice(len(numbers) - 40, None)):
            expected = rows(numbers[part], np.full(len(numbers[part]), factor), traffic.hidden, traffic.dtype)
            assert not differ(got[part], expected), (name, part)

    with open_buffer(comm, traffic) as buffer:
        results = [buffer.dispatch(x, topk_idx, num_experts=traffic.num_experts) for _ in range(2)]
        for result in results:
            assert_rows("recv_x", result.recv_x, received, 1)
        start = min(result.recv_x.data.ptr for result in results)
        last = results[1].recv_x
        assert last.nbytes > 2**31 and last.data.ptr + last.nbytes - start > 2**32
        combined_x = buffer.combine(last, results[1].handle).combined_x
        assert_rows("combined_x", combined_x, traffic.numbers(comm.rank), comm.size)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_arena_beyond_4_gib(num_ranks):
    if free_bytes() < 40 << 30:
        pytest.skip(f"needs 40 GiB of free GPU memory, found {free_bytes() >> 30}")
    threads(num_ranks, beyond_4_gib, timeout_s=90)


def outputs_of_a_matmul(comm):
    """An expert's output made under allocator() is combined where it lies, any other is copied, once."""
    traffic = Traffic(1)
    check_alone(comm, traffic)
    weight = cupy.eye(traffic.hidden, dtype=np.float32) * 2
    copied, copyto = [], cupy.copyto

    def spy(target, source, *args):
        copied.append(source.nbytes)
        copyto(target, source, *args)

    def combine(y, handle):
        with mock.patch.object(cupy, "copyto", spy):
            combined_x = buffer.combine(y, handle).combined_x
        assert_same("combined_x", (combined_x,), traffic.combined(0, factor=2)[:1])
        return copied.copy()

    with open_buffer(comm, traffic, num_nvl_bytes=4 << 20) as buffer:
        result = check(buffer, traffic)
        elsewhere = result.recv_x @ weight
        with buffer.allocator():
            y = result.recv_x @ weight
        assert is_in_arena(buffer, y) and not is_in_arena(buffer, elsewhere)
        assert combine(y, result.handle) == []
        assert combine(elsewhere, result.handle) == [elsewhere.nbytes]
        del y
        kept = fill(buffer)
        with buffer.allocator():
            y = result.recv_x @ weight  # the arena is full: from CuPy's pool
        assert not is_in_arena(buffer, y) and not differ(y, elsewhere)
        with pytest.raises(cupyep.ArenaExhaustedError):
            buffer.combine(y, result.handle)
        del kept
        assert combine(y, result.handle) == 2 * [elsewhere.nbytes]


def test_outputs_of_a_matmul_are_combined_in_place():
    launch.threads(1, outputs_of_a_matmul)


def skewed(comm, num_calls):
    """Calls back to back, with host and GPU of each rank late at random; results are compared on the GPU alone."""
    traffics = [Traffic(comm.size, num_tokens, seed=seed) for seed, num_tokens in enumerate((1, 60, 200))]
    check_alone(comm, *traffics)
    prepared = [
        (traffic, traffic.inputs(comm.rank), traffic.received(comm.rank), traffic.combined(comm.rank))
        for traffic in traffics
    ]
    chance, is_wrong = random.Random(comm.rank), cupy.zeros((), bool)
    with open_buffer(comm, *traffics) as buffer:
        check(buffer, traffics[0])
        for call in range(num_calls):
            traffic, inputs, received, combined = prepared[call % len(prepared)]
            late = chance.choice((None, None, time.sleep, busy))
            if late:
                late(chance.random() * 0.004)
            result = buffer.dispatch(*inputs, num_experts=traffic.num_experts)
            back = buffer.combine(result.recv_x, result.handle, result.recv_topk_weights)
            for got, expected in zip((*result[:3], *back[:2]), (*received, *combined), strict=True):
                is_wrong = is_wrong | differ(got, expected)
        return bool(is_wrong)


def test_skewed_ranks(run_ranks):
    assert run_ranks(3, skewed, 200) == [False] * 3
