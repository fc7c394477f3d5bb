"""The environment variables of cupyep, read here and nowhere else.

Each is read when it is asked for, so a notebook may set one before the call that needs it.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """CUPYEP_CACHE_DIR: folder of the kernel cache (cubins). Default: ~/.cache/cupyep."""
    return Path(os.environ.get("CUPYEP_CACHE_DIR") or Path.home() / ".cache" / "cupyep")


def dump_source_dir() -> Path | None:
    """CUPYEP_DUMP_SOURCE: folder that gets each kernel's assembled source, for readers and debuggers. Default: none."""
    value = os.environ.get("CUPYEP_DUMP_SOURCE")
    return Path(value) if value else None


def mover() -> str:
    """CUPYEP_MOVER: "auto" (TMA on compute capability 9.0 and later), "tma" or "vector". Default: auto."""
    value = os.environ.get("CUPYEP_MOVER") or "auto"
    if value not in ("auto", "tma", "vector"):
        raise ValueError(f"CUPYEP_MOVER: expected auto, tma or vector, got {value!r}")
    return value


def poison() -> bool:
    """CUPYEP_POISON=1: fill every arena block with 0xFF bytes (NaN) before use, so that an unwritten row shows."""
    return _flag("CUPYEP_POISON")


def skip_import_compile() -> bool:
    """CUPYEP_SKIP_IMPORT_COMPILE=1: do not compile the shape-independent kernels at import."""
    return _flag("CUPYEP_SKIP_IMPORT_COMPILE")


def shm_dir() -> Path:
    """CUPYEP_SHM_DIR: folder of the files that back shared memory between CPU ranks. Default: /dev/shm."""
    return Path(os.environ.get("CUPYEP_SHM_DIR") or "/dev/shm")


def host_name() -> str | None:
    """CUPYEP_HOST_ID: overrides what tells hosts apart (boot id and IPC namespace); for tests. Default: none."""
    return os.environ.get("CUPYEP_HOST_ID") or None


def world_size() -> int | None:
    """The launcher's number of ranks (Open MPI, MPICH, Slurm), or None when no launcher tells."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def local_rank() -> int | None:
    """The launcher's number of this process on its host (Open MPI, MPICH, Slurm), or None when no launcher tells."""
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def launched_by_mpi() -> bool:
    """Whether an MPI launcher started this process, so that comm=None means MPI.COMM_WORLD."""
    return any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"))


def mps_pipe_dir() -> Path:
    """CUDA_MPS_PIPE_DIRECTORY: where the CUDA MPS daemon listens. Default: /tmp/nvidia-mps."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")


def set_default_connections() -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS, before CUDA starts: streams that share one wait for each other, so ranks that are
    threads need many; processes under MPS need few, or the GPU runs out of channels."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8" if launched_by_mpi() else "32")


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1"
