"""Rows as 8-bit floats (e4m3), a scale per 128 values: the exact rule, in NumPy. Its twin: cuda_src/cupyep/fp8.cuh.

    amax    the largest magnitude of the 128 values, in float32, NaN left out, at least 1e-4
    scale   amax / 448, rounded once; with round_scale the next power of two that is not smaller
    code    value * inverse, rounded once in float32, then to e4m3: nearest even, past 448 saturated, NaN 0x7f;
            the inverse is 448 / amax, or with round_scale 1 / scale, which is exact

A reader gets value ~ code * scale back. 448 is the largest e4m3.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

GROUP = 128  # values that share a scale
MAX = np.float32(448)
LEAST_AMAX = np.float32(1e-4)


def quantize(x: np.ndarray, *, round_scale: bool) -> tuple[np.ndarray, np.ndarray]:
    """(codes uint8 `[rows, hidden]`, scales float32 `[rows, hidden / 128]`) of `x` `[rows, hidden]`."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # inf and NaN are the caller's business
        groups = x.astype(np.float32).reshape(len(x), x.shape[1] // GROUP, GROUP)
        # Not fmax, which loses numbers beside signalling NaNs.
        magnitudes = np.where(np.isnan(groups), np.float32(0), np.abs(groups))
        amax = np.maximum(magnitudes.max(axis=2, initial=0), LEAST_AMAX)
        scales, inverse = amax / MAX, MAX / amax
        if round_scale:
            scales = power_of_two(scales)
            inverse = np.float32(1) / scales
        scaled = groups * inverse[:, :, None]
        codes = np.clip(scaled, -MAX, MAX).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        codes = np.where(np.isnan(scaled), np.uint8(0x7F), codes)
    return codes.reshape(x.shape), scales


def power_of_two(scales: np.ndarray) -> np.ndarray:
    """The least power of two that is not smaller, of normal positive float32 numbers and infinity."""
    return ((scales.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)


def pack_ue8m0(scales: np.ndarray) -> np.ndarray:
    """Powers of two `[rows, groups]` as their exponent bytes, four to an int32 `[rows, groups / 4]`, lowest first."""
    exponents = (scales.view(np.uint32) >> np.uint32(23)).astype(np.uint8)
    return np.ascontiguousarray(exponents).view(np.int32)
