"""What the link between GPUs carries: stores to a peer, loads from it, both at once, and the driver's own copy.

Every rank is paired with the next one. "one" pattern runs on rank 0 alone; "all" on every rank at once, so that each
GPU sends and receives. GB/s is that of one rank's kernel or copy. Where ranks share a GPU there is no link: then this
is a dry run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from cupyep import abi
from cupyep.bench.ceilings import BYTES_PER_SM, FILL, Probe
from cupyep.bench.report import progress
from cupyep.bench.timing import CudaClock, Timing, measure
from cupyep.bench.world import TIMEOUT_S, World
from cupyep.buffer import Buffer

ARRAY_BYTES = 256 << 20  # of each rank: one array to load from, one to store to
# name -> (kernel, reads, writes, whom it concerns). "next": the next rank; "all": every other rank in turn.
PATTERNS = {
    "store to peer": ("mix", 0, 1, "next"),
    "load from peer": ("mix", 1, 0, "next"),
    "load from and store to peer": ("mix", 1, 1, "next"),
    "store to all peers": ("mix", 0, 1, "all"),
    "load from all peers": ("mix", 1, 0, "all"),
}
COPY = "cudaMemcpyAsync to peer"


class PeerRank:
    """A Buffer whose arena holds both arrays, and kernels that reach its peers' arrays. Collective."""

    def __init__(self, comm: Any, row_bytes: int) -> None:
        self.buffer = Buffer(comm, num_nvl_bytes=2 * ARRAY_BYTES + 4096, backend="cuda", timeout_s=TIMEOUT_S)
        self.device, self.stream = cupy.cuda.Device(), self.buffer.get_comm_stream()
        self.probe = Probe(row_bytes, self.stream)
        self.src, self.dst = (self.buffer.empty((ARRAY_BYTES,), np.uint8) for _ in range(2))
        self.src.fill(self.buffer.rank + 1)
        self.dst.fill(0)
        arena: Any = self.buffer._backend._arena
        peers, size = arena.peers.get().tolist(), self.buffer.size
        offsets = [arena.offset_of(array) for array in (self.src, self.dst)]  # alike on all ranks: the same calls
        others = [(self.buffer.rank + i) % size for i in range(1, min(size, abi.CEILING_ARRAYS + 1))] or [0]
        self.sources, self.destinations = ([peers[other] + offset for other in others] for offset in offsets)

    def launch(self, name: str, num_sms: int) -> None:
        """One kernel of PATTERNS, or one copy, on our stream."""
        with self.device:
            if name == COPY:
                size = self.moved(name, num_sms)
                runtime.memcpyAsync(
                    self.destinations[0], self.src.data.ptr, size, runtime.memcpyDefault, self.stream.ptr
                )
                return
            kernel, reads, writes, whom = PATTERNS[name]
            last = 1 if whom == "next" else None
            part = self._part(num_sms)
            self.probe.launch(kernel, num_sms, self.sources[:last], self.destinations[:last], part, reads, writes)

    def moved(self, name: str, num_sms: int) -> int:
        """Bytes over the link by one launch; in the direction that has more."""
        return ARRAY_BYTES if name == COPY else self._part(num_sms) // self.probe.chunk_bytes * self.probe.chunk_bytes

    def _part(self, num_sms: int) -> int:
        return min(ARRAY_BYTES, BYTES_PER_SM * num_sms)

    def barrier(self) -> None:
        with self.device:
            self.buffer._backend._launcher.barrier()

    def check(self, value: int, num_bytes: int) -> None:
        """That the rank before us has stored `value` in so much of our array, and nothing behind it."""
        with self.device:
            whole = num_bytes // self.probe.chunk_bytes * self.probe.chunk_bytes if value == FILL else num_bytes
            if not bool((self.dst[:whole] == value).all()) or bool(self.dst[whole:].any()):
                raise AssertionError(f"rank {self.buffer.rank}: what a peer stored here is wrong")
            self.dst.fill(0)

    def close(self) -> None:
        del self.src, self.dst
        self.buffer.close()


def run(world: World, num_sms: list[int], row_bytes: int, calls: int) -> Iterator[dict[str, Any]]:
    """Collective: the results of every pattern, on one rank and on all, by number of SMs."""
    most = world.machine().num_sms // world.ranks_per_device
    Buffer.set_num_sms(1)  # for barriers; the other kernels wait for nobody
    ranks = world.each(PeerRank, row_bytes)
    _verify(world, ranks)
    work = [(name, sms) for name in PATTERNS for sms in num_sms if sms <= most] + [(COPY, 0)]
    for name, sms in progress(work, "peers", show=world.is_first):
        for who in ("one", "all"):
            active = ranks if who == "all" else ranks[: int(world.is_first)]
            clocks = [_clock(rank) for rank in active]
            launches = [partial(rank.launch, name, sms) for rank in active]
            timings = measure(launches, clocks, partial(_align, world, ranks), calls)
            seconds = Timing.slowest(world.gather(timings)).mean
            moved = ranks[0].moved(name, sms)
            yield {
                "benchmark": "peers",
                "name": f"{name}, {who}",
                "num_ranks": world.size,
                "ranks_per_device": world.ranks_per_device,
                "num_sms": sms or None,
                "row_bytes": row_bytes,
                "bytes": moved,
                "time_us": seconds * 1e6,
                "gbps": moved / seconds / 1e9,
            }
    world.on(ranks, lambda rank: rank.close())


def _verify(world: World, ranks: list[PeerRank]) -> None:
    """Collective: stores and copies arrive at the next rank."""
    for name, value in (("store to peer", None), (COPY, 1)):
        world.align()
        for rank in ranks:
            rank.launch(name, 2)
        world.align()
        for rank in ranks:
            before = (rank.buffer.rank - 1) % world.size + 1  # what that rank's src is filled with
            rank.check(FILL if value is None else before, min(ARRAY_BYTES, rank.moved(name, 2)))
        world.align()


def _align(world: World, ranks: list[PeerRank]) -> None:
    world.align()
    for rank in ranks:
        rank.barrier()


def _clock(rank: PeerRank) -> CudaClock:
    with rank.device:
        return CudaClock(rank.stream)
