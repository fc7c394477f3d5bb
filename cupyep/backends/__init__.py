"""The verbs, twice: NumPy over shared memory, CUDA over peer memory. Everything above here is shared."""

from __future__ import annotations

from cupyep.backends.base import Backend
from cupyep.comm import Communicator
from cupyep.config import BufferConfig


def create(comm: Communicator, config: BufferConfig, device: int | None) -> Backend:
    """Collective: the backend that `config` asks for; "auto" takes cuda if every rank has a GPU and CuPy."""
    name = config.backend
    if name == "auto":
        usable = comm.allgather(cuda_usable(), operation="Buffer", timeout_s=config.timeout_s)
        name = "cuda" if all(usable) else "numpy"
    if name == "cuda":
        from cupyep.backends.cuda.backend import CudaBackend

        return CudaBackend(comm, config, device)
    from cupyep.backends.numpy.backend import NumpyBackend

    return NumpyBackend(comm, config)


def cuda_usable() -> bool:
    """Whether the CUDA backend can run here. Makes no CUDA context."""
    return False
