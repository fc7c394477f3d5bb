"""A channel of the low-latency mode between CPU ranks: words that carry data and epoch at once, in place of posts.

    start            e = epoch + 1
    await_consumed   until each peer's done word here says e - 1: it has read what we sent last
    (rows)           into our part of the peers' receive regions
    publish          one word to each peer
    await_arrivals   until each peer's word here says e
    (rows)           out of our own region
    leave            done = e at every peer

A word or done word ahead of these is of a peer that has masked us and gone on: we give it no rows and take none of it.
The kernels do the same word for word: cuda_src/cupyep/low_latency.cuh. docs/low-latency.md tells why it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyep.abi import AbortKind, Operation, Phase
from cupyep.backends.numpy.memory import Arena
from cupyep.backends.numpy.sync import Channel, fence
from cupyep.comm import Communicator
from cupyep.layout import Channel as ChannelId
from cupyep.layout import ControlLayout

if TYPE_CHECKING:
    from cupyep.backends.numpy.low_latency import NumpyLowLatency


class LowLatencyChannel(Channel):
    """A channel without posts: arrival words carry data and epoch at once; late peers may be masked."""

    def __init__(
        self, arena: Arena, control: ControlLayout, comm: Communicator, channel: ChannelId, owner: NumpyLowLatency
    ) -> None:
        super().__init__(arena, control, comm, channel, owner.timeout_s)
        region = control.region(channel, "arrivals")
        self._arrivals = [control.view(memory, region) for memory in arena.memories]  # [owner][kind, sender]
        self._owner = owner

    def start(self, operation: Operation, phases: int) -> None:
        """Begins an operation, or goes on with one whose send half is through."""
        self._timeout_s = self._owner.timeout_s
        if phases & Phase.SEND:
            self.begin(operation)

    def await_consumed(self) -> list[int]:
        """The peers that rows may be sent to: not masked, and through with what we sent last (H7), but no further."""
        before = (self.epoch - 1) & 0xFFFFFFFF
        done = self._done[self._comm.rank]
        came = self._in_time(done, lambda seen: (seen - before) & 0xFFFFFFFF < 0x80000000)
        fence()
        return [peer for peer in came if done[peer] == before]

    def publish(self, kind: int, signature: int, counts: Any) -> None:
        """Tells each peer how many rows, or weights, of ours it has now; 0 if it is masked."""
        fence()  # H8: rows first
        for peer in range(self._comm.size):
            count = 0 if self._owner.masked[peer] else int(counts[peer])
            self._arrivals[peer][kind, self._comm.rank] = self.epoch << 32 | signature << 16 | count

    def await_arrivals(self, kind: int, signature: int) -> np.ndarray:
        """Every rank's count, 0 of those that are masked or have gone on without us."""
        counts = np.zeros(self._comm.size, np.int64)
        words = self._arrivals[self._comm.rank][kind]
        for peer in self._in_time(words, lambda seen: self._reached(seen >> 32)):
            word = int(words[peer])
            if word >> 32 != self.epoch:
                continue
            if word >> 16 & 0xFFFF != signature:
                self.abort(AbortKind.MISMATCH, peer)
                self.check_abort()
            counts[peer] = word & 0xFFFF
        fence()  # H5
        return counts

    def _in_time(self, words: np.ndarray, reached: Callable[[int], bool]) -> list[int]:
        """The unmasked peers, once `reached` holds for all their words; late ones get masked, if they may be."""
        start = time.monotonic()  # one deadline for all of them
        for peer in self._unmasked():
            self._wait(words, peer, peer, reached, start)
        return self._unmasked()

    def leave(self) -> None:
        """Tells every rank that we have read its rows, and ends the operation."""
        fence()
        for peer in range(self._comm.size):
            self._done[peer][self._comm.rank] = self.epoch
        self.end()

    def _unmasked(self) -> list[int]:
        return np.flatnonzero(self._owner.masked == 0).tolist()

    def _late(self, peer: int, waited_s: float) -> None:
        if self._owner.masks_on_timeout:
            self._owner.masked[peer] = 1
        else:
            super()._late(peer, waited_s)
