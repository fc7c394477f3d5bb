"""What the toolkit asks of arguments. NumPy works on NumPy arrays, a GPU on others with __cuda_array_interface__."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupyep import checks
from cupyep.tma import launch as launches

_OVERLAP_EFFORT: Any = 10_000  # of NumPy's search for a byte of both arrays; what takes more passes for an overlap


def asarray(name: str, value: Any) -> Any:
    """`value` as numpy.ndarray or cupy.ndarray over the same memory. TypeError names the argument.

    UnsupportedDeviceError for a CUDA array where there is no CuPy or no GPU.
    """
    if isinstance(value, np.ndarray):
        return checks.unmasked(name, value)
    if not hasattr(value, "__cuda_array_interface__"):
        raise TypeError(f"{name}: expected a NumPy or a CUDA array, got {type(value).__name__}")
    launches.target(f"{name}: a CUDA array")
    import cupy

    return value if isinstance(value, cupy.ndarray) else cupy.asarray(value)


def is_numpy(array: Any) -> bool:
    return isinstance(array, np.ndarray)


def address(array: Any) -> int:
    """Of the first element."""
    return array.ctypes.data if is_numpy(array) else array.data.ptr


def pair(dst: Any, src: Any) -> tuple[Any, Any]:
    """(dst, src) as arrays of one kind and of one dtype, C-contiguous but for the first axis, that share no memory."""
    dst, src = asarray("dst", dst), asarray("src", src)
    if is_numpy(dst) != is_numpy(src):
        kinds = ["NumPy" if is_numpy(array) else "CUDA" for array in (dst, src)]
        raise TypeError(f"src: expected a {kinds[0]} array as dst is, got a {kinds[1]} array")
    if dst.dtype != src.dtype:
        raise TypeError(f"src: expected dtype {dst.dtype} as dst has, got {src.dtype}")
    apart("dst", dst, "src", src)
    writable("dst", dst)
    return dst, src


def apart(name: str, array: Any, other_name: str, other: Any) -> None:
    """No byte belongs to both arrays; they may lie between each other's rows."""
    if array.size and other.size and np.may_share_memory(_extent(array), _extent(other), max_work=_OVERLAP_EFFORT):
        raise ValueError(f"{name}: expected memory apart from {other_name}'s, got arrays that overlap")


def writable(name: str, array: Any) -> None:
    if is_numpy(array) and not array.flags.writeable:
        raise ValueError(f"{name}: expected an array that can be written, got a read-only one")


def contiguous(name: str, array: Any) -> None:
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: expected a C-contiguous array, got strides {array.strides} for shape {array.shape}")


def per_axis(name: str, values: Sequence[int], low: int, high: int, rank: int | None = None) -> tuple[int, ...]:
    """`values` as ints within [low, high], one for each of `rank` axes; None: of any number of axes."""
    try:
        values = tuple(values)
    except TypeError:
        raise TypeError(f"{name}: expected a sequence of ints, got {values!r}") from None
    if rank is not None and len(values) != rank:
        raise ValueError(f"{name}: expected {rank} values, one per axis of array, got {len(values)}")
    return tuple(checks.integer(f"{name}[{axis}]", value, low, high) for axis, value in enumerate(values))


def same_shape(dst: Any, src: Any) -> None:
    if dst.shape != src.shape:
        raise ValueError(f"src: expected shape {dst.shape} as dst has, got {src.shape}")


def reach(*arrays: Any) -> None:
    """Lets the current device touch arrays of other GPUs."""
    import cupy

    from cupyep.backends.cuda.arena import enable_peer_access

    device = cupy.cuda.runtime.getDevice()
    for array in arrays:
        if array.device.id != device:
            enable_peer_access(device, array.device.id)


def _extent(array: Any) -> np.ndarray:
    """An array for NumPy to look at where it lies, not at its content: also of a GPU's memory."""
    interface = {
        "version": 3,
        "data": (address(array), True),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": f"|V{array.itemsize}",
    }
    return array if is_numpy(array) else np.asarray(SimpleNamespace(__array_interface__=interface))
