"""What a CUDA graph uses stays as it is until the graph is gone: blocks that were allocated under its capture."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import cupy

from cupyep.errors import StateError

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_SEMAPHORE_BYTES = 64  # room for a sem_t
_pinned: dict[int, Any] = {}  # by the address of a semaphore that CUDA posts when the graph is gone
_pinned_lock = threading.Lock()


def pin(stream: cupy.cuda.Stream, objects: Any) -> None:
    """Keeps `objects` until the graph that `stream` is being captured into, all its instances and their launches end.

    Source: CUDA user objects. The graph owns one whose destructor is sem_post: CUDA may call it in any thread, and when
    Python has ended. What it tells of is let go at the next call.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise StateError("graph capture: needs the package cuda-bindings, which is not installed") from error
    release_unused()
    _, _, graph, *_ = _checked(driver.cuStreamGetCaptureInfo(stream.ptr))
    semaphore = _libc.malloc(_SEMAPHORE_BYTES)
    _libc.sem_init(ctypes.c_void_p(semaphore), 0, 0)
    with _pinned_lock:
        _pinned[semaphore] = objects
    no_sync = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    destructor = driver.CUhostFn(ctypes.cast(_libc.sem_post, ctypes.c_void_p).value)
    (user_object,) = _checked(driver.cuUserObjectCreate(semaphore, destructor, 1, int(no_sync)))
    move = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    _checked(driver.cuGraphRetainUserObject(graph, user_object, 1, int(move)))


def release_unused() -> None:
    """Lets go of what only graphs used that are gone."""
    if not _pinned:
        return
    with _pinned_lock:  # ranks may be threads
        for semaphore in list(_pinned):
            if _libc.sem_trywait(ctypes.c_void_p(semaphore)) == 0:
                _pinned.pop(semaphore)
                _libc.free(ctypes.c_void_p(semaphore))


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = result
    if error != 0:
        raise StateError(f"graph capture: the CUDA driver refused it: {error!r}")
    return tuple(values)
