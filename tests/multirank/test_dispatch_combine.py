"""Dispatch and combine against the oracle, over the whole table of cases."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from cases import AXES, CASES, Case, covered_pairs, is_possible
from multirank import checks, launch


@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads(case, backend):
    launch.threads(case.num_ranks, checks.run_case, case, backend)


@pytest.mark.parametrize("num_ranks", sorted({case.num_ranks for case in CASES}))
def test_threads_share_one_buffer(num_ranks, backend):
    cases = tuple(case for case in CASES if case.num_ranks == num_ranks)
    assert launch.threads(num_ranks, checks.run_cases, cases, backend, True) == [len(cases)] * num_ranks


@pytest.mark.parametrize(("num_ranks", "is_shared"), [(1, True), (2, False), (2, True), (3, True), (4, False)])
def test_processes(num_ranks, is_shared, backend):
    cases = tuple(case for case in CASES if case.num_ranks == num_ranks)
    assert launch.mpi(num_ranks, checks.run_cases, cases, backend, is_shared) == [len(cases)] * num_ranks


def test_unwritten_rows_would_show(monkeypatch, backend):
    """With every block filled with NaN before use, the results are still right."""
    monkeypatch.setenv("CUPYEP_POISON", "1")
    cases = tuple(case for case in CASES if case.num_ranks == 3)
    launch.threads(3, checks.run_cases, cases, backend, True)


def test_eight_processes(backend):
    """More ranks than most machines of this suite have cores: waiting ranks must yield."""
    case = Case(num_ranks=8, hidden=100, num_topk=8, tokens="uneven", dtype="bfloat16", seed=7)
    assert launch.mpi(8, checks.run_cases, (case,) * 5, backend, True) == [5] * 8


class Exporter:
    """An array of some other library: all that it offers is DLPack."""

    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def dispatch_exporters(comm, case, backend):
    with checks.open_buffer(comm, case, backend) as buffer:
        inputs = [Exporter(checks.place(array, "contiguous", backend)) for array in case.inputs(comm.rank)]
        result = buffer.dispatch(*inputs, num_experts=case.num_experts)
        checks.check_received(result, case, comm.rank)
        combined = buffer.combine(Exporter(result.recv_x), result.handle, Exporter(result.recv_topk_weights))
        checks.assert_bits("combined_x", combined.combined_x, checks.expect(case)[1][comm.rank])


def test_arrays_of_other_libraries(backend):
    case = Case(num_ranks=2, hidden=24, tokens=9, dtype="float16", expert_output="recv_x", seed=8)
    launch.threads(2, dispatch_exporters, case, backend)


def test_the_table_covers_all_pairs():
    options = [[(name, value) for value in AXES[name]] for name in AXES]
    pairs = {pair for one, other in itertools.combinations(options, 2) for pair in itertools.product(one, other)}
    assert {pair for pair in pairs if is_possible(dict(pair))} <= covered_pairs(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_data_of_a_case(case):
    """Data hold what they promise, special values and no NaN, and differ between ranks."""
    inputs = [case.inputs(rank) for rank in range(case.num_ranks)]
    for x, topk_idx, weights in inputs:
        assert not np.isnan(x).any() and (topk_idx >= -1).all() and (topk_idx < case.num_experts).all()
        assert (weights is not None) == case.weights
        if x.size > 2000:
            bits = x.view(f"u{x.itemsize}")
            least_normal = ml_dtypes.finfo(x.dtype).smallest_normal
            assert np.isinf(x).any() and (bits == 0).any() and (bits == 1 << (8 * x.itemsize - 1)).any()
            assert ((x != 0) & (np.abs(x) < least_normal)).any() and (x == ml_dtypes.finfo(x.dtype).max).any()
    large = [x.tobytes() for x, _, _ in inputs if x.size]
    assert len(set(large)) == len(large)
    if case.routing == "duplicates" and case.num_topk > 3:
        assert all(len(set(ids)) < case.num_topk for _, topk_idx, _ in inputs for ids in topk_idx.tolist())
