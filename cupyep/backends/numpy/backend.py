"""The verbs on the CPU: arrays in shared memory, every result complete when the call returns.

A dispatch is two operations. COUNT exchanges how many rows go from each rank to each other, which gives every (token,
destination) its final row. PUSH posts the output blocks and copies the rows there. A combine is one operation, PULL:
inputs are posted, and each token's home rank adds the rows that it finds at its peers.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from cupyep.abi import Operation
from cupyep.backends.base import Backend, Capacity, CompletedEvent, Shape
from cupyep.backends.numpy import routing
from cupyep.backends.numpy.low_latency import NumpyLowLatency
from cupyep.backends.numpy.memory import create_arena
from cupyep.backends.numpy.operations import Operations
from cupyep.backends.numpy.routing import NumpyHandle
from cupyep.comm import Communicator
from cupyep.config import BufferConfig
from cupyep.layout import ControlLayout, RowLayout


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
        if hasattr(value, "__cuda_array_interface__"):
            raise TypeError(f"{name}: expected a CPU array on the numpy backend, got {type(value).__name__} on a GPU")
        if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
        array = np.asarray(value)
        if array.dtype.kind in "OSU":
            raise TypeError(f"{name}: expected an array, got {type(value).__name__}")
        return array

    def asnumpy(self, value: Any) -> np.ndarray:
        return np.asarray(value)

    def dispatch(
        self, x: Any, topk_idx: Any, topk_weights: Any, num_experts: int, *, copy: bool, num_sms: int | None
    ) -> tuple:
        rows = RowLayout(x.shape[1] * x.itemsize, topk_idx.shape[1], topk_idx.itemsize, topk_weights is not None)
        shape = Shape(Operation.PUSH, x.shape[1], x.dtype, rows)
        route = routing.route(topk_idx, num_experts, self._comm.size)
        matrix, experts, most_tokens = self._operations.count(shape, route, num_experts)
        self.prepare(shape, most_tokens)
        rank = self._comm.rank
        handle = NumpyHandle(
            num_tokens=len(x),
            num_topk=topk_idx.shape[1],
            num_experts=num_experts,
            rows=np.where(route.is_token_in_rank, route.order + matrix[:rank].sum(0), -1).astype(np.int32),
            num_recv_tokens=int(matrix[:, rank].sum()),
            num_recv_tokens_per_rank=matrix[:, rank].tolist(),
            num_recv_tokens_per_expert=experts.tolist(),
            handle_id=next(self._handle_ids),
            owner=self,
        )
        handle.rows.flags.writeable = False
        received = self._operations.push(shape, x, topk_idx, topk_weights, handle)
        if copy:
            received = tuple(None if array is None else array.copy() for array in received)
        return *received, handle, CompletedEvent(), route.bad_id

    def cached_dispatch(self, x: Any, handle: NumpyHandle, *, copy: bool, num_sms: int | None) -> tuple:
        shape = Shape(Operation.PUSH, x.shape[1], x.dtype, RowLayout(x.shape[1] * x.itemsize))
        self._agree(shape, handle)
        recv_x = self._operations.push(shape, x, None, None, handle)[0]
        return recv_x.copy() if copy else recv_x, CompletedEvent()

    def combine(self, x: Any, handle: NumpyHandle, topk_weights: Any, *, num_sms: int | None) -> tuple:
        with_weights = topk_weights is not None
        rows = RowLayout(x.shape[1] * x.itemsize, handle.num_topk, 0, with_weights)
        shape = Shape(Operation.PULL, x.shape[1], x.dtype, rows)
        self._agree(shape, handle)
        return *self._operations.pull(shape, x, topk_weights, handle), CompletedEvent()

    def _agree(self, shape: Shape, handle: NumpyHandle) -> None:
        if shape not in self._prepared:  # equal on all ranks, or their posts differ
            self._operations.agree(shape, handle)
            self.prepare(shape)

    def layout(self, topk_idx: Any, num_experts: int, *, strict: bool) -> tuple:
        route = routing.route(topk_idx, num_experts, self._comm.size)
        if strict and route.bad_id is not None:
            raise ValueError(f"topk_idx: expected ids in -1..{num_experts - 1}, got {route.bad_id}")
        return route.num_tokens_per_rank, route.num_tokens_per_expert, route.is_token_in_rank, CompletedEvent()

    def barrier(self) -> CompletedEvent:
        self._operations.barrier()
        return CompletedEvent()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        dtype = np.dtype(dtype)
        return self._arena.block(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)

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
            self._comm.barrier(operation="close", timeout_s=self._config.timeout_s)
            self._comm.free()
        del self._operations, self._arena  # arrays that outlive us keep their arena
