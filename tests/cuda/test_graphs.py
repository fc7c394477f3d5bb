"""CUDA graphs: dispatch, matmul and combine captured once and replayed with other tokens and other routing."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_helpers import (
    CULPRIT,
    Traffic,
    assert_same,
    busy,
    check,
    check_alone,
    cupy,
    differ,
    fill,
    make_room,
    open_buffer,
    outcome,
    threads,
)

import cupyep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

TRAFFICS, REPLAYS = 5, 1000
AHEAD = 20  # replays that a thread may have queued: with a thousand launches the driver waits, and all threads with it

MATMUL = r"""
extern "C" __global__ void matmul(const float* a, const float* b, float* out, int n) {  // a CTA for each row
  for (int column = threadIdx.x; column < n; column += blockDim.x) {
    float sum = 0;
    for (int k = 0; k < n; ++k) sum += a[blockIdx.x * n + k] * b[k * n + column];
    out[blockIdx.x * n + column] = sum;
  }
}
"""


def on_a_stream(job: Callable[..., Any]) -> Callable[..., Any]:
    """`job` with a current stream that can be captured, which CUDA's default stream cannot."""

    @functools.wraps(job)
    def run(comm: Any) -> Any:
        with cupy.cuda.Stream(non_blocking=True):
            return job(comm)

    return run


class Layer:
    """A captured MoE layer of one rank whose experts double their rows; inputs and outputs stay where they are."""

    def __init__(self, buffer: cupyep.Buffer, traffic: Traffic) -> None:
        self.buffer, self.traffic = buffer, traffic
        self.worst = traffic.num_ranks * traffic.num_tokens
        self.x, self.topk_idx, self.weights = traffic.inputs(buffer.rank)
        self.doubling = cupy.eye(traffic.hidden, dtype=np.float32) * 2
        self.matmul = cupy.RawKernel(MATMUL, "matmul")  # CuPy refuses to have its cuBLAS calls captured
        self.y = buffer.empty((self.worst, traffic.hidden), np.float32)
        self.stream = cupy.cuda.get_current_stream()
        self.run()  # everything has been used once
        self.stream.synchronize()

    def run(self) -> None:
        """What is captured."""
        self.received = self.buffer.dispatch(
            self.x, self.topk_idx, self.weights, num_experts=self.traffic.num_experts, num_worst_tokens=self.worst
        )
        hidden = self.traffic.hidden
        self.matmul((self.worst,), (64,), (self.received.recv_x, self.doubling, self.y, np.int32(hidden)))
        self.home = self.buffer.combine(self.y, self.received.handle, self.received.recv_topk_weights)

    def capture(self) -> None:
        self.stream.begin_capture()
        try:
            self.run()
        finally:
            self.graph = self.stream.end_capture()

    def replay(self, inputs: tuple) -> tuple:
        """The captured layer for other tokens. Returns (recv_x, combined_x, combined_topk_weights)."""
        for mine, other in zip((self.x, self.topk_idx, self.weights), inputs, strict=True):
            cupy.copyto(mine, other)
        self.graph.launch(self.stream)
        return self.received.recv_x, self.home.combined_x, self.home.combined_topk_weights


def open_layer(comm, options=None):
    traffics = [Traffic(comm.size, num_tokens=40, hidden=64, seed=seed) for seed in range(TRAFFICS)]
    check_alone(comm, *traffics)
    buffer = open_buffer(comm, *traffics, **(options or {}))
    layer = Layer(buffer, traffics[0])
    layer.capture()
    return buffer, layer, traffics


@on_a_stream
def replays(comm):
    """Many replays, eager calls among them; every result is right. The busy bit never saw two at once."""
    buffer, layer, traffics = open_layer(comm)
    with buffer:
        make_room()  # before any kernel waits for a peer
        inputs = [traffic.inputs(comm.rank) for traffic in traffics]
        expected = [(traffic.received(comm.rank)[0], *traffic.combined(comm.rank, 2)) for traffic in traffics]
        wrong = cupy.zeros((), bool)
        for rows, sums, weights in expected:
            wrong |= differ(rows, rows) | differ(sums, sums) | differ(weights, weights)
        cupy.cuda.get_current_stream().synchronize()
        comm.allgather(None)
        for number in range(REPLAYS):
            if number % AHEAD == 0:
                layer.stream.synchronize()
            which = number % TRAFFICS
            recv_x, combined_x, combined_weights = layer.replay(inputs[which])
            rows, sums, weights = expected[which]
            wrong |= differ(recv_x[: len(rows)], rows) | differ(combined_x, sums) | differ(combined_weights, weights)
            if number % 100 == 50:
                assert layer.received.handle.recv_count.get().tolist() == [len(rows)]
                assert (layer.received.recv_topk_idx.get()[len(rows) :] == -1).all()
            if number % 250 == 100:
                check(buffer, traffics[which])
        assert not wrong


