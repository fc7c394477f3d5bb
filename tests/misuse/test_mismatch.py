"""Ranks that make different calls: MismatchError on all of them, before any row moves, and the Buffer can go on."""

from __future__ import annotations

import time

import pytest
from cases import Case
from multirank import checks

import cupyep

CASE = Case(num_ranks=3, hidden=16, tokens=6, num_local_experts=4, seed=900)
ODD_ONE = 2  # the rank that differs
TIMEOUT_S = 10.0  # of the Buffers: a mismatch must be told long before


def caught(call):
    """(the error of cupyep that `call` raises or None, seconds until then)."""
    start = time.monotonic()
    try:
        checks.complete(call())
    except cupyep.CupyepError as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def arrays(backend, rank, num_topk=2, hidden=16, dtype="float32", idx_dtype="int64", weights=True):
    case = Case(
        num_ranks=3, hidden=hidden, tokens=6, num_topk=num_topk, dtype=dtype, idx_dtype=idx_dtype, weights=weights
    )
    return [None if part is None else checks.place(part, "contiguous", backend) for part in case.inputs(rank)]


DISPATCHES = {  # what the odd one does: (its arrays, its num_experts, the field, rank 0's value, its value)
    "num_experts": ({}, 24, "num_experts", 12, 24),
    "num_topk": ({"num_topk": 3}, 12, "num_topk", 2, 3),
    "hidden": ({"hidden": 32}, 12, "hidden", 16, 32),
    "dtype": ({"hidden": 32, "dtype": "float16"}, 12, "dtype", "float32", "float16"),
    "idx_dtype": ({"idx_dtype": "int32"}, 12, "topk_idx", "int64", "int32"),
    "weights": ({"weights": False}, 12, "topk_weights", "some", "none"),
}


def mismatched_dispatches(comm, backend):
    errors = {}
    with cupyep.Buffer(comm, backend=backend, timeout_s=TIMEOUT_S) as buffer:
        for name, (change, num_experts, *_) in DISPATCHES.items():
            good = checks.check_dispatch(buffer, CASE, comm.rank, backend)
            parts = arrays(backend, comm.rank, **change if comm.rank == ODD_ONE else {})
            mine = num_experts if comm.rank == ODD_ONE else CASE.num_experts
            errors[name] = caught(lambda parts=parts, mine=mine: buffer.dispatch(*parts, num_experts=mine))
            checks.check_received(good, CASE, comm.rank)
            checks.run_case(comm, CASE, backend, buffer)
    return errors


def mismatched_worst_tokens(comm, backend):
    parts, errors = arrays(backend, comm.rank), []
    with cupyep.Buffer(comm, backend=backend, timeout_s=TIMEOUT_S) as buffer:
        for theirs in (0, 30):
            for worst in (40, theirs if comm.rank == ODD_ONE else 40):
                options = {"num_experts": CASE.num_experts, "num_worst_tokens": worst}
                error = caught(lambda options=options: buffer.dispatch(*parts, **options))
            errors.append(error)
            checks.run_case(comm, CASE, backend, buffer)
    return errors


def mismatched_combines(comm, backend):
    errors, is_odd = {}, comm.rank == ODD_ONE
    with cupyep.Buffer(comm, backend=backend, timeout_s=TIMEOUT_S) as buffer:
        results = [checks.check_dispatch(buffer, CASE, comm.rank, backend) for _ in range(2)]
        x, _, weights, _, handle, _ = results[0]
        wide = checks.namespace(backend).zeros((len(x), 32), "float32")
        parts = arrays(backend, comm.rank)
        odd_calls = {
            "handle_id": lambda: buffer.combine(x, results[1].handle, weights),
            "topk_weights": lambda: buffer.combine(x, handle),
            "hidden": lambda: buffer.combine(wide, handle, weights),
            "operation": lambda: buffer.dispatch(*parts, num_experts=CASE.num_experts),
            "cached": lambda: buffer.dispatch(parts[0], handle=handle),
        }
        for field, odd_call in odd_calls.items():
            others = odd_calls["operation"] if field == "cached" else lambda: buffer.combine(x, handle, weights)
            errors[field] = caught(odd_call if is_odd else others)
            for kept in results:
                checks.check_received(kept, CASE, comm.rank)
                checks.check_combine(buffer, CASE, comm.rank, backend, kept)
    return errors


