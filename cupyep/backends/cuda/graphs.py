"""What a CUDA graph uses stays as it is until the graph is gone: blocks that were allocated under its capture."""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from typing import Any

import cupy

from cupyep.errors import StateError

_pinned: dict[int, Any] = {}  # by the number that CUDA hands back
_numbers = itertools.count(1)
_released: deque[int] = deque()


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _release(number: int) -> None:
    """Called by CUDA in a thread of its own, where no CUDA call is allowed: only takes a note."""
    _released.append(number)


def pin(stream: cupy.cuda.Stream, objects: Any) -> None:
    """Keeps `objects` until the graph that `stream` is being captured into, all its instances and their launches end.

    Source: CUDA user objects. The graph owns one that names the objects; they are let go at the next call after its
    destructor has run.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise StateError("graph capture: needs the package cuda-bindings, which is not installed") from error
    release_unused()
    _, _, graph, *_ = _checked(driver.cuStreamGetCaptureInfo(stream.ptr))
    number = next(_numbers)
    _pinned[number] = objects
    no_sync = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    destructor = driver.CUhostFn(ctypes.cast(_release, ctypes.c_void_p).value)
    (user_object,) = _checked(driver.cuUserObjectCreate(number, destructor, 1, int(no_sync)))
    move = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    _checked(driver.cuGraphRetainUserObject(graph, user_object, 1, int(move)))


def release_unused() -> None:
    """Lets go of what only graphs used that are gone."""
    while _released:
        _pinned.pop(_released.popleft(), None)


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = result
    if error != 0:
        raise StateError(f"graph capture: the CUDA driver refused it: {error!r}")
    return tuple(values)