def test_replays(run_ranks):
    run_ranks(3, replays)


@on_a_stream
def lazy_work(comm):
    """Under capture: no counts for the host, no shape that is new. The capture ends well and the Buffer goes on."""
    traffic, errors = Traffic(comm.size), []
    with open_buffer(comm, traffic) as buffer:
        handle = check(buffer, traffic).handle
        x, topk_idx, weights = traffic.inputs(comm.rank)
        half, y = x.astype(np.float16), traffic.received(comm.rank)[0].astype(np.float16)
        stream = cupy.cuda.get_current_stream()
        for call in (
            lambda: buffer.dispatch(x, topk_idx, weights, num_experts=traffic.num_experts),
            lambda: buffer.dispatch(half, topk_idx, num_experts=traffic.num_experts, num_worst_tokens=500),
            lambda: buffer.dispatch(half, handle=handle),
            lambda: buffer.combine(y, handle),
            lambda: cupyep.quantize_fp8(x, 5),
        ):
            stream.begin_capture()
            errors.append(outcome(call)[0])
            stream.end_capture()
        check(buffer, traffic)
    return errors


def test_lazy_work_under_capture(run_ranks):
    for errors in run_ranks(2, lazy_work):
        for error in errors:
            assert isinstance(error, cupyep.StateError) and "graph capture" in str(error), repr(error)


@on_a_stream
def pinned(comm):
    """Blocks that a graph uses are nobody else's until it is gone, whatever becomes of the arrays."""
    buffer, layer, traffics = open_layer(comm, {"num_nvl_bytes": 8 << 20})
    with buffer:
        recv, home, *_ = layer.received.recv_x, layer.home.combined_x
        recv_at, home_at, shapes = recv.data.ptr, home.data.ptr, (recv.shape, home.shape)
        del recv, home
        layer.received = layer.home = None
        gc.collect()
        others = fill(buffer) + [cupy.full(shapes[1], 3, np.float32) for _ in range(50)]
        for array in others:
            array[...] = 3
        assert all(
            not array.data.ptr <= at < array.data.ptr + array.nbytes for array in others for at in (recv_at, home_at)
        )
        for mine, other in zip((layer.x, layer.topk_idx, layer.weights), traffics[1].inputs(comm.rank), strict=True):
            cupy.copyto(mine, other)
        layer.stream.synchronize()
        comm.allgather(None)
        layer.graph.launch(layer.stream)
        layer.stream.synchronize()
        assert all(bool((array == 3).all()) for array in others)
        memory = cupy.cuda.UnownedMemory(home_at, int(np.prod(shapes[1])) * 4, None)
        combined = cupy.ndarray(shapes[1], np.float32, cupy.cuda.MemoryPointer(memory, 0))
        assert_same("combined_x", (combined,), traffics[1].combined(comm.rank, 2)[:1])
        del others
        before = buffer._backend._arena.largest
        del layer.graph
        gc.collect()
        deadline = time.monotonic() + 10
        while buffer._backend._arena.largest <= before and time.monotonic() < deadline:
            buffer.barrier().synchronize()
            buffer.empty(16, np.uint8)
            time.sleep(0.01)
        assert buffer._backend._arena.largest > before
        check(buffer, traffics[2])


def test_blocks_are_pinned_until_the_graph_is_gone(run_ranks):
    run_ranks(2, pinned)


def overlapping(comm):
    """A replay that is not ordered after an asynchronous call: an error record on all ranks, no corruption."""
    buffer, layer, traffics = open_layer(comm)
    handle = check(buffer, traffics[0]).handle
    buffer.dispatch(layer.x, handle=handle).event.synchronize()  # a shape's first use waits on the host
    try:
        if comm.rank == CULPRIT:
            busy(1.0)
        buffer.dispatch(layer.x, handle=handle, async_finish=True)
        if comm.rank != CULPRIT:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                layer.graph.launch(stream)
        return outcome(lambda: (cupy.cuda.Device().synchronize(), buffer.barrier().synchronize()))[0]
    finally:
        outcome(buffer.close)


def test_a_replay_beside_an_asynchronous_call():
    for error in threads(2, overlapping):
        assert isinstance(error, cupyep.CupyepError) and "two operations of one channel" in str(error), repr(error)
