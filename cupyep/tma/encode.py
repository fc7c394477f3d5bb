"""The driver's encoding of a tensor map.

cuda-bindings' own wrapper writes into a Python object, whose memory is 16-byte aligned where the driver wants 64. So
the entry point is asked for through cuda-bindings, and called with memory of ours.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import numpy as np

_VERSION = 12000  # of CUDA, the first to have it


def tiled(
    names: dict[str, str],
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
) -> np.ndarray:
    """The 128 bytes, 128-byte aligned, of a map, as an array of size one, which CuPy passes to a kernel by value.

    The innermost axis comes first; names are those of the driver's enumerators.

    Raises: RuntimeError with the driver's error, should it refuse what passed our own checks.
    """
    from cuda.bindings import driver

    kinds = {
        "tensorDataType": driver.CUtensorMapDataType,
        "interleave": driver.CUtensorMapInterleave,
        "swizzle": driver.CUtensorMapSwizzle,
        "l2Promotion": driver.CUtensorMapL2promotion,
        "oobFill": driver.CUtensorMapFloatOOBfill,
    }
    number = {name: int(getattr(kinds[name], f"CU_TENSOR_MAP_{value}")) for name, value in names.items()}
    room = np.zeros(128 + 128, np.uint8)
    start = -room.ctypes.data % 128
    descriptor = room[start : start + 128]
    error = _entry()(
        descriptor.ctypes.data,
        number["tensorDataType"],
        len(shape),
        address,
        (ctypes.c_uint64 * len(shape))(*shape),
        (ctypes.c_uint64 * max(1, len(strides)))(*strides),
        (ctypes.c_uint32 * len(box))(*box),
        (ctypes.c_uint32 * len(box))(*element_strides),
        *(number[name] for name in ("interleave", "swizzle", "l2Promotion", "oobFill")),
    )
    if error:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {driver.CUresult(error).name}")
    return descriptor.view("V128")


@functools.cache
def _entry() -> Callable[..., int]:
    from cuda.bindings import driver

    name = b"cuTensorMapEncodeTiled"
    error, pointer, _ = driver.cuGetProcAddress(
        name, _VERSION, driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    )
    if int(error) or not int(pointer):
        raise RuntimeError(f"{name.decode()}: expected a driver of CUDA 12 or later, got {error.name}")
    integers, addresses = ctypes.c_uint32, ctypes.c_void_p
    types = [addresses, integers, integers, ctypes.c_uint64, *[addresses] * 4, *[integers] * 4]
    return ctypes.CFUNCTYPE(integers, *types)(int(pointer))
