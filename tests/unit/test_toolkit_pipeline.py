"""tma.Pipeline without a GPU: arguments, NumPy, plans; and that every kernel of the toolkit compiles as it should."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from compile_helpers import needs_nvrtc, sass

import cupyep
from cupyep import abi, tma
from cupyep.backends.cuda import jit
from cupyep.errors import CompileError
from cupyep.tma import bench, copies, tiles
from cupyep.tma.launch import Launch, Target

AMPERE, HOPPER, BLACKWELL = Target(80, 163 * 1024, 108), Target(90, 227 * 1024, 132), Target(100, 227 * 1024, 148)
WORKED = sorted((Path(__file__).resolve().parents[2] / "examples" / "tma_kernels").glob("*.cu"))


def line(**options):
    return tma.Pipeline(2, (64,), "float32", "a * x + b", scalars=("a", "b"), **options)


def counting():
    return tma.Pipeline(2, (64,), "float32", "x * n", scalars={"n": "u32"}, reference=lambda x, n: x * n)


def test_numpy_by_the_reference():
    pipeline = line(reference=lambda x, a, b: a * x + b, out_dtype="bfloat16")
    x = np.arange(200, dtype=np.float32)
    y = np.zeros(200, ml_dtypes.bfloat16)
    pipeline(y, x, a=2, b=1).synchronize()
    assert np.array_equal(y, (2 * x + 1).astype(ml_dtypes.bfloat16))
    rows = tma.Pipeline(2, (3, 8), "float32", "void compute(", out_row_shape=(4,), reference=lambda x: x[:, :4])
    y = np.zeros((5, 4), np.float32)
    rows(y, x[:40].reshape(5, 8))
    assert np.array_equal(y, x[:40].reshape(5, 8)[:, :4])
    cast = tma.Pipeline(2, (64,), "bfloat16", "x", out_dtype="float8_e4m3fn", reference=lambda x: x)
    y = np.zeros(64, np.uint8)
    cast(y, x[:64].astype(ml_dtypes.bfloat16))
    assert np.array_equal(y, x[:64].astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_numpy_fp8_given_as_bytes_and_made_saturating(kind):
    bytes_ = np.arange(256, dtype=np.uint8)
    y = np.zeros(256, np.float32)
    tma.Pipeline(2, (64,), kind, "x", out_dtype="float32", reference=lambda x: x.astype("f4"))(y, bytes_)
    assert np.array_equal(y, bytes_.view(kind).astype(np.float32), equal_nan=True)
    most = float(ml_dtypes.finfo(kind).max)
    x, y = np.array([1e6, -1e6, np.inf, -np.inf, np.nan, most, 1.0, 0.0], np.float32), np.zeros(16, kind)
    tma.Pipeline(2, (64,), "float32", "x", out_dtype=kind, reference=lambda x: x)(y, np.tile(x, 2))
    expected = [most, -most, most, -most, np.nan, most, 1, 0]
    assert np.array_equal(y.astype(np.float32), np.tile(expected, 2).astype(np.float32), equal_nan=True)


def test_the_reference_gets_the_numbers_that_a_kernel_gets():
    got = []
    kinds = {"a": "f32", "b": "i32", "c": "u64"}
    counts = tma.Pipeline(
        2, (64,), "float32", "x", scalars=kinds, reference=lambda x, a, b, c: got.extend([a, b, c]) or x
    )
    counts(Y, X, a=np.float64(0.1), b=np.int64(-1), c=2**64 - 1)
    assert got == [np.float32(0.1), -1, 2**64 - 1] and [type(n) for n in got] == [np.float32, np.int32, np.uint64]


X, Y = np.zeros(64, np.float32), np.zeros(64, np.float32)
FIXED = np.zeros(64, np.float32)
FIXED.flags.writeable = False
CODE = "void compute("


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tma.Pipeline(0, (64,), "float32", "x"), ValueError, r"stages: expected 1\.\.64, got 0"),
        (lambda: tma.Pipeline(2, (), "float32", "x"), ValueError, r"tile_shape: expected at least one axis, got \(\)"),
        (lambda: tma.Pipeline(2, (0,), "float32", "x"), ValueError, r"tile_shape\[0\]: expected 1\.\.1048576, got 0"),
        (
            lambda: tma.Pipeline(2, (3,), "float32", "x"),
            ValueError,
            "tile_shape: expected a tile of a multiple of 16",
        ),
        (lambda: tma.Pipeline(2, (64,), "float64", "x"), TypeError, "dtype: expected one of float32, .*, got float64"),
        (lambda: tma.Pipeline(2, (64,), "f33", "x"), TypeError, "dtype: expected one of float32, .*, got 'f33'"),
        (lambda: tma.Pipeline(2, (64,), "f4,,", "x"), TypeError, "dtype: expected one of float32, .*, got 'f4,,'"),
        (lambda: tma.Pipeline(2, (64,), None, "x"), TypeError, "dtype: expected one of float32, .*, got None"),
        (lambda: tma.Pipeline(2, 16, "float32", "x"), TypeError, "tile_shape: expected a sequence of ints, got 16"),
        (
            lambda: tma.Pipeline(2, (64,), "float32", None),
            TypeError,
            r"compute: expected a str of CUDA C\+\+, got None",
        ),
        (
            lambda: tma.Pipeline(2, (64,), "float32", CODE, out_row_shape=(-4.0,)),
            TypeError,
            r"out_row_shape\[0\]: expected an int, got -4\.0",
        ),
        (lambda: line(groups=3), ValueError, "groups: expected a divisor of the 2 stages, got 3"),
        (lambda: line(warps_per_group=16), ValueError, r"warps_per_group: expected 1\.\.15, got 16"),
        (lambda: line(out_row_shape=(2,)), ValueError, r"out_row_shape: expected \(\) for an expression, got \(2,\)"),
        (lambda: tma.Pipeline(2, (64,), "float32", "x", scalars=("x",)), ValueError, "scalars: expected names"),
        (lambda: tma.Pipeline(2, (64,), "float32", "x", scalars={"a": "f64"}), ValueError, "scalars: expected names"),
        *(
            (lambda name=name: tma.Pipeline(2, (64,), "float32", "x", scalars=(name,)), ValueError, f"got {name}: f32")
            for name in ("y", "self", "stream", "num_sms", "tile", "scalars", "\u00e9", 3)
        ),
        *(
            (
                lambda scalars=scalars: tma.Pipeline(2, (64,), "float32", "x", scalars=scalars),
                TypeError,
                f"scalars: expected names, or names and their types, got {scalars!r}",
            )
            for scalars in ("alpha", 3, None)
        ),
        *(
            (
                lambda scalars=scalars: tma.Pipeline(2, (64,), "float32", "x", scalars=scalars),
                ValueError,
                "scalars: expected names .*, got .*\\[\\]",
            )
            for scalars in (([],), {"a": []})
        ),
        (lambda: line(reference=3), TypeError, "reference: expected a function or None, got 3"),
        (lambda: line()(Y, X, a="1", b=2), TypeError, "a: expected a number, got '1'"),
        (lambda: line()(Y, X, a=1, b=X), TypeError, "b: expected a number, got array"),
        (lambda: counting()(Y, X, n=-1), ValueError, r"n: expected 0\.\.4294967295, got -1"),
        (lambda: counting()(Y, X, n=2.7), TypeError, r"n: expected an int, got 2\.7"),
        (lambda: line()(Y, X, a=1, b=2, num_sms=0), ValueError, "num_sms: expected at least 1, got 0"),
        (lambda: line()(Y, X, a=1, b=2, stream="x"), TypeError, "stream: expected a CuPy stream or None, got 'x'"),
        (lambda: line()(FIXED, X, a=1, b=2), ValueError, "y: expected an array that can be written"),
        (lambda: line()(X[4:], X[:-4], a=1, b=2), ValueError, "y: expected memory apart from x's"),
        (
            lambda: line(reference=lambda x, a, b: a)(Y, X, a=1, b=2),
            ValueError,
            r"reference: expected a result of shape \(64,\) as y has, got \(\)",
        ),
        (lambda: line()(Y, X, a=1), TypeError, r"scalars: expected \['a', 'b'\], got \['a'\]"),
        (lambda: line()(Y, X.astype("f2"), a=1, b=2), TypeError, "x: expected float32, got float16"),
        (lambda: line()(Y[:32], X, a=1, b=2), ValueError, "y: expected 64 rows as x has, got 32"),
        (
            lambda: line()(Y, X.reshape(8, 8), a=1, b=2),
            ValueError,
            r"x: expected shape \[num_rows, \*\(\)\], got \(8, 8\)",
        ),
        (
            lambda: line()(Y[:3], X[:3], a=1, b=2),
            ValueError,
            "x: expected address and bytes in multiples of 16",
        ),
        (lambda: line()(Y, X[::2], a=1, b=2), ValueError, "x: expected a C-contiguous array"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_numpy_needs_a_reference():
    with pytest.raises(cupyep.UnsupportedDeviceError, match=r"without reference=: needs compute capability 9\.0"):
        line()(Y, X, a=1, b=2)


def test_shared_memory_is_bounded():
    large = tma.Pipeline(8, (8192,), "float32", "x")
    with pytest.raises(ValueError, match=r"stages: expected 232,448 bytes .* got 393,344 \(8 tiles of 32,768 and 4 of"):
        large.plan(HOPPER, 0, 0, 8192, 1, {})


def launches(target: Target) -> dict[str, Launch]:
    """Every variant of every kernel of the toolkit that the target has."""
    rows = copies.Rows(0, 0, 7168, 100, 7168, 7168)
    odd = copies.Rows(2, 2, 7168, 100, 7168, 7168, dst_rows=16, idx_bytes=4)
    found = {
        "rows": copies.plan_copy(target, rows, 8),
        "odd": copies.plan_copy(target, odd, 8),
        "hints": copies.plan_copy(target, rows, 8, load_hint=abi.Hint.EVICT_FIRST, store_hint=abi.Hint.EVICT_LAST),
        **{f"add {dtype}": copies.plan_copy(target, rows, 8, add=add) for dtype, add in copies.ADD.items()},
    }
    if target.compute_capability >= 90:
        descriptor = np.zeros(128, np.uint8)
        for rank in range(1, 6):
            tensor_map = tma.TensorMap(np.zeros((8,) * rank, "f4"), (*[2] * (rank - 1), 8))
            found[f"tensor {rank}"] = tiles.plan_copy_tensor(target, tensor_map, (descriptor, descriptor), 8)
        for name, (pipeline, scalars) in bench.pipelines().items():
            found[name] = pipeline.plan(target, 0, 0, 100, 8, scalars)
    return found


@needs_nvrtc
@pytest.mark.parametrize("target", [AMPERE, HOPPER, BLACKWELL], ids=lambda target: target.arch)
def test_kernels_compile_without_spills_and_incoherent_loads(target):
    for name, launch in launches(target).items():
        usage = jit.resource_usage(launch.request)
        assert usage[launch.function].spill_bytes == 0, name
        assert usage[launch.function].num_registers * launch.num_threads <= 65536, name
        code = sass(jit.build(launch.request).read_bytes())[launch.function]
        assert not re.search(r"LDG\S*\.CONSTANT|\bLDL\b|\bSTL\b", code), name
        wanted = [] if target is AMPERE or name == "odd" else ["UTMALDG"] if "tensor" in name else ["UBLKCP.S.G"]
        assert all(instruction in code for instruction in wanted), name


@needs_nvrtc
@pytest.mark.parametrize("path", WORKED, ids=lambda path: path.stem)
def test_worked_kernels_compile(path):
    assert len(WORKED) == 3
    for arch in ("sm_90", "sm_100"):
        cubin, log = jit.compile_source(path.name, path.read_text(), arch)
        assert "warning" not in log and re.search(r"\b0 bytes spill stores", log)
        code = sass(cubin)[path.stem]
        assert "UBLKCP.S.G" in code and "UBLKCP.G.S" in code and not re.search(r"\bLDL\b|\bSTL\b", code)


@needs_nvrtc
def test_an_error_in_the_users_code_names_its_line():
    wrong = tma.Pipeline(2, (64,), "float32", "x +\n y")
    with pytest.raises(CompileError, match=r'compute\(2\): error: identifier "y" is undefined'):
        jit.build(wrong.plan(HOPPER, 0, 0, 64, 1, {}).request)


@needs_nvrtc
@pytest.mark.parametrize("code", ["", "// x", "x; return 1"])
def test_an_expression_is_one_and_not_none(code):
    wrong = tma.Pipeline(2, (64,), "float32", code)
    with pytest.raises(CompileError, match=r"compute\([12]\): error: expected an? "):
        jit.build(wrong.plan(HOPPER, 0, 0, 64, 1, {}).request)


def test_include_dir_holds_the_headers():
    assert (Path(cupyep.include_dir()) / "cupyep" / "tma.cuh").is_file()
