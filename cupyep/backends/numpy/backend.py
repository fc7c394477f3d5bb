"""The verbs on the CPU: arrays in shared memory, every result complete when the call returns.

A dispatch is two operations. COUNT exchanges how many rows go from each rank to each other, which gives every (token,
destination) its final row. PUSH posts the output blocks and copies the rows there. A combine is one operation, PULL:
inputs are posted, and each token's home rank adds the rows that it finds at its peers.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from cupyep.backends.base import Backend, Capacity, Form, Run
from cupyep.backends.numpy import routing
from cupyep.backends.numpy.arrays import asarray, aswritable
from cupyep.backends.numpy.experts import arrange, expand, reduce
from cupyep.backends.numpy.low_latency import NumpyLowLatency
from cupyep.backends.numpy.memory import create_arena
from cupyep.backends.numpy.operations import Operations
from cupyep.backends.numpy.routing import NumpyHandle
from cupyep.backends.shapes import Outputs, Shape, Tokens
from cupyep.comm import Communicator
from cupyep.config import BufferConfig
from cupyep.errors import ArenaExhaustedError
from cupyep.handle import EventOverlap
from cupyep.layout import ControlLayout


class NumpyBackend(Backend):
    """One rank on the CPU."""

    name = "numpy"

    def __init__(self, comm: Communicator, config: BufferConfig) -> None:
        super().__init__(comm, config)
        self._control = ControlLayout(comm.size)
        self._handle_ids = itertools.count(1)
        self._resize(self.capacity)
        if config.low_latency_mode:
            self._low_latency = self._create_low_latency()

    def _resize(self, capacity: Capacity) -> None:
        timeout_s = self._config.timeout_s
        self._arena = create_arena(self._comm, self._control.initial(), capacity.heap_bytes, timeout_s)
        self._operations = Operations(self._arena, self._control, self._comm, timeout_s)
        self._comm.watch = self.check

    def _load(self, shape: Shape) -> None:
        pass  # nothing to compile

    def _create_low_latency(self) -> NumpyLowLatency:
        return NumpyLowLatency(self._comm, self._config)

    def asarray(self, name: str, value: Any) -> np.ndarray:
        return asarray(name, value)

    def aswritable(self, name: str, value: Any) -> np.ndarray:
        return aswritable(name, value)

    def bounds(self, array: Any) -> tuple[int, int]:
        return np.lib.array_utils.byte_bounds(array)

    def asnumpy(self, value: Any) -> np.ndarray:
        return np.asarray(value)

    def dispatch(self, tokens: Tokens, num_experts: int, form: Form, run: Run) -> tuple:
        shape = tokens.shape(form.by_expert)
        route = routing.route(tokens.topk_idx, num_experts, self._comm.size)
        rank, fixed = self._comm.rank, form.num_worst_tokens
        matrix, experts, most_tokens = self._operations.count(shape, route, num_experts, form)
        self.prepare(shape, most_tokens, fixed)
        num_recv = int(matrix[:, rank].sum())
        for peer in np.flatnonzero(matrix.sum(0) > fixed) if fixed else ():  # all ranks see all counts
            raise ArenaExhaustedError(int(matrix[:, peer].sum()), fixed, int(peer), "num_worst_tokens")
        handle = NumpyHandle(
            num_tokens=len(tokens.x),
            num_topk=shape.rows.num_topk,
            num_experts=num_experts,
            rows=np.where(route.is_token_in_rank, route.order + matrix[:rank].sum(0), -1).astype(np.int32),
            num_recv_tokens=fixed or num_recv,
            num_recv_tokens_per_rank=[] if fixed else matrix[:, rank].tolist(),
            num_recv_tokens_per_expert=[] if fixed else experts.tolist(),
            recv_count=np.array([num_recv], np.int32),
            recv_count_per_expert=experts.astype(np.int32),
            handle_id=next(self._handle_ids),
            owner=self,
        )
        handle.rows.flags.writeable = False
        received = self._operations.push(shape, tokens, handle)
        received.topk_idx[num_recv:] = -1
        if form.by_expert:
            handle = replace(handle, expert_rows=arrange(received.topk_idx, handle.recv_count_per_expert, form))
        return _formed(received, form, handle), handle, EventOverlap(), route.bad_id

    def cached_dispatch(self, tokens: Tokens, handle: NumpyHandle, form: Form, run: Run) -> tuple:
        shape = tokens.shape(handle.expert_rows is not None)
        self._agree(shape, handle)
        received = self._operations.push(shape, tokens, handle)
        return _formed(received, form, handle), EventOverlap()

    def combine(self, outputs: Outputs, handle: NumpyHandle, out: Any, run: Run) -> tuple:
        shape = outputs.shape(handle.num_topk)
        self._agree(shape, handle)
        if handle.expert_rows is not None:
            rows = reduce(outputs.x, handle.expert_rows, outputs.topk_weights, shape.dtype)
            outputs = Outputs(rows, bias=outputs.bias)
        return *self._operations.pull(shape, outputs, handle, out), EventOverlap()

    def _agree(self, shape: Shape, handle: NumpyHandle) -> None:
        if shape not in self._prepared:  # equal on all ranks, or their posts differ
            self._operations.agree(shape, handle)
            self.prepare(shape)

    def layout(self, topk_idx: Any, num_experts: int, *, strict: bool) -> tuple:
        route = routing.route(topk_idx, num_experts, self._comm.size)
        if strict and route.bad_id is not None:
            raise ValueError(f"topk_idx: expected ids in -1..{num_experts - 1}, got {route.bad_id}")
        return route.num_tokens_per_rank, route.num_tokens_per_expert, route.is_token_in_rank, EventOverlap()

    def barrier(self) -> EventOverlap:
        self._operations.barrier()
        return EventOverlap()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        dtype = np.dtype(dtype)
        return self._arena.block(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def _offset_of(self, array: np.ndarray) -> int | None:
        return self._arena.offset_of(array)

    def _peer_view(self, rank: int, offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        return self._arena.memories[rank][offset : offset + num_bytes].view(dtype).reshape(shape)

    def record_stream(self, array: Any, stream: Any) -> None:
        pass  # operations are complete when they return

    def check(self) -> None:
        self._operations.check()
        if self._low_latency:
            self._low_latency.check()

    def abort(self) -> None:
        self._operations.abort()
        if self._low_latency:
            self._low_latency.abort()

    def close(self, *, collective: bool) -> None:
        if self._low_latency:
            self._low_latency.close(collective=collective)
        if collective:
            self._comm.free()
        del self._operations, self._arena  # arrays that outlive us keep their arena


def _formed(received: Tokens, form: Form, handle: NumpyHandle) -> Tokens:
    """What was received, as the caller wants it."""
    if handle.expert_rows is not None:
        parts = [
            None if part is None else expand(part, handle.expert_rows, handle.recv_count_per_expert, form.zero_gaps)
            for part in (received.x, received.scales)
        ]
        received = received._replace(x=parts[0], scales=parts[1])
    if form.copy:
        received = received.map(np.copy)
    if received.scales is not None and form.scales_order == "F":
        received = received._replace(scales=np.asfortranarray(received.scales))
    return received
