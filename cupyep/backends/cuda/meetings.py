"""Where ranks that are threads meet around a launch, and how one that gives up is known to all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import cupy

from cupyep.abi import AbortKind
from cupyep.backends.cuda.streams import check_rank_streams
from cupyep.comm import Communicator, LocalComm
from cupyep.errors import PeerError, PeerTimeoutError

_ALONE = nullcontext()


class Launcher(Protocol):
    """What a meeting needs of those who launch."""

    def check_abort(self) -> None: ...

    def abort(self, kind: AbortKind, peer: int, stream: Any) -> None: ...


class Meetings:
    """One rank's meetings with the other threads; processes and a rank alone have none. On the current device."""

    def __init__(self, comm: Communicator, timeout_s: float | None) -> None:
        # Steps of their own: nothing else that ranks do together may be taken for a meeting.
        self.comm = comm.duplicate() if isinstance(comm, LocalComm) else comm
        self._timeout_s = timeout_s
        self._stream = cupy.cuda.Stream(non_blocking=True)  # the others may be waiting for a peer

    def around(self, launcher: Launcher, current: cupy.cuda.Stream) -> AbstractContextManager[None]:
        """Within it a rank launches one operation for the stream `current`.

        Threads meet before and after: until all have launched, no rank may make a call that waits for the context (an
        allocation, a module load), because a kernel of another rank already waits for this rank's.
        """
        if not self.comm.in_process or self.comm.size == 1 or current.is_capturing():
            return _ALONE  # nobody can be late: under capture nothing is launched
        return self._together(launcher, current)

    @contextmanager
    def _together(self, launcher: Launcher, current: cupy.cuda.Stream) -> Iterator[None]:
        check_rank_streams(self._meet(launcher, current.ptr))
        yield
        self._meet(launcher, None)

    def _meet(self, launcher: Launcher, value: Any) -> list[Any]:
        """Everybody's value. Who waits too long makes its record the verdict of all ranks.

        A rank that comes after the others have left learns it while it waits, or its kernel does: the abort word is not
        read before every launch, as that is a copy that the host waits for.
        """
        try:
            return self.comm.allgather(value, operation="launch", timeout_s=self._timeout_s)
        except PeerError as error:
            kind = AbortKind.TIMEOUT if isinstance(error, PeerTimeoutError) else AbortKind.RAISED
            self.abort(launcher, kind, error.peer)
            launcher.check_abort()
            raise

    def abort(self, launcher: Launcher, kind: AbortKind, peer: int) -> None:
        """Makes every rank leave; the host waits until they all can know."""
        launcher.abort(kind, peer, self._stream)
        self._stream.synchronize()
