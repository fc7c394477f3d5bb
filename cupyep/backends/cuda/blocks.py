"""The arena blocks of one operation: what is received, and what combine lets its peers read."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from cupyep.backends.base import Shape, Tokens
from cupyep.backends.cuda.arena import Arena, Block
from cupyep.backends.cuda.streams import CommStream
from cupyep.errors import ArenaExhaustedError


class Blocks:
    """Allocates from `arena` in the order of `comm_stream`."""

    def __init__(self, arena: Arena, comm_stream: CommStream) -> None:
        self._arena, self._comm_stream = arena, comm_stream

    def allocate(self, sizes: dict[str, int], current: Any) -> dict[str, Block]:
        """A block for each part of `sizes` (bytes). Raises ArenaExhaustedError and then holds none.

        The largest comes last: what is trimmed off it borders on free memory then, and large gaps stay large. Blocks
        may have been in use on other streams: the communication stream waits for what these have been given.
        """
        by_size = sorted(sizes.items(), key=lambda part: part[1])
        blocks = {name: self._arena.block(size, current) for name, size in by_size}
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


def received(blocks: dict[str, Block], shape: Shape, num_rows: int) -> Tokens:
    """What was received, as exact views; what the worst case took beyond them goes back."""
    rows, sizes = shape.rows, shape.rows.parts(num_rows)
    columns = {
        "rows": (shape.hidden, shape.dtype),
        "scales": (rows.scale_bytes // shape.scale_dtype.itemsize if rows.scale_bytes else 0, shape.scale_dtype),
        "idx": (rows.num_topk, np.dtype(f"i{rows.idx_bytes or 8}")),
        "weights": (rows.num_topk, np.dtype(np.float32)),
    }
    arrays: list[Any] = []
    for name, (num_columns, dtype) in columns.items():
        if name not in rows.parts(1):
            arrays.append(None)
        elif name not in blocks:  # the arena had no room, but no row came either
            arrays.append(cupy.empty((0, num_columns), dtype))
        else:
            blocks[name].trim(sizes[name])
            arrays.append(blocks[name].array((num_rows, num_columns), dtype))
    return Tokens(*arrays)
