"""Dispatch and combine: kernels and whole calls, full and cached, beside ceiling and prediction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cupyep import model
from cupyep.bench.cases import Case
from cupyep.bench.ranks import Rank
from cupyep.bench.report import progress
from cupyep.bench.timed import time_of
from cupyep.bench.timing import Timing
from cupyep.bench.world import World
from cupyep.buffer import Buffer

Predict = Callable[[model.Traffic, int, model.Machine], model.Estimate]


@dataclass(frozen=True)
class Line:
    """A line of the table. action, ceiling: methods of a rank, by name, with the number of SMs as their argument.

    scope: "kernel" (launched alone, GPU only) or "API" (a whole call of Buffer).
    """

    verb: str
    scope: str
    action: str
    predict: Predict | None = None
    ceiling: str | None = None


LINES = (
    Line("dispatch", "kernel", "push", model.dispatch_time, "push_ceiling"),
    Line("combine", "kernel", "pull", model.combine_time, "pull_ceiling"),
    Line("barrier", "kernel", "barrier"),
    Line("dispatch", "API", "call_dispatch"),
    Line("dispatch, cached", "API", "call_cached_dispatch"),
    Line("combine", "API", "call_combine"),
    Line("barrier", "API", "call_barrier"),
)


def run(
    world: World, cases: list[Case], num_sms: list[int], calls: int, lines: tuple[Line, ...] = LINES
) -> Iterator[dict[str, Any]]:
    """Collective: the results of every case, number of SMs and line; on the NumPy backend, of whole calls alone."""
    num_sms = fitting(world, num_sms)
    lines = tuple(line for line in lines if line.scope == "API" or world.backend == "cuda")
    steps = iter(progress(range(len(cases) * len(num_sms) * len(lines)), "ep", show=world.is_first))
    for case in cases:
        ranks = open_ranks(world, case, max(num_sms, key=lambda sms: sms or 0))
        for sms in num_sms:
            if world.backend == "cuda":
                verify_kernels(world, ranks, sms)
            for line in lines:
                next(steps)
                yield _result(world, case, ranks, sms, line, calls)
        world.on(ranks, lambda rank: rank.close())
    next(steps, None)


def fitting(world: World, num_sms: list[int]) -> list[Any]:
    """Those of `num_sms` that every rank can have at once; [None] on the NumPy backend, which has none."""
    if world.backend == "numpy":
        return [None]
    most = world.machine().num_sms // world.ranks_per_device
    if world.is_first and max(num_sms) > most:
        print(f"ep: a rank can have {most} SMs here; more are left out", file=sys.stderr)
    return [sms for sms in num_sms if sms <= most] or [most]


def open_ranks(world: World, case: Case, most_sms: int | None) -> list[Any]:
    """Collective: this process's ranks, whose results were verified."""
    if world.backend == "numpy":
        return world.each(Rank, case, world.backend)
    from cupyep.bench.kernels import CudaRank

    Buffer.set_num_sms(most_sms)
    ranks = world.each(CudaRank, case, world.backend)
    offsets = world.gather([rank.prepare() for rank in ranks])
    for rank in ranks:
        rank.connect(offsets)
    return ranks


def verify_kernels(world: World, ranks: list[Any], num_sms: int) -> None:
    """Collective: that the kernels alone, with so many SMs, make right what was made wrong. Raises AssertionError."""
    for rank in ranks:
        rank.poison()
    for action in ("push", "pull"):
        world.align()
        for rank in ranks:
            getattr(rank, action)(num_sms)
    world.align()
    world.on(ranks, lambda rank: rank.check())


def _result(world: World, case: Case, ranks: list[Any], sms: int | None, line: Line, calls: int) -> dict[str, Any]:
    timing = time_of(world, ranks, line.action, sms, line.scope, calls)
    logical, wire = (mean(world, [getattr(rank, f"{kind}_bytes") for rank in ranks]) for kind in ("logical", "wire"))
    result = {
        "benchmark": "ep",
        "verb": line.verb,
        "scope": line.scope,
        "backend": world.backend,
        "num_ranks": world.size,
        "ranks_per_device": world.ranks_per_device,
        "ranks_are": "processes" if world.is_mpi else "threads",
        "num_sms": sms,
        **asdict(case),
        "in_graph": timing.in_graph,
        **times(timing),
    }
    if line.verb == "barrier":
        return result
    result |= rates(logical, wire, timing)
    if line.predict is not None and sms is not None:
        destinations = logical / case.row_bytes / case.num_tokens
        traffic = model.Traffic(
            case.num_tokens, case.row_bytes, world.size, world.ranks_per_device, case.num_topk, destinations
        )
        result["predicted_us"] = line.predict(traffic, sms, world.machine()).seconds * 1e6
    if line.ceiling is not None and ranks[0].probe is not None:
        seconds = time_of(world, ranks, line.ceiling, sms, "kernel", calls).mean
        result["ceiling_gbps"] = mean(world, [rank.ceiling_bytes for rank in ranks]) / seconds / 1e9
    return result


def times(timing: Timing) -> dict[str, float]:
    """The fields of a result that say how long a call took."""
    return {
        "time_us": timing.mean * 1e6,
        "min_us": timing.minimum * 1e6,
        "p50_us": timing.p50 * 1e6,
        "p99_us": timing.p99 * 1e6,
    }


def rates(logical: float, wire: float, timing: Timing) -> dict[str, float]:
    """The fields that say what moved per call, a rank's mean, and how fast."""
    seconds = timing.mean * 1e9
    return {
        "logical_bytes": logical,
        "wire_bytes": wire,
        "logical_gbps": logical / seconds,
        "wire_gbps": wire / seconds,
        "us_per_mb": timing.mean * 1e12 / logical,
    }


def mean(world: World, values: list[int]) -> float:
    everyone = world.gather(values)
    return sum(everyone) / len(everyone)
