"""Runs one case, or many, on every rank of a communicator and compares each result with the oracle, bit by bit.

Called by threads of one process and by the processes of an MPI job alike, with either backend.
"""

from __future__ import annotations

import functools
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import reference
from cases import Case

import cupyep

TIMEOUT_S = 60.0


def namespace(backend: str) -> Any:
    """The array module of `backend`."""
    if backend == "numpy":
        return np
    import cupy

    return cupy


def asnumpy(array: Any) -> np.ndarray:
    """A host copy of a NumPy or CuPy array; for CuPy it waits for the current stream."""
    return array.get() if hasattr(array, "get") else np.array(array)


def place(array: np.ndarray, memory: str, backend: str) -> Any:
    """A copy of `array` as an array of `backend` that lies in memory as Case.memory says."""
    xp = namespace(backend)
    array = xp.array(array, order="C")
    num_rows, width = array.shape
    if memory == "fortran":
        return xp.array(array, order="F")
    if memory == "strided":
        large = xp.zeros((2 * num_rows, width + 3), array.dtype)
        large[::2, 3:] = array
        return large[::2, 3:]
    if memory == "reversed":
        return xp.array(array[::-1, ::-1], order="C")[::-1, ::-1]
    if memory == "offset":  # contiguous, but one element past an aligned address
        flat = xp.zeros(array.size + 1, array.dtype)
        flat[1:] = array.ravel()
        return flat[1:].reshape(array.shape)
    if memory == "read-only" and backend == "numpy":
        array.flags.writeable = False
    return array


def complete(result: Any) -> Any:
    """`result` of a call, or its event, once the operation is complete: a GPU tells of an error only then."""
    event = result if isinstance(result, cupyep.EventOverlap) else getattr(result, "event", result)
    if hasattr(event, "synchronize"):
        event.synchronize()
    return result


def assert_bits(name: str, got: Any, expected: np.ndarray) -> None:
    """Same type, shape and bits; any NaN equals any other, since its payload is not part of the contract."""
    got = asnumpy(got)
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        raise AssertionError(f"{name}: expected {expected.dtype} {expected.shape}, got {got.dtype} {got.shape}")
    bits = np.dtype(f"u{expected.dtype.itemsize}")
    differs = np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(expected).view(bits)
    if expected.dtype.kind not in "iub":
        differs &= ~(np.isnan(got) & np.isnan(expected))
    if differs.any():
        at = tuple(int(index) for index in np.argwhere(differs)[0])
        raise AssertionError(
            f"{name}: {int(differs.sum())} of {differs.size} elements differ, the first at {at}: "
            f"expected {expected[at]!r}, got {got[at]!r}"
        )


def assert_equal(name: str, got: Any, expected: Any) -> None:
    """Equal and of one type, so that lists are lists."""
    if type(got) is not type(expected) or got != expected:
        raise AssertionError(f"{name}: expected {expected!r}, got {got!r}")


_expecting = threading.Lock()  # the threads of a job wait for one of them to compute what all expect


def expect(case: Case) -> tuple[list[reference.Received], list[np.ndarray], list[np.ndarray] | None]:
    """Per rank: what dispatch gives, what combine gives, and combine's weights (None without weights)."""
    with _expecting:
        return _expect(case)


@functools.lru_cache(maxsize=8)
def _expect(case: Case) -> tuple[list[reference.Received], list[np.ndarray], list[np.ndarray] | None]:
    xs, idxs, weightss = zip(*(case.inputs(rank) for rank in range(case.num_ranks)), strict=True)
    received = reference.dispatch(list(xs), list(idxs), list(weightss) if case.weights else None, case.num_experts)
    outputs = [case.outputs(rank, len(received[rank].x)) for rank in range(case.num_ranks)]
    ys = [part.x for part in received] if case.expert_output == "recv_x" else [output for output, _ in outputs]
    combined = reference.combine(ys, received, case.num_tokens)
    sums = reference.combine([weights for _, weights in outputs], received, case.num_tokens) if case.weights else None
    return received, combined, sums


def open_buffer(comm: Any, case: Case, backend: str, **options: Any) -> cupyep.Buffer:
    """A Buffer fit for `case`."""
    maximum = max(1, *case.num_tokens) if case.capacity == "given" else None
    return cupyep.Buffer(comm, max_tokens_per_rank=maximum, backend=backend, **{"timeout_s": TIMEOUT_S, **options})


def check_dispatch(buffer: cupyep.Buffer, case: Case, rank: int, backend: str) -> Any:
    """Dispatch the case's tokens, compare everything that comes back, and return it."""
    inputs = case.inputs(rank)
    x, topk_idx, topk_weights = (None if array is None else place(array, case.memory, backend) for array in inputs)
    result = buffer.dispatch(x, topk_idx, topk_weights, num_experts=case.num_experts, copy=case.copy, validate=True)
    check_received(result, case, rank)
    assert_bits("x after dispatch", x, inputs[0])
    assert_bits("topk_idx after dispatch", topk_idx, inputs[1])
    return result


