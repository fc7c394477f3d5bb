"""Wrong combines, wrong layouts given to dispatch, and calls that the state of the Buffer does not allow."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from cases import Case
from multirank import checks

import cupyep

CASE = Case(num_ranks=1, hidden=16, tokens=5, seed=800)
ALONE = SimpleNamespace(rank=0)


@pytest.fixture
def buffer(backend):
    with cupyep.Buffer(None, backend=backend, max_tokens_per_rank=8, timeout_s=5) as buffer:
        yield buffer
        checks.run_case(ALONE, CASE, backend, buffer)  # whatever went wrong, the Buffer can go on


@pytest.fixture
def received(buffer, backend):
    return checks.check_dispatch(buffer, CASE, 0, backend)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "text"),
    [
        ((4, 16), "float32", ValueError, r"^x: expected 5 .*, got 4"),
        ((6, 16), "float32", ValueError, r"^x: expected 5 .*, got 6"),
        ((5,), "float32", ValueError, r"^x: expected 2 dim.*, got .*\(5,\)"),
        ((5, 16), "float64", TypeError, r"^x: expected float32, float16 or bfloat16, got float64"),
        ((5, 16), "int32", TypeError, r"^x: expected float32, float16 or bfloat16, got int32"),
    ],
)
def test_wrong_outputs(buffer, backend, received, shape, dtype, error, text):
    with pytest.raises(error, match=text):
        buffer.combine(checks.namespace(backend).zeros(shape, dtype), received.handle)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "text"),
    [
        ((5, 3), "float32", ValueError, r"^topk_weights: expected shape \(5, 2\), got \(5, 3\)"),
        ((4, 2), "float32", ValueError, r"^topk_weights: expected shape \(5, 2\), got \(4, 2\)"),
        ((10,), "float32", ValueError, r"^topk_weights: expected shape \(5, 2\), got \(10,\)"),
        ((5, 2), "float64", TypeError, r"^topk_weights: expected float32, got float64"),
    ],
)
def test_wrong_weights(buffer, backend, received, shape, dtype, error, text):
    with pytest.raises(error, match=text):
        buffer.combine(received.recv_x, received.handle, checks.namespace(backend).zeros(shape, dtype))


@pytest.mark.parametrize("handle", [None, 3, (1, 2), "handle"])
def test_no_handle_at_all(buffer, received, handle):
    with pytest.raises(TypeError, match=rf"^handle: expected a Handle.*, got {type(handle).__name__}"):
        buffer.combine(received.recv_x, handle)


def test_the_handle_of_another_buffer(buffer, backend, received):
    with cupyep.Buffer(None, backend=backend) as other:
        foreign = checks.check_dispatch(other, CASE, 0, backend)
        with pytest.raises(cupyep.StateError, match=r"handle: expected .*this Buffer.*got .*another"):
            buffer.combine(received.recv_x, foreign.handle)
        with pytest.raises(cupyep.StateError, match=r"handle: expected .*this Buffer.*got .*another"):
            other.combine(received.recv_x, received.handle)


def test_a_repeated_dispatch(buffer, backend, received):
    x, topk_idx, weights = (checks.place(array, "contiguous", backend) for array in CASE.inputs(0))
    for arguments, error, text in (
        ({"handle": 3}, TypeError, r"^handle: expected a Handle.*, got int"),
        ({"handle": received.handle, "topk_idx": topk_idx}, ValueError, r"^topk_idx: expected None with handle=, got"),
        ({"handle": received.handle, "topk_weights": weights}, ValueError, r"^topk_weights: expected None .*, got"),
        ({"handle": received.handle, "x": x[:-1]}, ValueError, r"^x: expected 5 rows.*, got 4"),
        ({"handle": received.handle, "x": x.astype("float64")}, TypeError, r"^x: expected .*, got float64"),
    ):
        with pytest.raises(error, match=text):
            buffer.dispatch(**{"x": x} | arguments)


def test_wrong_layouts_are_found_with_validate_only(buffer, backend):
    x, topk_idx, _ = (checks.place(array, "contiguous", backend) for array in CASE.inputs(0))
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(topk_idx, CASE.num_experts)
    right = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": is_in_rank}
    buffer.dispatch(x, topk_idx, num_experts=CASE.num_experts, validate=True, **right)
    assert buffer.dispatch(x, topk_idx, **right).handle.num_experts == CASE.num_experts  # told by the counts' length
    for name, array in right.items():
        wrong = array.copy()
        wrong[-1] = ~wrong[-1] if wrong.dtype == bool else wrong[-1] + 1
        with pytest.raises(ValueError, match=rf"^{name}: expected .*, got"):
            buffer.dispatch(x, topk_idx, num_experts=CASE.num_experts, validate=True, **{**right, name: wrong})
        with pytest.raises(ValueError, match=rf"^{name}: expected shape .*, got"):
            buffer.dispatch(x, topk_idx, num_experts=CASE.num_experts, validate=True, **{**right, name: array[:-1]})
        buffer.dispatch(x, topk_idx, num_experts=CASE.num_experts, **{**right, name: wrong})


def current_stream(buffer):
    if buffer.backend == "numpy":
        return None
    import cupy

    return cupy.cuda.get_current_stream()


CALLS = {
    "dispatch": lambda buffer, result, x, topk_idx: buffer.dispatch(x, topk_idx, num_experts=CASE.num_experts),
    "combine": lambda buffer, result, x, topk_idx: buffer.combine(result.recv_x, result.handle),
    "barrier": lambda buffer, *_: buffer.barrier(),
    "empty": lambda buffer, *_: buffer.empty((1, 1), np.float32),
    "prepare": lambda buffer, *_: buffer.prepare(hidden=8, dtype=np.float32),
    "get_dispatch_layout": lambda buffer, result, x, topk_idx: buffer.get_dispatch_layout(topk_idx, CASE.num_experts),
    "record_stream": lambda buffer, result, *_: buffer.record_stream(result.recv_x, current_stream(buffer)),
    "allocator": lambda buffer, *_: buffer.allocator().__enter__(),
}


@pytest.mark.parametrize("verb", CALLS)
def test_use_after_close(backend, verb):
    x, topk_idx, _ = (checks.place(array, "contiguous", backend) for array in CASE.inputs(0))
    with cupyep.Buffer(None, backend=backend) as buffer:
        result = buffer.dispatch(x, topk_idx, num_experts=CASE.num_experts)
        CALLS[verb](buffer, result, x, topk_idx)
    with pytest.raises(cupyep.StateError, match=rf"{verb}.*closed"):
        CALLS[verb](buffer, result, x, topk_idx)
    buffer.close()


def test_a_buffer_that_nobody_closed_warns(backend):
    buffer = cupyep.Buffer(None, backend=backend)
    with pytest.warns(ResourceWarning, match="Buffer of rank 0 was not closed"):
        del buffer
    cupyep.run_local(open_and_close, 2, backend)  # nothing is taken any more


def open_and_close(comm, backend):
    cupyep.Buffer(comm, backend=backend, timeout_s=5).close()


def test_empty_when_the_arena_is_full(backend):
    with cupyep.Buffer(None, 1 << 20, backend=backend, timeout_s=5) as buffer:
        with pytest.raises(cupyep.ArenaExhaustedError) as caught:
            buffer.empty((2 << 20,), np.uint8)
        assert caught.value.needed == 2 << 20 and 0 < caught.value.free <= (1 << 20) + 4096 and caught.value.rank == 0
        kept = [buffer.empty((1 << 18,), np.uint8) for _ in range(3)]
        with pytest.raises(MemoryError):
            buffer.empty((1 << 19,), np.uint8)
        kept.clear()
        assert buffer.empty((1 << 19,), np.uint8).size == 1 << 19
