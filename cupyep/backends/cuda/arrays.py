"""Arrays of callers as the kernels want them."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from cupyep import checks


def asarray(name: str, value: Any) -> cupy.ndarray:
    """`value` on the current device, without a copy where possible. TypeError names the argument."""
    if isinstance(value, cupy.ndarray):
        return value  # cupy.asarray would copy one of another GPU
    is_exporter = not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__")
    if not is_exporter and not hasattr(value, "__cuda_array_interface__"):
        value = checks.host_array(name, value)
    try:
        return cupy.from_dlpack(value) if is_exporter else cupy.asarray(value)
    except (BufferError, TypeError, ValueError) as error:
        dtype = getattr(value, "dtype", type(value).__name__)
        raise TypeError(
            f"{name}: expected a type that CuPy has (fp8 travels as uint8), got {dtype}: {error}"
        ) from error


def aswritable(name: str, value: Any) -> cupy.ndarray:
    """`value`, which kernels will write, as an array over the same memory."""
    if not hasattr(value, "__cuda_array_interface__") and not hasattr(value, "__dlpack__"):
        raise TypeError(f"{name}: expected an array on the GPU to write to, got {type(value).__name__}")
    if isinstance(value, np.ndarray):
        raise TypeError(f"{name}: expected an array on the GPU to write to, got one on the host")
    array = asarray(name, value)
    if not array.flags.c_contiguous or array.data.ptr % 16:
        raise ValueError(f"{name}: expected a contiguous array at a multiple of 16 bytes, got another")
    return array


def plain(array: Any) -> Any:
    """What kernels read: C-contiguous and 16-byte aligned, a copy if need be."""
    return array if is_plain(array) else array.copy(order="C")


def is_plain(array: Any) -> bool:
    """Whether kernels can read it where it is."""
    return array.flags.c_contiguous and array.data.ptr % 16 == 0
