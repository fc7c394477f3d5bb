"""What arithmetic instructions make of values: functions of NumPy arrays, where NumPy has none that does the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def shift(left: bool) -> Callable[[Any, Any], Any]:
    """shl and shr: amounts of the type's width and more give 0, or the sign."""

    def run(value: Any, amount: Any) -> Any:
        bits = 8 * value.dtype.itemsize
        clipped = np.minimum(amount, np.uint32(bits - 1)).astype(value.dtype)
        result = value << clipped if left else value >> clipped
        return result if not left and value.dtype.kind == "i" else np.where(amount < bits, result, value.dtype.type(0))

    return run


def quotient(a: Any, b: Any) -> Any:
    safe = np.where(b == 0, b.dtype.type(1), b)
    return np.where(b == 0, ~a.dtype.type(0), a // safe)


def remainder(a: Any, b: Any) -> Any:
    return a % np.where(b == 0, b.dtype.type(1), b)


def reverse_bits(value: Any) -> Any:
    value = np.asarray(value)
    bits = np.unpackbits(value[..., None].astype(">u4").view(np.uint8).reshape(*value.shape, 4), axis=-1)
    return np.packbits(bits[..., ::-1], axis=-1).reshape(*value.shape, 4).view(">u4")[..., 0].astype(np.uint32)


def leading_zeros(value: Any) -> Any:
    """bfind.shiftamt: how far the highest bit is from the top; ~0 for 0."""
    exponent = np.frexp(np.asarray(value).astype(np.float64))[1]
    return np.where(value == 0, np.uint32(0xFFFFFFFF), (32 - exponent).astype(np.uint32))


def bf16_bits(value: Any) -> Any:
    """float32 to bfloat16, ties to even, NaN kept quiet."""
    bits = np.asarray(value, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), rounded)


def e4m3_bits(value: Any) -> Any:
    """float32 to e4m3, ties to even, saturated at 448, NaN 0x7F: the codes are sorted by value."""
    magnitude = np.minimum(np.abs(np.asarray(value, np.float32)).astype(np.float64), 448)
    exponent = np.where(magnitude < 2.0**-6, -6, np.frexp(magnitude)[1] - 1)  # below 2^-6 the spacing stays
    steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int64)  # of 2^(exponent - 3): 8..16 for normal numbers
    code = np.where(np.isnan(value), 0, steps + 8 * (exponent + 6)) | np.where(np.signbit(value), 0x80, 0)
    return np.where(np.isnan(value), 0x7F, code).astype(np.uint32)


def f16_bits(value: Any) -> Any:
    return np.asarray(value, np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)
