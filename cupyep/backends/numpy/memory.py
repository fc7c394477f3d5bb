"""Memory that all CPU ranks see: mmap'ed files between processes, plain arrays between threads.

A file has mode 0600 and loses its name once every rank has mapped it: from then on nothing is left behind even if all
ranks are killed. Files grow on demand: a heap that is never touched costs nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cupyep import env
from cupyep.backends.freelist import FreeList
from cupyep.comm import Communicator
from cupyep.comm.host import check_same_host
from cupyep.errors import ArenaExhaustedError
from cupyep.layout import ALIGNMENT

_PAGE = mmap.PAGESIZE


class Arena:
    """One rank's arena and its view of all others.

    Attributes:
        memories: every rank's arena as uint8, by rank; `memories[rank]` is our own.
        heap: free list over our own arena, behind the control block.
    """

    def __init__(
        self, memories: list[np.ndarray], rank: int, control_bytes: int, files: list[int], lock: threading.Lock | None
    ):
        self.memories, self._rank = memories, rank
        self._files = files  # descriptors by rank, empty in process; kept for locks and reservations
        self._lock = lock
        self.heap = FreeList(control_bytes, memories[rank].nbytes, rank)
        self.own = memories[rank]
        self.address = self.own.ctypes.data

    def __del__(self) -> None:
        for file in self._files:
            os.close(file)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Excludes all other ranks: stands in for the compare-and-swap that NumPy lacks. Used on the abort path only.

        A rank that was stopped while it held the lock delays the others by a second, no more.
        """
        deadline = time.monotonic() + 1
        if self._lock is not None:
            held = self._lock.acquire(timeout=1)
            try:
                yield
            finally:
                if held:
                    self._lock.release()
            return
        while True:
            try:
                fcntl.flock(self._files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
        try:
            yield
        finally:
            fcntl.flock(self._files[0], fcntl.LOCK_UN)

    def block(self, num_bytes: int) -> np.ndarray:
        """`num_bytes` of our own heap as uint8; the block goes back when the last view of it dies."""
        offset, size = self.heap.alloc(num_bytes)
        if self._files:
            try:
                os.posix_fallocate(self._files[self._rank], offset, size)  # else a full file system means SIGBUS
            except OSError as error:
                self.heap.free(offset, size)
                stat, where = os.fstatvfs(self._files[self._rank]), f"free bytes of {env.shm_dir()} (CUPYEP_SHM_DIR)"
                raise ArenaExhaustedError(size, stat.f_bavail * stat.f_frsize, self._rank, where) from error
        block: np.ndarray = np.asarray(_Block(self, offset, size))
        if env.poison():
            block[:] = 0xFF
        return block[:num_bytes]

    def offset_of(self, array: np.ndarray) -> int | None:
        """Where a contiguous `array` lies in our own arena, or None."""
        offset = array.ctypes.data - self.address
        inside = offset >= 0 and offset + array.nbytes <= self.own.nbytes
        return offset if inside and array.flags.c_contiguous else None


class _Block:
    """Owner of one heap block: the arrays over it keep it alive, and it keeps the arena alive."""

    def __init__(self, arena: Arena, offset: int, size: int) -> None:
        self._arena, self._range = arena, (offset, size)
        self.__array_interface__ = {
            "data": (arena.address + offset, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._arena.heap.released.append(self._range)  # drained by the next alloc; no lock here


def create_arena(comm: Communicator, initial: np.ndarray, heap_bytes: int, timeout_s: float | None) -> Arena:
    """Collective: an arena of control block + heap on every rank, mapped by every rank. Sizes may not differ.

    `initial`: the control block's bytes, which every rank sees before any rank returns.
    """
    control_bytes = initial.nbytes
    num_bytes = -(-(control_bytes + heap_bytes) // _PAGE) * _PAGE
    if comm.in_process:
        return _create_private(comm, num_bytes, initial, timeout_s)
    check_same_host(comm, timeout_s)
    path = env.shm_dir() / f"cupyep-{os.getpid()}-{secrets.token_hex(8)}"
    files: list[int] = []

    def create() -> Path:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            files.append(descriptor)
            os.ftruncate(descriptor, num_bytes)
            os.posix_fallocate(descriptor, 0, control_bytes)
            os.pwrite(descriptor, initial.tobytes(), 0)
        except OSError as error:
            hint = f"{error.strerror}: shared memory of {num_bytes:,} bytes; CUPYEP_SHM_DIR names another folder"
            raise OSError(error.errno, hint, str(path.parent)) from error
        return path

    def attach() -> list[np.ndarray]:
        own = files.pop()
        for rank, name in enumerate(paths):
            files.append(own if rank == comm.rank else os.open(name, os.O_RDWR | os.O_CLOEXEC))
        return [np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8) for descriptor in files]

    try:
        paths = comm.together("create arena", create, timeout_s=timeout_s)
        memories: list[np.ndarray] = []
        comm.together("map arena", lambda: memories.extend(attach()), timeout_s=timeout_s)
    except BaseException:
        for descriptor in files:
            os.close(descriptor)
        raise
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it was never made
            path.unlink()
    return Arena(memories, comm.rank, control_bytes, files, None)


def _create_private(comm: Communicator, num_bytes: int, initial: np.ndarray, timeout_s: float | None) -> Arena:
    def create() -> tuple[np.ndarray, threading.Lock]:
        try:
            raw = np.empty(num_bytes + ALIGNMENT, np.uint8)  # not touched: the heap costs nothing until it is used
        except (MemoryError, ValueError) as error:  # more than there is; more than can be counted
            raise ArenaExhaustedError(num_bytes, 0, comm.rank) from error
        start = -raw.ctypes.data % ALIGNMENT
        raw[start : start + initial.nbytes] = initial
        return raw[start : start + num_bytes], threading.Lock()

    everyone = comm.together("create arena", create, timeout_s=timeout_s)
    return Arena([memory for memory, _ in everyone], comm.rank, initial.nbytes, [], everyone[0][1])
