"""previous_event and async_finish: what an operation does not wait for, and memory that is not reused too early."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_helpers import Traffic, assert_same, busy, check, check_alone, cupy, differ, open_buffer
from multirank import launch

import cupyep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SLOW_S = 0.3


def used(buffer, traffic):
    """A handle of `traffic`; every shape of this file has been used, for the first use of one waits on the host."""
    handle = check(buffer, traffic).handle
    again = buffer.dispatch(traffic.inputs(buffer.rank)[0], handle=handle)
    buffer.combine(again.recv_x, handle).event.synchronize()
    return handle


def behind_an_event(comm):
    """Operations behind an earlier event run beside what the current stream was given since."""
    traffic = Traffic(comm.size)
    check_alone(comm, traffic)
    with open_buffer(comm, traffic) as buffer:
        used(buffer, traffic)
        x, topk_idx, weights = traffic.inputs(comm.rank)
        stream = cupy.cuda.get_current_stream()
        ready = buffer.capture()
        busy(SLOW_S)
        behind = cupy.cuda.Event()
        behind.record(stream)
        result = buffer.dispatch(
            x, topk_idx, weights, num_experts=traffic.num_experts, previous_event=ready, async_finish=True
        )
        result.event.synchronize()
        home = buffer.combine(result.recv_x, result.handle, previous_event=result.event, async_finish=True)
        home.event.synchronize()
        assert not behind.done, "they waited for the current stream"
        late = buffer.dispatch(x, handle=result.handle, previous_event=ready.event, async_finish=True)
        late.event.synchronize()
        assert not behind.done, "it waited for the current stream"
        buffer.dispatch(x, handle=result.handle, async_finish=True).event.synchronize()
        assert behind.done, "without an event it has to wait"
        assert_same("recv_x", (result.recv_x,), traffic.received(comm.rank)[:1])
        assert_same("combined_x", (home.combined_x,), traffic.combined(comm.rank)[:1])


def test_behind_an_event(run_ranks):
    run_ranks(2, behind_an_event)


def does_not_hold_up(comm):
    """The current stream goes on while an asynchronous operation waits for its previous event."""
    traffic = Traffic(1)
    check_alone(comm, traffic)
    with open_buffer(comm, traffic) as buffer:
        handle = used(buffer, traffic)
        x = traffic.inputs(0)[0]
        other, current = cupy.cuda.Stream(non_blocking=True), cupy.cuda.get_current_stream()
        current.synchronize()
        with other:
            busy(SLOW_S)
            ready = buffer.capture()
        result = buffer.dispatch(x, handle=handle, previous_event=ready, async_finish=True)
        current.synchronize()
        assert not result.event.event.done
        with result.event:
            pass
        current.synchronize()
        assert result.event.event.done
        assert_same("recv_x", (result.recv_x,), traffic.received(0)[:1])


def test_the_current_stream_goes_on():
    launch.threads(1, does_not_hold_up)


def dropped(comm):
    """Inputs that the caller drops, and bias and out, are kept until the operation has used them."""
    traffic = Traffic(1, num_tokens=4000, hidden=1024)
    check_alone(comm, traffic)
    with open_buffer(comm, traffic) as buffer:
        handle = used(buffer, traffic)
        expected, current = traffic.received(0)[0], cupy.cuda.get_current_stream()
        cupy.full_like(expected, 7), cupy.ones_like(expected)  # loading their kernels later would wait for busy
        other = cupy.cuda.Stream(non_blocking=True)
        for verb in ("dispatch", "combine"):
            given = (traffic.inputs(0)[0] if verb == "dispatch" else expected).copy()
            bias = cupy.ones((traffic.num_tokens, traffic.hidden), np.float32)
            current.synchronize()
            cupy.get_default_memory_pool().free_all_blocks()
            with other:
                busy(SLOW_S)
                ready = buffer.capture()
            options = {"previous_event": ready, "async_finish": True}
            if verb == "dispatch":
                result = buffer.dispatch(given, handle=handle, **options)
            else:
                result = buffer.combine(given, handle, None, bias, **options)
            del given, bias
            for _ in range(4):  # whoever gets that memory writes at once, in the current stream
                cupy.full_like(expected, 7)
            current.synchronize()
            assert not result.event.event.done
            result.event.current_stream_wait()
            if verb == "dispatch":
                assert not differ(result.recv_x, expected)
            else:
                assert not differ(result.combined_x, traffic.combined(0)[0] + np.float32(1))


def test_inputs_are_kept_until_they_were_used():
    launch.threads(1, dropped)


def slow_reader(comm):
    """A stream reads results that the caller has dropped; later results are not put there before it is through."""
    first, second = Traffic(1, missing=0), Traffic(1, missing=0, seed=1)  # the same routing: all to the one rank
    check_alone(comm, first, second)
    with open_buffer(comm, first) as buffer:
        handle = used(buffer, first)
        y, other = first.received(0)[0], second.received(0)[0]
        expected = first.combined(0)[0]
        total, rows = cupy.zeros_like(expected), cupy.zeros_like(y)
        cupy.cuda.Device().synchronize()
        home = buffer.combine(y, handle)
        kept = buffer.dispatch(first.inputs(0)[0], handle=handle, copy=True)
        address = home.combined_x.data.ptr
        busy(SLOW_S)
        cupy.copyto(total, home.combined_x)
        cupy.copyto(rows, kept.recv_x)
        ready = buffer.capture()
        del home, kept
        # Neither waits for the reader by itself: their event lies before it.
        early = cupy.cuda.Event()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            early.record(stream)
        later = [buffer.combine(other, handle, previous_event=early, async_finish=True) for _ in range(3)]
        again = [buffer.dispatch(second.inputs(0)[0], handle=handle, copy=True) for _ in range(2)]
        assert any(result.combined_x.data.ptr == address for result in later), "its memory was not used again"
        ready.synchronize()
        assert not differ(total, expected) and not differ(rows, y)
        for result in later:
            result.event.current_stream_wait()
            assert not differ(result.combined_x, second.combined(0)[0])
        assert not differ(again[-1].recv_x, other)


def test_results_are_not_reused_before_they_were_read():
    launch.threads(1, slow_reader)


def through_arena(comm):
    """Within buffer.allocator() a matmul's output lies in the arena, and combine takes it as it is."""
    from gpu_helpers import is_in_arena

    traffic = Traffic(comm.size, hidden=64)
    with open_buffer(comm, traffic) as buffer:
        result = check(buffer, traffic)
        twice = cupy.eye(64, dtype=np.float32) * 2
        with buffer.allocator():
            y = cupy.matmul(result.recv_x, twice)
        assert is_in_arena(buffer, y) and not is_in_arena(buffer, cupy.matmul(result.recv_x, twice))
        assert buffer._backend._arena.offset_of(y) is not None  # what combine asks
        home = buffer.combine(y, result.handle)
        assert_same("combined_x", (home.combined_x,), traffic.combined(comm.rank, 2)[:1])
        assert isinstance(home.event, cupyep.EventOverlap)


def test_zero_copy_through_the_allocator(run_ranks):
    run_ranks(2, through_arena)