def check_received(result: Any, case: Case, rank: int) -> None:
    """The result of a dispatch, now or later, against the oracle."""
    expected = expect(case)[0][rank]
    handle = result.handle
    for name, got in (
        ("num_recv_tokens_per_expert_list", result.num_recv_tokens_per_expert_list),
        ("handle.num_recv_tokens_per_expert", handle.num_recv_tokens_per_expert),
    ):
        assert_equal(name, got, expected.num_recv_tokens_per_expert)
    assert_equal("num_recv_tokens_per_rank", handle.num_recv_tokens_per_rank, expected.num_recv_tokens_per_rank)
    assert_equal("num_recv_tokens", handle.num_recv_tokens, len(expected.x))
    assert_bits("send_row", handle.send_row, expected.send_row)
    assert_bits("recv_topk_idx", result.recv_topk_idx, expected.topk_idx)
    if expected.topk_weights is None:
        assert_equal("recv_topk_weights", result.recv_topk_weights, None)
    else:
        assert_bits("recv_topk_weights", result.recv_topk_weights, expected.topk_weights)
    assert_bits("recv_x", result.recv_x, expected.x)


def check_combine(buffer: cupyep.Buffer, case: Case, rank: int, backend: str, result: Any) -> Any:
    """Combine the case's expert outputs for a dispatched `result`, compare, and return what comes back."""
    y, weights = case.outputs(rank, len(result.recv_x))
    if case.expert_output == "recv_x":
        y_given = result.recv_x
    elif "arena" in case.expert_output:
        y_given = arena_array(buffer, y.shape, y.dtype, case.expert_output)
        y_given[...] = namespace(backend).asarray(y)
    else:
        y_given = place(y, case.memory, backend)
    weights_given = None if weights is None else place(weights, case.memory, backend)
    combined = buffer.combine(y_given, result.handle, weights_given)
    _, expected, sums = expect(case)
    assert_bits("combined_x", combined.combined_x, expected[rank])
    if sums is None:
        assert_equal("combined_topk_weights", combined.combined_topk_weights, None)
    else:
        assert_bits("combined_topk_weights", combined.combined_topk_weights, sums[rank])
    if case.expert_output != "recv_x":
        assert_bits("y after combine", y_given, y)
    return combined


def arena_array(buffer: cupyep.Buffer, shape: tuple[int, int], dtype: np.dtype, kind: str) -> Any:
    """An array in the arena: one that combine can use in place, or one whose order or address it cannot use."""
    if kind == "transposed arena array":
        return buffer.empty(shape[::-1], dtype).T
    if kind == "odd arena array":
        return buffer.empty(shape[0] * shape[1] + 1, dtype)[1:].reshape(shape)
    return buffer.empty(shape, dtype)


def run_case(comm: Any, case: Case, backend: str, buffer: cupyep.Buffer | None = None) -> None:
    """One dispatch and one combine of `case`, in `buffer` or in a new one; the received rows stay as they are."""
    rank = comm.Get_rank() if hasattr(comm, "Get_rank") else comm.rank
    try:
        with nullcontext(buffer) if buffer else open_buffer(comm, case, backend) as used:
            check_layout(used, case, rank, backend)
            result = check_dispatch(used, case, rank, backend)
            check_combine(used, case, rank, backend, result)
            check_received(result, case, rank)
    except Exception as error:
        raise AssertionError(f"rank {rank}: {case!r}: {type(error).__name__}: {error}") from error


def check_layout(buffer: cupyep.Buffer, case: Case, rank: int, backend: str) -> None:
    """get_dispatch_layout against the oracle. It is local: no other rank needs to call it."""
    topk_idx = case.inputs(rank)[1]
    per_rank, per_rdma_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
        place(topk_idx, case.memory, backend), case.num_experts
    )
    expected = reference.layout(topk_idx, case.num_experts, case.num_ranks)
    assert_equal("num_tokens_per_rank", asnumpy(per_rank).tolist(), expected.num_tokens_per_rank)
    assert_equal("num_tokens_per_rdma_rank", per_rdma_rank, None)
    assert_equal("num_tokens_per_expert", asnumpy(per_expert).tolist(), expected.num_tokens_per_expert)
    assert_bits("is_token_in_rank", is_in_rank, expected.is_token_in_rank)


def run_cases(comm: Any, cases: tuple[Case, ...], backend: str, is_shared: bool) -> int:
    """All `cases` in turn, each in a buffer of its own or all in one that grows. Returns how many ran."""
    with cupyep.Buffer(comm, backend=backend, timeout_s=TIMEOUT_S) if is_shared else nullcontext() as buffer:
        for case in cases:
            run_case(comm, case, backend, buffer)
    return len(cases)
