"""The verbs on the GPU: count, push and pull kernels on a stream of the Buffer's own.

A dispatch launches COUNT and, back to back, PUSH into blocks for the worst case, or as large as the arena can give;
while rows are moving the host waits for the counts, cuts the exact views and gives the tails back. If some rank's block
turns out too small, COUNT tells all ranks and the PUSH behind it does nothing. When a shape is new, or the arena has to
grow, the counts are read first and PUSH follows with exact blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import cupy
import numpy as np
from cupy.cuda import runtime

from cupyep.abi import AbortKind, Operation, Verdict
from cupyep.backends.base import Capacity, Shape
from cupyep.backends.cuda import devices
from cupyep.backends.cuda.arena import Arena, Block
from cupyep.backends.cuda.blocks import Blocks, offsets, received
from cupyep.backends.cuda.kernels import Kernels
from cupyep.backends.cuda.launcher import CudaHandle, Launcher, Routing
from cupyep.backends.cuda.low_latency import CudaLowLatency
from cupyep.backends.cuda.session import Session
from cupyep.backends.cuda.streams import CommStream, CudaEvent
from cupyep.comm import Communicator
from cupyep.config import BufferConfig
from cupyep.errors import PeerError
from cupyep.layout import ControlLayout, RowLayout

T = TypeVar("T")
_ANY = 2**32 - 1  # capacity in COUNT of an arena that is yet to be sized
_abandoned: list[Any] = []  # what kernels of a broken group may still touch; never freed


class CudaBackend(Session):
    """One rank on a GPU."""

    name = "cuda"

    def __init__(self, comm: Communicator, config: BufferConfig, device: int | None, num_sms: int | None) -> None:
        super().__init__(comm, config)
        self._device, self._max_num_sms = devices.choose(comm, device, num_sms, config.timeout_s)
        self._handle_id = 1  # of the next dispatch; equal on all ranks
        try:
            with cupy.cuda.Device(self._device):
                self._comm_stream, self._abort_stream = CommStream(), cupy.cuda.Stream(non_blocking=True)
                self._kernels: Kernels = self._together("load kernels", lambda: devices.load(self._device, comm.size))
                self._resize(self.capacity)
                if config.low_latency_mode:
                    self._low_latency = self._create_low_latency()
        except BaseException:
            devices.release(self._device, comm, self._max_num_sms)
            raise

    def _resize(self, capacity: Capacity) -> None:
        old = getattr(self, "_arena", None)
        initial, timeout_s = ControlLayout(self._comm.size).initial(), self._config.timeout_s
        self._arena = Arena(self._comm, self._device, initial, capacity.heap_bytes, timeout_s)
        self._blocks = Blocks(self._arena, self._comm_stream)
        self._launcher = Launcher(self._arena, self._kernels, self._comm, timeout_s, self._comm_stream.stream)
        self._comm.watch = self._check_abort
        if old is not None:
            self._comm_stream.stream.synchronize()
            old.close(collective=True)

    def _create_low_latency(self) -> CudaLowLatency:
        share = devices.whole_share(self._comm, self._device, self._config.timeout_s)
        with cupy.cuda.Device(self._device):
            return CudaLowLatency(
                self._comm, self._config, self._device, self._kernels, self._comm_stream, share, self._fail
            )

    def _load(self, shape: Shape) -> None:
        self._together("load kernels", lambda: self._kernels.load(shape))

    def asarray(self, name: str, value: Any) -> cupy.ndarray:
        with cupy.cuda.Device(self._device):
            if not isinstance(value, (cupy.ndarray, np.ndarray)) and hasattr(value, "__dlpack__"):
                return cupy.from_dlpack(value)
            if not hasattr(value, "__cuda_array_interface__") and np.asarray(value).dtype.kind in "OSU":
                raise TypeError(f"{name}: expected an array, got {type(value).__name__}")
            return cupy.asarray(value)

    def asnumpy(self, value: Any) -> np.ndarray:
        return cupy.asnumpy(value)

    # dispatch

    def dispatch(
        self, x: Any, topk_idx: Any, topk_weights: Any, num_experts: int, *, copy: bool, num_sms: int | None
    ) -> tuple:
        sms, handle_id, size = num_sms or self._max_num_sms, self._handle_id, self._comm.size
        rows = RowLayout(x.shape[1] * x.itemsize, topk_idx.shape[1], topk_idx.itemsize, topk_weights is not None)
        shape = Shape(Operation.PUSH, x.shape[1], x.dtype, rows)
        with self._operation() as current:
            x, topk_idx, topk_weights = (_plain(array) for array in (x, topk_idx, topk_weights))
            order, words = cupy.empty((len(x), size), np.int32), cupy.empty(2 + size, np.int32)

            def push(capacity: int, blocks: Any) -> None:
                routing = Routing(handle_id, num_experts, order, words, capacity)
                self._launcher.push(shape, routing, x, topk_idx, topk_weights, offsets(blocks), sms)

            early, capacity, free = shape in self._prepared, _ANY, self._arena.largest
            blocks: dict[str, Block] = {}
            if early:
                capacity = min(size * self.capacity.max_tokens_per_rank, rows.fitting(free))
                blocks = self._blocks.allocate(rows.parts(capacity), current) if capacity else {}
            with self._launching(Operation.COUNT, current):
                routing = Routing(handle_id, num_experts, order, words, capacity)
                self._launcher.count(shape, routing, topk_idx, self.capacity.max_tokens_per_rank, free)
                counted_event = self._comm_stream.record()
                if early:
                    push(capacity, blocks)
            self._host_wait(counted_event)
            counted = self._launcher.counted(shape, num_experts // size)
            num_recv, self._handle_id = sum(counted.rows), handle_id + 1
            if not early or counted.verdict == Verdict.GROW:
                blocks = {}  # of an arena that may be replaced now
                self.prepare(shape, counted.most_tokens)
                granted = self._blocks.try_allocate(rows.parts(num_recv), current)
                with self._launching(Operation.PUSH, current):
                    runtime.memsetAsync(words.data.ptr, 0, 4, self._comm_stream.stream.ptr)  # COUNT may have set skip
                    push(num_recv, granted)
                self._host_wait(self._comm_stream.record())  # a rank may have had no block: all ranks raise now
                self._launcher.check()
                assert isinstance(granted, dict)
                blocks = granted
            arrays = received(blocks, rows.parts(num_recv), shape, num_recv, topk_idx.dtype)
            event = self._finish(current)
            if copy:
                arrays = tuple(None if array is None else array.copy() for array in arrays)
        handle = CudaHandle(
            num_tokens=len(x),
            num_topk=topk_idx.shape[1],
            num_experts=num_experts,
            num_recv_tokens=num_recv,
            num_recv_tokens_per_rank=counted.rows,
            num_recv_tokens_per_expert=counted.experts,
            handle_id=handle_id,
            owner=self,
            routing=Routing(handle_id, num_experts, order, words, num_recv),
        )
        return *arrays, handle, event, counted.bad_id

    def cached_dispatch(self, x: Any, handle: CudaHandle, *, copy: bool, num_sms: int | None) -> tuple:
        sms, rows = num_sms or self._max_num_sms, RowLayout(x.shape[1] * x.itemsize)
        shape, num_recv = Shape(Operation.PUSH, x.shape[1], x.dtype, rows), handle.num_recv_tokens
        with self._operation() as current:
            self._agree(shape, handle, current)
            x, blocks = _plain(x), self._blocks.try_allocate(rows.parts(num_recv), current)
            with self._launching(Operation.PUSH, current):
                self._launcher.push(shape, handle.routing, x, None, None, offsets(blocks), sms)
            recv_x = received(self._granted(blocks), rows.parts(num_recv), shape, num_recv, None)[0]
            event = self._finish(current)
            return recv_x.copy() if copy else recv_x, event

    # combine

    def combine(self, x: Any, handle: CudaHandle, topk_weights: Any, *, num_sms: int | None) -> tuple:
        sms, with_weights = num_sms or self._max_num_sms, topk_weights is not None
        rows = RowLayout(x.shape[1] * x.itemsize, handle.num_topk, 0, with_weights)
        shape = Shape(Operation.PULL, x.shape[1], x.dtype, rows)
        with self._operation() as current:
            self._agree(shape, handle, current)
            where, staged = self._blocks.visible({"rows": x, "weights": topk_weights}, current)
            out = cupy.empty((handle.num_tokens, x.shape[1]), x.dtype)
            out_weights = cupy.empty((handle.num_tokens, handle.num_topk), np.float32) if with_weights else None
            with self._launching(Operation.PULL, current):
                self._launcher.pull(shape, handle.routing, out, out_weights, where, sms)
            self._granted(where)
            event = self._finish(current)
            del staged
        return out, out_weights, event

    def layout(self, topk_idx: Any, num_experts: int, *, strict: bool) -> tuple:
        with cupy.cuda.Device(self._device):
            size, num_local = self._comm.size, num_experts // self._comm.size
            bad = (topk_idx < -1) | (topk_idx >= num_experts)
            listed = (topk_idx >= 0) & ~bad
            if strict and bool(bad.any()):
                raise ValueError(f"topk_idx: expected ids in -1..{num_experts - 1}, got {int(topk_idx[bad][0])}")
            owners = cupy.where(listed, topk_idx // num_local, -1)
            in_rank = (owners[:, :, None] == cupy.arange(size)).any(axis=1)
            per_expert = cupy.bincount(topk_idx[listed].astype(np.int64), minlength=num_experts).astype(np.int32)
            event = CudaEvent(cupy.cuda.get_current_stream().record(), self._checked)
            return in_rank.sum(axis=0, dtype=np.int32), per_expert, in_rank, event

    def barrier(self) -> CudaEvent:
        with self._operation() as current:
            with self._launching(Operation.BARRIER, current):
                self._launcher.barrier()
            return self._finish(current)

    # memory

    def empty(self, shape: tuple[int, ...], dtype: Any) -> cupy.ndarray:
        with cupy.cuda.Device(self._device):
            return self._blocks.empty(shape, dtype, cupy.cuda.get_current_stream())

    @contextmanager
    def allocator(self) -> Iterator[None]:
        with cupy.cuda.using_allocator(self._blocks.malloc):
            yield

    def record_stream(self, array: Any, stream: Any) -> None:
        self._arena.record_stream(array.data.ptr, stream)

    def comm_stream(self) -> cupy.cuda.Stream:
        return self._comm_stream.stream

    def _agree(self, shape: Shape, handle: CudaHandle, current: Any) -> None:
        """Collective on a shape's first use: all ranks mean the same, then it is loaded."""
        if shape not in self._prepared:  # equal on all ranks, or their posts differ
            with self._launching(shape.operation, current):
                self._launcher.agree(shape, handle.routing)
            self._host_wait(self._comm_stream.record())
            self._launcher.check()
            self.prepare(shape)

    @property
    def max_num_sms(self) -> int:
        return self._max_num_sms

    def check(self) -> None:
        with cupy.cuda.Device(self._device):
            self._host_wait(self._comm_stream.record())
            self._launcher.check()
            if self._low_latency:
                runtime.deviceSynchronize()  # its kernels run on the caller's streams
            self._check_abort()

    def _check_abort(self) -> None:
        """Raises if a rank has left for good."""
        self._launcher.check_abort()
        if self._low_latency:
            self._low_latency.check()

    def _fail(self, error: PeerError) -> None:
        self.broken = error

    def abort(self) -> None:
        with cupy.cuda.Device(self._device):
            if self._low_latency:
                self._low_latency.abort()
            self._launcher.abort(AbortKind.RAISED, self._comm.rank, self._abort_stream)
            self._abort_stream.synchronize()

    def close(self, *, collective: bool) -> None:
        devices.release(self._device, self._comm, self._max_num_sms)
        with cupy.cuda.Device(self._device):
            if not collective:
                self._let_kernels_leave()
                _abandoned.append((self._launcher, self._arena, self._low_latency))
            if self._low_latency:
                self._low_latency.close(collective=collective)
            self._arena.close(collective=collective)
        if collective:
            self._comm.free()


def _plain(array: Any) -> Any:
    """What kernels read: C-contiguous and 16-byte aligned, a copy if need be."""
    if array is None or (array.flags.c_contiguous and array.data.ptr % 16 == 0):
        return array
    return array.copy(order="C")
