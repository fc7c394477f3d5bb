"""Both ways to move rows: the vector mover over the table of cases, and large rows of many tokens by either."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from cases import CASES, Case
from gpu_helpers import Traffic, check, mpi, open_buffer, threads
from multirank import checks, test_expert_layout, test_options, test_quantize

from cupyep.backends.cuda import plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

LARGE = Traffic(4, num_tokens=4096, hidden=7168, dtype="bfloat16", num_topk=8, num_local_experts=64, missing=0.05)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A function that names the movers of all push and pull kernels that this test's ranks have loaded."""
    monkeypatch.setenv("CUPYEP_DUMP_SOURCE", str(tmp_path))

    def used() -> set[str]:
        numbers = {int(re.search(r"\bkMover = (\d)", path.read_text())[1]) for path in tmp_path.glob("pu*.cu")}
        return {name for name, number in plan.MOVERS.items() if number in numbers}

    return used


def cases_of(num_ranks):
    return tuple(case for case in CASES if case.num_ranks == num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_vector_mover_in_threads(num_ranks, used, monkeypatch):
    monkeypatch.setenv("CUPYEP_MOVER", "vector")
    cases = cases_of(num_ranks)
    assert threads(num_ranks, checks.run_cases, cases, "cuda", True, timeout_s=120) == [len(cases)] * num_ranks
    assert used() == {"vector"}


def test_vector_mover_in_processes(used, monkeypatch):
    monkeypatch.setenv("CUPYEP_MOVER", "vector")
    cases = cases_of(2)[-4:]
    assert mpi(2, checks.run_cases, cases, "cuda", True, timeout_s=90) == [len(cases)] * 2
    assert used() == {"vector"}


def options(comm):
    """What else dispatch and combine can do: scales, the expert layout, bias, fixed sizes."""
    test_expert_layout.expert_layout(comm, "aligned", "cuda")
    test_expert_layout.expert_layout(comm, "odd rows", "cuda")
    test_quantize.dispatch_pairs(comm, "fp8", "F", "strided", False, "cuda")
    test_quantize.dispatch_pairs(comm, "nvfp4", "C", "fortran", True, "cuda")
    for hidden in (64, 7):
        case = Case(num_ranks=3, tokens="uneven", hidden=hidden, dtype="bfloat16", routing="some -1", seed=hidden)
        test_options.combine_with_bias(comm, case, 2, "cuda")
        test_options.fixed_size(comm, case, "cuda")


def test_vector_mover_with_options(used, monkeypatch):
    monkeypatch.setenv("CUPYEP_MOVER", "vector")
    threads(3, options, timeout_s=120)
    assert used() == {"vector"}


def large(comm):
    with open_buffer(comm, LARGE) as buffer:
        check(buffer, LARGE)
        check(buffer, dataclasses.replace(LARGE, seed=1), copy=True)


@pytest.mark.parametrize(
    ("run", "mover"),
    [(threads, "auto"), (threads, "vector"), (mpi, "auto"), (mpi, "vector")],
    ids=["threads-auto", "threads-vector", "mpi-auto", "mpi-vector"],
)
def test_large_rows_of_many_tokens(run, mover, used, monkeypatch):
    monkeypatch.setenv("CUPYEP_MOVER", mover)
    run(4, large, timeout_s=90)
    assert used() == {"vector"} if mover == "vector" else len(used()) == 1
