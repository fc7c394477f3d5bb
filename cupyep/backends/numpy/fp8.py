"""quantize_fp8 and dequantize_fp8 in NumPy: the twin of quantize.cu, operation for operation."""

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
        most = np.fmax(np.fmax.reduce(np.abs(values), axis=2), np.float32(1e-4))
        scales, inverse = most / _LARGEST, _LARGEST / most
        if round_scale:
            scales = ((scales.view(np.uint32) + 0x7FFFFF) & 0x7F800000).view(np.float32)
            inverse = 1 / scales
        scaled = values * inverse[:, :, None]
        codes = np.clip(scaled, -_LARGEST, _LARGEST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    codes[np.isnan(scaled)] = 0x7F
    data = np.ascontiguousarray(codes.reshape(len(x), codes.shape[1] * block)[:, : x.shape[1]])
    if not ue8m0:
        return data, scales
    packed = np.zeros((len(x), -(-scales.shape[1] // 4) * 4), np.uint8)
    packed[:, : scales.shape[1]] = scales.view(np.uint32) >> 23
    return data, packed.view(np.int32)


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
