"""How ranks find each other: mpi4py processes, threads of one process, or one rank alone."""

from __future__ import annotations

from typing import Any

from cupyep import env
from cupyep.comm.base import Communicator
from cupyep.comm.local import LocalComm, run_threads, single
from cupyep.errors import StateError

__all__ = ["Communicator", "LocalComm", "connect", "run_threads"]


def connect(comm: Any, timeout_s: float | None) -> Communicator:
    """Collective: a private Communicator for a Buffer.

    Args:
        comm: an mpi4py communicator, a LocalComm, or None: MPI.COMM_WORLD in a process that an MPI launcher started,
            else one rank alone.
        timeout_s: deadline in seconds.

    Raises: TypeError; StateError where an MPI launcher started a process that has no mpi4py.
    """
    if isinstance(comm, LocalComm):
        return comm.duplicate()
    if comm is None and not env.launched_by_mpi():
        return single()
    if comm is not None and not type(comm).__module__.startswith("mpi4py"):
        raise TypeError(f"comm: expected an mpi4py communicator, a cupyep.LocalComm or None, got {type(comm).__name__}")
    try:
        from cupyep.comm.mpi import communicator  # only here, so that a machine without MPI can import cupyep
    except ImportError as error:
        raise StateError(
            f"comm: an MPI launcher started this process, and mpi4py (extra mpi) fails: {error}"
        ) from error
    return communicator(comm, timeout_s)
