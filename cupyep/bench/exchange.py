"""All-to-all exchanges of rows among MPI processes: MPI from host memory, MPI from GPU memory, NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cupyep.bench.world import World

Exchange = Callable[[Any, list[int], list[int]], Any]  # (rows by destination, rows sent to each, received from each)


def exchanges(world: World) -> Iterator[tuple[str, Exchange | None, str]]:
    """(name, exchange, why there is none). An exchange is collective; its result is complete on the current stream."""
    if not world.is_mpi:
        yield "MPI and NCCL", None, "need ranks that are processes: start it with mpirun"
        return
    from cupyep.comm import mpi

    if world.backend == "numpy":
        yield "MPI.Alltoallv", lambda *rows: _mpi(mpi.world(), np, *rows), ""
        return
    import cupy

    yield "MPI.Alltoallv through host memory", lambda *rows: _staged(mpi.world(), *rows), ""
    if mpi.is_cuda_aware():
        yield "MPI.Alltoallv of GPU memory", lambda *rows: _mpi(mpi.world(), cupy, *rows), ""
    else:
        yield "MPI.Alltoallv of GPU memory", None, "this MPI library is not CUDA-aware"
    why = _why_no_nccl(world)
    yield "NCCL send/recv", None if why else Nccl(world), why


def _mpi(comm: Any, xp: Any, rows: Any, sent: list[int], received: list[int]) -> Any:
    out = xp.empty((sum(received), *rows.shape[1:]), rows.dtype)
    pitch = rows.shape[1] * rows.itemsize
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()  # MPI reads the memory at once
    messages = [
        [a.view(np.uint8).ravel(), [n * pitch for n in counts]] for a, counts in ((rows, sent), (out, received))
    ]
    comm.Alltoallv(*messages)
    return out


def _staged(comm: Any, rows: Any, sent: list[int], received: list[int]) -> Any:
    import cupy

    return cupy.asarray(_mpi(comm, np, rows.get(), sent, received))


def _why_no_nccl(world: World) -> str:
    from cupy.cuda import nccl

    if not nccl.available:
        return "CuPy finds no libnccl"
    return "NCCL wants a GPU for each rank" if world.ranks_per_device > 1 else ""


class Nccl:
    """Grouped sends and receives on the current stream, as NCCL's own all-to-all is made of them."""

    def __init__(self, world: World) -> None:
        import cupy
        from cupy.cuda import nccl

        self._nccl, self._size = nccl, world.size
        unique_id = world.gather([nccl.get_unique_id() if world.is_first else None])[0]
        self._device = cupy.cuda.Device(world.devices()[0])
        with self._device:
            self._comm = nccl.NcclCommunicator(world.size, unique_id, world.process)

    def __call__(self, rows: Any, sent: list[int], received: list[int]) -> Any:
        import cupy

        with self._device:
            out, stream = cupy.empty((sum(received), *rows.shape[1:]), rows.dtype), cupy.cuda.get_current_stream().ptr
            pitch = rows.shape[1] * rows.itemsize
            source, target = rows.data.ptr, out.data.ptr
            self._nccl.groupStart()
            for peer in range(self._size):
                for transfer, address, count in (
                    (self._comm.send, source, sent[peer] * pitch),
                    (self._comm.recv, target, received[peer] * pitch),
                ):
                    if count:
                        transfer(address, count, self._nccl.NCCL_UINT8, peer, stream)
                source, target = source + sent[peer] * pitch, target + received[peer] * pitch
            self._nccl.groupEnd()
            return out
