"""The verbs, twice: NumPy over shared memory, CUDA over peer memory. Everything above here is shared."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from cupyep.backends.base import Backend
from cupyep.comm import Communicator
from cupyep.config import BufferConfig
from cupyep.errors import StateError

_DLPACK_CUDA = 2  # kDLCUDA


def create(comm: Communicator, config: BufferConfig, device: int | None, num_sms: int | None) -> Backend:
    """Collective: the backend that `config` asks for; "auto" takes cuda if every rank has a GPU and CuPy."""
    name = config.backend
    if name == "auto":
        usable = comm.allgather(cuda_usable(), operation="Buffer", timeout_s=config.timeout_s)
        name = "cuda" if all(usable) else "numpy"
    if name == "cuda":
        comm.together("Buffer", require_cuda, timeout_s=config.timeout_s)
        from cupyep.backends.cuda.backend import CudaBackend

        return CudaBackend(comm, config, device, num_sms)
    from cupyep.backends.numpy.backend import NumpyBackend

    return NumpyBackend(comm, config)


def of_array(array: Any) -> ModuleType:
    """The fp8 module of the backend that `array` belongs to: CUDA for memory of a GPU, else NumPy."""
    on_gpu = hasattr(array, "__cuda_array_interface__")
    if not on_gpu and hasattr(array, "__dlpack_device__"):
        on_gpu = array.__dlpack_device__()[0] == _DLPACK_CUDA
    return importlib.import_module(f"cupyep.backends.{'cuda' if on_gpu else 'numpy'}.fp8")


def require_cuda() -> None:
    """Raises StateError where the CUDA backend cannot run, with what is missing."""
    if importlib.util.find_spec("cupy") is None:
        raise StateError("backend: 'cuda' needs CuPy: install the extra cuda12 or cuda13 of cupyep")
    if not cuda_usable():
        raise StateError("backend: 'cuda' needs a GPU, CuPy sees none; 'cupyep doctor' tells more")


def cuda_usable() -> bool:
    """Whether the CUDA backend can run here: CuPy is installed and sees a GPU. Makes no CUDA context."""
    if importlib.util.find_spec("cupy") is None:
        return False
    from cupyep.backends.cuda.devices import usable

    return usable()


@contextmanager
def rank_context(rank: int) -> Iterator[None]:
    """What a thread needs to be a rank: on a GPU, a device and a stream of its own."""
    if cuda_usable():
        from cupyep.backends.cuda.streams import rank_stream

        with rank_stream(rank):
            yield
    else:
        yield
