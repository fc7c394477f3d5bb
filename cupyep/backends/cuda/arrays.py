"""Arrays of callers as the kernels want them."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np


def asarray(name: str, value: Any) -> cupy.ndarray:
    """`value` on the current device, without a copy where possible. TypeError names the argument."""
    if isinstance(value, cupy.ndarray):
        return value  # cupy.asarray would copy one of another GPU
    if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
        return cupy.from_dlpack(value)
    if not hasattr(value, "__cuda_array_interface__") and np.asarray(value).dtype.kind in "OSU":
        raise TypeError(f"{name}: expected an array, got {type(value).__name__}")
    return cupy.asarray(value)


def plain(array: Any) -> Any:
    """What kernels read: C-contiguous and 16-byte aligned, a copy if need be."""
    if array.flags.c_contiguous and array.data.ptr % 16 == 0:
        return array
    return array.copy(order="C")
