"""COUNT, PUSH and PULL as NVRTC compiles them, dispatch and combine against the oracle, under many schedules.

`pytest --long tests/ptxsim` runs 200 schedules of every case instead of five.
"""

from __future__ import annotations

import os

import pytest
from cases import Case

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from ptxsim import failures, harness
from ptxsim.harness import Job

SEEDS = range(int(os.environ.get("CUPYEP_PTXSIM_SEEDS", "5")))


def case(**values: object) -> Case:
    return Case(**{"num_local_experts": 2, "dtype": "bfloat16", "hidden": 64, **values})  # type: ignore[arg-type]


JOBS = {
    "bfloat16": Job(case(tokens=(9, 7)), num_ctas=1),
    "bfloat16-vector": Job(case(tokens=(9, 7)), "vector", num_ctas=1),
    "three ranks, one empty, -1": Job(case(num_ranks=3, tokens=(4, 0, 7), num_topk=3, routing="some -1"), rounds=2),
    "three ranks-vector": Job(case(num_ranks=3, tokens=(4, 0, 7), num_topk=3, routing="some -1"), "vector", rounds=2),
    "chunks": Job(case(hidden=128, dtype="float16", tokens=(9, 2)), chunks=2),
    "short last chunk": Job(case(hidden=1096, dtype="float16", tokens=(5, 3)), chunks=2, consumers=2),
    "float32, no weights": Job(case(hidden=16, dtype="float32", tokens=(0, 6), num_topk=1, weights=False), num_ctas=3),
    "odd rows": Job(case(hidden=25, dtype="float16", tokens=(3, 4), num_topk=4, idx_dtype="int32"), "vector"),
    "long odd rows": Job(case(hidden=131, dtype="float16", tokens=(3, 4)), "vector"),
    "rows only": Job(case(tokens=(9, 7)), num_ctas=1, rows_only=True),
    "scales": Job(case(tokens=(9, 7)), num_ctas=1, scale_bytes=40 * 16),
    "scales-vector": Job(case(num_ranks=3, tokens=(4, 0, 7)), "vector", scale_bytes=24),
    "odd scales, rows only": Job(case(tokens=(4, 5)), num_ctas=1, scale_bytes=37, rows_only=True),
    "fp8 rows": Job(case(hidden=2304, dtype="float16", tokens=(3, 2)), scale_bytes=36 * 4, kernels=("count", "push")),
    "scales in chunks": Job(case(hidden=128, dtype="float16", tokens=(5, 2)), chunks=2, scale_bytes=4),
    "bias": Job(case(num_ranks=3, tokens=(4, 0, 7)), num_bias=1),
    "two addends in chunks": Job(case(hidden=128, dtype="float16", tokens=(5, 2)), chunks=2, num_bias=2),
    "bias-vector": Job(case(hidden=25, dtype="float16", tokens=(3, 4), routing="some -1"), "vector", num_bias=2),
    "nowhere": Job(case(hidden=32, tokens=(2, 2), routing="nowhere")),
    "duplicates": Job(case(num_ranks=3, tokens=(3, 5, 1), num_topk=4, routing="duplicates")),
    "one rank gets all": Job(case(num_ranks=3, tokens=(3, 5, 1), routing="one rank"), num_ctas=1),
    "nobody has tokens": Job(case(tokens=(0, 0))),
    "many experts": Job(case(hidden=32, tokens=(3, 3), num_local_experts=40, idx_dtype="int32")),
    "more tokens than COUNT has threads": Job(case(hidden=8, tokens=(1100, 30)), kernels=("count",)),
    "counts behind each other": Job(case(num_ranks=3, hidden=8, tokens=(4, 0, 7), num_topk=3, routing="some -1"),
                                    kernels=("count",), rounds=3),
    "the backend's plan": Job(case(hidden=32, tokens=(9, 9)), own_plan=True),
    "the backend's plan-vector": Job(case(hidden=32, tokens=(9, 9)), "vector", own_plan=True),
    "two warps for side rows": Job(case(hidden=8, tokens=(21, 3), num_topk=32, num_local_experts=16), num_ctas=1,
                                   own_plan=True, kernels=("count", "push")),
}
THREE = case(num_ranks=3, tokens=(5, 3, 4))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", JOBS)
def test_dispatch_and_combine(name: str, seed: int) -> None:
    harness.run(JOBS[name], seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mover", ["tma", "vector"])
@pytest.mark.parametrize("absent", [(2, "count"), (0, "push"), (1, "pull")], ids=str)
def test_a_rank_that_never_comes(absent: tuple[int, str], mover: str, seed: int) -> None:
    """The deadline passes: every CTA leaves with its copies drained, and all ranks name the same culprit."""
    group = harness.run(Job(THREE, mover, absent=absent), seed)
    failures.check_failures(group)
    assert sum(rank.error is not None for rank in group.ranks) == 2


@pytest.mark.parametrize("mover", ["tma", "vector"])
@pytest.mark.parametrize("stalled", [(2, "count"), (1, "push"), (0, "pull")], ids=str)
def test_a_rank_that_stops_on_the_way(stalled: tuple[int, str], mover: str) -> None:
    """It goes on when the others wait or have left, and finds the record, or nobody has noticed."""
    aborted = 0
    for seed in SEEDS:
        group = harness.run(Job(THREE, mover, stalled=stalled), seed)
        failures.check_failures(group)
        aborted += group.ranks[0].abort_word() != 0
    assert aborted, "no schedule was long enough for a deadline to pass"


def test_barrier_and_abort() -> None:
    """BARRIER lets nobody through before all have come; the host's abort reaches every rank."""
    for seed in SEEDS:
        failures.run_barriers(3, seed)


def test_two_barriers_at_once() -> None:
    """They overlap or they do not; what is excluded, for kernels of one warp, is that both take an epoch untold."""
    turns = range(12)
    assert {failures.run_unordered(seed, n) for seed in SEEDS for n in turns} == {False, True}
    reread = (("cupyep/sync.cuh", "idle = epoch - 1;", "idle = ptx::ld_relaxed_gpu(turn(sync)) & ~0u;"),)
    with pytest.raises(AssertionError, match="both ended well, at epoch 1"):
        for n in turns:
            failures.run_unordered(0, n, reread)
