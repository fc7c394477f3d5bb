"""The async proxy: mbarriers, bulk loads and bulk stores, each as late and in as many steps as the rules allow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxsim.memory import DEPTH, GLOBAL, Fault, Store

if TYPE_CHECKING:
    from random import Random

    from ptxsim.state import Cta


@dataclass
class Mbarrier:
    """In shared memory. `known`: the ticks that arrivals of this phase have released, `handed`: those of the last."""

    count: int
    init_warp: int
    init_tick: int
    known: np.ndarray
    handed: np.ndarray
    pending: int = 0
    tx: int = 0
    phase: int = 0
    fenced: bool = False  # fence.mbarrier_init by the thread that initialised it

    def __post_init__(self) -> None:
        self.pending = self.count

    def settle(self, cta: Cta) -> None:
        if self.tx < 0:
            raise Fault(f"mbarrier: {-self.tx} bytes more completed than expected (negative transaction count)")
        if self.pending < 0:
            raise Fault("mbarrier: more arrivals than its count in one phase")
        if self.pending == 0 and self.tx == 0:
            self.phase, self.pending = self.phase ^ 1, self.count
            self.handed = np.maximum(self.handed, self.known)
            cta.clock.events += 1


@dataclass
class BulkLoad:
    """Global to shared. Lands in one or two steps; the last completes the bytes."""

    cta: Cta
    to: int
    start: int  # byte in global memory
    size: int
    mbar: int
    place: int  # in the program
    done: int = 0

    def step(self, rng: Random, force: bool = False) -> bool:
        """One step; True when it was the last."""
        end = self.size if force or rng.random() < 0.6 else max(self.done, rng.randrange(0, self.size, 16))
        at = slice(self.start + self.done, self.start + end)
        # Either may be seen: the memory as of the last proxy fence, or as it is now.
        source = self.cta.proxy if rng.random() < 0.5 or self.cta.has_pending(at) else self.cta.space.system.bytes
        self.cta.shared[self.to + self.done : self.to + end] = source[at]
        self.done = end
        if end < self.size:
            return False
        mbarrier = self.cta.mbarrier(self.mbar)
        mbarrier.tx -= self.size
        mbarrier.settle(self.cta)
        self.cta.clock.events += 1
        return True


@dataclass
class BulkStore:
    """Shared to global: first reads all of its source, later it is written."""

    cta: Cta
    start: int
    source: int
    size: int
    warp: int
    place: int
    add: np.dtype | None = None  # a reduction: elements of this type are added
    data: np.ndarray | None = None  # read, not yet written
    written: bool = False

    def read(self) -> None:
        if self.data is None:
            self.data = self.cta.shared[self.source : self.source + self.size].copy()

    def write(self) -> Store:
        """Now the CTA sees it; others do after a release, or when the Store is published."""
        self.read()
        self.written = True
        at = np.arange(self.start, self.start + self.size)
        assert self.data is not None
        if self.add is not None:  # atomic at gpu scope: what others of the GPU have added is there
            old = self.cta.view.current(at, 1, DEPTH["gpu"]).view(self.add)
            self.data = (old + self.data.view(self.add)).astype(self.add).view(np.uint8)
        self.cta.proxy[at] = self.data
        store = Store(at, self.data, 1, self.warp, self.cta.tick(self.warp), False)
        self.cta.view.store(store)
        if self.add is not None:
            self.cta.view.publish(store)
        return store

    def step(self, rng: Random, force: bool = False) -> bool:
        if self.data is None and not force:
            self.read()
            return False
        store = self.write()
        if store in self.cta.view.pending:
            self.cta.view.publish(store)
            rank = self.cta.view.parent
            assert rank is not None
            rank.publish(store)
        return True


@dataclass
class Groups:
    """A thread's bulk groups: the open one, and those it has committed."""

    open: list[BulkStore] = field(default_factory=list)
    committed: deque[list[BulkStore]] = field(default_factory=deque)

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = []

    def wait(self, newest: int, read: bool) -> None:
        """Until at most `newest` groups are unfinished, or have not read their source."""
        for group in list(self.committed)[: max(0, len(self.committed) - newest)]:
            for store in group:
                if read:
                    store.read()
                elif not store.written:
                    store.write()
                    store.cta.inflight.remove(store)
            if not read:
                self.committed.popleft()

    def unread(self) -> bool:
        return any(store.data is None for group in (*self.committed, self.open) for store in group)


def load(cta: Cta, lane: int, to: int, source: int, size: int, mbar: int) -> None:
    """cp.async.bulk.shared.global by one lane."""
    _check(cta, to, source, size)
    mbarrier = cta.mbarrier(mbar)
    if not mbarrier.fenced:
        raise Fault("mbarrier used by a bulk copy before fence.mbarrier_init by its initialiser (H6)")
    cta.check_fenced(to, size, "bulk load overwrites shared memory that {} has accessed without a proxy fence (H3)")
    for other in cta.inflight:
        if isinstance(other, BulkLoad) and other.to < to + size and to < other.to + other.size:
            raise Fault("bulk load into shared memory that another one is still loading")
    cta.inflight.append(BulkLoad(cta, to, source - GLOBAL, size, mbar, cta.place))


def store(cta: Cta, lane: int, to: int, source: int, size: int, add: np.dtype | None = None) -> None:
    """cp.async.bulk.global.shared, or cp.reduce.async.bulk with an addition, by one lane."""
    _check(cta, source, to, size)
    cta.check_fenced(source, size, "bulk store reads shared memory that {} has written without a proxy fence (H2)",
                     only_writes=True)
    operation = BulkStore(cta, to - GLOBAL, source, size, lane // 32, cta.place, add)
    cta.inflight.append(operation)
    cta.groups(lane).open.append(operation)


def _check(cta: Cta, shared: int, address: int, size: int) -> None:
    if shared % 16 or address % 16 or size % 16:
        raise Fault(f"bulk copy: addresses {shared:#x} and {address:#x} and {size} bytes must be multiples of 16")
    if not 0 < size <= len(cta.shared) or shared + size > len(cta.shared) or shared < cta.static_start:
        raise Fault(f"bulk copy: {size} bytes at {shared:#x} are outside of shared memory")
    ends: Any = np.array([address, address + size - 16], np.uint64)
    cta.space.index(ends, 8, 2)
