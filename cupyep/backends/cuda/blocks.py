"""The arena blocks of one operation: what is received, and what combine lets its peers read."""

from __future__ import annotations

import math
from typing import Any

import cupy
import numpy as np

from cupyep import env
from cupyep.backends.cuda import graphs
from cupyep.backends.cuda.arena import Arena, Block
from cupyep.backends.cuda.streams import CommStream
from cupyep.backends.shapes import Shape, Tokens
from cupyep.errors import ArenaExhaustedError


class Blocks:
    """Allocates from `arena` in the order of `comm_stream`."""

    def __init__(self, arena: Arena, comm_stream: CommStream) -> None:
        self._arena, self._comm_stream = arena, comm_stream

    def allocate(self, sizes: dict[str, int], current: Any) -> dict[str, Block]:
        """A block for each part of `sizes` (bytes). Raises ArenaExhaustedError and then holds none.

        The largest should come last: what is trimmed off it borders on free memory then, and large gaps stay large.
        Blocks may have been in use on other streams: the communication stream waits for what these have been given.
        """
        graphs.release_unused()
        self.settle()
        blocks = {name: self._arena.block(size, current) for name, size in sizes.items()}
        if env.poison():
            self._arena.poison(blocks.values())
        self._pin(blocks)
        return blocks

    def settle(self, current: Any = None) -> None:
        """Takes back what was released; our stream waits for its users. A graph cannot: there the host does.

        `current`: what our stream follows next, into its capture if it is captured. Then it need not wait for it here.
        """
        self._arena.drain()
        behind = self._comm_stream.stream if current is None else current
        for stream in self._arena.take_waiting():
            if not behind.is_capturing():
                if current is None or stream.ptr != current.ptr:
                    self._comm_stream.follow(stream)
            elif not stream.is_capturing():  # one that is captured is behind what it did before
                stream.synchronize()

    def _pin(self, blocks: Any) -> None:
        if self._comm_stream.stream.is_capturing():
            graphs.pin(self._comm_stream.stream, blocks)

    def try_allocate(self, sizes: dict[str, int], current: Any) -> dict[str, Block] | ArenaExhaustedError:
        """As allocate; the error comes as a value, to be posted."""
        try:
            return self.allocate(sizes, current)
        except ArenaExhaustedError as error:
            return error

    def lent(self, shape: tuple[int, ...], dtype: Any, current: Any, order: str = "C") -> cupy.ndarray:
        """An array of CuPy's pool that our stream writes and `current` uses. Our stream is CuPy's current one now.

        The pool would reuse its memory in the order of one stream; as a block it waits for both.
        """
        graphs.release_unused()
        self.settle()
        num_bytes = max(1, _num_bytes(shape, dtype))
        block = self._arena.adopt(cupy.get_default_memory_pool().malloc(num_bytes), num_bytes, current)
        self._pin(block)
        return block.array(shape, dtype, order)

    def empty(self, shape: tuple[int, ...], dtype: Any, current: Any) -> cupy.ndarray:
        """An array for use on the stream `current`. Raises ArenaExhaustedError."""
        if current.is_capturing():
            self._comm_stream.follow(current)
        block = self.allocate({"rows": _num_bytes(shape, dtype)}, current)["rows"]
        current.wait_event(self._comm_stream.record())  # earlier users of the block are done there
        return block.array(shape, dtype)

    def malloc(self, num_bytes: int) -> cupy.cuda.MemoryPointer:
        """For CuPy: from the arena, or from CuPy's own pool when that is full."""
        try:
            return self.empty((max(num_bytes, 1),), np.uint8, cupy.cuda.get_current_stream()).data
        except ArenaExhaustedError:
            return cupy.get_default_memory_pool().malloc(num_bytes)

    def visible(self, arrays: dict[str, Any]) -> tuple[dict[str, int] | ArenaExhaustedError, list[Any]]:
        """(offset in the arena of each array, arrays to keep): in place where they can be used so, else a copy."""
        stream = self._comm_stream.stream
        offsets: dict[str, int] = {}
        keep: list[Any] = []
        for name, array in arrays.items():
            if array is None or not array.size:
                continue
            offset = self._arena.offset_of(array)
            if offset is None or offset % 16:
                try:
                    block = self.allocate({name: array.nbytes}, stream)[name]
                except ArenaExhaustedError as error:
                    return error, keep
                staged = block.array(array.shape, array.dtype)
                cupy.copyto(staged, array)
                offset, array = block.offset, staged
            offsets[name] = offset
            keep.append(array)
        return offsets, keep


def _num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def offsets(blocks: dict[str, Block] | ArenaExhaustedError) -> dict[str, int] | ArenaExhaustedError:
    """Where the blocks begin, for a post."""
    return blocks if isinstance(blocks, ArenaExhaustedError) else {name: block.offset for name, block in blocks.items()}


def received(blocks: dict[str, Block], shape: Shape, num_rows: int) -> Tokens:
    """What was received, as exact views; what the worst case took beyond them goes back."""
    arrays: dict[str, Any] = {}
    for name, (num_columns, dtype) in shape.columns.items():
        if (block := blocks.get(name)) is None:  # the arena had no room, but no row came either
            arrays[name] = cupy.empty((0, num_columns), dtype)
        else:
            block.trim(num_rows * shape.rows.sizes[name])
            arrays[name] = block.array((num_rows, num_columns), dtype)
    return Tokens(*map(arrays.get, ("rows", "scales", "idx", "weights")))
