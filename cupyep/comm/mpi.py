"""Ranks as MPI processes. The only module that imports mpi4py."""

from __future__ import annotations

import ctypes
import secrets
import time
from typing import Any

import mpi4py
from mpi4py import MPI

from cupyep import env
from cupyep.comm.base import Communicator
from cupyep.errors import PeerTimeoutError

_NUM_TAGS = 32767  # what every MPI library has to offer
_unfinished: dict[int, tuple[MPI.Intracomm, MPI.Request]] = {}  # by the caller's communicator: see _duplicate


class MpiCommunicator(Communicator):
    """A duplicate of an MPI communicator (COMM_WORLD, or one from Split), so that no message meets the user's own.

    Collectives are built from non-blocking point-to-point messages: MPI's own collectives tell neither that a peer is
    late nor which. Host collectives happen at creation, first use of a shape and close, never per call.
    """

    in_process = False

    def __init__(self, comm: MPI.Intracomm, timeout_s: float | None) -> None:
        self.rank, self.size = comm.rank, comm.size
        told = env.local_rank()
        self.local_rank = MPI.COMM_WORLD.rank if told is None else told  # not comm's: groups of a job share its GPUs
        self._step = 0
        self._sends: list[MPI.Request] = []
        self._meet(comm, timeout_s)
        self._comm = self._duplicate(comm, timeout_s)

    def _meet(self, comm: MPI.Intracomm, timeout_s: float | None) -> None:
        """Collective: all ranks are here now. MPI's Idup, which follows, could not tell who does not come.

        A hello counts once its echo is back, so what an earlier, timed-out attempt has left behind counts for nothing.
        These messages go over the caller's communicator with the largest tag that MPI has: only a receive of any tag
        that is outstanding now could take one.
        """
        tag, number = int(comm.Get_attr(MPI.TAG_UB) or _NUM_TAGS), secrets.randbits(62)
        peers = [peer for peer in range(self.size) if peer != self.rank]
        sends = [comm.isend(("hello", number), peer, tag) for peer in peers]
        absent, start = set(peers), time.monotonic()
        while absent:
            for peer in peers:
                while (message := comm.improbe(peer, tag)) is not None:
                    kind, theirs = message.recv()
                    if kind == "hello":
                        sends.append(comm.isend(("echo", theirs), peer, tag))
                    elif theirs == number:
                        absent.discard(peer)
            if absent:
                self._pause(start, timeout_s, "Buffer", min(absent))
        self._sends += sends  # small, and received by now or soon

    def _duplicate(self, comm: MPI.Intracomm, timeout_s: float | None) -> MPI.Intracomm:
        """Collective. A duplicate that could not be completed in time is the one to complete at the next attempt."""
        key = comm.py2f()
        duplicate, request = _unfinished.pop(key) if key in _unfinished else comm.Idup()
        start = time.monotonic()
        while not request.Test():
            try:
                self._pause(start, timeout_s, "Buffer", (self.rank + 1) % self.size)
            except PeerTimeoutError:
                _unfinished[key] = duplicate, request
                raise
        return duplicate

    def _exchange(self, value: Any, operation: str, timeout_s: float | None) -> list[Any]:
        tag = self._step % _NUM_TAGS
        self._step += 1
        self._sends = [send for send in self._sends if not send.Test()]
        self._sends += [self._comm.isend(value, peer, tag) for peer in range(self.size) if peer != self.rank]
        received = {self.rank: value}
        start = time.monotonic()
        while missing := [peer for peer in range(self.size) if peer not in received]:
            for peer in missing:
                message = self._comm.improbe(peer, tag)
                if message is not None:
                    received[peer] = message.recv()
            if absent := [peer for peer in missing if peer not in received]:
                self._pause(start, timeout_s, operation, absent[0])
        return [received[peer] for peer in range(self.size)]

    def _pause(self, start: float, timeout_s: float | None, operation: str, missing: int) -> None:
        if self.watch is not None:
            self.watch()
        waited = time.monotonic() - start
        if timeout_s is not None and waited >= timeout_s:
            raise PeerTimeoutError(operation, 0, self.rank, missing, waited)
        time.sleep(0 if waited < 0.002 else 0.0005)  # ranks may outnumber cores

    def free(self) -> None:
        self.watch = None
        MPI.Request.Waitall(self._sends)  # every rank has passed the last collective: all messages were received
        self._comm.Free()


def communicator(comm: Any, timeout_s: float | None) -> MpiCommunicator:
    """Wraps an mpi4py intracommunicator (None: COMM_WORLD). Collective."""
    if comm is None:
        comm = MPI.COMM_WORLD
    if comm == MPI.COMM_NULL:
        raise ValueError("comm: expected a communicator that this rank belongs to, got MPI.COMM_NULL")
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm: expected an mpi4py intracommunicator, got {type(comm).__name__}")
    return MpiCommunicator(comm, timeout_s)


def world() -> MPI.Intracomm:
    """COMM_WORLD itself, for what is no part of a Buffer (benchmarks)."""
    return MPI.COMM_WORLD


def is_cuda_aware() -> bool:
    """Whether MPI takes GPU memory as it is: what Open MPI's and MPICH's own query says, no where there is none."""
    for library in (MPI.__file__, None):  # None: what is loaded into the process already
        query = getattr(ctypes.CDLL(library), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False


def library_info() -> dict[str, str]:
    """Which mpi4py, which MPI library, and the thread level it grants. Local; importing this module has started MPI."""
    levels = ("single", "funneled", "serialized", "multiple")
    numbers = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    return {
        "mpi4py": mpi4py.__version__,
        "library": " ".join(MPI.Get_library_version().splitlines()[0].split()),
        "thread_level": dict(zip(numbers, levels, strict=True))[MPI.Query_thread()],
    }