CREATIONS = [  # (options of all, options of the odd one, the field)
    ({"max_tokens_per_rank": 8}, {"max_tokens_per_rank": 9}, "max_tokens_per_rank"),
    ({}, {"max_tokens_per_rank": 8}, "max_tokens_per_rank"),
    ({}, {"num_nvl_bytes": 1 << 20}, "num_nvl_bytes"),
]


def mismatched_creations(comm, backend):
    errors = []
    for common, change, _ in CREATIONS:
        options = {"backend": backend, "timeout_s": TIMEOUT_S} | common | (change if comm.rank == ODD_ONE else {})
        errors.append(caught(lambda options=options: cupyep.Buffer(comm, **options)))
        checks.run_case(comm, CASE, backend)
    return errors


def mismatched_prepare(comm, backend, change):
    options = {"hidden": 16, "dtype": "float32"} | (change if comm.rank == ODD_ONE else {})
    with cupyep.Buffer(comm, backend=backend, timeout_s=TIMEOUT_S) as buffer:
        error = caught(lambda: buffer.prepare(**options))
        checks.run_case(comm, CASE, backend, buffer)
    return error


def assert_mismatch(errors, field, *values):
    """Every rank got the same error, and in time. `values`: rank 0's and the odd one's, or nothing."""
    for rank, (error, seconds) in enumerate(errors):
        assert isinstance(error, cupyep.MismatchError), f"{field}: rank {rank}: {error!r}"
        assert seconds < 0.5 * TIMEOUT_S
        assert (error.field, error.rank) == (field, ODD_ONE), f"{field}: rank {rank}: {error!r}"
        assert not values or (error.expected, error.got) == values, f"{field}: rank {rank}: {error!r}"
        assert field in str(error) and f"rank {ODD_ONE}" in str(error)


def test_dispatch(run_ranks, backend):
    results = run_ranks(3, mismatched_dispatches, backend)
    for name, (*_, field, expected, got) in DISPATCHES.items():
        assert_mismatch([errors[name] for errors in results], field, expected, got)


def test_num_worst_tokens(run_ranks, backend):
    results = run_ranks(3, mismatched_worst_tokens, backend)
    for number, theirs in enumerate((0, 30)):
        assert_mismatch([errors[number] for errors in results], "num_worst_tokens", 40, theirs)


def test_combine(run_ranks, backend):
    results = run_ranks(3, mismatched_combines, backend)
    values = {"operation": ("combine", "dispatch"), "cached": ("dispatch", "dispatch with a handle")}
    for field in results[0]:
        name = "operation" if field == "cached" else field
        assert_mismatch([errors[field] for errors in results], name, *values.get(field, ()))


def mismatched_weights_of_experts(comm, backend):
    """Rows are added up before they travel; the weights do not, but their sums would be of two kinds."""
    errors, options = [], {"num_experts": CASE.num_experts, "layout": "expert"}
    with cupyep.Buffer(comm, backend=backend, timeout_s=TIMEOUT_S) as buffer:
        result = buffer.dispatch(*arrays(backend, comm.rank), **options)
        given, none = (result.recv_x, result.handle, result.recv_topk_weights), (result.recv_x, result.handle)
        errors.append(caught(lambda: buffer.combine(*(none if comm.rank == ODD_ONE else given))))  # of a new shape
        for parts in (given, none):
            buffer.combine(*parts)
        errors.append(caught(lambda: buffer.combine(*(none if comm.rank == ODD_ONE else given))))
        checks.run_case(comm, CASE, backend, buffer)
    return errors


def test_weights_in_the_expert_layout(run_ranks, backend):
    for errors in zip(*run_ranks(3, mismatched_weights_of_experts, backend), strict=True):
        assert_mismatch(errors, "topk_weights", "some", "none")


def test_creation(run_ranks, backend):
    results = run_ranks(3, mismatched_creations, backend)
    for number, (*_, field) in enumerate(CREATIONS):
        assert_mismatch([errors[number] for errors in results], field)


@pytest.mark.parametrize(
    "change",
    [{"hidden": 4096}, {"max_tokens_per_rank": 1000}, {"dtype": "float16"}],
    ids=lambda change: next(iter(change)),
)
def test_prepare(run_ranks, backend, change):
    for rank, (error, seconds) in enumerate(run_ranks(3, mismatched_prepare, backend, change)):
        assert isinstance(error, cupyep.MismatchError), f"rank {rank}: {error!r}"
        assert seconds < 0.5 * TIMEOUT_S
