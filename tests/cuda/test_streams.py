"""Order without waiting: what an operation waits for, what waits for it, and what the host does meanwhile.

A slow kernel (gpu_helpers.busy) holds a stream up for so long that a missing wait shows as rows of an earlier call.
"""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
from gpu_helpers import Traffic, assert_same, busy, check, check_alone, cupy, differ, fill, open_buffer, threads
from multirank import launch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SLOW_S = 0.2
FIRST, SECOND = Traffic(1), Traffic(1, seed=1)  # of one rank; alike but for the rows


def new_stream():
    return cupy.cuda.Stream(non_blocking=True)


def two_traffics(comm):
    """Alike but for the rows, and ready to be used: all kernels are loaded."""
    traffics = Traffic(comm.size), Traffic(comm.size, seed=1)
    check_alone(comm, *traffics)
    return traffics


def late_inputs(comm):
    """The caller's stream writes the inputs after a while: dispatch, repeated dispatch and combine wait for it."""
    _, traffic = two_traffics(comm)
    with open_buffer(comm, traffic) as buffer, new_stream() as stream:
        check(buffer, traffic)
        inputs = traffic.inputs(comm.rank)
        x, topk_idx, topk_weights = late = [cupy.zeros_like(array) for array in inputs]

        def write_late(*pairs):
            stream.synchronize()
            busy(SLOW_S)
            for target, source in pairs:
                cupy.copyto(target, source)

        write_late(*zip(late, inputs, strict=True))
        result = buffer.dispatch(x, topk_idx, topk_weights, num_experts=traffic.num_experts)
        expected = traffic.received(comm.rank)
        assert_same("recv_x recv_topk_idx recv_topk_weights", result[:3], expected)

        x[...] = 0
        buffer.dispatch(x, handle=result.handle)  # a shape's first use is slower
        write_late((x, inputs[0]))
        again = buffer.dispatch(x, handle=result.handle)
        assert_same("recv_x", again[:1], expected[:1])

        for y in (buffer.empty(expected[0].shape, x.dtype), cupy.empty_like(expected[0])):  # in place, and staged
            y[...] = 0
            write_late((y, expected[0]))
            combined = buffer.combine(y, result.handle, result.recv_topk_weights)
            assert_same("combined_x combined_topk_weights", combined[:2], traffic.combined(comm.rank))


def host_runs_ahead(comm):
    """Behind a busy stream, calls return at once, but for a dispatch: its counts stand behind that stream, too."""
    traffic, _ = two_traffics(comm)
    with open_buffer(comm, traffic) as buffer, new_stream() as stream:
        result = check(buffer, traffic)
        x, topk_idx, topk_weights = traffic.inputs(comm.rank)
        buffer.dispatch(x, handle=result.handle)
        calls = {
            "repeated dispatch": lambda: buffer.dispatch(x, handle=result.handle).event,
            "combine": lambda: buffer.combine(result.recv_x, result.handle).event,
            "barrier": buffer.barrier,
        }
        comm_stream = buffer.get_comm_stream()
        assert isinstance(comm_stream, cupy.cuda.Stream) and comm_stream.ptr != stream.ptr
        buffer.combine(result.recv_x, result.handle)  # without weights: another shape
        for name, call in calls.items():
            comm_stream.synchronize()
            start = time.monotonic()
            busy(SLOW_S)
            event = call()
            assert time.monotonic() - start < 0.5 * SLOW_S, name
            assert not comm_stream.done and not stream.done, name  # operations run on the one, the other waits for it
            event.synchronize()
            assert time.monotonic() - start > 0.9 * SLOW_S and comm_stream.done, name
        start = time.monotonic()
        busy(SLOW_S)
        buffer.dispatch(x, topk_idx, topk_weights, num_experts=traffic.num_experts)
        assert time.monotonic() - start > 0.9 * SLOW_S


def wait_on_other_streams(comm):
    """Another stream sees the rows once it has waited: for the event, or for the communication stream itself."""
    first, second = two_traffics(comm)
    with open_buffer(comm, first) as buffer:
        handle = check(buffer, second).handle
        x, expected = second.inputs(comm.rank)[0], second.received(comm.rank)[0]
        outs = [cupy.zeros_like(expected) for _ in range(2)]
        buffer.dispatch(cupy.zeros_like(x), handle=handle)  # loads, and leaves other rows in the block
        cupy.cuda.Device().synchronize()
        for out, by_event in zip(outs, (True, False), strict=True):
            busy(SLOW_S)
            result = buffer.dispatch(x, handle=handle)
            with new_stream() as other:
                if by_event:
                    result.event.current_stream_wait()
                else:
                    other.wait_event(buffer.get_comm_stream().record())
                assert not other.done
                cupy.copyto(out, result.recv_x)
                other.synchronize()
            del result
            buffer.dispatch(cupy.zeros_like(x), handle=handle)
        for out in outs:
            assert not differ(out, expected)


