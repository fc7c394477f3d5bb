"""Wrong arguments: the type of each error, that it names the argument, what was expected and what came."""

from __future__ import annotations

import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import reference
from cases import Case
from multirank import checks, launch

import cupyep

NUM_EXPERTS, HIDDEN, TOPK, TOKENS = 8, 16, 2, 5


@pytest.fixture(scope="module")
def buffer(backend):
    with cupyep.Buffer(None, backend=backend, max_tokens_per_rank=8, timeout_s=5) as buffer:
        yield buffer


@pytest.fixture(autouse=True)
def still_usable(request, backend):
    """A wrong call leaves the Buffer as it was: after each test a right one works."""
    yield
    if "buffer" in request.fixturenames:
        good = Case(num_ranks=1, hidden=HIDDEN, tokens=TOKENS, num_local_experts=NUM_EXPERTS)
        checks.run_case(SimpleNamespace(rank=0), good, backend, request.getfixturevalue("buffer"))


def array(backend, shape, dtype, fill=0):
    return checks.namespace(backend).full(shape, fill, dtype)


def message(name, expected, got):
    """The form of all argument errors: "num_topk: expected 1..32, got 40"."""
    return rf"^{re.escape(name)}: expected .*{expected}.*, got .*{got}"


F4, F8, I4, I8, U4, BF16 = "float32", "float64", "int32", "int64", "uint32", ml_dtypes.bfloat16
GOOD = {"x": ((TOKENS, HIDDEN), F4), "topk_idx": ((TOKENS, TOPK), I8), "topk_weights": ((TOKENS, TOPK), F4)}

WRONG_ARRAYS = [  # argument, shape, dtype, error, (name, expected, got)
    ("x", (TOKENS,), F4, ValueError, ("x", "2 dim", r"\(5,\)")),
    ("x", (TOKENS, 2, HIDDEN), F4, ValueError, ("x", "2 dim", r"\(5, 2, 16\)")),
    ("x", (TOKENS, 0), F4, ValueError, ("x", "", r"\(5, 0\)")),
    ("x", (TOKENS, HIDDEN), F8, TypeError, ("x", "float32, float16 or bfloat16", F8)),
    ("x", (TOKENS, HIDDEN), I4, TypeError, ("x", "float32, float16 or bfloat16", I4)),
    ("x", (TOKENS, HIDDEN), "complex64", TypeError, ("x", "float32, float16 or bfloat16", "complex64")),
    ("x", (9, HIDDEN), F4, ValueError, ("topk_idx", "9", "5")),
    ("topk_idx", (TOKENS,), I8, ValueError, ("topk_idx", "2 dim", r"\(5,\)")),
    ("topk_idx", (TOKENS - 1, TOPK), I8, ValueError, ("topk_idx", "5", "4")),
    ("topk_idx", (TOKENS, TOPK), F4, TypeError, ("topk_idx", "int32 or int64", F4)),
    ("topk_idx", (TOKENS, TOPK), U4, TypeError, ("topk_idx", "int32 or int64", U4)),
    ("topk_idx", (TOKENS, TOPK), "int16", TypeError, ("topk_idx", "int32 or int64", "int16")),
    ("topk_idx", (TOKENS, TOPK), "bool", TypeError, ("topk_idx", "int32 or int64", "bool")),
    ("topk_idx", (TOKENS, 40), I8, ValueError, ("num_topk", r"1\.\.32", "40")),
    ("topk_idx", (TOKENS, 33), I8, ValueError, ("num_topk", r"1\.\.32", "33")),
    ("topk_idx", (TOKENS, 0), I8, ValueError, ("num_topk", r"1\.\.32", "0")),
    ("topk_weights", (TOKENS, TOPK), F8, TypeError, ("topk_weights", "float32", F8)),
    ("topk_weights", (TOKENS, TOPK), "float16", TypeError, ("topk_weights", "float32", "float16")),
    ("topk_weights", (TOKENS, TOPK), BF16, TypeError, ("topk_weights", "float32", "bfloat16")),
    ("topk_weights", (TOKENS, TOPK + 1), F4, ValueError, ("topk_weights", r"\(5, 2\)", r"\(5, 3\)")),
    ("topk_weights", (TOPK, TOKENS), F4, ValueError, ("topk_weights", r"\(5, 2\)", r"\(2, 5\)")),
]


@pytest.mark.parametrize(("argument", "shape", "dtype", "error", "text"), WRONG_ARRAYS)
def test_wrong_arrays(buffer, backend, argument, shape, dtype, error, text):
    arrays = {name: array(backend, *spec) for name, spec in (GOOD | {argument: (shape, dtype)}).items()}
    with pytest.raises(error, match=message(*text)):
        buffer.dispatch(**arrays, num_experts=NUM_EXPERTS)
    if argument == "topk_idx" and shape[0] == TOKENS:
        with pytest.raises(error, match=message(*text)):
            buffer.get_dispatch_layout(arrays["topk_idx"], NUM_EXPERTS)


