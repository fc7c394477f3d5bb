"""The facts of `cupyep doctor`, gathered one after the other; nothing that is missing or broken stops the rest."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupyep import env
from cupyep.doctor import bounded
from cupyep.doctor.report import has_gpu, verdict

_CUDA = "cupyep.backends.cuda.probe"


def examine() -> dict[str, Any]:
    """All facts as plain values, with `verdict` (the report's last line) and `ready`.

    A section that could not be had has an "error"; one that there was no reason to ask for is "skipped".
    Sync: blocks for seconds; every probe has a deadline.
    """
    from cupyep import __version__

    facts: dict[str, Any] = {
        "cupyep": __version__,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "host": {"system": platform.platform(), "cores": len(os.sched_getaffinity(0))},
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "cupy": cupy(),
        "gpus": gpus(),
        "mps": bounded.call(f"{_CUDA}:mps", timeout_s=15),
        "mpi": mpi(),
        "shared_memory": shared_memory(),
        "limits": limits(),
        "cache": cache(),
    }
    facts.update(cuda(facts["gpus"]))
    facts["kernels"] = kernels(facts["cuda"])
    facts["verdict"] = verdict(facts)
    facts["ready"] = facts["verdict"].startswith("ready")
    return facts


def cupy() -> dict[str, Any]:
    """Which CuPy is installed, and the NVRTC that it finds."""
    from cupyep.backends.cuda import probe

    return {"wheels": probe.wheels(), **bounded.call(f"{_CUDA}:libraries", timeout_s=60)}


def gpus() -> dict[str, Any]:
    """Driver and physical GPUs."""
    from cupyep.backends.cuda import probe

    return {"device_files": probe.device_files(), **bounded.call(f"{_CUDA}:gpus", timeout_s=30)}


def cuda(physical: dict[str, Any]) -> dict[str, Any]:
    """Devices with their peer access, the IPC self-test, and whether the CUDA backend would run; with GPUs only."""
    if not has_gpu(physical):
        return {name: {"skipped": "no NVIDIA GPU"} for name in ("cuda", "ipc", "backend")}
    return {
        "cuda": bounded.call(f"{_CUDA}:devices", timeout_s=60),
        "ipc": bounded.call(f"{_CUDA}:ipc", timeout_s=60),
        "backend": bounded.call("cupyep.doctor.checks:backend", timeout_s=60),
    }


def backend() -> dict[str, Any]:
    """Whether backend="auto" would choose cuda here. Runs in a process of its own."""
    from cupyep import backends

    return {"cuda_usable": bool(backends.cuda_usable())}


def mpi() -> dict[str, Any]:
    """The launcher, and what importing mpi4py finds: asked in a process of its own, unless this one is a rank."""
    launcher = mpiexec()
    if env.launched_by_mpi():  # a child would inherit the launcher's variables, but not its connection
        try:
            from cupyep.comm.mpi import library_info

            return {"mpiexec": launcher, **library_info()}
        except Exception as error:
            return {"mpiexec": launcher, "error": bounded.one_line(error)}
    return {"mpiexec": launcher, **bounded.call("cupyep.comm.mpi:library_info", timeout_s=30)}


def mpiexec() -> str | None:
    """The environment's own launcher, else the one on PATH."""
    own = Path(sys.executable).with_name("mpiexec")
    return str(own) if own.exists() else shutil.which("mpiexec")


def shared_memory() -> dict[str, Any]:
    """Room where CPU ranks share memory, and rows moved between two processes there."""
    folder = env.shm_dir()
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        return {"folder": str(folder), "free_bytes": None, "error": bounded.one_line(error)}
    tested = bounded.call("cupyep.doctor.selftest:shared_memory", timeout_s=40)
    return {"folder": str(folder), "free_bytes": stat.f_bavail * stat.f_frsize, **tested}


def limits() -> dict[str, Any]:
    """Soft limits that many ranks may meet: open files (one per peer's arena) and locked bytes; None is no limit."""
    numbers = {"open_files": resource.RLIMIT_NOFILE, "locked_bytes": resource.RLIMIT_MEMLOCK}
    values = {name: resource.getrlimit(number)[0] for name, number in numbers.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in values.items()}


def cache() -> dict[str, Any]:
    """The folder of compiled kernels: its size, and whether it (or, if missing, the place for it) can be written."""
    try:
        folder = env.cache_dir()
    except RuntimeError as error:  # no home directory
        return {"folder": None, "num_bytes": 0, "error": bounded.one_line(error)}
    num_bytes = 0
    try:
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        place = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return {"folder": str(folder), "num_bytes": num_bytes, "error": bounded.one_line(error)}
    return {"folder": str(folder), "num_bytes": num_bytes, "writable": True}


def kernels(visible: dict[str, Any]) -> dict[str, Any]:
    """How kernels would move rows on each device, and how many SMs a rank would use."""
    try:
        setting = env.mover()
    except ValueError as error:
        return {"error": str(error)}
    chosen = bounded.call(f"{_CUDA}:choices", timeout_s=60) if visible.get("devices") else {}
    return {"mover_setting": setting, **chosen}
