"""The verbs on the GPU: count, push and pull kernels on a stream of the Buffer's own.

A dispatch launches COUNT and, back to back, PUSH into blocks for the worst case, or as large as the arena can give;
while rows are moving the host waits for the counts, cuts the exact views and gives the tails back. If some rank's block
turns out too small, COUNT tells all ranks and the PUSH behind it does nothing. When a shape is new, or the arena has to
grow, the counts are read first and PUSH follows with exact blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import cupy
import numpy as np
from cupy.cuda import runtime

from cupyep import model
from cupyep.abi import AbortKind, Operation, Verdict
from cupyep.backends.base import Capacity, Form, Shape, Tokens
from cupyep.backends.cuda import devices
from cupyep.backends.cuda.arena import Arena, Block
from cupyep.backends.cuda.arrays import asarray, plain
from cupyep.backends.cuda.blocks import Blocks, offsets, received
from cupyep.backends.cuda.kernels import Kernels
from cupyep.backends.cuda.launcher import CudaHandle, Launcher, Routing
from cupyep.backends.cuda.session import Session
from cupyep.backends.cuda.streams import CommStream, CudaEvent
from cupyep.comm import Communicator, LocalComm
from cupyep.config import BufferConfig
from cupyep.errors import CupyepError
from cupyep.layout import ControlLayout, RowLayout

T = TypeVar("T")
_ANY = 2**32 - 1  # capacity in COUNT of an arena that is yet to be sized
_abandoned: list[Any] = []  # what kernels of a broken group may still touch; never freed


class CudaBackend(Session):
    """One rank on a GPU."""

    name = "cuda"

    def __init__(self, comm: Communicator, config: BufferConfig, device: int | None, num_sms: int | None) -> None:
        super().__init__(comm, config)
        self._claim = devices.choose(comm, device, num_sms, config.timeout_s)
        self._device = self._claim.device
        self._machine, self._wanted_sms = devices.machine(self._device), dict[tuple[Operation, int, int], int]()
        self._launches = comm.duplicate() if isinstance(comm, LocalComm) else comm
        self._handle_id = 1  # of the next dispatch; equal on all ranks
        try:
            with cupy.cuda.Device(self._device):
                self._comm_stream, self._abort_stream = CommStream(), cupy.cuda.Stream(non_blocking=True)
                self._kernels: Kernels = self._together("load kernels", lambda: devices.load(self._device, comm.size))
                self._resize(self.capacity)
        except BaseException:
            devices.release(self._claim)
            raise
        cupy.cuda.Device(self._device).use()  # what the caller makes from now on lies where this rank can use it

    def _resize(self, capacity: Capacity) -> None:
        old = getattr(self, "_arena", None)
        initial, timeout_s = ControlLayout(self._comm.size).initial(), self._config.timeout_s
        self._arena = Arena(self._comm, self._device, initial, capacity.heap_bytes, timeout_s)
        self._blocks = Blocks(self._arena, self._comm_stream)
        self._launcher = Launcher(self._arena, self._kernels, self._comm, timeout_s, self._comm_stream.stream)
        self._comm.watch = self._launches.watch = self._launcher.check_abort
        if old is not None:
            self._comm_stream.stream.synchronize()
            old.close(collective=True)

    def _load(self, shape: Shape) -> None:
        self._together("load kernels", lambda: self._kernels.load(shape))

    def asarray(self, name: str, value: Any) -> cupy.ndarray:
        with cupy.cuda.Device(self._device):
            array = asarray(name, value)
        if array.size and array.device.id != self._device:
            raise ValueError(f"{name}: expected an array on the Buffer's GPU {self._device}, got GPU {array.device.id}")
        return array

    def asnumpy(self, value: Any) -> np.ndarray:
        return cupy.asnumpy(value)

    # dispatch

    def dispatch(self, tokens: Tokens, num_experts: int, form: Form, num_sms: int | None) -> tuple:
        handle_id, size, shape, num_tokens = self._handle_id, self._comm.size, tokens.shape, len(tokens.x)
        rows, sms = shape.rows, num_sms or self._default_sms(shape, shape.rows.num_topk)
        with self._operation() as current:
            tokens = tokens.map(plain)
            order, words = cupy.empty((num_tokens, size), np.int32), cupy.empty(2 + size, np.int32)

            def push(capacity: int, blocks: Any) -> None:
                routing = Routing(handle_id, num_experts, order, words, capacity)
                self._launcher.push(shape, routing, tokens, offsets(blocks), sms)

            early, capacity, free = shape in self._prepared, _ANY, self._arena.largest
            blocks: dict[str, Block] = {}
            if early:
                capacity = min(size * self.capacity.max_tokens_per_rank, rows.fitting(free))
                blocks = self._blocks.allocate(rows.parts(capacity), current) if capacity else {}
            with self._launching(Operation.COUNT, current):
                routing = Routing(handle_id, num_experts, order, words, capacity)
                self._launcher.count(shape, routing, tokens.topk_idx, self.capacity.max_tokens_per_rank, free)
                counted_event = self._comm_stream.record()
                if early:
                    push(capacity, blocks)
            self._host_wait(counted_event)
            try:
                counted = self._launcher.counted(shape, num_experts // size)
            except CupyepError:
                blocks.clear()  # whoever keeps the error must not keep them
                raise
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
            came = received(blocks, shape, num_recv)
            event = self._finish(current)
            came = _formed(came, form)
        handle = CudaHandle(
            num_tokens=num_tokens,
            num_topk=rows.num_topk,
            num_experts=num_experts,
            num_recv_tokens=num_recv,
            num_recv_tokens_per_rank=counted.rows,
            num_recv_tokens_per_expert=counted.experts,
            handle_id=handle_id,
            owner=self,
            routing=Routing(handle_id, num_experts, order, words, num_recv),
        )
        return came, handle, event, counted.bad_id

    def cached_dispatch(self, tokens: Tokens, handle: CudaHandle, form: Form, num_sms: int | None) -> tuple:
        shape, num_recv = tokens.shape, handle.num_recv_tokens
        sms = num_sms or self._default_sms(shape, handle.num_topk)
        with self._operation() as current:
            self._agree(shape, handle, current)
            tokens, blocks = tokens.map(plain), self._blocks.try_allocate(shape.rows.parts(num_recv), current)
            with self._launching(Operation.PUSH, current):
                self._launcher.push(shape, handle.routing, tokens, offsets(blocks), sms)
            came = received(self._granted(blocks), shape, num_recv)
            event = self._finish(current)
            return _formed(came, form), event

    # combine

    def combine(self, x: Any, handle: CudaHandle, topk_weights: Any, *, num_sms: int | None) -> tuple:
        with_weights = topk_weights is not None
        rows = RowLayout(x.shape[1] * x.itemsize, handle.num_topk, 0, with_weights)
        shape = Shape(Operation.PULL, x.shape[1], x.dtype, rows)
        sms = num_sms or self._default_sms(shape, handle.num_topk)
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
        if not isinstance(stream, cupy.cuda.Stream | cupy.cuda.ExternalStream):
            raise TypeError(f"stream: expected a cupy.cuda.Stream, got {type(stream).__name__}")
        self._arena.record_stream(array.data.ptr, stream)

    def _offset_of(self, array: cupy.ndarray) -> int | None:
        return self._arena.offset_of(array)

    def _peer_view(self, rank: int, offset: int, shape: tuple[int, ...], dtype: Any) -> cupy.ndarray:
        return self._arena.peer_view(rank, offset, shape, dtype)

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

    def _default_sms(self, shape: Shape, num_topk: int) -> int:
        """The model's SMs for rows of this kind, within the budget."""
        key = shape.operation, shape.rows.row_bytes, num_topk
        if key not in self._wanted_sms:
            self._wanted_sms[key] = model.num_sms(
                shape.rows.row_bytes,
                self._comm.size,
                verb=shape.operation.verb,
                num_topk=num_topk,
                ranks_per_device=self._claim.ranks_per_device,
                machine=self._machine,
            )
        return min(self._wanted_sms[key], self._claim.num_sms)

    @property
    def max_num_sms(self) -> int:
        return self._claim.num_sms

    def check(self) -> None:
        with cupy.cuda.Device(self._device):
            self._host_wait(self._comm_stream.record())
            self._launcher.check()
            self._launcher.check_abort()

    def abort(self) -> None:
        with cupy.cuda.Device(self._device):
            self._launcher.abort(AbortKind.RAISED, self._comm.rank, self._abort_stream)
            self._abort_stream.synchronize()

    def close(self, *, collective: bool) -> None:
        devices.release(self._claim)
        with cupy.cuda.Device(self._device):
            if not collective:
                self._let_kernels_leave()
                _abandoned.append((self._launcher, self._arena))
            self._arena.close(collective=collective)
        self._comm.watch = self._launches.watch = None  # or communicator, launcher and arena would be a cycle
        if collective:
            self._comm.free()


def _formed(came: Tokens, form: Form) -> Tokens:
    """What was received, as the caller wants it."""
    if form.copy:
        came = came.map(cupy.copy)
    if came.scales is not None and form.scales_order == "F":
        came = replace(came, scales=cupy.asfortranarray(came.scales))
    return came