@pytest.mark.parametrize(
    ("argument", "value", "error", "text"),
    [
        ("x", None, TypeError, ("x", "", "NoneType")),
        ("x", "tokens", TypeError, ("x", "", "str")),
        ("topk_idx", None, ValueError, ("topk_idx", "", "None")),
        ("num_experts", 0, ValueError, ("num_experts", "", "0")),
        ("num_experts", -8, ValueError, ("num_experts", "", "-8")),
        ("num_experts", 8.0, TypeError, ("num_experts", "int", "8.0")),
        ("num_experts", True, TypeError, ("num_experts", "int", "True")),
        ("num_experts", None, ValueError, ("num_experts", "int", "None")),
        ("num_experts", 5000, ValueError, ("num_experts / num_ranks", r"1\.\.1024", "5000")),
        ("num_sms", 0, ValueError, ("num_sms", "1", "0")),
        ("num_sms", "all", TypeError, ("num_sms", "int", "'all'")),
    ],
)
def test_wrong_values(buffer, backend, argument, value, error, text):
    good = {name: array(backend, *spec) for name, spec in GOOD.items()} | {"num_experts": NUM_EXPERTS}
    with pytest.raises(error, match=message(*text)):
        buffer.dispatch(**good | {argument: value})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"x": [[1.0, 2.0], [3.0]]}, TypeError, ("x", "array", "list")),
        ({"x": [np.zeros((5, 16), F4), np.zeros((5, 3), F4)]}, TypeError, ("x", "array", "list")),
        ({"num_experts": None, "num_tokens_per_expert": 4}, TypeError, ("num_tokens_per_expert", "array", "4")),
        ({"validate": "no"}, TypeError, ("validate", "bool", "'no'")),
        ({"expert_alignment": 4}, ValueError, ("expert_alignment", "1 in the rank layout", "4")),
        ({"expert_alignment": -5}, ValueError, ("expert_alignment", "1", "-5")),
        ({"layout": "experts"}, ValueError, ("layout", "'rank' or 'expert'", "'experts'")),
    ],
)
def test_wrong_options(buffer, backend, arguments, error, text):
    good = {name: array(backend, *spec) for name, spec in GOOD.items()} | {"num_experts": NUM_EXPERTS}
    with pytest.raises(error, match=message(*text)):
        buffer.dispatch(**good | arguments)


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("num_experts", 999, ("num_experts", "8", "999")),
        ("expert_alignment", -5, ("expert_alignment", "1", "-5")),
        ("expert_alignment", 3, ("expert_alignment", "2", "3")),
        ("layout", "experts", ("layout", "'rank' or 'expert'", "'experts'")),
    ],
)
def test_what_contradicts_a_handle(buffer, backend, argument, value, text):
    given = [array(backend, *GOOD[name]) for name in ("x", "topk_idx")]
    first = buffer.dispatch(*given, num_experts=NUM_EXPERTS, layout="expert", expert_alignment=2)
    for options in ({}, {"num_experts": NUM_EXPERTS, "expert_alignment": 2, "layout": "expert"}):
        buffer.dispatch(given[0], handle=first.handle, **options)
    with pytest.raises(ValueError, match=message(*text)):
        buffer.dispatch(given[0], handle=first.handle, **{argument: value})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dtype": "float33"}, TypeError, ("dtype", "element type", "'float33'")),
        ({"dtype": None}, TypeError, ("dtype", "element type", "None")),
        ({"idx_dtype": "int33"}, TypeError, ("idx_dtype", "element type", "'int33'")),
        ({"scale_dtype": "e8"}, TypeError, ("scale_dtype", "element type", "'e8'")),
        ({"layout": "expert", "wire_dtype": "int64"}, TypeError, ("wire_dtype", "bfloat16", "int64")),
        ({"layout": "expert", "wire_dtype": "bf16"}, TypeError, ("wire_dtype", "element type", "'bf16'")),
        ({"wire_dtype": "float16"}, ValueError, ("wire_dtype", "None in the rank layout", "'float16'")),
    ],
)
def test_wrong_arguments_of_prepare(buffer, arguments, error, text):
    with pytest.raises(error, match=message(*text)):
        buffer.prepare(**{"hidden": HIDDEN, "dtype": F4} | arguments)


def test_wrong_wire_dtype(buffer, backend):
    given = [array(backend, *GOOD[name]) for name in ("x", "topk_idx")]
    came = buffer.dispatch(*given, num_experts=NUM_EXPERTS, layout="expert")
    for wire_dtype, text in (("bf16", ("wire_dtype", "element type", "'bf16'")), ("i8", ("wire_dtype", F4, "int64"))):
        with pytest.raises(TypeError, match=message(*text)):
            buffer.combine(came.recv_x, came.handle, wire_dtype=wire_dtype)
    with pytest.raises(TypeError, match=message("dtype", "element type", "'bf16'")):
        cupyep.dequantize_fp8(*cupyep.quantize_fp8(given[0]), dtype="bf16")


def test_wrong_arguments_of_empty(buffer):
    for dtype in (object, "float33", "S", None):
        with pytest.raises(TypeError, match=message("dtype", "element type", "")):
            buffer.empty(3, dtype)
    with pytest.raises(cupyep.ArenaExhaustedError):
        buffer.empty((2**32, 2**32), F4)


