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

    scope: as in time_of: "kernel" (launched alone), "API" (a whole call of Buffer), "graph". verb: up to a comma it
    says whose bytes move. one_sm: the kernel has one CTA, whatever --sms says.
    """

    verb: str
    scope: str
    action: str
    predict: Predict | None = None
    ceiling: str | None = None
    one_sm: bool = False

    @property
    def moves(self) -> str:
        return self.verb.partition(",")[0]


LINES = (
    Line("dispatch", "kernel", "push", model.dispatch_time, "push_ceiling"),
    Line("combine", "kernel", "pull", model.combine_time, "pull_ceiling"),
    Line("count", "kernel", "count", one_sm=True),
    Line("dispatch, count and push", "kernel", "count_and_push"),
    Line("barrier", "kernel", "barrier", one_sm=True),
    Line("dispatch", "API", "call_dispatch"),
    Line("dispatch, cached", "API", "call_cached_dispatch"),
    Line("combine", "API", "call_combine"),
    Line("barrier", "API", "call_barrier", one_sm=True),
)


def run(
    world: World, cases: list[Case], num_sms: list[int], calls: int, lines: tuple[Line, ...] = LINES
) -> Iterator[dict[str, Any]]:
    """Collective: the results of every case, number of SMs and line; on the NumPy backend, of whole calls alone."""
    num_sms, kind = fitting(world, num_sms), rank_class(world)
    lines = possible(lines, kind)
    steps = iter(progress(range(len(cases) * len(num_sms) * len(lines)), "ep", show=world.is_first))
    for case in cases:
        ranks = open_ranks(world, kind, case, max(num_sms, key=lambda sms: sms or 0))
        for sms in num_sms:
            if world.backend == "cuda":
                verify_kernels(world, ranks, sms)
            for line in lines:
                next(steps)
                if line.one_sm and sms != num_sms[0]:
                    continue
                yield {"benchmark": "ep", **result(world, case, ranks, sms and 1 if line.one_sm else sms, line, calls)}
        world.on(ranks, lambda rank: rank.close())
    next(steps, None)


def possible(lines: tuple[Line, ...], kind: type[Rank]) -> tuple[Line, ...]:
    """Those of `lines` that ranks of that kind can do: without a GPU, whole calls alone."""
    return tuple(line for line in lines if hasattr(kind, line.action))


def rank_class(world: World) -> type[Rank]:
    """Of a rank on the world's backend."""
    if world.backend == "numpy":
        return Rank
    from cupyep.bench.kernels import CudaRank

    return CudaRank


def fitting(world: World, num_sms: list[int]) -> list[Any]:
    """Those of `num_sms` that every rank can have at once; [None] on the NumPy backend, which has none."""
    if world.backend == "numpy":
        return [None]
    most = world.machine().num_sms // world.ranks_per_device
    if world.is_first and max(num_sms) > most:
        print(f"ep: a rank can have {most} SMs here; more are left out", file=sys.stderr)
    return [sms for sms in num_sms if sms <= most] or [most]


def open_ranks(world: World, kind: type[Rank], case: Case, most_sms: int | None) -> list[Any]:
    """Collective: this process's ranks, whose results were verified."""
    if world.backend == "cuda":
        Buffer.set_num_sms(most_sms)
    ranks: list[Any] = world.each(kind, case, world.backend, kind.heap_bytes(case, world.size))
    if world.backend == "cuda":
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


def result(world: World, case: Case, ranks: list[Any], sms: int | None, line: Line, calls: int) -> dict[str, Any]:
    """Collective: the line, measured."""
    timing = time_of(world, ranks, line.action, sms, line.scope, calls)
    fields = {
        "verb": line.verb,
        "scope": line.scope,
        "num_ranks": world.size,
        "ranks_per_device": world.ranks_per_device,
        "num_sms": sms,
        **asdict(case),
        "in_graph": timing.in_graph,
        **times(timing),
    }
    if line.action in ranks[0].memory_bytes:
        moved = mean(world, [rank.memory_bytes[line.action] for rank in ranks])
        return {**fields, "memory_bytes": moved, "gbps": moved / timing.mean / 1e9}
    if line.moves not in ranks[0].bytes:
        return fields
    logical, wire = moved_bytes(world, ranks, line.moves)
    fields |= rates(logical, wire, timing)
    if line.predict is not None and sms is not None:
        row_bytes = case.row_bytes(line.moves)
        destinations = logical / row_bytes / case.num_tokens
        traffic = model.Traffic(
            case.num_tokens, row_bytes, world.size, world.ranks_per_device, case.num_topk, destinations
        )
        fields["predicted_us"] = line.predict(traffic, sms, world.machine()).seconds * 1e6
    if line.ceiling is not None and ranks[0].ceiling_bytes(line.moves):
        seconds = time_of(world, ranks, line.ceiling, sms, "kernel", calls).mean
        fields["ceiling_gbps"] = mean(world, [rank.ceiling_bytes(line.moves) for rank in ranks]) / seconds / 1e9
    return fields


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


def moved_bytes(world: World, ranks: list[Any], verb: str) -> tuple[float, float]:
    """Collective: (logical, wire) bytes of one dispatch or combine, the mean over all ranks."""
    logical, wire = (mean(world, [rank.bytes[verb][kind] for rank in ranks]) for kind in (0, 1))
    return logical, wire


def mean(world: World, values: list[int]) -> float:
    """Collective: of all ranks' values."""
    everyone = world.gather(values)
    return sum(everyone) / len(everyone)
