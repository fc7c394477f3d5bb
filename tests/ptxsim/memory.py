"""One global address space of all ranks, seen through a chain of views: a CTA's, its rank's, the system's.

A store lands in the CTA's own view and waits in its buffer. A release at gpu scope moves what it orders on to the
rank's view, one at sys scope to the system's; a view takes over what its parent knows at an acquire only. So what
nobody releases is seen by no other CTA, and what nobody acquires is old. Strong (relaxed, acquire, atomic) accesses
meet at the level of their scope, and strong stores move on by themselves, some time later and in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

GLOBAL, SHARED, PARAM = 0x7F << 40, 0x7E << 40, 0x7D << 40  # generic windows
GUARD = 256  # bytes that belong to nobody, between allocations
POISON = 0xCB
DEPTH = {"cta": 0, "gpu": 1, "sys": 2}  # levels above a CTA's view


class Fault(Exception):
    """What a kernel must not do; the scheduler adds where it was done."""


@dataclass(eq=False)
class Store:
    """Waits in a view: `data` for the elements `index` of `width` bytes, by a warp, as its `tick`-th store."""

    index: np.ndarray
    data: np.ndarray
    width: int
    warp: int
    tick: int
    strong: bool

    def __post_init__(self) -> None:
        self.low, self.high = int(self.index.min()) * self.width, (int(self.index.max()) + 1) * self.width


class Clock:
    """events counts what others may notice: whoever polls in vain sleeps until it moves. now: %globaltimer, in ns."""

    def __init__(self) -> None:
        self.events, self.now = 0, 1_000_000


class View:
    """The bytes as one level sees them, and what is to move on to its parent."""

    def __init__(self, num_bytes: int, parent: View | None, clock: Clock) -> None:
        self.bytes = np.full(num_bytes, POISON, np.uint8) if parent is None else parent.bytes.copy()
        self.words = {width: self.bytes.view(f"u{width}") for width in (1, 2, 4, 8)}
        self.parent, self.clock, self.pending = parent, clock, list[Store]()
        self.version, self.seen = 0, -1

    def store(self, store: Store) -> None:
        self.words[store.width][store.index] = store.data
        self.version += 1
        if self.parent is None:
            self.clock.events += 1
        else:
            self.pending.append(store)

    def publish(self, store: Store) -> None:
        """Moves a store on to the parent, behind older ones to the same place."""
        assert self.parent is not None
        for older in [other for other in self.pending if other.low < store.high and store.low < other.high]:
            self.pending.remove(older)
            self.parent.store(older)
            if older is store:
                return

    def release(self, known: np.ndarray, scope: str) -> None:
        """Publishes, up to the level of `scope`, the stores that `known[warp]` ticks of each warp comprise."""
        for store in [store for store in self.pending if store.tick <= known[store.warp]]:
            if store in self.pending:
                self.publish(store)
        if scope == "sys" and self.parent is not None:
            self.parent.flush()

    def flush(self) -> None:
        while self.pending:
            self.publish(self.pending[0])

    def refresh(self, scope: str) -> None:
        """An acquire: takes over what the levels up to `scope` know."""
        if self.parent is None:
            return
        if scope == "sys":
            self.parent.refresh(scope)
        if self.seen == self.parent.version:
            return
        self.seen = self.parent.version
        self.version += 1
        self.bytes[:] = self.parent.bytes
        for store in self.pending:
            self.words[store.width][store.index] = store.data

    def current(self, index: np.ndarray, width: int, depth: int) -> np.ndarray:
        """The elements as the level `depth` above has them: a strong load. Own stores to them come first."""
        if depth and self.parent is not None:
            low, high = int(index.min()) * width, (int(index.max()) + 1) * width
            for store in [store for store in self.pending if store.low < high and low < store.high]:
                if store in self.pending:
                    self.publish(store)
            value = self.parent.current(index, width, depth - 1)
            if not np.array_equal(self.words[width][index], value):
                self.words[width][index] = value
                self.version += 1
        return self.words[width][index]


class Space:
    """Allocations, the system's view and one per rank."""

    def __init__(self, num_ranks: int, num_bytes: int = 1 << 20) -> None:
        self.clock, num_bytes = Clock(), -(-num_bytes // GUARD) * GUARD  # words of eight bytes
        self.system = View(num_bytes, None, self.clock)
        self.ranks = [View(num_bytes, self.system, self.clock) for _ in range(num_ranks)]
        self.owned, self._top = np.zeros(num_bytes, bool), GUARD

    def allocate(self, num_bytes: int) -> int:
        """The address of poisoned memory."""
        start = self._top
        self._top = -(-(start + num_bytes + GUARD) // GUARD) * GUARD
        if self._top > len(self.owned):
            raise MemoryError("simulated memory: make the Space larger")
        self.owned[start : start + num_bytes] = True
        return GLOBAL + start

    def write(self, rank: int, address: int, data: Any) -> None:
        """By the host of `rank`, between its kernels."""
        raw = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
        at = slice(address - GLOBAL, address - GLOBAL + raw.size)
        for view in (self.ranks[rank], self.system):
            view.bytes[at] = raw
            view.version += 1
        self.clock.events += 1

    def read(self, rank: int, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """What the host of `rank` sees: only what its kernels wrote or acquired."""
        start, dtype = address - GLOBAL, np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        return self.ranks[rank].bytes[start : start + size].copy().view(dtype).reshape(shape)

    def index(self, address: np.ndarray, width: int, count: int = 1) -> np.ndarray:
        """Element indices of `count` elements from each address on, checked; 2-D when count > 1."""
        start = address - np.uint64(GLOBAL)
        last = start + np.uint64(width * count - 1)
        if (last >= np.uint64(len(self.owned))).any() or not (self.owned[start].all() and self.owned[last].all()):
            wrong = [hex(int(a)) for a, s, e in zip(address, start, last, strict=True)
                     if e >= len(self.owned) or not (self.owned[s] and self.owned[e])]
            raise Fault(f"global access out of bounds: {wrong[0]}, {width * count} bytes")
        if (address % np.uint64(width * count)).any():
            raise Fault(f"misaligned global access of {width * count} bytes")
        index = (start // np.uint64(width)).astype(np.int64)
        return index[:, None] + np.arange(count) if count > 1 else index
