"""Non-bulk asynchronous copies: of each thread for itself, by the generic proxy, in groups that it alone waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptxsim.memory import Fault

if TYPE_CHECKING:
    from random import Random

    from ptxsim.state import Cta


class Copy:
    """One instruction: an entry of each array, or a row, for every lane that issued it."""

    def __init__(self, cta: Cta, lanes: np.ndarray, groups: np.ndarray, to: np.ndarray, start: np.ndarray) -> None:
        self.cta, self.lanes = cta, lanes
        self.groups = groups  # the group's number among those of its lane
        self.to, self.start = to, start  # [lane, byte] in shared and in global memory
        self.early = cta.view.bytes[start]  # the source as it was at the issue
        self.under_way = np.ones(len(lanes), bool)
        self.unfinished = self.under_way.copy()  # by its lane's reckoning: until it has waited

    def step(self, rng: Random, force: bool = False) -> bool:
        """Lands for all lanes or for some; True when it was the last. A lane may have read its source any time."""
        landing = self.under_way.copy()
        if not force and rng.random() < 0.2:
            landing &= np.array([rng.random() < 0.5 for _ in self.lanes])
        if landing.any():
            start = self.start[landing]
            known = self.cta.view.bytes[start]
            own = self.cta.has_pending(slice(int(start.min()), int(start.max()) + 1))
            fresh = known if own else self.cta.space.system.bytes[start]
            choice = np.array([rng.randrange(3) for _ in start])
            self.cta.shared[self.to[landing]] = np.choose(choice[:, None], (self.early[landing], known, fresh))
            self.under_way &= ~landing
            self.cta.landed(self.lanes[landing])
        return not self.under_way.any()


class LaneCopies:
    """Those of a CTA, and whose the bytes of its shared memory are.

    An access to the destination of a copy before its lane has waited is a fault, and so is one by another lane before
    the lane that copied has met the others at a barrier, or another lane's copy before the lane that read has.
    """

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.committed = np.zeros(cta.num_lanes, np.int64)  # groups of each lane
        self.unfinished: list[Copy] = []
        # Of each byte of shared memory: -1 - lane: that lane's copy is unfinished; 1 + lane: finished, and that lane's.
        self.owner = np.zeros(len(cta.shared), np.int32)
        self.reader = self.owner.copy()  # 1 + lane: of those that read it, the last that has met nobody since

    def issue(self, mask: np.ndarray, to: np.ndarray, start: np.ndarray) -> None:
        """[lane, byte] in shared and in global memory, for the lanes of `mask`."""
        lanes = np.flatnonzero(mask)
        self.cta.note_access(mask, to, 1, write=True)
        if len(np.unique(to)) < to.size:
            raise Fault("lanes copy to the same shared memory")
        self.check_mine(self.reader, lanes, to, "copy over what thread {} has read, with no barrier after it")
        self.owner[to] = -1 - lanes[:, None]
        self.unfinished.append(Copy(self.cta, lanes, self.committed[lanes], to, start))
        self.cta.inflight.append(self.unfinished[-1])

    def commit(self, mask: np.ndarray) -> None:
        self.committed[mask] += 1

    def wait(self, mask: np.ndarray, newest: int) -> np.ndarray:
        """The lanes that may go on: at most `newest` of their groups are unfinished. -1: not the open one either."""
        last, done = self.committed - newest, mask.copy()
        due = [(copy, which) for copy in self.unfinished if (
            which := copy.unfinished & mask[copy.lanes] & (copy.groups < last[copy.lanes])).any()]
        for copy, which in due:
            done[copy.lanes[which & copy.under_way]] = False
        for copy, which in due:
            self.finish(copy, which & done[copy.lanes])
        return done

    def finish(self, copy: Copy, which: np.ndarray) -> None:
        lanes, to = copy.lanes[which, None], copy.to[which]
        self.owner[to] = 1 + lanes
        if self.cta.uses_bulk:
            self.cta.unfenced_writes[lanes, to] = True  # a proxy fence before the wait was too early
        copy.unfinished &= ~which
        if not copy.unfinished.any():
            self.unfinished.remove(copy)

    def hand_over(self, mask: np.ndarray) -> None:
        """A barrier or a release by these lanes: what they have copied and read is everybody's."""
        for table in (self.owner, self.reader):
            table[(table > 0) & mask[np.maximum(table - 1, 0)]] = 0

    def leave(self, mask: np.ndarray) -> None:
        if any((copy.unfinished & mask[copy.lanes]).any() for copy in self.unfinished):
            raise Fault("exit with copies to shared memory that were not waited for")

    def access(self, lanes: np.ndarray, touched: np.ndarray, write: bool) -> None:
        """An ordinary access to [lane, byte]."""
        self.check_finished(touched)
        self.check_mine(self.owner, lanes, touched, "access to what thread {} has copied, with no barrier after it")
        if not write:
            self.reader[touched] = 1 + lanes[:, None]

    def check_finished(self, touched: np.ndarray | slice) -> None:
        """That nobody has yet to wait for a copy to these bytes of shared memory."""
        first = int(self.owner[touched].min(initial=0))
        if first < 0:
            raise Fault(f"access to shared memory whose copy thread {-1 - first} has not waited for")

    def check_mine(self, table: np.ndarray, lanes: np.ndarray, touched: np.ndarray, message: str) -> None:
        """That these [lane, byte] are, by `table`, no other lane's."""
        whose = table[touched]
        foreign = (whose > 0) & (whose != 1 + lanes[:, None])
        if foreign.any():
            raise Fault(message.format(whose[foreign][0] - 1))