def test_more_tokens_than_agreed(buffer, backend):
    with pytest.raises(ValueError, match=message("num_tokens", "at most .*8", "9")):
        buffer.dispatch(array(backend, (9, HIDDEN), F4), array(backend, (9, TOPK), I8), num_experts=NUM_EXPERTS)


@pytest.mark.parametrize("bad", [-2, NUM_EXPERTS, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [I4, I8])
def test_ids_of_no_expert(buffer, backend, bad, dtype):
    topk_idx = np.zeros((TOKENS, TOPK), dtype)
    topk_idx[3, 1] = bad
    topk_idx = checks.place(topk_idx, "contiguous", backend)
    with pytest.raises(ValueError, match=message("topk_idx", r"-1\.\.7", str(bad))):
        buffer.dispatch(array(backend, *GOOD["x"]), topk_idx, num_experts=NUM_EXPERTS)


def lone_bad_id(comm, backend, validate):
    """Rank 1 names an expert that is none; rank 0 gets what the oracle says, and both go on."""
    case = Case(num_ranks=2, hidden=HIDDEN, tokens=TOKENS, seed=700)
    with cupyep.Buffer(comm, backend=backend, timeout_s=5) as buffer:
        inputs = [part.copy() for part in case.inputs(comm.rank)]
        if comm.rank == 1:
            inputs[1][2, :] = (case.num_experts, -5)
        x, topk_idx, weights = (checks.place(part, "contiguous", backend) for part in inputs)
        if comm.rank == 1:
            with pytest.raises(ValueError, match=message("topk_idx", r"-1\.\.7", "8")):
                buffer.dispatch(x, topk_idx, weights, num_experts=case.num_experts, validate=validate)
        else:
            xs, idxs, weightss = (list(parts) for parts in zip(case.inputs(0), case.inputs(1), strict=True))
            idxs[1] = idxs[1].copy()
            idxs[1][2, :] = -1
            expected = reference.dispatch(xs, idxs, weightss, case.num_experts)[0]
            result = buffer.dispatch(x, topk_idx, weights, num_experts=case.num_experts, validate=validate)
            checks.assert_bits("recv_x", result.recv_x, expected.x)
            checks.assert_bits("recv_topk_idx", result.recv_topk_idx, expected.topk_idx)
        checks.run_case(comm, case, backend, buffer)


@pytest.mark.parametrize("validate", [False, True])
def test_a_bad_id_of_one_rank_does_not_touch_the_others(backend, validate):
    launch.threads(2, lone_bad_id, backend, validate)


def test_experts_that_do_not_divide(backend):
    def call(comm):
        with cupyep.Buffer(comm, backend=backend, timeout_s=5) as buffer:
            arrays = {name: array(backend, *spec) for name, spec in GOOD.items()}
            with pytest.raises(ValueError, match=message("num_experts", "multiple of the 3 ranks", "8")):
                buffer.dispatch(**arrays, num_experts=8)
            buffer.dispatch(**arrays, num_experts=9)

    launch.threads(3, call)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"backend": "tpu"}, ValueError, ("backend", "numpy", "'tpu'")),
        ({"comm": 42}, TypeError, ("comm", "LocalComm", "int")),
        ({"num_nvl_bytes": -1}, ValueError, ("num_nvl_bytes", "at least 0", "-1")),
        ({"num_nvl_bytes": 1.5}, TypeError, ("num_nvl_bytes", "int", "1.5")),
        ({"num_rdma_bytes": -1}, ValueError, ("num_rdma_bytes", "at least 0", "-1")),
        ({"low_latency_mode": 1}, TypeError, ("low_latency_mode", "bool", "1")),
        ({"max_tokens_per_rank": 0}, ValueError, ("max_tokens_per_rank", "1", "0")),
        ({"max_tokens_per_rank": "many"}, TypeError, ("max_tokens_per_rank", "int", "'many'")),
        ({"timeout_s": 0}, ValueError, ("timeout_s", "positive", "0")),
        ({"timeout_s": -3}, ValueError, ("timeout_s", "positive", "-3")),
        ({"timeout_s": float("nan")}, ValueError, ("timeout_s", "positive", "nan")),
        ({"timeout_s": "1"}, TypeError, ("timeout_s", "number", "'1'")),
    ],
)
def test_wrong_constructor_arguments(backend, arguments, error, text):
    with pytest.raises(error, match=message(*text)):
        cupyep.Buffer(**({"backend": backend} | arguments))


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), ("8", TypeError)])
def test_set_num_sms(value, error):
    before = cupyep.Buffer.num_sms
    with pytest.raises(error, match=message("num_sms", "", re.escape(str(value)))):
        cupyep.Buffer.set_num_sms(value)
    assert cupyep.Buffer.num_sms == before


@pytest.mark.parametrize("num_ranks", [0, -1, 1.0, "2"])
def test_run_local_num_ranks(num_ranks):
    with pytest.raises((TypeError, ValueError), match=message("num_ranks", "", re.escape(repr(num_ranks)))):
        cupyep.run_local(lambda comm: None, num_ranks)
