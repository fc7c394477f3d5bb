"""From facts to words: the verdict, the text and the JSON of `cupyep doctor`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Facts = dict[str, Any]


def verdict(facts: Facts) -> str:
    """ "ready (cuda)", "ready (numpy only: WHY)" or "fix: WHAT": the first thing that stands in the way."""
    if error := facts["kernels"].get("error"):
        return f"fix: {error}"
    mpi = facts["mpi"]
    if "error" in mpi and not _is_missing(mpi["error"], "mpi4py"):
        return f"fix: mpi4py does not load its MPI library ({mpi['error']}); the extra mpi brings one"
    if len(facts["cupy"]["wheels"]) > 1:
        return f"fix: uninstall all but one CuPy of {', '.join(facts['cupy']['wheels'])}"
    if not has_gpu(facts["gpus"]):
        return _without_cuda(facts, "no NVIDIA GPU")
    return _with_gpu(facts)


def has_gpu(gpus: Facts) -> bool:
    """Whether a library counted a GPU, or there is at least the device file of one."""
    return bool(gpus.get("gpus") or gpus["device_files"])


def _with_gpu(facts: Facts) -> str:
    cupy, gpus, cuda = facts["cupy"], facts["gpus"], facts["cuda"]
    if "error" in cupy:
        if not cupy["wheels"]:
            extra = "cuda12" if gpus.get("driver_cuda", "").startswith("12.") else "cuda13"
            return f"fix: there is a GPU but no CuPy; the extra {extra} brings it"
        return f"fix: {cupy['wheels'][0]} does not load ({cupy['error']})"
    if "error" in cuda:
        return f"fix: CUDA does not start on this GPU ({cuda['error']})"
    if not cuda["devices"]:
        return _without_cuda(facts, "CUDA_VISIBLE_DEVICES hides every GPU")
    if error := facts["ipc"].get("error"):
        return f"fix: CUDA IPC between two processes failed ({error}); containers need a common IPC and PID namespace"
    if error := facts["cache"].get("error"):
        return f"fix: the kernel cache cannot be written ({error}); set CUPYEP_CACHE_DIR to a folder that can"
    if error := facts["backend"].get("error"):
        return f"fix: the CUDA backend does not load ({error})"
    if not facts["backend"]["cuda_usable"]:
        return _without_cuda(facts, "this version's CUDA backend does not run here")
    return "ready (cuda)"


def _without_cuda(facts: Facts, why: str) -> str:
    shared = facts["shared_memory"]
    if "error" in shared:
        return f"fix: processes cannot share memory in {shared['folder']} ({shared['error']}); set CUPYEP_SHM_DIR"
    return f"ready (numpy only: {why})"


def _is_missing(error: str, module: str) -> bool:
    return error.startswith("ModuleNotFoundError") and module in error


def as_json(facts: Facts) -> str:
    """One JSON object."""
    return json.dumps(facts, indent=2)


def as_text(facts: Facts) -> str:
    """One line per fact; the verdict is the last."""
    return "\n".join([*(f"{name:<14} {text}" for name, text in _lines(facts)), facts["verdict"]])


def _lines(facts: Facts) -> Iterator[tuple[str, str]]:
    python, host, limits = facts["python"], facts["host"], facts["limits"]
    yield "cupyep", facts["cupyep"]
    yield "python", f"{python['version']} ({python['executable']})"
    yield "host", f"{host['system']}, {host['cores']} cores"
    yield "numpy", f"{facts['numpy']}, ml_dtypes {facts['ml_dtypes']}"
    yield from _gpu_lines(facts)
    mpi, shared, cache, kernels = facts["mpi"], facts["shared_memory"], facts["cache"], facts["kernels"]
    if "error" in mpi:
        yield "mpi", f"not usable, so ranks can be threads only: {mpi['error']}"
    else:
        yield "mpi", f"{mpi['library']}, thread level {mpi['thread_level']}, mpi4py {mpi['mpi4py']}"
    yield "mpiexec", mpi["mpiexec"] or "not found"
    free = "" if shared["free_bytes"] is None else f", {_bytes(shared['free_bytes'])} free"
    yield "shared memory", f"{shared['folder']}{free}; {_or_error(shared, 'self_test')}"
    yield "limits", f"{_or_none(limits['open_files'])} open files, {_bytes(limits['locked_bytes'])} locked memory"
    state = "writable" if cache.get("writable") else f"not writable: {cache['error']}"
    yield "kernel cache", f"{cache['folder']}, {_bytes(cache['num_bytes'])}, {state}"
    if "error" in kernels:
        yield "kernels", kernels["error"]
    elif "movers" in kernels:
        yield "mover", f"{', '.join(kernels['movers'])} (by device; CUPYEP_MOVER: {kernels['mover_setting']})"
        yield "SMs per rank", f"{kernels['num_sms_rule']} = {kernels['num_sms']} for one rank per device"
    else:
        yield "mover", f"{kernels['mover_setting']} (no device to choose for)"


def _gpu_lines(facts: Facts) -> Iterator[tuple[str, str]]:
    cupy, gpus, cuda, mps = facts["cupy"], facts["gpus"], facts["cuda"], facts["mps"]
    yield "cupy", ", ".join(cupy["wheels"]) or "not installed"
    yield "nvrtc", _or_error(cupy, "nvrtc")
    if "error" in gpus:
        yield "driver", f"none found ({gpus['error']}); {gpus['device_files']} GPU device files"
    else:
        version = gpus["driver"] or "(version unknown)"
        yield "driver", f"{version}, CUDA up to {gpus['driver_cuda']}, told by {gpus['source']}"
        for index, gpu in enumerate(gpus["gpus"]):
            memory = _bytes(gpu["memory_bytes"])
            yield f"gpu {index}", f"{gpu['name']}, compute capability {gpu['compute_capability']}, {memory}"
    for index, device in enumerate(cuda.get("devices", [])):
        reached = " ".join("yes" if can else "no" for can in cuda["peer_access"][index])
        capability = device["compute_capability"]
        yield f"cuda device {index}", f"{capability}, {device['num_sms']} SMs; peer access to 0, 1, ...: {reached}"
    if not cuda.get("devices"):
        yield "cuda devices", "none visible" if "devices" in cuda else _or_error(cuda, "devices")
    yield "cuda ipc", _or_error(facts["ipc"], "self_test")
    why = f" ({mps['why']})" if "why" in mps else ""
    yield "mps", _or_error(mps, "state") + why


def _or_error(section: Facts, name: str) -> str:
    """The fact `name`, else why it is not there."""
    return section.get(name) or section.get("skipped") or f"failed: {section['error']}"


def _or_none(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def _bytes(value: int | None) -> str:
    if value is None:
        return "unlimited"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} bytes"
