"""One rank on a GPU: its life, its memory, and the verbs that are not dispatch or combine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from cupyep.abi import AbortKind, Operation
from cupyep.backends.base import Capacity, Run
from cupyep.backends.cuda import devices
from cupyep.backends.cuda.arena import Arena
from cupyep.backends.cuda.arrays import asarray, aswritable
from cupyep.backends.cuda.blocks import Blocks
from cupyep.backends.cuda.combine import Combine
from cupyep.backends.cuda.dispatch import Dispatch
from cupyep.backends.cuda.experts import Experts
from cupyep.backends.cuda.kernels import Kernels
from cupyep.backends.cuda.launcher import Launcher
from cupyep.backends.cuda.low_latency import CudaLowLatency
from cupyep.backends.cuda.meetings import Meetings
from cupyep.backends.cuda.streams import CommStream, CudaEvent
from cupyep.backends.shapes import Shape
from cupyep.comm import Communicator
from cupyep.config import BufferConfig
from cupyep.errors import PeerError
from cupyep.layout import ControlLayout

_abandoned: list[Any] = []  # what kernels of a broken group may still touch; never freed


class CudaBackend(Dispatch, Combine):
    """One rank on a GPU."""

    name = "cuda"

    def __init__(self, comm: Communicator, config: BufferConfig, device: int | None, num_sms: int | None) -> None:
        super().__init__(comm, config)
        self._claim = devices.choose(comm, device, num_sms, config.timeout_s)
        self._device = self._claim.device
        self._machine, self._chosen_sms = devices.machine(self._device), dict[tuple[Shape, int], int]()
        try:
            with cupy.cuda.Device(self._device):
                self._comm_stream, self._meetings = CommStream(), Meetings(comm, config.timeout_s)
                self._kernels: Kernels = self._together("load kernels", lambda: devices.load(self._device, comm.size))
                self._resize(self.capacity)
                if config.low_latency_mode:
                    self._low_latency = self._create_low_latency()
        except BaseException:
            devices.release(self._claim)
            raise
        cupy.cuda.Device(self._device).use()  # what the caller makes from now on lies where this rank can use it

    def _resize(self, capacity: Capacity) -> None:
        old = getattr(self, "_arena", None)
        initial, timeout_s = ControlLayout(self._comm.size).initial(), self._config.timeout_s
        self._arena = Arena(self._comm, self._device, initial, capacity.heap_bytes, timeout_s)
        self._blocks = Blocks(self._arena, self._comm_stream)
        num_sms = cupy.cuda.Device(self._device).attributes["MultiProcessorCount"]
        self._experts = Experts(self._kernels, self._blocks, self._comm_stream.stream, num_sms)
        self._launcher = Launcher(self._arena, self._kernels, self._comm, timeout_s, self._comm_stream.stream)
        self._comm.watch = self._meetings.comm.watch = self._check_abort
        if old is not None:
            self._comm_stream.stream.synchronize()
            old.close(collective=True)

    def _create_low_latency(self) -> CudaLowLatency:
        with cupy.cuda.Device(self._device):
            return CudaLowLatency(
                self._comm, self._meetings, self._config, self._claim, self._kernels, self._comm_stream, self._fail
            )

    def _load(self, shape: Shape) -> None:
        self._together("load kernels", lambda: self._kernels.load(shape))

    def asarray(self, name: str, value: Any) -> cupy.ndarray:
        if not isinstance(value, cupy.ndarray):
            with cupy.cuda.Device(self._device):
                value = asarray(name, value)
        if value.data.device_id != self._device and value.size:
            found = value.data.device_id
            raise ValueError(f"{name}: expected an array on the Buffer's GPU {self._device}, got GPU {found}")
        return value

    def aswritable(self, name: str, value: Any) -> cupy.ndarray:
        with cupy.cuda.Device(self._device):
            return aswritable(name, value)

    def bounds(self, array: Any) -> tuple[int, int]:
        return cupy.byte_bounds(array)

    def event(self, value: Any) -> Any:
        if not isinstance(value, (CudaEvent, cupy.cuda.Event)):
            raise TypeError(
                f"previous_event: expected an EventOverlap or a cupy.cuda.Event, got {type(value).__name__}"
            )
        return value

    def asnumpy(self, value: Any) -> np.ndarray:
        return cupy.asnumpy(value)

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
        with cupy.cuda.Device(self._device), self._operation(Operation.BARRIER, Run()) as current:
            with self._launching(Operation.BARRIER, current):
                self._launcher.barrier()
            return self._finish(current, Run())

    def capture(self) -> CudaEvent:
        with cupy.cuda.Device(self._device):
            self._blocks.settle()  # what was released so far waits for no more than this event does
            event = cupy.cuda.Event(disable_timing=True)
            event.record(cupy.cuda.get_current_stream())
            return CudaEvent(event, self._checked)

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
            self._meetings.abort(self._launcher, AbortKind.RAISED, self._comm.rank)

    def dropped(self) -> None:
        devices.release(self._claim)  # its memory stays: peers may use it

    def close(self, *, collective: bool) -> None:
        devices.release(self._claim)
        try:
            with cupy.cuda.Device(self._device):
                if not collective:
                    self._let_kernels_leave()
                    _abandoned.append((self._launcher, self._arena, self._low_latency))
                if self._low_latency:
                    self._low_latency.close(collective=collective)
                self._arena.close(collective=collective)
        finally:
            self._comm.watch = self._meetings.comm.watch = None  # or communicator, launcher and arena would be a cycle
        if collective:
            self._comm.free()
