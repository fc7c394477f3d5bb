"""One operation on the GPU: in which order streams wait, and how errors come up."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import cupy

from cupyep import model
from cupyep.abi import AbortKind, Operation
from cupyep.backends.base import Backend, Run
from cupyep.backends.cuda.arena import Arena
from cupyep.backends.cuda.blocks import Blocks
from cupyep.backends.cuda.devices import Claim
from cupyep.backends.cuda.experts import Experts
from cupyep.backends.cuda.launcher import CudaHandle, Launcher
from cupyep.backends.cuda.meetings import Meetings
from cupyep.backends.cuda.streams import Behind, CommStream, CudaEvent
from cupyep.backends.shapes import Shape
from cupyep.errors import ArenaExhaustedError, PeerError, StateError

T = TypeVar("T")


class Session(Backend):
    """What the verbs of a CudaBackend have in common."""

    _device: int
    _claim: Claim
    _machine: model.Machine
    _chosen_sms: dict[tuple[Shape, int], int]
    _arena: Arena
    _blocks: Blocks
    _comm_stream: CommStream
    _experts: Experts
    _launcher: Launcher
    _meetings: Meetings

    def _together(self, step: str, action: Callable[[], T]) -> T:
        """Collective: our own result of `action`, which must have succeeded on every rank."""
        result: list[T] = []
        self._comm.together(step, lambda: result.append(action()), timeout_s=self._config.timeout_s)
        return result[0]

    def _operation(self, operation: Operation, run: Run, not_captured: str = "") -> Behind:
        """Gives the caller's stream. Within, CuPy's current one is ours, which goes on after the caller's or an event.

        On our device. Raises what went wrong behind us; StateError under graph capture if there is a reason against it.
        """
        current = cupy.cuda.get_current_stream()
        if not_captured and current.is_capturing():
            raise StateError(f"{operation.verb}: under graph capture {not_captured}")
        self._launcher.check()
        if run.previous_event is None:
            self._blocks.settle(current)  # before our stream follows it, so that once is enough
        self._comm_stream.begin(current, run.previous_event)
        return Behind(self._comm_stream.stream, current)

    _not_loaded = "its shape must have been used or prepared, because agreeing and loading take the host"

    @property
    def max_num_sms(self) -> int:
        return self._claim.num_sms

    def _num_sms(self, run: Run, shape: Shape, num_topk: int) -> int:
        """The caller's SMs, or the model's for rows of this kind, within the budget."""
        if run.num_sms:
            return run.num_sms
        if (chosen := self._chosen_sms.get((shape, num_topk))) is None:
            wanted = model.num_sms(
                shape.rows.row_bytes,
                self._comm.size,
                verb=shape.operation.verb,
                num_topk=num_topk,
                ranks_per_device=self._claim.ranks_per_device,
                machine=self._machine,
            )
            chosen = self._chosen_sms[shape, num_topk] = min(wanted, self._claim.num_sms)
        return chosen

    def _launching(self, operation: Operation, current: Any) -> AbstractContextManager[None]:
        """Launches of one operation."""
        self._launcher.operation = operation
        return self._meetings.around(self._launcher, current)

    def _agree(self, shape: Shape, handle: CudaHandle, current: Any) -> None:
        """Collective on a shape's first use, equal on all ranks, or their posts differ: then it is loaded."""
        with self._launching(shape.operation, current):
            self._launcher.agree(shape, handle.routing)
        self._host_wait(self._comm_stream.record())
        self._launcher.check()
        self.prepare(shape)

    def _host_wait(self, event: cupy.cuda.Event) -> None:
        """Waits without the GIL. The kernels have deadlines of their own; a thread that raised is noticed here."""
        if not self._comm.in_process:
            return event.synchronize()
        while not event.done:
            if failed := self._comm.failed_peer():
                self._meetings.abort(self._launcher, AbortKind.RAISED, failed[0])
                return event.synchronize()
            time.sleep(10e-6)

    def _finish(self, current: Any, run: Run, used: Any = None) -> CudaEvent:
        """The caller's stream goes on once the operation is complete, or at once: then `used` is kept until it is."""
        event = self._comm_stream.record()
        if not run.async_finish:
            current.wait_event(event)
        elif not current.is_capturing():
            self._comm_stream.keep(event, used)
        return CudaEvent(event, self._checked)

    def _checked(self) -> None:
        """Raises what the device has told; a peer's failure ends the group."""
        try:
            self._launcher.check()
            self._launcher.check_ids()
        except PeerError as error:
            self.broken = error
            raise

    def _granted(self, blocks: T | ArenaExhaustedError) -> T:
        """`blocks`, which have been posted. If there were none, raises what all ranks raise, once all know it."""
        if isinstance(blocks, ArenaExhaustedError):
            self._host_wait(self._comm_stream.record())
            self._launcher.check()
            raise blocks
        return blocks

    def _let_kernels_leave(self) -> None:
        """After an abort our kernels leave by themselves; peers' memory stays mapped until they have."""
        event, deadline = self._comm_stream.record(), time.monotonic() + 5
        while not event.done and time.monotonic() < deadline:
            time.sleep(0.001)
