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


@dataclass(eq=False)
class BulkLoad:
    """Global to shared. Lands in one or two steps; the last completes the bytes."""

    cta: Cta
    to: int
    start: int  # byte in global memory
    size: int
    mbar: int
    place: int  # in the program
    done: int = 0

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every byte, in shared and in global memory; there -1: nowhere, it is filled with 0."""
        offset = np.arange(self.size)
        return self.to + offset, self.start + offset

    def step(self, rng: Random, force: bool = False) -> bool:
        """One step; True when it was the last."""
        end = self.size if force or rng.random() < 0.6 else max(self.done, rng.randrange(0, self.size, 16))
        to, at = (places[self.done : end] for places in self.places())
        # Either may be seen: the memory as of the last proxy fence, or as it is now.
        inside = at[at >= 0]
        window = slice(int(inside.min()), int(inside.max()) + 1) if inside.size else slice(0, 0)
        fresh = rng.random() >= 0.5 and not self.cta.has_pending(window)
        source = self.cta.space.system.bytes if fresh else self.cta.proxy
        self.cta.shared[to] = np.where(at < 0, np.uint8(0), source[at])
        self.done = end
        if end < self.size:
            return False
        mbarrier = self.cta.mbarrier(self.mbar)
        mbarrier.tx -= self.size
        mbarrier.settle(self.cta)
        self.cta.clock.events += 1
        return True


@dataclass(eq=False)
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

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every byte, in shared and in global memory."""
        offset = np.arange(self.size)
        return self.source + offset, self.start + offset

    def read(self) -> None:
        if self.data is None:
            self.data = self.cta.shared[self.places()[0]]

    def write(self) -> Store:
        """Now the CTA sees it; others do after a release, or when the Store is published."""
        self.read()
        self.written = True
        _, at = self.places()
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
    check_load(cta, to, size, mbar)
    cta.inflight.append(BulkLoad(cta, to, source - GLOBAL, size, mbar, cta.place))


def check_load(cta: Cta, to: int, size: int, mbar: int) -> None:
    """That the mbarrier may be used, and the shared memory overwritten."""
    mbarrier = cta.mbarrier(mbar)
    if not mbarrier.fenced:
        raise Fault("mbarrier used by a bulk copy before fence.mbarrier_init by its initialiser (H6)")
    cta.check_fenced(to, size, "bulk load overwrites shared memory that {} has accessed without a proxy fence (H3)")
    for other in cta.inflight:
        if isinstance(other, BulkLoad) and other.to < to + size and to < other.to + other.size:
            raise Fault("bulk load into shared memory that another one is still loading")


def store(cta: Cta, lane: int, to: int, source: int, size: int, add: np.dtype | None = None) -> None:
    """cp.async.bulk.global.shared, or cp.reduce.async.bulk with an addition, by one lane."""
    _check(cta, source, to, size)
    check_store(cta, source, size)
    issue(cta, lane, BulkStore(cta, to - GLOBAL, source, size, lane // 32, cta.place, add))


def check_store(cta: Cta, source: int, size: int) -> None:
    """That the shared memory may be read."""
    cta.check_fenced(source, size, "bulk store reads shared memory that {} has written without a proxy fence (H2)",
                     only_writes=True)


def issue(cta: Cta, lane: int, operation: BulkStore) -> None:
    """Into the lane's open group."""
    cta.inflight.append(operation)
    cta.groups(lane).open.append(operation)


def _check(cta: Cta, shared: int, address: int, size: int) -> None:
    if shared % 16 or address % 16 or size % 16:
        raise Fault(f"bulk copy: addresses {shared:#x} and {address:#x} and {size} bytes must be multiples of 16")
    if not 0 < size <= len(cta.shared) or shared + size > len(cta.shared) or shared < cta.static_start:
        raise Fault(f"bulk copy: {size} bytes at {shared:#x} are outside of shared memory")
    ends: Any = np.array([address, address + size - 16], np.uint64)
    cta.space.index(ends, 8, 2)
