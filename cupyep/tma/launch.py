"""From a planned kernel launch to the GPU. Planning needs no GPU: it asks a Target what the GPU is like."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyep import abi, checks
from cupyep.backends.cuda import jit
from cupyep.errors import UnsupportedDeviceError
from cupyep.handle import EventOverlap
from cupyep.structs import Struct, emit

TMA_CAPABILITY = 90


@dataclass(frozen=True)
class Target:
    """A GPU: compute capability times ten, shared memory that one CTA may have in bytes, number of SMs."""

    compute_capability: int
    smem_limit: int
    num_sms: int

    @property
    def arch(self) -> str:
        return f"sm_{self.compute_capability}"

    def require_tma(self, what: str) -> None:
        """Raises UnsupportedDeviceError where the GPU has no TMA."""
        if self.compute_capability < TMA_CAPABILITY:
            raise UnsupportedDeviceError(what, "compute capability 9.0", f"{self.compute_capability / 10}")


@dataclass(frozen=True)
class Launch:
    """All of a launch but its stream. arguments: what the kernel takes by value, one array each."""

    request: jit.Request
    function: str
    num_ctas: int
    num_threads: int
    smem_bytes: int
    arguments: tuple[np.ndarray, ...]


def prelude(constants: dict[str, int], *structs: Struct) -> str:
    """What a kernel of the toolkit starts with: `namespace cfg` with all enumerators and `constants`, and structs."""
    return _prelude(tuple(constants.items()), structs)


@functools.cache
def _prelude(constants: tuple[tuple[str, int], ...], structs: tuple[Struct, ...]) -> str:
    return emit({**abi.enum_constants(), **dict(constants)}, structs)


def check(stream: Any, num_sms: int = 1) -> None:
    """Refuses what every GPU would, so that NumPy, which needs neither, does too."""
    if stream is not None and not (hasattr(stream, "ptr") and hasattr(stream, "__enter__")):  # an event has no "with"
        raise TypeError(f"stream: expected a CuPy stream or None, got {stream!r}")
    checks.integer("num_sms", num_sms, 1)


def num_sms(target: Target, value: int) -> int:
    """`value` as a number of SMs that the GPU has."""
    return checks.integer("num_sms", value, 1, target.num_sms)


def target(what: str = "cupyep.tma") -> Target:
    """The current GPU. Raises UnsupportedDeviceError, on behalf of `what`, where there is none."""
    try:
        from cupy.cuda import runtime

        return _target(runtime.getDevice())
    except ImportError as error:
        raise UnsupportedDeviceError(what, "compute capability 9.0", f"no CuPy ({error})") from None
    except runtime.CUDARuntimeError as error:
        raise UnsupportedDeviceError(what, "compute capability 9.0", f"no GPU ({error})") from None


def require(what: str) -> None:
    """Raises UnsupportedDeviceError, saying that `what` needs it, unless the current GPU has TMA. Local."""
    target(what).require_tma(what)


@functools.cache
def _target(device: int) -> Target:
    from cupy.cuda import runtime

    found = runtime.getDeviceProperties(device)
    capability = found["major"] * 10 + found["minor"]
    return Target(capability, found["sharedMemPerBlockOptin"], found["multiProcessorCount"])


def on(stream: Any) -> Any:
    """A context in which `stream` is CuPy's current one; None: as it is."""
    return nullcontext() if stream is None else stream


def run(launch: Launch) -> Any:
    """Launches on the current stream of the current device. Returns the event behind it. Does not wait."""
    import cupy
    from cupy.cuda import driver

    from cupyep.backends.cuda.streams import CudaEvent

    stream = cupy.cuda.get_current_stream()
    device = cupy.cuda.runtime.getDevice()
    kernel = _kernel(device, launch.request, launch.function, launch.smem_bytes)
    pointers = np.array([argument.ctypes.data for argument in launch.arguments], np.uintp)
    threads, smem = launch.num_threads, launch.smem_bytes
    driver.launchKernel(
        kernel.kernel.ptr, launch.num_ctas, 1, 1, threads, 1, 1, smem, stream.ptr, pointers.ctypes.data, 0
    )
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return CudaEvent(event, lambda: None)


@functools.cache
def _kernel(device: int, request: jit.Request, function: str, smem_bytes: int) -> Any:
    """Loaded once per device. The RawKernel keeps its module."""
    return jit.function(jit.load(jit.build(request)), function, smem_bytes)


def done() -> EventOverlap:
    """The event of what is complete already, as on the CPU."""
    return EventOverlap()
