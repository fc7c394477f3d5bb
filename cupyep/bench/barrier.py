"""Barriers and small batches: what is left when there are hardly any bytes.

A bare barrier is timed inside one launch that does many (gpu.NUM_BARRIERS), so that its time has no launch in it: a
post to every rank, the wait for theirs, the verdict, and the epoch's advance. Kernels of a small batch are replayed in
one CUDA graph, because launching one costs the host more than it runs; their time has a graph's gap between kernels in
it, which the line "barrier, in a graph" shows: a barrier kernel does little else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from cupyep.bench import ep
from cupyep.bench.cases import Case
from cupyep.bench.report import progress
from cupyep.bench.timed import in_graph, time_of
from cupyep.bench.timing import Timing
from cupyep.bench.world import World

_API = tuple(line for line in ep.LINES if line.scope == "API")


def run(world: World, cases: list[Case], num_sms: list[int], calls: int) -> Iterator[dict[str, Any]]:
    """Collective: the bare barrier, then each case's kernels (on a GPU) and calls."""
    if world.backend == "numpy":
        yield from ep.run(world, cases, num_sms, calls, _API)
        return
    for number, case in enumerate(progress(cases, "barrier", show=world.is_first)):
        for sms in ep.fitting(world, num_sms):
            ranks = ep.open_ranks(world, ep.rank_class(world), case, sms)
            if number == 0:
                yield bare(world, ranks, calls)
            ep.verify_kernels(world, ranks, sms)
            for verb, action in (("dispatch", "push"), ("combine", "pull"), ("barrier", "barrier")):
                timing = in_graph(world, ranks, action, sms, calls)
                yield _result(world, f"{verb}, in a graph", timing, num_sms=sms, **asdict(case))
            world.on(ranks, lambda rank: rank.check())
            for line in _API:
                timing = time_of(world, ranks, line.action, sms, line.scope, calls)
                yield _result(world, f"{line.verb}, whole call", timing, num_sms=sms, **asdict(case))
            world.on(ranks, lambda rank: rank.close())


def bare(world: World, ranks: list[Any], calls: int) -> dict[str, Any]:
    """Collective: the line of the bare barrier, by ranks on GPUs."""
    from cupyep.bench.gpu import NUM_BARRIERS

    return _result(world, "barrier, bare", time_of(world, ranks, "barriers", 1, "kernel", calls), NUM_BARRIERS)


def _result(world: World, name: str, timing: Timing, count: int = 1, **more: Any) -> dict[str, Any]:
    shared = {"num_ranks": world.size, "ranks_per_device": world.ranks_per_device}
    return {"benchmark": "barrier", "name": name, **shared, **more, **ep.times(timing.over(count))}
