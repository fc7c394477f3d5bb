"""Kernels that wait for nobody, in the interpreter: against the oracle, on both kinds of target."""

from __future__ import annotations

import math

import expert_reference
import fp8_reference
import numpy as np
import pytest
import reference
from cases import DTYPES, values
from multirank.checks import assert_bits

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from cupyep import abi, checks
from cupyep.backends.cuda import plan
from ptxsim.local import Gpu
from ptxsim.memory import POISON

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


FAULTS = {  # of arrange.cu: what is left out or changed
    "no barrier behind the zeros": ("smem[i] = 0;\n  __syncthreads();", "smem[i] = 0;"),
    "no barrier behind the scan": ("row += listings;\n    }\n  }\n  __syncthreads();", "row += listings;\n    }\n  }"),
    "CTAs before this one are forgotten": ("before < blockIdx.x", "before < 0"),
    "a column's listings only": ("const u32 end = p.capacity * p.num_topk;", "const u32 end = p.capacity;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_arrange_are_seen(fault):
    """Each shows under some schedule. A missing __syncwarp does not: lanes part where a burst begins, not there."""
    idx = np.random.default_rng(3).integers(0, 3, (70, 2)).astype(np.int32)
    listed = [int((idx[:60] == expert).sum()) for expert in range(3)]
    received = reference.Received(idx[:60], idx[:60], None, listed, [], [], np.zeros(0))
    expected = expert_reference.expand(received, 2).row_map

    def differs(seed, patch):
        gpu = Gpu(seed)
        row_map = gpu.empty(idx.nbytes)
        fields = {"topk_idx": gpu.array(idx), "histograms": gpu.empty(24), "row_map": row_map, "offsets": gpu.empty(16),
                  "received": gpu.array(np.array([60, *listed], np.int32)), "num_topk": 2, "num_local_experts": 3,
                  "capacity": 70, "idx_bytes": 4, "alignment": 2}
        gpu.launch("arrange_count", "arrange", "sm_90", {}, abi.ARRANGE_PARAMS, 2, 64, 12, **fields)
        gpu.launch("arrange_place", "arrange", "sm_90", {}, abi.ARRANGE_PARAMS, 2, 64, 24, patch, **fields)
        got = gpu.read(row_map, idx.shape, np.int32)
        return (got[:60] != expected).any() or (got[60:] != -1).any()

    patch = (("kernels/arrange.cu", *FAULTS[fault]),)
    assert not differs(0, ()) and any(differs(seed, patch) for seed in range(60))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "num_local", "alignment", "idx_dtype", "dtype", "wire", "hidden"),
    [
        (90, 3, 5, 4, "int64", "bfloat16", "bfloat16", 24),
        (40, 8, 40, 1, "int32", "float16", "float32", 7),
        (3, 1, 1, 128, "int64", "float32", "bfloat16", 10),
        (12, 3, 2, 4, "int64", "bfloat16", "float32", 24),
        (0, 2, 4, 8, "int64", "float32", "float32", 4),
        (4, 2, 2, 4, "int32", "float16", "bfloat16", 2304),
    ],
)
def test_expert_layout(num_tokens, num_topk, num_local, alignment, idx_dtype, dtype, wire, hidden, arch):
    """arrange, expand and reduce, with room for more rows than came; every CTA and warp has a share."""
    rng, capacity, num_ctas = np.random.default_rng(num_tokens), num_tokens + 5, 3
    dtype, wire = DTYPES[dtype], DTYPES[wire]
    idx = rng.integers(-1, num_local, (capacity, num_topk)).astype(idx_dtype)
    listed = [int((idx[:num_tokens] == expert).sum()) for expert in range(num_local)]
    x, weights = values(rng, (capacity, hidden), dtype), values(rng, (capacity, num_topk), np.dtype("f4"))
    received = reference.Received(x[:num_tokens], idx[:num_tokens], None, listed, [], [], np.zeros(0))
    expected = expert_reference.expand(received, alignment)
    gpu, row_bytes, num_rows = Gpu(num_local, 1 << 19), hidden * dtype.itemsize, max(1, len(expected.rows))
    row_map = {
        "row_map": gpu.empty(4 * idx.size), "offsets": gpu.empty(4 * (num_local + 1)), "num_topk": num_topk,
        "received": gpu.array(np.array([num_tokens, *listed], np.int32)), "num_local_experts": num_local,
        "capacity": capacity,
    }  # fmt: skip
    histograms = gpu.empty(4 * num_ctas * num_local)
    for name, warps in (("arrange_count", 1), ("arrange_place", 2)):
        gpu.launch(name, "arrange", arch, {}, abi.ARRANGE_PARAMS, num_ctas, 64, 4 * warps * num_local,
                   topk_idx=gpu.array(idx), idx_bytes=idx.itemsize, alignment=alignment,
                   histograms=histograms, **row_map)
    counts = gpu.read(histograms, (num_ctas, num_local), np.uint32)
    assert counts.sum(0).tolist() == listed and (num_tokens < 50 or (counts.sum(1) > 0).all())
    assert gpu.read(row_map["offsets"], (num_local + 1,), np.int32).tolist() == expected.offsets
    got = gpu.read(row_map["row_map"], idx.shape, np.int32)
    assert_bits("row_map", got[:num_tokens], expected.row_map)
    assert (got[num_tokens:] == -1).all()

    expanded = gpu.empty(num_rows * row_bytes)
    chosen = plan.expand_plan(row_bytes)
    gpu.launch("expand", "expand", arch, chosen.constants, abi.EXPAND_PARAMS, 2, chosen.num_threads, rows=gpu.array(x),
               expanded=expanded, zero_gaps=1, **row_map)
    untouched = np.full(row_bytes, POISON, np.uint8).view(dtype)
    wanted = np.stack([np.zeros(hidden, dtype) if row is None else row for row in expected.rows] or [untouched])
    assert_bits("expanded", gpu.read(expanded, wanted.shape, dtype), wanted)

    y = values(rng, (num_rows, hidden), dtype)
    for given in (weights, None):
        rows, chosen = gpu.empty(capacity * hidden * wire.itemsize), plan.reduce_plan(hidden, dtype, wire)
        gpu.launch("reduce", "reduce", arch, chosen.constants, abi.REDUCE_PARAMS, 2, 64, expanded=gpu.array(y),
                   rows=rows, weights=0 if given is None else gpu.array(given), **row_map)
        got = gpu.read(rows, (capacity, hidden), wire)
        assert_bits("reduced", got[:num_tokens], expert_reference.reduce(y, expected.row_map, given, wire))
        assert (np.ascontiguousarray(got[num_tokens:]).view(np.uint8) == POISON).all()
