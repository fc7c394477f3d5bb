"""Compiling at import: the kernels that need no shape are in the disk cache before the first Buffer wants them."""

from __future__ import annotations

import importlib.util
import warnings

from cupyep import env

_USUAL_RANKS = (1, 2, 4, 8)  # where no launcher tells how many ranks there will be


def compile_at_import() -> None:
    """Compiles the count and barrier kernels for this machine's GPUs, if NVML reports any; a warm cache costs nothing.

    Makes no CUDA context and does not initialise CUDA, so devices can still be chosen. Imports cupy only on a machine
    with a GPU. A failure is a warning: it will be an error where the kernel is needed.
    """
    if env.skip_import_compile() or not all(map(importlib.util.find_spec, ("cupy", "pynvml"))):
        return
    architectures = gpu_architectures()
    if not architectures:
        return
    from cupyep.backends.cuda import jit, plan

    sizes = (size,) if (size := env.world_size()) else _USUAL_RANKS
    try:
        jit.warm_up(
            jit.Request(name, architecture, plan.prelude(num_ranks))
            for name in ("count", "barrier")
            for architecture in architectures
            for num_ranks in sizes
        )
    except Exception as error:
        warnings.warn(f"cupyep could not compile its kernels: {error}", RuntimeWarning, stacklevel=3)


def gpu_architectures() -> set[str]:
    """Targets of the GPUs that NVML reports, as "sm_90"; empty where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return set()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return {"sm_{}{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles}
    finally:
        pynvml.nvmlShutdown()
