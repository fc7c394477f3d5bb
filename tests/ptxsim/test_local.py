"""Kernels that wait for nobody, in the interpreter: against the oracle, on both kinds of target."""

from __future__ import annotations

import math

import fp8_reference
import numpy as np
import pytest
from cases import DTYPES, values
from multirank.checks import assert_bits

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from cupyep import abi, checks
from ptxsim.local import Gpu

ARCHS = ("sm_80", "sm_90")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", ["plain", "rounded", "ue8m0"])
@pytest.mark.parametrize(("dtype", "hidden", "block"),
                         [("bfloat16", 300, 128), ("float16", 75, 32), ("float32", 10, 4)])
def test_quantize(dtype, hidden, block, form, arch):
    rng = np.random.default_rng(hidden)
    x = values(rng, (5, hidden), DTYPES[dtype]).copy()
    x[:4] = (rng.standard_normal((4, hidden)) * 2.0 ** rng.integers(-30, 12, (4, hidden))).astype(x.dtype)
    x[2, 3], x[1] = np.nan, 0
    codes, scales = fp8_reference.quantize(x, block, form != "plain")
    given = fp8_reference.pack_exponents(scales) if form == "ue8m0" else scales
    gpu = Gpu(1)
    constants = {"kDType": int(checks.DTYPES[x.dtype]), "kBlock": block, "kRoundScale": form != "plain",
                 "kVecBytes": math.gcd(4, hidden, block) * x.itemsize, "kUe8m0": int(form == "ue8m0")}
    constants = {name: int(value) for name, value in constants.items()}
    at = {"wide": gpu.array(x), "codes": gpu.empty(codes.nbytes), "scales": gpu.array(np.zeros_like(given))}
    gpu.launch("quantize_fp8", "quantize", arch, constants, abi.QUANTIZE_PARAMS, 2, 64, **at, num_tokens=5,
               hidden=hidden)
    assert_bits("codes", gpu.read(at["codes"], codes.shape, np.uint8), codes)
    assert_bits("scales", gpu.read(at["scales"], given.shape, given.dtype), given)
    at["wide"] = gpu.empty(x.nbytes)
    gpu.launch("dequantize_fp8", "quantize", arch, constants, abi.QUANTIZE_PARAMS, 2, 64, **at, num_tokens=5,
               hidden=hidden)
    assert_bits("wide", gpu.read(at["wide"], x.shape, x.dtype), fp8_reference.dequantize(codes, scales, block, x.dtype))
