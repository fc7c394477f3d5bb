"""Arrays of callers as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyep import checks


def asarray(name: str, value: Any) -> np.ndarray:
    """`value` as a NumPy array, without a copy where possible. TypeError names the argument."""
    if hasattr(value, "__cuda_array_interface__"):
        raise TypeError(f"{name}: expected a CPU array on the numpy backend, got {type(value).__name__} on a GPU")
    if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:  # NumPy's, or of the library that exports
            expected = "an array that NumPy can take by DLPack, of CPU memory and a type that it has"
            raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}: {error}") from error
    return checks.host_array(name, value)


def aswritable(name: str, value: Any) -> np.ndarray:
    """`value`, which will be written, as an array over the same memory."""
    array = asarray(name, value)
    if not isinstance(value, np.ndarray) and not hasattr(value, "__dlpack__"):
        raise TypeError(f"{name}: expected an array to write to, got {type(value).__name__}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(f"{name}: expected a contiguous array that can be written, got one that is not")
    return array
