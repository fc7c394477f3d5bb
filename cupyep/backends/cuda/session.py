"""One operation on the GPU: in which order streams wait, where threads as ranks meet, and how errors come up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import cupy

from cupyep.abi import AbortKind, Operation
from cupyep.backends.base import Backend
from cupyep.backends.cuda.launcher import Launcher
from cupyep.backends.cuda.streams import CommStream, CudaEvent, check_rank_streams
from cupyep.comm import Communicator
from cupyep.errors import ArenaExhaustedError, PeerError, PeerTimeoutError

T = TypeVar("T")


class Session(Backend):
    """What the verbs of a CudaBackend have in common."""

    _device: int
    _comm_stream: CommStream
    _abort_stream: cupy.cuda.Stream
    _launcher: Launcher
    _launches: Communicator  # of threads: for meetings around launches alone, which nothing else may be taken for

    def _together(self, step: str, action: Callable[[], T]) -> T:
        """Collective: our own result of `action`, which must have succeeded on every rank."""
        result: list[T] = []
        self._comm.together(step, lambda: result.append(action()), timeout_s=self._config.timeout_s)
        return result[0]

    @contextmanager
    def _operation(self) -> Iterator[Any]:
        """The device and the caller's stream, unless something behind us went wrong."""
        with cupy.cuda.Device(self._device):
            self._launcher.check()
            yield cupy.cuda.get_current_stream()

    @contextmanager
    def _launching(self, operation: Operation, current: Any) -> Iterator[None]:
        """Launches that come after the caller's stream.

        Threads as ranks meet before and after: until all have launched, no rank may make a call that waits for the
        context (an allocation, a module load), because a kernel of another rank already waits for this rank's.
        """
        self._launcher.operation = operation
        check_rank_streams(self._meet(current.ptr))
        self._comm_stream.follow(current)
        yield
        self._meet(None)

    def _meet(self, value: Any) -> list[Any]:
        """Where ranks are threads: everybody's value. Who waits too long makes its record the verdict of all ranks."""
        if not self._comm.in_process or self._comm.size == 1:
            return []
        try:
            self._launcher.check_abort()  # a late rank learns here that the others have left
            return self._launches.allgather(value, operation="launch", timeout_s=self._config.timeout_s)
        except PeerError as error:
            kind = AbortKind.TIMEOUT if isinstance(error, PeerTimeoutError) else AbortKind.RAISED
            self._launcher.abort(kind, error.peer, self._abort_stream)
            self._abort_stream.synchronize()
            self._launcher.check_abort()
            raise

    def _host_wait(self, event: cupy.cuda.Event) -> None:
        """Waits without the GIL. The kernels have deadlines of their own; a thread that raised is noticed here."""
        if not self._comm.in_process:
            return event.synchronize()
        while not event.done:
            if failed := self._comm.failed_peer():
                self._launcher.abort(AbortKind.RAISED, failed[0], self._abort_stream)
                return event.synchronize()
            time.sleep(10e-6)

    def _finish(self, current: Any) -> CudaEvent:
        """The current stream goes on once the operation is complete."""
        event = self._comm_stream.record()
        current.wait_event(event)
        return CudaEvent(event, self._checked)

    def _checked(self) -> None:
        """Raises what the device has told; a peer's failure ends the group."""
        try:
            self._launcher.check()
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
