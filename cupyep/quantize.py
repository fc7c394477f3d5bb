"""fp8 rows for dispatch: e4m3 codes with one scale per block of elements. The same bits on both backends."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupyep import backends, checks

MAX_BLOCK = 1024  # elements
E4M3 = (np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e4m3fn))


def quantize_fp8(x: Any, block: int = 128, round_scale: bool = False, ue8m0: bool = False) -> tuple[Any, Any]:
    """(data, scales), which dispatch takes as its x: x is close to data * scales.

    Args:
        x: `[num_tokens, hidden]` float32, float16 or bfloat16, a NumPy or a CUDA array.
        block: elements that share a scale, 1..1024; a row's last block may be shorter.
        round_scale: scales are rounded up to powers of two.
        ue8m0: scales come as biased exponents, a byte each, four to an int32 (low byte first; 0 behind the last);
            implies round_scale.

    Returns: data `[num_tokens, hidden]`, e4m3 codes as uint8 (CuPy has no fp8 type; in NumPy
        `data.view(ml_dtypes.float8_e4m3fn)`); scales `[num_tokens, ceil(hidden / block)]` float32, or
        `[num_tokens, ceil(hidden / block / 4)]` int32. A scale is max(|x|, 1e-4) / 448, a code is x * (448 / max)
        rounded to nearest even; NaN does not count for the maximum and becomes 0x7f.
    Raises: TypeError, ValueError. StateError if a kernel would have to be loaded under graph capture.
    Sync: local; on the current stream.
    """
    library = backends.of_array(x)
    x = library.asarray("x", x)
    checks.payload("x", x)
    checks.integer("block", block, 1, MAX_BLOCK)
    for name, value in (("round_scale", round_scale), ("ue8m0", ue8m0)):
        checks.boolean(name, value)
    return library.quantize(x, block, round_scale or ue8m0, ue8m0)


def dequantize_fp8(data: Any, scales: Any, block: int = 128, dtype: Any = ml_dtypes.bfloat16) -> Any:
    """data * scales, computed in fp32 and rounded once to `dtype`.

    Args:
        data: `[num_tokens, hidden]` e4m3 codes, uint8 or float8_e4m3fn.
        scales: as quantize_fp8 gives them, float32 or packed int32, in any order.
        block: elements that share a scale, 1..1024.
        dtype: of the result: float32, float16 or bfloat16.

    Returns: `[num_tokens, hidden]` of dtype.
    Raises, Sync: as quantize_fp8.
    """
    library = backends.of_array(data)
    data, scales = library.asarray("data", data), library.asarray("scales", scales)
    checks.matrix("data", data)
    checks.matrix("scales", scales)
    checks.integer("block", block, 1, MAX_BLOCK)
    if data.dtype not in E4M3:
        raise TypeError(f"data: expected uint8 or float8_e4m3fn, got {data.dtype}")
    if scales.dtype not in (np.float32, np.int32):
        raise TypeError(f"scales: expected float32 or int32, got {scales.dtype}")
    dtype = checks.addable("dtype", dtype)
    num_scales = num_blocks = -(-data.shape[1] // block)
    if scales.dtype == np.int32:
        num_scales = -(-num_blocks // 4)
    if tuple(scales.shape) != (data.shape[0], num_scales):
        raise ValueError(f"scales: expected shape {(data.shape[0], num_scales)}, got {tuple(scales.shape)}")
    return library.dequantize(data.view(np.uint8), scales, block, dtype)
