"""Which stream an operation runs on, what it waits for, and what waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy

from cupyep.errors import StateError
from cupyep.handle import EventOverlap


class CudaEvent(EventOverlap):
    """The end of an operation on the communication stream, or a place in another stream."""

    def __init__(self, event: cupy.cuda.Event, check: Any) -> None:
        self.event, self._check = event, check

    def wait_on(self, stream: cupy.cuda.Stream) -> None:
        """Orders what `stream` gets from now on behind it. The host does not wait."""
        stream.wait_event(self.event)

    def current_stream_wait(self) -> None:
        self.wait_on(cupy.cuda.get_current_stream())

    def synchronize(self) -> None:
        self.event.synchronize()
        self._check()


class CommStream:
    """The Buffer's own high-priority stream: after the caller's current stream, and before it again."""

    def __init__(self) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=-1)
        self._followed = cupy.cuda.Event(disable_timing=True)  # of `follow`, again and again
        self._kept: deque[tuple[cupy.cuda.Event, Any]] = deque()

    def begin(self, current: cupy.cuda.Stream, previous: Any) -> None:
        """What comes next here waits for `previous`, an event, or if there is none for what `current` was given."""
        while self._kept and not current.is_capturing() and self._kept[0][0].done:
            self._kept.popleft()
        if previous is None:
            self.follow(current)
        elif isinstance(previous, CudaEvent):
            previous.wait_on(self.stream)
        else:
            self.stream.wait_event(previous)

    def keep(self, event: cupy.cuda.Event, used: Any) -> None:
        """Holds `used`, what our kernels read and write, until `event` has come, as far as anybody looks."""
        self._kept.append((event, used))

    def follow(self, stream: cupy.cuda.Stream) -> None:
        """What comes next here waits for what `stream` has been given so far."""
        self._followed.record(stream)
        self.stream.wait_event(self._followed)  # what it stands for now; recording it anew does not change that

    def record(self) -> cupy.cuda.Event:
        """An event behind what was launched here so far."""
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event


class Behind:
    """Within it CuPy's current stream is `stream`; gives the caller's, `current`."""

    __slots__ = ("_current", "_stream")

    def __init__(self, stream: cupy.cuda.Stream, current: cupy.cuda.Stream) -> None:
        self._stream, self._current = stream, current

    def __enter__(self) -> Any:
        self._stream.__enter__()
        return self._current

    def __exit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)


def check_rank_streams(pointers: list[int]) -> None:
    """Threads as ranks: the null stream, or one stream of two ranks, would make a rank wait for itself."""
    if any(pointer in (0, 1, 2) for pointer in pointers):
        raise StateError("current stream: expected a stream of the rank's own in every thread, got a default stream")
    if len(set(pointers)) < len(pointers):
        raise StateError("current stream: expected a different stream in every rank's thread, got one shared by two")


@contextmanager
def rank_stream(rank: int) -> Iterator[None]:
    """The device and a non-blocking current stream for one thread of run_local."""
    with cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()), cupy.cuda.Stream(non_blocking=True):
        yield
