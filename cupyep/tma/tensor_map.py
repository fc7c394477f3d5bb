"""Tensor maps: what the copy engine knows of an array of 1 to 5 dimensions, and of the tiles that it cuts from it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from cupyep import checks
from cupyep.tma import arrays
from cupyep.tma import launch as launches

MAX_RANK = 5
SWIZZLE_BYTES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}  # the row of a tile that it permutes
INTERLEAVES = ("none", "16B", "32B")
L2_PROMOTIONS = ("none", "64B", "128B", "256B")
OOB_FILLS = ("zeros", "nan")
# NumPy type -> the driver's name; what is not listed goes by its size as unsigned integers.
_FLOATS = {
    np.dtype(np.float16): "FLOAT16",
    np.dtype(np.float32): "FLOAT32",
    np.dtype(np.float64): "FLOAT64",
    np.dtype(ml_dtypes.bfloat16): "BFLOAT16",
}
_BY_SIZE = {1: "UINT8", 2: "UINT16", 4: "UINT32", 8: "UINT64"}


class TensorMap:
    """A view of an array as tiles of one shape, for TMA.

    Args:
        array: 1 to 5 dimensions, NumPy or CUDA, of an element of 1, 2, 4 or 8 bytes (fp8 as uint8). The last axis is
            contiguous; the others may have any stride that is a multiple of 16 bytes. Kept alive by the map.
        box: elements that a tile spans along each axis, in the array's order, 1..256. The last, in bytes, is a
            multiple of 16.
        element_strides: per axis, 1..8: a tile takes every so-manieth element of its box. The last one is 1.
        swizzle: "none", "32B", "64B" or "128B": how a tile lies in shared memory; a tile's row is as long as that.
            The driver takes shorter ones too, but on an H200 a load of such a tile wrote past its tile_bytes.
        interleave: "none", "16B" or "32B" (rank 3 and more), for kernels of your own.
        l2_promotion: "none", "64B", "128B" or "256B": how much L2 fetches at least.
        oob_fill: "zeros" or "nan" (float types): what a tile holds where it lies outside of the array.

    Attributes: the arguments, as tuples; dtype, shape; tile_shape; tile_bytes; descriptor.
    Raises: TypeError, ValueError naming argument and axis. Sync: none.
    Source: CUDA driver API, cuTensorMapEncodeTiled, whose rules these are.
    """

    def __init__(
        self,
        array: Any,
        box: Sequence[int],
        *,
        element_strides: Sequence[int] | None = None,
        swizzle: str = "none",
        interleave: str = "none",
        l2_promotion: str = "none",
        oob_fill: str = "zeros",
    ) -> None:
        self.array = array = arrays.asarray("array", array)
        self.shape, self.dtype, rank = tuple(array.shape), array.dtype, array.ndim
        checks.integer("array.ndim", rank, 1, MAX_RANK)
        if self.dtype.itemsize not in _BY_SIZE or self.dtype.hasobject:
            raise TypeError(f"array: expected elements of 1, 2, 4 or 8 bytes, got {self.dtype}")
        for axis, size in enumerate(self.shape):
            checks.integer(f"array.shape[{axis}]", size, 1, 2**32)
        self.box = arrays.per_axis("box", box, 1, 256, rank)
        element_strides = (1,) * rank if element_strides is None else element_strides
        self.element_strides = arrays.per_axis("element_strides", element_strides, 1, 8, rank)
        self.swizzle = _one_of("swizzle", swizzle, tuple(SWIZZLE_BYTES))
        self.interleave = _one_of("interleave", interleave, INTERLEAVES)
        self.l2_promotion = _one_of("l2_promotion", l2_promotion, L2_PROMOTIONS)
        self.oob_fill = _one_of("oob_fill", oob_fill, OOB_FILLS)
        self.tile_shape = tuple(math.ceil(b / s) for b, s in zip(self.box, self.element_strides, strict=True))
        self.tile_bytes = math.prod(self.tile_shape) * self.dtype.itemsize
        self.strides = self._strides()
        self._check_tile()

    def _strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis, checked. An axis of one element has none: it gets one."""
        unit, address = 32 if self.interleave == "32B" else 16, arrays.address(self.array)
        if address % unit:
            raise ValueError(f"array: expected an address that is a multiple of {unit}, got {address:#x}")
        strides = list(self.array.strides)
        inside = self.dtype.itemsize
        for axis in reversed(range(len(strides))):
            if self.shape[axis] == 1:
                strides[axis] = inside
            if axis == len(strides) - 1:
                if strides[axis] != self.dtype.itemsize:
                    raise ValueError(
                        f"array.strides[{axis}]: expected {self.dtype.itemsize} (contiguous along the last axis), "
                        f"got {strides[axis]}"
                    )
            elif strides[axis] % unit or not 0 < strides[axis] < 2**40:
                expected = f"a positive multiple of {unit} bytes below 2^40"
                raise ValueError(f"array.strides[{axis}]: expected {expected}, got {strides[axis]}")
            inside = max(inside, math.ceil(strides[axis] * self.shape[axis] / unit) * unit)
        return tuple(strides)

    def _check_tile(self) -> None:
        rank, last = len(self.shape), len(self.shape) - 1
        row_bytes = self.tile_shape[last] * self.dtype.itemsize
        if self.interleave != "none":
            if rank < 3:
                raise ValueError(f"interleave: expected none below rank 3, got {self.interleave} for rank {rank}")
            if self.interleave == "32B" and self.swizzle != "32B":
                raise ValueError(f"swizzle: expected 32B with interleave 32B, got {self.swizzle}")
        else:
            if self.element_strides[last] != 1:
                raise ValueError(f"element_strides[{last}]: expected 1, got {self.element_strides[last]}")
            if row_bytes % 16:
                raise ValueError(f"box[{last}]: expected a multiple of 16 bytes, got {row_bytes} bytes")
            if self.swizzle != "none" and row_bytes != SWIZZLE_BYTES[self.swizzle]:
                raise ValueError(f"box[{last}]: expected {self.swizzle} with swizzle {self.swizzle}, got {row_bytes}B")
        if self.oob_fill == "nan" and self.dtype not in _FLOATS:
            raise ValueError(f"oob_fill: expected zeros for {self.dtype}, got nan")

    @functools.cached_property
    def descriptor(self) -> np.ndarray:
        """The driver's 128 bytes (CUtensorMap): an array of size one, which CuPy passes to a kernel by value.

        The kernel's parameter is `const __grid_constant__` and 64-byte aligned.

        Raises: UnsupportedDeviceError before compute capability 9.0; TypeError for a NumPy array.
        """
        from cupyep.tma import encode

        launches.require("tma.TensorMap.descriptor")
        if arrays.is_numpy(self.array):
            raise TypeError("array: expected a CUDA array for a descriptor, got a NumPy array")
        names = {
            "tensorDataType": f"DATA_TYPE_{_FLOATS.get(self.dtype, _BY_SIZE[self.dtype.itemsize])}",
            "interleave": f"INTERLEAVE_{self.interleave.upper()}",
            "swizzle": f"SWIZZLE_{self.swizzle.upper()}",
            "l2Promotion": f"L2_PROMOTION_{'NONE' if self.l2_promotion == 'none' else f'L2_{self.l2_promotion}'}",
            "oobFill": f"FLOAT_OOB_FILL_{'NONE' if self.oob_fill == 'zeros' else 'NAN_REQUEST_ZERO_FMA'}",
        }
        sizes = (self.shape, self.strides[:-1], self.box, self.element_strides)
        return encode.tiled(names, arrays.address(self.array), *(axes[::-1] for axes in sizes))

    def __repr__(self) -> str:
        return f"<TensorMap of {self.dtype}{list(self.shape)}, tiles {list(self.tile_shape)}, swizzle {self.swizzle}>"


def swizzled(offset: Any, swizzle: str) -> Any:
    """Where a tile's byte at `offset` lies in shared memory: 16-byte pieces change places within their line.

    Args: offset: int or array of ints, bytes from a 1,024-byte boundary; swizzle: as of TensorMap. An involution.
    """
    if not isinstance(offset, int) and getattr(getattr(offset, "dtype", None), "kind", None) not in ("i", "u"):
        raise TypeError(f"offset: expected an int or an array of ints, got {offset!r}")
    pieces = {"none": 0, "32B": 1, "64B": 3, "128B": 7}[_one_of("swizzle", swizzle, tuple(SWIZZLE_BYTES))]
    return offset ^ (offset >> 3 & pieces << 4)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name}: expected {', '.join(allowed)}, got {value!r}")
    return value
