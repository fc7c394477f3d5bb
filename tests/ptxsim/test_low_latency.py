"""LOW_LATENCY_DISPATCH and LOW_LATENCY_COMBINE as NVRTC compiles them, against the oracle, under many schedules."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from cases import Case

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from multirank.low_latency import Job

from ptxsim import low_latency, mutants_low_latency
from ptxsim.low_latency import Run

SEEDS = range(int(os.environ.get("CUPYEP_PTXSIM_SEEDS", "5")))


def job(
    fp8: str = "", travel: bool = True, split: bool = False, masked: tuple = (), extra: int = 0, **fields: object
) -> Job:
    usual = {"hidden": 128, "dtype": "bfloat16", "num_topk": 2, "tokens": (5, 3), "num_local_experts": 2}
    case = Case(**{**usual, **fields})  # type: ignore[arg-type]
    return Job(case, fp8=fp8, travel=travel, split=split, masked=masked, extra=extra)


RUNS = {
    "fp8": Run(job("plain")),
    "fp8-vector": Run(job("plain", travel=False), "vector"),
    "bf16": Run(job(travel=False), rounds=2),
    "bf16-vector, halves": Run(job(split=True), "vector", rounds=2),
    "round, float32": Run(job("round", dtype="float32", hidden=384)),
    "ue8m0": Run(job("ue8m0", travel=False, split=True, hidden=512, extra=1), num_ctas=3),
    "float16, halves": Run(job("round", split=True, dtype="float16", idx_dtype="int32")),
    "three ranks, one empty, -1": Run(job(num_ranks=3, tokens=(4, 0, 7), num_topk=3, routing="some -1"), rounds=2),
    "36 scales a row": Run(job("plain", travel=False, hidden=4608, num_topk=1, tokens=(2, 1)), dispatches_only=True),
    "two slots": Run(job(split=True, travel=False, tokens=(3, 3)), slots=2, rounds=2, overlap=True),
    "odd rows": Run(job(travel=False, hidden=25, dtype="float16", num_topk=4, num_local_experts=4)),
    "rows of two shares": Run(job(travel=False, hidden=97, dtype="float16", tokens=(2, 3)), num_ctas=1),
    "rings of one slot": Run(job(travel=False, hidden=36, num_topk=4, num_local_experts=4), smem_bytes=4 << 10),
    "rings of four slots": Run(
        job(tokens=(2, 3), hidden=65, num_topk=4, num_local_experts=3), smem_bytes=16 << 10, num_vecs=2
    ),
    "fp8 rows of two shares": Run(job("plain", hidden=2048, tokens=(2, 1)), num_ctas=1),
    "duplicates": Run(job("plain", num_ranks=3, tokens=(3, 5, 1), num_topk=4, routing="duplicates")),
    "nowhere": Run(job(tokens=(2, 2), routing="nowhere", travel=False)),
    "many tokens": Run(job(tokens=(40, 33), hidden=16, num_local_experts=5), num_ctas=1),
    "weights later, one rank empty": Run(job(tokens=(3, 0), travel=False), rounds=2),
    "nobody has tokens": Run(job("plain", tokens=(0, 0), travel=False), num_ctas=3),
    "masked": Run(job(num_ranks=3, tokens=(4, 3, 3), masked=((0, 2), (1, 2)), travel=False), rounds=2),
}
THREE = job(num_ranks=3, tokens=(4, 2, 3), travel=False)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", RUNS)
def test_dispatch_and_combine(name: str, seed: int) -> None:
    low_latency.run(RUNS[name], seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("split", [False, True], ids=["one launch", "halves"])
@pytest.mark.parametrize("absent", [(2, "dispatch"), (0, "combine")], ids=str)
def test_a_rank_that_never_comes(absent: tuple[int, str], split: bool, seed: int) -> None:
    """The deadline passes: every CTA leaves, and all ranks name the same culprit."""
    low_latency.run(Run(replace(THREE, split=split), absent=absent), seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("split", [False, True], ids=["one launch", "halves"])
def test_a_late_rank_is_masked(split: bool, seed: int) -> None:
    """The others go on without it, twice, with what they would have without its tokens and experts."""
    masked = replace(THREE, split=split, masked=((0, 1), (2, 1)))
    group = low_latency.Group(Run(masked, rounds=2, absent=(1, "dispatch"), masks_on_timeout=True), seed)
    for rank in group.ranks:
        group.space.write(rank.rank, rank.masks.data.ptr, rank.masks.get() * 0)  # they are to find out
    group.go()
    for rank in group.ranks:
        if rank.rank != 1:
            assert rank.error is None
            assert rank.masks.get().tolist() == [0, 1, 0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("begins", [1, 2])
@pytest.mark.parametrize("masks_on_timeout", [False, True])
def test_a_late_rank_that_lives_harms_nobody(masks_on_timeout: bool, begins: int, seed: int) -> None:
    """It meets words of later calls, whose signatures are others; the others get what they would get without it."""
    late = replace(mutants_low_latency.RUNS["late"], late=(2, begins), masks_on_timeout=masks_on_timeout)
    group = low_latency.run(late, seed)
    assert group.ranks[2].masks.get().tolist() == [0, 0, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_comes_at_the_deadline(seed: int) -> None:
    """All CTAs of its peer either take its rows or mask it; what it makes of the tables that are left harms nobody."""
    low_latency.run(mutants_low_latency.RUNS["tardy"], seed)
