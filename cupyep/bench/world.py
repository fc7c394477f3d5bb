"""The ranks of a benchmark: processes of an MPI job, one each, or threads of this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from cupyep import backends, env, model
from cupyep.comm import connect
from cupyep.threads import run_local

T = TypeVar("T")
TIMEOUT_S = 60.0  # of waits among processes, and of a Buffer


class World:
    """All ranks of the job; this process drives one of them (MPI) or all (threads).

    Args: num_ranks of threads, None under MPI; backend: "auto", "cuda" or "numpy". Collective.
    Raises: ValueError if the launcher and num_ranks disagree; StateError without a GPU for "cuda".
    """

    def __init__(self, num_ranks: int | None, backend: str) -> None:
        self.is_mpi = env.launched_by_mpi()
        self._host = connect(None, TIMEOUT_S)
        if self.is_mpi and num_ranks not in (None, self._host.size):
            raise ValueError(f"--ranks: expected nothing under an MPI launcher, which started {self._host.size}")
        self.size = self._host.size if self.is_mpi else num_ranks or 4
        if backend == "cuda":
            backends.require_cuda()
        self.backend = "cuda" if backend != "numpy" and backends.cuda_usable() else "numpy"
        self.process, self.is_first = self._host.rank, self._host.rank == 0
        self.ranks_per_device = self._sharing() if self.backend == "cuda" else 0  # the most ranks on one GPU

    def each(self, fn: Callable[..., T], *args: Any, timeout_s: float = 300) -> list[T]:
        """`fn(comm, *args)` as every rank of this process, each with a device and a stream: their results."""

        def body(comm: Any, rank: int) -> T:
            try:
                return fn(comm, *args)
            finally:
                self.synchronize()

        if self.is_mpi:
            with backends.rank_context(self._host.rank):
                return [body(None, self._host.rank)]
        return run_local(lambda comm: body(comm, comm.rank), self.size, timeout_s=timeout_s)

    def on(self, ranks: list[Any], fn: Callable[[Any], T]) -> list[T]:
        """`fn(rank)` for this process's `ranks`, each as itself."""
        return self.each(lambda comm: fn(ranks[comm.rank if comm is not None else 0]))

    def gather(self, values: list[T]) -> list[T]:
        """Collective among processes: the `values` of all of them, by rank."""
        return [
            value for part in self._host.allgather(values, operation="bench", timeout_s=TIMEOUT_S) for value in part
        ]

    def align(self) -> None:
        """Until every process is here and its devices have nothing to do."""
        self.synchronize()
        self._host.barrier(operation="bench", timeout_s=TIMEOUT_S)

    def synchronize(self) -> None:
        """Until the devices that this process's ranks use have nothing to do."""
        if self.backend == "cuda":
            import cupy

            for device in self.devices():
                cupy.cuda.Device(device).synchronize()

    def devices(self) -> list[int]:
        """Those of this process's ranks."""
        from cupy.cuda import runtime

        count = runtime.getDeviceCount()
        ranks = [self._host.rank] if self.is_mpi else range(self.size)
        return sorted({rank % count for rank in ranks})

    def _sharing(self) -> int:
        from cupy.cuda import runtime

        ranks = [self._host.rank] if self.is_mpi else range(self.size)
        mine = [runtime.deviceGetPCIBusId(rank % runtime.getDeviceCount()) for rank in ranks]
        return max(Counter(self.gather(mine)).values())

    def machine(self) -> model.Machine:
        """The GPU of this process's first rank."""
        from cupyep.backends.cuda.devices import machine

        return machine(self.devices()[0])
