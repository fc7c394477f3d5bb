"""The time of one action of all ranks: whole calls by each rank itself, kernels and graphs by one thread."""

from __future__ import annotations

from functools import partial
from typing import Any

from cupyep.bench.timing import Clock, CudaClock, HostClock, Timing, measure
from cupyep.bench.world import World

KERNELS_IN_GRAPH = 20
LAUNCH_S = 30e-6  # what one launch from Python takes at most, about: 21 to 25 us were seen
IN_GRAPH_IF_SHORT = ("count", "count_and_push", "push", "pull", "push_ceiling", "pull_ceiling")


def time_of(world: World, ranks: list[Any], action: str, sms: int | None, scope: str, calls: int) -> Timing:
    """Collective: the time of one `action` of every rank; of the slowest rank.

    scope: "kernel", "graph" (the action captured once and replayed), "API" (whole calls), or "host" (until a call
    returns, whatever the GPU still does). Kernels and graphs of threads are launched by one thread, so that no rank
    waits for Python in another; calls come from each rank's own thread. Kernels that take less time than to launch them
    are measured in a graph.
    """
    if scope == "graph":
        return in_graph(world, ranks, action, sms, calls, 1)
    if scope == "kernel":
        timing = _time_of_actions(world, ranks, [partial(getattr(rank, action), sms) for rank in ranks], calls)
        if action in IN_GRAPH_IF_SHORT and timing.mean < LAUNCH_S * len(ranks):
            return in_graph(world, ranks, action, sms, calls)
        return timing

    def calls_of(rank: Any) -> Timing:
        clock = HostClock() if scope == "host" else _current_clock(world)
        return measure([partial(getattr(rank, action), sms)], [clock], world.align, calls)[0]

    return Timing.slowest(world.gather(world.on(ranks, calls_of)))


def in_graph(
    world: World, ranks: list[Any], action: str, sms: int | None, calls: int, count: int = KERNELS_IN_GRAPH
) -> Timing:
    """Collective: the time of one of `count` equal actions in one CUDA graph of each rank."""
    graphs = [rank.graph(action, sms, count) for rank in ranks]
    launches = [partial(rank.launch_graph, graph) for rank, graph in zip(ranks, graphs, strict=True)]
    return _time_of_actions(world, ranks, launches, calls).over(count, in_graph=True)


def _time_of_actions(world: World, ranks: list[Any], actions: list[Any], calls: int) -> Timing:
    clocks: list[Clock] = [_clock_on(rank) for rank in ranks]
    timings = measure(actions, clocks, partial(align, world, ranks), calls)
    for rank in ranks:
        rank.check_kernels()
    return Timing.slowest(world.gather(timings))


def align(world: World, ranks: list[Any]) -> None:
    """The ranks' streams start together: behind a barrier on the GPU."""
    world.align()
    for rank in ranks:
        rank.barrier(1)


def _clock_on(rank: Any) -> CudaClock:
    with rank.device:
        return CudaClock(rank.stream)


def _current_clock(world: World) -> Clock:
    if world.backend == "numpy":
        return HostClock()
    import cupy

    return CudaClock(cupy.cuda.get_current_stream())
