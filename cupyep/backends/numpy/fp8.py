"""Rows as 8-bit floats (e4m3), a scale per block of values: the exact rule, in NumPy. Its twin: fp8.cuh.

    amax    the largest magnitude of the block's values, in float32, NaN left out, at least 1e-4
    scale   amax / 448, rounded once; with round_scale the next power of two that is not smaller
    code    value * inverse, rounded once in float32, then to e4m3: nearest even, past 448 saturated, NaN 0x7f;
            the inverse is 448 / amax, or with round_scale 1 / scale, which is exact

A reader gets value ~ code * scale back. 448 is the largest e4m3.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupyep.backends.numpy.arrays import asarray as asarray

_LARGEST = np.float32(448)


def quantize(x: np.ndarray, block: int, round_scale: bool, ue8m0: bool) -> tuple[np.ndarray, np.ndarray]:
    """See cupyep.quantize_fp8."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinities are the caller's business
        values = _blocks(x.astype(np.float32), block)
        # Not fmax, which loses numbers beside signalling NaNs.
        magnitudes = np.where(np.isnan(values), np.float32(0), np.abs(values))
        amax = np.maximum(magnitudes.max(axis=2, initial=0), np.float32(1e-4))
        scales, inverse = amax / _LARGEST, _LARGEST / amax
        if round_scale:
            scales = power_of_two(scales)
            inverse = 1 / scales
        scaled = values * inverse[:, :, None]
        codes = np.clip(scaled, -_LARGEST, _LARGEST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    codes[np.isnan(scaled)] = 0x7F
    data = np.ascontiguousarray(codes.reshape(len(x), codes.shape[1] * block)[:, : x.shape[1]])
    return data, pack_ue8m0(scales) if ue8m0 else scales


def power_of_two(scales: np.ndarray) -> np.ndarray:
    """The least power of two that is not smaller, of normal positive float32 numbers and infinity."""
    return ((scales.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)


def pack_ue8m0(scales: np.ndarray) -> np.ndarray:
    """Powers of two as their exponent bytes, four to an int32, lowest first, zeros behind the last."""
    packed = np.zeros((len(scales), -(-scales.shape[1] // 4) * 4), np.uint8)
    packed[:, : scales.shape[1]] = scales.view(np.uint32) >> 23
    return packed.view(np.int32)


def dequantize(data: np.ndarray, scales: np.ndarray, block: int, dtype: Any) -> np.ndarray:
    """See cupyep.dequantize_fp8."""
    if scales.dtype == np.int32:
        scales = np.ascontiguousarray(scales).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        values = _blocks(np.ascontiguousarray(data).view(ml_dtypes.float8_e4m3fn).astype(np.float32), block)
        values *= scales[:, : values.shape[1], None]
        return values.reshape(len(data), values.shape[1] * block)[:, : data.shape[1]].astype(dtype)


def _blocks(x: np.ndarray, block: int) -> np.ndarray:
    """`[num_tokens, hidden]` as `[num_tokens, num_blocks, block]`, zeros behind the last element."""
    num_blocks = -(-x.shape[1] // block)
    padded = np.zeros((len(x), num_blocks * block), x.dtype)
    padded[:, : x.shape[1]] = x
    return padded.reshape(len(x), num_blocks, block)
