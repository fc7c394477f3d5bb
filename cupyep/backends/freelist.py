"""Host-side sub-allocation of an arena's heap, for both backends."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from cupyep.errors import ArenaExhaustedError
from cupyep.layout import ALIGNMENT, align


class FreeList:
    """First-fit over [start, end) bytes; blocks are multiples of 128 bytes and 128-byte aligned.

    `released` is where finalisers put blocks: appending to a deque takes no lock and may happen anywhere, also in the
    middle of a call of ours. It is drained by the next `alloc`.
    """

    def __init__(self, start: int, end: int, rank: int) -> None:
        self._gaps = [(align(start), end - end % ALIGNMENT)] if end - align(start) >= ALIGNMENT else []
        self._rank = rank
        self.released: deque[tuple[int, int]] = deque()  # (offset, num_bytes)

    def alloc(self, num_bytes: int) -> tuple[int, int]:
        """(offset, size) of a new block of at least `num_bytes`. Raises ArenaExhaustedError."""
        self.drain()
        size = align(max(num_bytes, 1))
        for index, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                self._gaps[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start, size
        raise ArenaExhaustedError(size, self.largest, self._rank)

    def free(self, offset: int, size: int) -> None:
        """Gives [offset, offset + size) back and merges it with its neighbours."""
        if size == 0:
            return
        start, end = offset, offset + size
        first = last = bisect_right(self._gaps, (start, end))  # the gaps that it replaces are [first, last)
        if last < len(self._gaps) and self._gaps[last][0] == end:
            end, last = self._gaps[last][1], last + 1
        if first > 0 and self._gaps[first - 1][1] == start:
            start, first = self._gaps[first - 1][0], first - 1
        self._gaps[first:last] = [(start, end)]

    def drain(self) -> None:
        """Frees what finalisers have released."""
        while self.released:
            self.free(*self.released.popleft())

    @property
    def largest(self) -> int:
        """Bytes of the largest gap."""
        return max((end - start for start, end in self._gaps), default=0)

    @property
    def total(self) -> int:
        """Bytes of all gaps together."""
        self.drain()
        return sum(end - start for start, end in self._gaps)
