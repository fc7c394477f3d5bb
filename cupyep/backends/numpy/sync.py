"""The handshake of one channel between CPU ranks: posts, counts, done words, deadlines, abort and revoke.

Follow one operation of epoch e, here and in the kernels alike:

    begin       e = epoch + 1; the busy word catches two operations at once (on a GPU two steps: next_epoch, begin)
    post        our signature and block to every rank, slot [e % 2][us]; the epoch word last: it makes the rest valid
    wait_posts  until slot [e % 2][s] of our own block says e, for EVERY rank s
    (move)      rows go to or come from the blocks that were posted
    finish      done = e at every rank, then wait until every rank's done word here has reached e

Posts and counts are double-buffered by parity, and every rank waits for all: a rank can thus be one operation ahead of
a slow reader, never two, and overwrites nothing unread. Epochs are compared by signed difference, so they may wrap.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable

import numpy as np

from cupyep import abi, layout
from cupyep.abi import AbortKind, Operation, Status
from cupyep.backends.numpy.memory import Arena
from cupyep.backends.verdict import abort_error, signature_mismatch
from cupyep.comm import Communicator
from cupyep.errors import StateError

_EPOCH_WORD = abi.POST.dtype.fields["epoch"][1] // 4  # type: ignore[index]
_fence_lock = threading.Lock()


def fence() -> None:
    """Orders our loads and stores before it against those after it (a release of one lock, then an acquire)."""
    for _ in range(2):
        with _fence_lock:
            pass


class Channel:
    """This rank's end of one channel. `timeout_s` bounds every wait."""

    def __init__(
        self,
        arena: Arena,
        control: layout.ControlLayout,
        comm: Communicator,
        channel: layout.Channel,
        timeout_s: float | None,
    ):
        views = [
            {name: control.view(memory, control.region(channel, name)) for name in ("posts", "done", "counts")}
            for memory in arena.memories
        ]
        self._posts = [view["posts"] for view in views]  # [owner][parity, sender]
        self._words = [posts.view(np.uint32).reshape(2, comm.size, -1) for posts in self._posts]
        self._done = [view["done"] for view in views]  # [owner][sender]
        self.counts = [view["counts"] for view in views]  # [owner][parity, sender, word]
        self._state = control.view(arena.own, control.region(channel, "state"))
        self._abort = [control.view(memory, control.abort) for memory in arena.memories]
        self._arena, self._comm, self._timeout_s = arena, comm, timeout_s
        self._operation, self.epoch = Operation.BARRIER, 0

    def begin(self, operation: Operation) -> int:
        """Starts an operation and returns the parity of its epoch."""
        self.check_abort()
        if self._state["busy"]:
            raise StateError(f"{operation.verb}: another operation of this channel is running on this rank")
        self._state["busy"] = 1
        self.epoch = (int(self._state["epoch"]) + 1) & 0xFFFFFFFF
        self._operation = operation
        return self.epoch & 1

    def end(self) -> None:
        """Ends the operation."""
        self._state["epoch"] = self.epoch
        self._state["busy"] = 0

    def post(self, record: np.ndarray) -> None:
        """Tells every rank what we do and where our block is. Counts written before are published with it."""
        words = record.reshape(1).view(np.uint32)
        fence()  # H8: counts (and rows of the operation before) first
        slots = [self._words[peer][self.epoch & 1, self._comm.rank] for peer in range(self._comm.size)]
        for slot in slots:
            slot[:_EPOCH_WORD], slot[_EPOCH_WORD + 1 :] = words[:_EPOCH_WORD], words[_EPOCH_WORD + 1 :]
        fence()  # H8: the post's words before its epoch
        for slot in slots:
            slot[_EPOCH_WORD] = self.epoch

    def wait_posts(self, waited_us: np.ndarray | None = None) -> np.ndarray:
        """Every rank's post of this epoch, by rank (a copy). Raises MismatchError where signatures differ.

        `waited_us[peer]` grows by the microseconds until that peer's post was here.
        """
        parity, own, start = self.epoch & 1, self._comm.rank, time.monotonic()
        missing = set(range(self._comm.size))

        def has_come(peer: int, _: int = 0) -> bool:
            for other in [
                other for other in missing if self._reached(int(self._words[own][parity, other, _EPOCH_WORD]))
            ]:
                missing.remove(other)
                if waited_us is not None:
                    waited_us[other] += int((time.monotonic() - start) * 1e6)
            return peer not in missing

        for peer in range(self._comm.size):
            self._wait(self._words[own][parity, peer], _EPOCH_WORD, peer, functools.partial(has_come, peer), start)
        fence()  # H5: the epoch words before what they publish
        posts = self._posts[own][parity].copy()
        for revoked in np.flatnonzero(posts["status"] == Status.REVOKED):  # it may have been FAILED before
            self._await_record(int(revoked))
        if mismatch := signature_mismatch(posts):
            self.end()
            raise mismatch
        return posts

    def check_writable(self, peer: int) -> None:
        """Raises unless `peer`'s block may still be written or read (H7): no abort, and its post not revoked."""
        self.check_abort()
        if self._posts[self._comm.rank][self.epoch & 1, peer]["status"] == Status.REVOKED:
            self._await_record(peer)

    def _await_record(self, peer: int) -> None:
        """Raises the error of the abort record, which follows a revoked post at once."""
        self._wait(self._abort[self._comm.rank], 0, peer, reached=lambda seen: False)

    def finish(self) -> None:
        """Tells every rank that our part is complete, and waits until all are."""
        fence()  # H4, H8: our copies before the done words
        for peer in range(self._comm.size):
            self._done[peer][self._comm.rank] = self.epoch
        start = time.monotonic()
        for peer in range(self._comm.size):
            self._wait(self._done[self._comm.rank], peer, peer, start=start)
        fence()  # H5: their copies are seen
        self.end()

    def _reached(self, seen: int) -> bool:
        return (seen - self.epoch) & 0xFFFFFFFF < 0x80000000  # epochs wrap

    def _wait(
        self,
        words: np.ndarray,
        index: int,
        peer: int,
        reached: Callable[[int], bool] | None = None,
        start: float | None = None,
    ) -> bool:
        """Until words[index] is `reached` (None: our epoch). `start`: when the wait for all peers began; None: now."""
        reached = reached or self._reached
        start = time.monotonic() if start is None else start
        while not reached(int(words[index])):
            self.check_abort()
            if failed := self._comm.failed_peer():
                self.abort(AbortKind.RAISED, failed[0])
                self.check_abort()
            waited = time.monotonic() - start
            if self._timeout_s is not None and waited >= self._timeout_s:
                self._late(peer, waited)
                return False
            if waited < 0.002:
                os.sched_yield()  # ranks may outnumber cores: a bare spin costs a time slice per handshake
            else:
                time.sleep(0.0002)
        return True

    def _late(self, peer: int, waited_s: float) -> None:
        self.abort(AbortKind.TIMEOUT, peer)
        self.check_abort(waited_s)

    def check_abort(self, waited_s: float | None = None) -> None:
        """Raises the error that the first rank to leave has broadcast, if any."""
        word = int(self._abort[self._comm.rank][0])
        if word:
            raise abort_error(word, waited_s if waited_s is not None else (self._timeout_s or 0))

    def abort(self, kind: AbortKind, peer: int) -> None:
        """Leaves the operation for good: revokes our posts, then makes one record the verdict of all ranks.

        Rank 0's abort word is the one arbiter: the first record to get there wins, and every rank ends up with it.
        """
        for posts in self._posts:  # whoever has not yet touched our block must not
            posts["status"][self.epoch & 1, self._comm.rank] = Status.REVOKED
        fence()
        with self._arena.exclusive():
            if not self._abort[0][0]:
                self._abort[0][0] = abi.pack_abort(kind, self._operation, self._comm.rank, peer, self.epoch)
            word = self._abort[0][0]
        for abort in self._abort:
            abort[0] = word
