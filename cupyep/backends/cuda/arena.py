"""A rank's GPU memory that its peers can reach: one cudaMalloc block, exported once, sub-allocated on the host."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from cupyep.backends.freelist import FreeList
from cupyep.comm import Communicator
from cupyep.errors import ArenaExhaustedError, TopologyError
from cupyep.layout import align

_retired: list[tuple[int, int, Any]] = []  # (device, address, blocks) of closed arenas whose arrays are still alive
_retired_lock = threading.Lock()


class Arena:
    """One rank's arena and the addresses of all others. Creation and close are collective.

    Attributes: address, num_bytes; addresses (by rank); peers (the same as a device array, for the kernels).
    """

    def __init__(
        self, comm: Communicator, device: int, initial: np.ndarray, heap_bytes: int, timeout_s: float | None
    ) -> None:
        """`initial`: the control block's bytes, which every rank sees before any rank returns."""
        free_retired()
        self._comm, self._device, self._timeout_s = comm, device, timeout_s
        self.num_bytes = align(align(initial.nbytes) + align(heap_bytes), 1 << 21)  # IPC exports whole allocations
        self.address, self._opened = 0, {}  # type: int, dict[int, int]
        try:
            exported = comm.together("create arena", lambda: self._create(initial), timeout_s=timeout_s)
            comm.together("open peers' arenas", lambda: self._open(exported), timeout_s=timeout_s)
        except BaseException:
            self._close_opened()
            if self.address:
                runtime.free(self.address)  # nobody has used it: creation did not complete anywhere
            raise
        self.addresses = [self._opened.get(rank, self.address) for rank in range(comm.size)]
        self.peers = cupy.array(self.addresses, dtype=cupy.uint64)
        start = align(initial.nbytes)
        self.heap = FreeList(start, start + align(heap_bytes), comm.rank)
        self.released: deque[tuple[int, int, Any, set[int]]] = deque()  # see Block.__del__
        self._returning: list[Any] = []  # memory of the pool; see take_waiting
        self.live: dict[int, tuple[weakref.ref[Block], set[int]]] = {}  # by offset: a block, its streams; until drain
        self._adopted: dict[int, tuple[weakref.ref[Block], set[int]]] = {}  # the same of the pool's; do not keep us
        self.waiting: set[int] = set()  # streams of released blocks, for whoever reuses them
        self._streams: dict[int, Any] = {}  # by address; see remember

    def _create(self, initial: np.ndarray) -> tuple[int, int, bytes]:
        try:
            self.address = runtime.malloc(self.num_bytes)
        except runtime.CUDARuntimeError as error:
            raise ArenaExhaustedError(self.num_bytes, runtime.memGetInfo()[0], self._comm.rank) from error
        runtime.memcpy(self.address, initial.ctypes.data, initial.nbytes, runtime.memcpyHostToDevice)
        runtime.deviceSynchronize()
        return self._device, self.address, b"" if self._comm.in_process else runtime.ipcGetMemHandle(self.address)

    def _open(self, exported: list[tuple[int, int, bytes]]) -> None:
        for rank, (device, address, handle) in enumerate(exported):
            if rank == self._comm.rank:
                continue
            try:
                if self._comm.in_process:
                    if device != self._device:
                        enable_peer_access(self._device, device)
                    self._opened[rank] = address
                else:
                    self._opened[rank] = runtime.ipcOpenMemHandle(handle)
            except runtime.CUDARuntimeError as error:
                matrix: list[list[str | None]] = [[None] * self._comm.size for _ in range(self._comm.size)]
                matrix[self._comm.rank][rank] = str(error)
                raise TopologyError("a rank cannot open a peer's memory", matrix) from error

    def block(self, num_bytes: int, stream: Any) -> Block:
        """A heap block for use on `stream`; it goes back when its last array dies. Raises ArenaExhaustedError.

        After `drain`, which takes back what was released.
        """
        offset, size = self.heap.alloc(num_bytes)
        block = Block(self, offset, size, self.remember(stream))
        self.live[offset] = weakref.ref(block), block.streams
        return block

    def poison(self, blocks: Iterable[Block]) -> None:
        """Fills blocks with 0xFF bytes."""
        runtime.deviceSynchronize()  # earlier users of this memory
        for block in blocks:
            runtime.memset(block.address, 0xFF, block.size)
        runtime.deviceSynchronize()

    def adopt(self, memory: cupy.cuda.MemoryPointer, num_bytes: int, stream: Any) -> Block:
        """Memory of CuPy's pool as a block for use on `stream`: it goes back in the way that heap blocks do."""
        block = Block(self, memory.ptr - self.address, num_bytes, self.remember(stream), memory)
        self._adopted[block.offset] = weakref.ref(block), block.streams
        return block

    def remember(self, stream: Any) -> int:
        """Keeps `stream` for as long as a block may have to wait for it; returns its address, which blocks hold.

        A block must not hold the stream itself: when both die in one garbage cycle, the stream is destroyed first.
        """
        self._streams[stream.ptr] = stream
        return stream.ptr

    def take_waiting(self) -> list[Any]:
        """The streams that released blocks were used on. The caller waits for them before it allocates anything."""
        if not self.waiting:
            return []
        self._returning.clear()
        taken, self.waiting = self.waiting, set()
        streams = [self._streams[address] for address in taken]
        for address in taken.difference(*[used for _, used in self._borrowed()]):
            del self._streams[address]  # no block is left that may have to wait for it
        return streams

    @property
    def largest(self) -> int:
        """Bytes of the largest block that could be had now."""
        self.drain()
        return self.heap.largest

    def drain(self) -> None:
        """Takes back the blocks that finalisers released; what used them is noted in `waiting`."""
        while self.released:
            offset, size, memory, streams = self.released.popleft()
            self.waiting |= streams
            if memory is None:
                self.live.pop(offset, None)
                self.heap.free(offset, size)
            else:
                self._adopted.pop(offset, None)
                self._returning.append(memory)

    def _borrowed(self) -> list[tuple[weakref.ref[Block], set[int]]]:
        return [*self.live.values(), *self._adopted.values()]

    def record_stream(self, address: int, stream: Any) -> None:
        """The block that holds `address` waits for `stream` before it is reused. ValueError if none does."""
        for reference, _ in self._borrowed():
            block = reference()
            if block is not None and 0 <= address - block.address < block.size:
                block.streams.add(self.remember(stream))
                return
        raise ValueError("array: expected one that this Buffer made, got memory from elsewhere")

    def offset_of(self, array: cupy.ndarray) -> int | None:
        """Where a contiguous `array` lies in this arena, or None."""
        offset = array.data.ptr - self.address
        inside = offset >= 0 and offset + array.nbytes <= self.num_bytes
        return offset if inside and array.flags.c_contiguous else None

    def peer_view(self, rank: int, offset: int, shape: tuple[int, ...], dtype: Any) -> cupy.ndarray:
        """An array over a peer's arena; valid until close."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        memory = cupy.cuda.UnownedMemory(self.addresses[rank] + offset, num_bytes, self, self._device)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def close(self, *, collective: bool) -> None:
        """Frees the memory, once its last array is gone. After an error a peer may still write: then it is kept."""
        self._close_opened()
        if not collective:
            return  # a documented leak: an arena that a peer has not given up is never freed
        self._comm.barrier(operation="close", timeout_s=self._timeout_s)  # nobody has it open any more
        with _retired_lock:
            _retired.append((self._device, self.address, self))
        free_retired()

    def _close_opened(self) -> None:
        opened, self._opened = self._opened, {}
        for address in opened.values():
            if not self._comm.in_process:
                runtime.ipcCloseMemHandle(address)


class Block:
    """Owner of one heap block, or of `memory` of the pool. Its finaliser makes no CUDA call: it may run anywhere."""

    __slots__ = ("__weakref__", "_arena", "_memory", "offset", "size", "streams")

    def __init__(self, arena: Arena, offset: int, size: int, stream: int, memory: Any = None) -> None:
        self._arena, self.offset, self.size, self.streams, self._memory = arena, offset, size, {stream}, memory

    @property
    def address(self) -> int:
        return self._arena.address + self.offset

    def trim(self, num_bytes: int) -> None:
        """Gives the tail back at once: nothing has been, or will be, written there."""
        keep = align(max(num_bytes, 1))
        if keep < self.size:
            self._arena.heap.free(self.offset + keep, self.size - keep)
            self.size = keep

    def array(self, shape: tuple[int, ...], dtype: Any, order: str = "C") -> cupy.ndarray:
        """An array over the block's start; it and its views keep the block."""
        memory = cupy.cuda.UnownedMemory(self.address, self.size, self, self._arena._device)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), None, order)

    def __del__(self) -> None:
        self._arena.released.append((self.offset, self.size, self._memory, self.streams))


def abort_word(address: int) -> int:
    """The abort word of the arena at `address`, as the device has it now; 0: nobody has left."""
    word = np.zeros(1, np.uint64)
    runtime.memcpy(word.ctypes.data, address, 8, runtime.memcpyDeviceToHost)  # ControlLayout.abort: it comes first
    return int(word[0])


def free_retired() -> None:
    """Frees the closed arenas whose last array has died."""
    with _retired_lock:
        for entry in _retired[:]:
            device, address, arena = entry
            arena.drain()
            if not arena.live:
                _retired.remove(entry)
                with cupy.cuda.Device(device):
                    for stream in arena.take_waiting():
                        stream.synchronize()
                    runtime.free(address)


def enable_peer_access(device: int, peer: int) -> None:
    """Lets kernels of `device` reach memory of `peer`. Raises CUDARuntimeError where the hardware cannot."""
    with cupy.cuda.Device(device):
        try:
            runtime.deviceEnablePeerAccess(peer)
        except runtime.CUDARuntimeError as error:
            if "AlreadyEnabled" not in str(error):
                raise
