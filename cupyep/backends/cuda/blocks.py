"""The arena blocks of one operation: what is received, and what combine lets its peers read."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from cupyep.backends.base import Shape
from cupyep.backends.cuda.arena import Arena, Block
from cupyep.backends.cuda.streams import CommStream
from cupyep.errors import ArenaExhaustedError


class Blocks:
    """Allocates from `arena` in the order of `comm_stream`."""

    def __init__(self, arena: Arena, comm_stream: CommStream) -> None:
        self._arena, self._comm_stream = arena, comm_stream

    def allocate(self, sizes: dict[str, int], current: Any) -> dict[str, Block]:
        """A block for each part of `sizes` (bytes). Raises ArenaExhaustedError and then holds none.

        Blocks may have been in use on other streams: the communication stream waits for what these have been given.
        """
        blocks = {name: self._arena.block(size, current) for name, size in sizes.items()}
        for stream in self._arena.take_waiting():
            self._comm_stream.follow(stream)
        return blocks

    def try_allocate(self, sizes: dict[str, int], current: Any) -> dict[str, Block] | ArenaExhaustedError:
        """As allocate; the error comes as a value, to be posted."""
        try:
            return self.allocate(sizes, current)
        except ArenaExhaustedError as error:
            return error

    def empty(self, shape: tuple[int, ...], dtype: Any, current: Any) -> cupy.ndarray:
        """An array for use on the stream `current`. Raises ArenaExhaustedError."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        block = self.allocate({"rows": num_bytes}, current)["rows"]
        current.wait_event(self._comm_stream.record())  # earlier users of the block are done there
        return block.array(shape, dtype)

    def malloc(self, num_bytes: int) -> cupy.cuda.MemoryPointer:
        """For CuPy: from the arena, or from CuPy's own pool when that is full."""
        try:
            return self.empty((max(num_bytes, 1),), np.uint8, cupy.cuda.get_current_stream()).data
        except ArenaExhaustedError:
            return cupy.get_default_memory_pool().malloc(num_bytes)

    def visible(self, arrays: dict[str, Any], current: Any) -> tuple[dict[str, int] | ArenaExhaustedError, list[Any]]:
        """(offset in the arena of each array, arrays to keep): in place where they can be used so, else a copy."""
        offsets: dict[str, int] = {}
        keep: list[Any] = []
        for name, array in arrays.items():
            if array is None or not array.size:
                continue
            offset = self._arena.offset_of(array)
            if offset is None:
                try:
                    staged = self.empty(array.shape, array.dtype, current)
                except ArenaExhaustedError as error:
                    return error, keep
                cupy.copyto(staged, array)
                offset, array = self._arena.offset_of(staged), staged
            assert offset is not None
            offsets[name] = offset
            keep.append(array)
        return offsets, keep


def offsets(blocks: dict[str, Block] | ArenaExhaustedError) -> dict[str, int] | ArenaExhaustedError:
    """Where the blocks begin, for a post."""
    return blocks if isinstance(blocks, ArenaExhaustedError) else {name: block.offset for name, block in blocks.items()}


def received(blocks: dict[str, Block], sizes: dict[str, int], shape: Shape, num_rows: int, idx_dtype: Any) -> tuple:
    """(recv_x, recv_topk_idx, recv_topk_weights) as exact views; what the worst case took beyond them goes back."""
    columns = {
        "rows": (shape.hidden, shape.dtype),
        "idx": (shape.rows.num_topk, idx_dtype),
        "weights": (shape.rows.num_topk, np.float32),
    }
    arrays: list[Any] = []
    for name, (num_columns, dtype) in columns.items():
        if name not in sizes:
            arrays.append(None)
        elif name not in blocks:  # the arena had no room, but no row came either
            arrays.append(cupy.empty((0, num_columns), dtype))
        else:
            blocks[name].trim(sizes[name])
            arrays.append(blocks[name].array((num_rows, num_columns), dtype))
    return tuple(arrays)
