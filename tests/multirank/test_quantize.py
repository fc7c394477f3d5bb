"""quantize_fp8 and dequantize_fp8 against the oracle, bit by bit, and what dispatch makes of their results."""

from __future__ import annotations

import fp8_reference
import ml_dtypes
import numpy as np
import pytest
import reference
from cases import DTYPES, Case, values
from multirank import checks, launch

import cupyep

SHAPES = [(3, 256, 128), (2, 100, 128), (5, 7, 3), (1, 12, 4), (0, 128, 128), (2, 2050, 1024), (4, 640, 128)]


def tokens(num_tokens, hidden, dtype, seed=0):
    """Normal numbers of very different sizes, with special values, NaN among them."""
    rng = np.random.default_rng((seed, num_tokens, hidden))
    x = values(rng, (num_tokens, hidden), DTYPES[dtype]).copy()
    calm = rng.random(x.shape) < 0.9  # most blocks would else have an infinity in them
    x[calm] = (rng.standard_normal(x.shape) * 2.0 ** rng.integers(-20, 12, x.shape))[calm].astype(x.dtype)
    if x.size > 20:
        x.ravel()[17] = np.nan
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ["plain", "rounded", "ue8m0"])
def test_against_the_oracle(shape, dtype, form, backend):
    num_tokens, hidden, block = shape
    x = tokens(num_tokens, hidden, dtype)
    data, scales = cupyep.quantize_fp8(
        checks.place(x, "strided", backend), block, round_scale=form == "rounded", ue8m0=form == "ue8m0"
    )
    codes, expected = fp8_reference.quantize(x, block, form != "plain")
    checks.assert_bits("data", data, codes)
    checks.assert_bits("scales", scales, fp8_reference.pack_exponents(expected) if form == "ue8m0" else expected)
    for wide in DTYPES.values():
        again = cupyep.dequantize_fp8(data, scales.T.copy().T, block, wide)
        checks.assert_bits("dequantized", again, fp8_reference.dequantize(codes, expected, block, wide))


def test_every_code_and_every_tie(backend):
    """All e4m3 values, the middles between them, and the float32 numbers beside those, come to the right code."""
    sizes = np.array([448.0, *fp8_reference.E4M3], np.float32)  # a block's maximum of 448 makes its scale 1
    middles = (sizes[1:-1] + sizes[2:]) / 2
    some = np.concatenate([sizes, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, sizes[0])])
    x = np.concatenate([some, -some])[None]
    data, scales = cupyep.quantize_fp8(checks.place(x, "contiguous", backend), 1024)
    assert checks.asnumpy(scales).tolist() == [[1.0]]
    expected = fp8_reference.nearest(x[0])[None]
    checks.assert_bits("data", data, expected)
    codes = np.arange(256, dtype=np.uint8)[None]
    wide = cupyep.dequantize_fp8(
        checks.place(codes, "contiguous", backend), checks.place(np.ones((1, 1), np.float32), "contiguous", backend),
        256, np.float32)  # fmt: skip
    checks.assert_bits("dequantized", wide, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: cupyep.quantize_fp8(x, 0), ValueError, r"^block: expected 1\.\.1024, got 0"),
        (lambda x: cupyep.quantize_fp8(x, 2000), ValueError, r"^block: expected 1\.\.1024, got 2000"),
        (lambda x: cupyep.quantize_fp8(x, round_scale=1), TypeError, "^round_scale: expected a bool, got 1"),
        (lambda x: cupyep.quantize_fp8(x[0]), ValueError, "^x: expected 2 dimensions"),
        (lambda x: cupyep.quantize_fp8(x.astype("f8")), TypeError, "^x: expected float32, .*, got float64"),
        (lambda x: cupyep.dequantize_fp8(x, x), TypeError, "^data: expected uint8 .*, got float32"),
        (lambda x: cupyep.dequantize_fp8(x.view("u1"), x), ValueError, r"^scales: expected shape \(2, 1\), got"),
        (lambda x: cupyep.dequantize_fp8(x.view("u1"), x[:, :1], dtype="i4"), TypeError, "^dtype: expected .*int32"),
    ],
)
def test_wrong_arguments(call, error, text, backend):
    with pytest.raises(error, match=text):
        call(checks.namespace(backend).zeros((2, 8), np.float32))


KINDS = {  # data dtype, its columns; scale dtype, their columns
    "fp8": ("uint8", 256, "float32", 2),
    "ue8m0": ("uint8", 2048, "int32", 4),
    "mxfp8": ("uint8", 288, "uint8", 9),
    "nvfp4": ("uint8", 51, "uint8", 7),
    "bf16 and a word": ("bfloat16", 100, "float32", 1),
    "many scales": ("int8", 16, "float32", 700),
}


