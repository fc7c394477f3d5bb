"""What the toolkit asks of arrays: NumPy works on its own, a GPU on all others with __cuda_array_interface__."""

from __future__ import annotations

from typing import Any

import numpy as np


def asarray(name: str, value: Any) -> Any:
    """`value` as numpy.ndarray or cupy.ndarray over the same memory. TypeError names the argument."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "__cuda_array_interface__"):
        raise TypeError(f"{name}: expected a NumPy or a CUDA array, got {type(value).__name__}")
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
    if dst.size and src.size and _first(dst) < _end(src) and _first(src) < _end(dst):
        raise ValueError("dst: expected memory apart from src's, got arrays that overlap")
    return dst, src


def contiguous(name: str, array: Any) -> None:
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: expected a C-contiguous array, got strides {array.strides} for shape {array.shape}")


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


def _first(array: Any) -> int:
    return address(array) + sum(
        min(0, stride * (size - 1)) for stride, size in zip(array.strides, array.shape, strict=True)
    )


def _end(array: Any) -> int:
    ends = (max(0, stride * (size - 1)) for stride, size in zip(array.strides, array.shape, strict=True))
    return address(array) + sum(ends) + array.itemsize
