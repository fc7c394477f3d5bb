"""quantize_fp8 and dequantize_fp8 on the GPU: kernels of quantize.cu on the current stream."""

from __future__ import annotations

import functools
import math
from typing import Any

import cupy
import numpy as np

from cupyep import abi, checks
from cupyep.backends.cuda import jit, plan
from cupyep.backends.cuda.arrays import asarray as asarray
from cupyep.backends.cuda.arrays import plain
from cupyep.backends.cuda.kernels import Call, Kernel
from cupyep.errors import StateError

_THREADS, _CTAS_PER_SM = 256, 8


def quantize(x: cupy.ndarray, block: int, round_scale: bool, ue8m0: bool) -> tuple[cupy.ndarray, cupy.ndarray]:
    """See cupyep.quantize_fp8."""
    num_blocks = -(-x.shape[1] // block)
    data = cupy.empty(x.shape, np.uint8)
    if ue8m0:
        scales = cupy.zeros((len(x), -(-num_blocks // 4)), np.int32)
    else:
        scales = cupy.empty((len(x), num_blocks), np.float32)
    _run("quantize_fp8", plain(x), data, scales, block, round_scale)
    return data, scales


def dequantize(data: cupy.ndarray, scales: cupy.ndarray, block: int, dtype: Any) -> cupy.ndarray:
    """See cupyep.dequantize_fp8."""
    wide = cupy.empty(data.shape, dtype)
    _run("dequantize_fp8", wide, plain(data), plain(scales), block, False)
    return wide


def _run(
    name: str, wide: cupy.ndarray, codes: cupy.ndarray, scales: cupy.ndarray, block: int, round_scale: bool
) -> None:
    if not wide.size:
        return
    device, hidden = wide.device, wide.shape[1]
    constants = {
        "kDType": int(checks.DTYPES[wide.dtype]),
        "kBlock": block,
        "kVecBytes": math.gcd(4, hidden, block) * wide.itemsize,
        "kRoundScale": int(round_scale),
        "kUe8m0": int(scales.dtype == np.int32),
    }
    with device:
        stream = cupy.cuda.get_current_stream()
        key = name, device.id, tuple(constants.items())
        if stream.is_capturing() and key not in _loaded:
            raise StateError(f"{name}: its kernel is not loaded; call it once for these types before graph capture")
        kernel = _kernel(*key)
        _loaded.add(key)
        call = Call(abi.QUANTIZE_PARAMS, {})
        call.set(wide=wide.data.ptr, codes=codes.data.ptr, scales=scales.data.ptr, num_tokens=len(wide), hidden=hidden)
        num_sms = device.attributes["MultiProcessorCount"]
        kernel.launch(num_sms * _CTAS_PER_SM, call, stream)


_loaded: set[Any] = set()


@functools.cache
def _kernel(name: str, device: int, constants: tuple[tuple[str, int], ...]) -> Kernel:
    arch = f"sm_{cupy.cuda.Device(device).compute_capability}"
    module = jit.load(jit.build(jit.Request("quantize", arch, plan.prelude(1, dict(constants)))))
    return Kernel(jit.function(module, name), _THREADS, 0)
