"""The oracle of every cast to e4m3: the nearest of all its values, block by block. Imports nothing from cupyep."""

from __future__ import annotations

import math

import numpy as np
import reference

# By code, from the definition: 4 exponent bits with bias 7, 3 mantissa bits; all ones is NaN, so the largest is 448.
E4M3 = np.array([(1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)][:127])


def nearest(values: np.ndarray) -> np.ndarray:
    """The codes [N] uint8 next to float32 `values` [N]; of two equally near the even one; past 448 the largest."""
    distance = np.abs(E4M3 - np.minimum(np.abs(values.astype(np.float64)), 448.0)[:, None])
    code = distance.argmin(1)  # the lower of two
    after = np.minimum(code + 1, len(E4M3) - 1)
    is_tie = (after > code) & (distance[np.arange(len(code)), after] == distance.min(1))
    code = np.where(is_tie & (code % 2 == 1), after, code) | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def quantize(x: np.ndarray, block: int, round_scale: bool) -> tuple[np.ndarray, np.ndarray]:
    """(codes [T, H] uint8, scales [T, ceil(H / block)] float32)."""
    num_tokens, hidden = x.shape
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((num_tokens, -(-hidden // block)), np.float32)
    for token in range(num_tokens):
        values = reference.widen(x[token])
        for start in range(0, hidden, block):
            part = values[start : start + block]
            known = [abs(value) for value in part if not np.isnan(value)]
            most = max([np.float32(1e-4), *known])
            with np.errstate(all="ignore"):
                scale, inverse = most / np.float32(448), np.float32(448) / most
                if round_scale and np.isfinite(scale):
                    scale = np.float32(2.0 ** math.ceil(math.log2(float(scale))))
                if round_scale:
                    inverse = np.float32(1) / scale
                codes[token, start : start + block] = nearest(part * inverse)
            scales[token, start // block] = scale
    return codes, scales


def pack_exponents(scales: np.ndarray) -> np.ndarray:
    """Powers of two as biased exponents, four to an int32, the first in the low byte."""
    packed = np.zeros((len(scales), -(-scales.shape[1] // 4)), np.int32)
    for token, block in np.ndindex(scales.shape):
        scale = float(scales[token, block])
        exponent = 255 if math.isinf(scale) else round(math.log2(scale)) + 127
        packed.view(np.uint8)[token, block] = exponent
    return packed


def dequantize(codes: np.ndarray, scales: np.ndarray, block: int, dtype: np.dtype) -> np.ndarray:
    """scales: float32 [T, blocks]."""
    wide = np.zeros(codes.shape, np.float32)
    for token, i in np.ndindex(codes.shape):
        code = int(codes[token, i])
        value = math.nan if code & 0x7F == 0x7F else E4M3[code & 0x7F] * (-1 if code & 0x80 else 1)
        with np.errstate(all="ignore"):
            wide[token, i] = np.float32(value) * scales[token, i // block]
            if code == 0x80:
                wide[token, i] = np.float32(-0.0) * scales[token, i // block]
    return np.stack([reference.narrow(row, dtype) for row in wide]) if len(wide) else wide.astype(dtype)