def dispatch_pairs(comm, kind, order, memory, copy, backend):
    """Dispatch and cached dispatch of (data, scales) give what two dispatches of the parts give in the oracle."""
    data_dtype, width, scale_dtype, num_scales = KINDS[kind]
    case = Case(num_ranks=comm.size, tokens="uneven", num_topk=3, routing="some -1", seed=list(KINDS).index(kind))

    def parts(seed, columns, dtype):
        size = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
        rngs = [np.random.default_rng((seed, rank)) for rank in range(comm.size)]
        counts = case.num_tokens
        raw = [rng.integers(0, 128, (n, columns * size), np.uint8) for rng, n in zip(rngs, counts, strict=True)]
        return [array.view(getattr(ml_dtypes, dtype, dtype)) for array in raw]

    ids = [case.inputs(rank)[1] for rank in range(comm.size)]
    with checks.open_buffer(comm, case, backend) as buffer:
        handle = None
        for seed in range(3):
            data, scales = parts(seed, width, data_dtype), parts(seed + 10, num_scales, scale_dtype)
            x = tuple(checks.place(part[comm.rank], memory, backend) for part in (data, scales))
            options = {"copy": copy, "scales_order": order}
            if handle is None:
                topk_idx = checks.place(ids[comm.rank], memory, backend)
                result = buffer.dispatch(x, topk_idx, num_experts=case.num_experts, **options)
                handle = result.handle
            else:
                result = buffer.dispatch(x, handle=handle, **options)
            for name, got, sent in zip(("data", "scales"), result.recv_x, (data, scales), strict=True):
                expected = reference.dispatch(sent, ids, None, case.num_experts)[comm.rank].x
                checks.assert_bits(f"received {name}", got, expected)
            assert result.recv_x[1].flags[f"{order}_CONTIGUOUS"]


@pytest.mark.parametrize("kind", KINDS)
def test_pairs(kind, run_ranks, backend):
    order, memory = ("F", "strided") if len(kind) % 2 else ("C", "fortran")
    run_ranks(3, dispatch_pairs, kind, order, memory, "8" in kind, backend)


def mismatched_scales(comm, backend):
    """Ranks whose scales differ in type, then in number: an error on all, then business as usual."""
    case, errors = Case(num_ranks=2, seed=3), []
    x, topk_idx, _ = (
        None if part is None else checks.place(part, "contiguous", backend) for part in case.inputs(comm.rank)
    )
    with checks.open_buffer(comm, case, backend) as buffer:
        xp = checks.namespace(backend)
        for dtype, columns in (("i4" if comm.rank else "f4", 2), ("f4", 2 + comm.rank)):
            with pytest.raises(cupyep.MismatchError) as error:
                buffer.dispatch((x, xp.zeros((len(x), columns), dtype)), topk_idx, num_experts=case.num_experts)
            errors.append(str(error.value))
        checks.run_case(comm, case, backend, buffer)
    return errors


def test_mismatched_scales(backend):
    for first, second in launch.threads(2, mismatched_scales, backend):
        assert "scales: rank 0 has '8 bytes of float32', rank 1 has '8 bytes of int32'" in first
        assert "rank 0 has '8 bytes of float32', rank 1 has '12 bytes of float32'" in second


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (("u1", 16, "f4", 3, 5, 4), ValueError, r"^x\[1\]: expected 5 rows"),
        (("u1", 16, "f8", 3, 5, 5), TypeError, r"^x\[1\]: expected one of .*, got float64"),
        (("u2", 16, "f4", 3, 5, 5), TypeError, r"^x\[0\]: expected one of .*, got uint16"),
        (("u1", 16, "f4", 0, 5, 5), ValueError, r"^x\[1\]: expected at least 1 column"),
        (("u1", 16, "f4", 20000, 5, 5), ValueError, r"^x\[1\]: expected rows of at most 64 KiB"),
    ],
)
def test_wrong_pairs(x, error, text, backend):
    data_dtype, width, scale_dtype, num_scales, num_tokens, num_scale_rows = x
    xp = checks.namespace(backend)
    with cupyep.Buffer(None, backend=backend) as buffer:
        pair = xp.zeros((num_tokens, width), data_dtype), xp.zeros((num_scale_rows, num_scales), scale_dtype)
        topk_idx = xp.zeros((num_tokens, 1), np.int64)
        with pytest.raises(error, match=text):
            buffer.dispatch(pair, topk_idx, num_experts=1)
        with pytest.raises(ValueError, match=r"^x: expected an array or a pair .*, got 3 items"):
            buffer.dispatch((*pair, None), topk_idx, num_experts=1)
        with pytest.raises(ValueError, match=r"^scales_order: expected 'C' or 'F', got 'A'"):
            buffer.dispatch(xp.zeros((5, 4), np.float32), topk_idx, num_experts=1, scales_order="A")