SCENARIOS = (late_inputs, host_runs_ahead, wait_on_other_streams)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_one_rank(scenario):
    launch.threads(1, scenario)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_two_ranks(scenario):
    threads(2, scenario)


def large_rows_by_one_sm(comm):
    """The rows move for many milliseconds: calls return before that, and what follows on the stream sees them all."""
    traffic = Traffic(1, num_tokens=1 << 16, hidden=7168, dtype="bfloat16", num_topk=1, missing=0)
    with open_buffer(comm, traffic) as buffer:
        check_large(buffer, dataclasses.replace(traffic, seed=1), lambda: None)  # leaves other rows everywhere
        check_large(buffer, traffic, lambda: buffer.get_comm_stream().done)


def check_large(buffer, traffic, is_done):
    x, topk_idx, weights = traffic.inputs(0)
    given, out, total = x.copy(), cupy.zeros_like(x), cupy.zeros_like(x)
    cupy.cuda.get_current_stream().synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    address = given.data.ptr
    result = buffer.dispatch(given, topk_idx, weights, num_experts=traffic.num_experts, num_sms=1)
    assert not is_done()
    cupy.copyto(out, result.recv_x)
    del given
    junk = cupy.zeros_like(x)  # written behind the dispatch, whose input was here
    assert junk.data.ptr == address
    combined = buffer.combine(result.recv_x, result.handle, num_sms=1)
    assert not is_done()
    cupy.copyto(total, combined.combined_x)
    assert not differ(out, x) and not differ(total, x)


def test_results_are_ready_in_stream_order():
    launch.threads(1, large_rows_by_one_sm)


def reuse(comm, is_recorded):
    """Two slow streams read a result that the caller drops; later calls get its block. What the two have read."""
    check_alone(comm, FIRST, SECOND)
    with open_buffer(comm, FIRST, num_nvl_bytes=1 << 20) as buffer:
        check(buffer, FIRST)
        expected, kept = FIRST.received(0)[0], []
        outs = [cupy.zeros_like(expected) for _ in range(2)]
        readers = [new_stream() for _ in outs]
        result = buffer.dispatch(*FIRST.inputs(0), num_experts=FIRST.num_experts)
        address = result.recv_x.data.ptr
        cupy.cuda.Device().synchronize()
        for number, (reader, out) in enumerate(zip(readers, outs, strict=True)):
            with reader:
                busy(SLOW_S * (1 + number))
                cupy.copyto(out, result.recv_x)
            if is_recorded:
                buffer.record_stream(result.recv_x[3:], reader)  # a view will do
        del result
        for _ in range(3):
            kept.append(buffer.dispatch(*SECOND.inputs(0), num_experts=SECOND.num_experts))
        kept.append(fill(buffer))  # all the rest of the arena, new blocks
        assert kept[0].recv_x.data.ptr == address
        cupy.cuda.Device().synchronize()
        for later in kept[:3]:
            assert not differ(later.recv_x, SECOND.received(0)[0])
        return [bool(differ(out, expected)) for out in outs]


@pytest.mark.parametrize("poison", ["0", "1"], ids=["plain", "poison"])
def test_a_recorded_stream_reads_on_after_the_array_is_dropped(monkeypatch, poison):
    monkeypatch.setenv("CUPYEP_POISON", poison)
    assert launch.threads(1, reuse, True) == [[False, False]]


def test_without_record_stream_the_block_is_used_at_once():
    """Which is why record_stream exists; and the test above could fail."""
    assert launch.threads(1, reuse, False) == [[True, True]]


class LongestPause(threading.Thread):
    """Runs Python code all the time and measures, in seconds, how long it was ever kept from doing so."""

    def __init__(self):
        super().__init__(daemon=True)
        self.seconds, self._ended = 0.0, threading.Event()

    def run(self):
        last = time.perf_counter()
        while not self._ended.is_set():
            now = time.perf_counter()
            self.seconds, last = max(self.seconds, now - last), now

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self.join()


def wait_for_a_slow_peer(comm):
    """Rank 1's stream is busy, so rank 0 waits for its counts. (seconds of the dispatch, longest pause of a thread)."""
    traffic, _ = two_traffics(comm)
    with open_buffer(comm, traffic) as buffer:
        check(buffer, traffic)
        inputs = traffic.inputs(comm.rank)
        buffer.barrier().synchronize()
        if comm.rank == 1:
            busy(3 * SLOW_S)
        start = time.monotonic()
        with LongestPause() as pause:
            result = buffer.dispatch(*inputs, num_experts=traffic.num_experts)
            seconds = time.monotonic() - start
        assert_same("recv_x", result[:1], traffic.received(comm.rank)[:1])
        return seconds, pause.seconds


def test_other_python_threads_run_while_a_dispatch_waits(run_ranks):
    for seconds, longest_pause in run_ranks(2, wait_for_a_slow_peer):
        assert seconds > 2 * SLOW_S > 2 * longest_pause
