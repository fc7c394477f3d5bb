"""A CTA: lanes with registers and program counters, shared memory, and who knows of whose stores.

All lanes of a CTA are one axis of every array; a warp is 32 of them. An instruction is computed for all lanes and kept
for those of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxsim import async_copies
from ptxsim.cp_async import LaneCopies
from ptxsim.memory import POISON, Fault, Space, View
from ptxsim.parser import Program

FREE, WARP, CTA, COPY = 0, 1, 2, 3  # what a lane is blocked at


@dataclass(eq=False)
class Grid:
    """A launched kernel of one rank."""

    rank: int
    program: Program
    code: list[Any]  # Compiled
    num_ctas: int
    num_threads: int
    smem_bytes: int
    params: np.ndarray

    def __post_init__(self) -> None:
        self.left = self.num_ctas


class Cta:
    """One CTA of a grid."""

    static_start = 1024  # of shared memory: no valid object has address 0

    def __init__(self, grid: Grid, index: int, space: Space) -> None:
        self.grid, self.index, self.space, self.clock = grid, index, space, space.clock
        self.num_lanes = -(-grid.num_threads // 32) * 32
        self.num_warps = self.num_lanes // 32
        lanes = np.arange(self.num_lanes, dtype=np.uint32)
        constant = {"%ctaid.x": index, "%ntid.x": grid.num_threads, "%nctaid.x": grid.num_ctas, "%smid": index}
        self.special = {"%tid.x": lanes, "%laneid": lanes % np.uint32(32),
                        **{name: np.full(self.num_lanes, value, np.uint32) for name, value in constant.items()}}
        self.registers = [np.zeros(self.num_lanes, f"u{size}" if size else bool)
                          for size in grid.program.register_bytes]
        self.everyone = np.ones(self.num_lanes, bool)
        self.warp_of = np.arange(self.num_lanes) // 32
        self.pc = np.full(self.num_lanes, grid.program.entry)
        self.place = grid.program.entry  # of the instruction under way
        self.live = lanes < grid.num_threads
        self.blocked = np.zeros(self.num_lanes, np.uint8)
        self.barrier_id = np.zeros(self.num_lanes, np.int64)
        self.parked = np.full(self.num_lanes, -1)  # the clock at the last poll in vain
        self.progress = np.ones(self.num_lanes, bool)  # since the last poll
        self.polled = np.zeros(self.num_lanes, np.uint64)  # the value that it saw
        self.dynamic_start = self.static_start + -(-grid.program.static_bytes // 128) * 128
        self.shared_end = self.dynamic_start + grid.smem_bytes
        self.shared = np.full(-(-self.shared_end // 16) * 16, POISON, np.uint8)
        self.words = {width: self.shared.view(f"u{width}") for width in (1, 2, 4, 8)}
        self.view = View(len(space.owned), space.ranks[grid.rank], self.clock)
        self.proxy = self.view.bytes.copy()  # global memory as bulk loads may still see it
        self.known = np.zeros((self.num_warps, self.num_warps), np.int64)  # [warp, other]: ticks it is ordered after
        self.mbarriers: dict[int, async_copies.Mbarrier] = {}
        self.inflight: list[Any] = []  # asynchronous copies
        self._groups: dict[int, async_copies.Groups] = {}
        # Shared memory that a lane has read or written by itself since its last proxy fence.
        self.uses_bulk = any("bulk" in instruction.opcode for instruction in grid.program.code)
        self.unfenced_reads = np.zeros((self.num_lanes, len(self.shared) if self.uses_bulk else 0), bool)
        self.unfenced_writes = self.unfenced_reads.copy()
        uses_copies = any(instruction.opcode[:2] == ["cp", "async"] and "bulk" not in instruction.opcode
                          for instruction in grid.program.code)
        self.copies = LaneCopies(self) if uses_copies else None

    # --- order between warps ------------------------------------------------------------------------------------------

    def tick(self, warp: int) -> int:
        self.known[warp, warp] += 1
        return int(self.known[warp, warp])

    def warps(self, mask: np.ndarray) -> list[int]:
        return np.flatnonzero(mask.reshape(-1, 32).any(1)).tolist()

    def hand_over(self, mask: np.ndarray) -> None:
        """These lanes meet others at a barrier, or release."""
        if self.copies:
            self.copies.hand_over(mask)

    def release(self, mask: np.ndarray, scope: str) -> None:
        self.hand_over(mask)
        if scope != "cta":
            self.view.release(self.known[self.warps(mask)].max(0), scope)

    def has_pending(self, at: slice) -> bool:
        stores = (*self.view.pending, *self.space.ranks[self.grid.rank].pending)
        return any(store.low < at.stop and at.start < store.high for store in stores)

    # --- shared memory ------------------------------------------------------------------------------------------------

    def shared_index(self, address: np.ndarray, width: int, count: int = 1) -> np.ndarray:
        if (address % width).any() or (address % (width * count)).any():
            raise Fault(f"misaligned shared access of {width * count} bytes")
        if (address < self.static_start).any() or (address + width * count > self.shared_end).any():
            raise Fault(f"shared access out of bounds: {int(address.max()):#x}, {width * count} bytes")
        index = address.astype(np.int64) // width
        return index[:, None] + np.arange(count) if count > 1 else index

    def note_access(self, mask: np.ndarray, index: np.ndarray, width: int, write: bool) -> None:
        """Holds generic accesses against unfinished copies, and remembers them for the rules of the async proxy."""
        if self.uses_bulk or self.copies:
            lanes = np.flatnonzero(mask)
            first = index.reshape(len(lanes), -1)[:, 0] * width
            touched = first[:, None] + np.arange(width * (index.size // len(lanes)))
            if self.copies:
                self.copies.access(lanes, touched, write)
            if self.uses_bulk:
                table = self.unfenced_writes if write else self.unfenced_reads
                table[lanes[:, None], touched] = True

    def proxy_fence(self, mask: np.ndarray) -> None:
        """fence.proxy.async, for what these lanes have accessed."""
        self.unfenced_reads[mask] = self.unfenced_writes[mask] = False

    def check_fenced(self, start: int, size: int, message: str, only_writes: bool = False) -> None:
        if self.copies:
            self.copies.check_finished(slice(start, start + size))
        tables = (self.unfenced_writes,) if only_writes else (self.unfenced_writes, self.unfenced_reads)
        for table in tables:
            guilty = np.flatnonzero(table[:, start : start + size].any(1))
            if guilty.size:
                raise Fault(message.format(f"thread {guilty[0]}"))

    def mbarrier(self, address: int, warp: int | None = None) -> async_copies.Mbarrier:
        if address not in self.mbarriers:
            raise Fault(f"mbarrier at {address:#x} is not initialised")
        found = self.mbarriers[address]
        if warp is not None and self.known[warp, found.init_warp] < found.init_tick:
            raise Fault(f"mbarrier used by warp {warp} before its initialisation was handed over by a barrier (H6)")
        return found

    def groups(self, lane: int) -> async_copies.Groups:
        return self._groups.setdefault(lane, async_copies.Groups())

    # --- lanes --------------------------------------------------------------------------------------------------------

    def ready(self) -> np.ndarray:
        """Lanes that can go on, those left out that poll in vain."""
        return self.live & (self.blocked == FREE) & (self.parked != self.clock.events)

    def poll(self, mask: np.ndarray, values: np.ndarray) -> None:
        """After a look at a flag: lanes that saw the same before and did nothing since sleep until something moves."""
        seen = self.polled[mask]
        values = values.reshape(seen.shape).astype(np.uint64)
        asleep = mask.copy()
        asleep[mask] = (seen == values) & ~self.progress[mask]
        self.parked[asleep] = self.clock.events
        self.progress[mask] = False
        self.polled[mask] = values

    def leave(self, mask: np.ndarray) -> None:
        """exit: by these lanes."""
        for lane in np.flatnonzero(mask):
            if int(lane) in self._groups and self._groups[int(lane)].unread():
                raise Fault("exit with bulk stores that have not read their shared memory")
        if self.copies:
            self.copies.leave(mask)
        self.live &= ~mask
        self.blocked[self.blocked == WARP] = FREE  # look again: fewer have to come
        if not self.live.any() and any(isinstance(copy, async_copies.BulkLoad) for copy in self.inflight):
            raise Fault("exit with bulk loads under way to shared memory")
        self.meet()

    def arrive(self, mask: np.ndarray, identity: Any) -> None:
        """At a CTA barrier."""
        self.blocked[mask] = CTA
        self.barrier_id[mask] = np.broadcast_to(identity, mask.shape)[mask]
        self.meet()

    def wait(self, mask: np.ndarray, newest: int) -> bool:
        """At a wait for each lane's own copies. True: somebody has to wait."""
        done = self.copies.wait(mask, newest)
        self.blocked[mask & ~done] = COPY
        self.pc[done] += 1
        return bool((done != mask).any())

    def landed(self, lanes: np.ndarray) -> None:
        """A copy of each of these lanes, for which it may be waiting."""
        self.blocked[lanes[self.blocked[lanes] == COPY]] = FREE
        self.clock.events += 1

    def meet(self) -> None:
        """Opens the CTA barriers at which everybody has arrived who is expected."""
        for identity in np.unique(self.barrier_id[(self.blocked == CTA) & self.live]):
            here = (self.blocked == CTA) & (self.barrier_id == identity) & self.live
            expected = int(identity) >> 8  # threads, or 0 for all
            if here.sum() < expected or (expected == 0 and (here != self.live).any()):
                continue
            warps = self.warps(here)
            for warp in warps:
                lanes = np.flatnonzero(here[32 * warp : 32 * warp + 32]) + 32 * warp
                if (self.pc[lanes] != self.pc[lanes[0]]).any():
                    raise Fault(f"lanes of warp {warp} meet at different barriers of the program")
            self.known[warps] = self.known[warps].max(0)
            self.hand_over(here)
            for pc in np.unique(self.pc[here]):
                self.grid.code[pc].run(self, here & (self.pc == pc), here)
            self.blocked[here], self.progress[here] = FREE, True
            self.pc[here] += 1
