"""The low-latency mode in microseconds, beside its bytes and the bare barrier.

Calls are captured twenty to a CUDA graph, so that no launch costs stand between them. The goal is what the bytes take
at the rate at which all ranks at once copy memory, measured in the same run, and three bare barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from cupyep.bench import barrier, ep
from cupyep.bench.cases import VERBS, Case
from cupyep.bench.low_latency_ranks import LowLatencyRank
from cupyep.bench.report import progress
from cupyep.bench.timed import in_graph, time_of
from cupyep.bench.timing import Timing
from cupyep.bench.world import World

NUM_BARRIERS = 3  # of the goal
NUM_LINES = {"numpy": 2, "cuda": 7}


def run(world: World, cases: list[Case], num_sms: list[int], calls: int) -> Iterator[dict[str, Any]]:
    """Collective: every case and number of SMs (none: all that a rank has); on the NumPy backend, the calls alone."""
    points = [(case, sms) for case in cases for sms in (ep.fitting(world, num_sms) if num_sms else [None])]
    steps = iter(progress(range(len(points) * NUM_LINES[world.backend]), "low-latency", show=world.is_first))
    for case, sms in points:
        ranks: list[Any] = world.each(rank_class(world), case, world.backend)
        world.on(ranks, partial(LowLatencyRank.there_and_back, num_sms=sms))
        common = {
            "benchmark": "low-latency",
            "num_ranks": world.size,
            "ranks_per_device": world.ranks_per_device,
            "num_sms": ranks[0].max_num_sms if sms is None and world.backend == "cuda" else sms,
            **asdict(case),
        }
        lines = on_numpy if world.backend == "numpy" else on_gpu
        for line in lines(world, ranks, sms, calls):
            next(steps)
            yield {**common, **line}
        world.on(ranks, lambda rank: rank.close())
    next(steps, None)


def rank_class(world: World) -> type[LowLatencyRank]:
    """Of a rank on the world's backend."""
    if world.backend == "numpy":
        return LowLatencyRank
    from cupyep.bench.low_latency_kernels import CudaLowLatencyRank

    return CudaLowLatencyRank


def on_numpy(world: World, ranks: list[Any], sms: int | None, calls: int) -> Iterator[dict[str, Any]]:
    """Collective: the calls."""
    for verb in VERBS:
        yield _line(f"{verb} call", checked(world, ranks, verb, time_of, sms, "API", calls))


def on_gpu(world: World, ranks: list[Any], sms: int | None, calls: int) -> Iterator[dict[str, Any]]:
    """Collective: barrier, copy, kernels, the pair, and what calls cost the host."""
    from cupyep.bench.low_latency_kernels import COPY_BYTES

    bare = barrier.bare(world, ranks, calls)
    yield {name: bare[name] for name in ("name", "time_us", "min_us", "p50_us", "p99_us")}
    copy = time_of(world, ranks, "copy", None, "kernel", calls)
    rate = 2 * COPY_BYTES / copy.mean  # read and written
    yield {**_line("copy of memory, all ranks at once", copy), "gbps": rate / 1e9}
    kernels_us = 0.0
    for verb in VERBS:
        line = _line(f"{verb}, in a graph", checked(world, ranks, verb, in_graph, sms, calls))
        moved = ep.mean(world, [rank.memory_bytes[verb] for rank in ranks])
        bytes_us = moved / rate * 1e6
        kernels_us += line["time_us"]
        yield {
            **line,
            "memory_bytes": moved,
            "bytes_us": bytes_us,
            "goal_us": bytes_us + NUM_BARRIERS * bare["time_us"],
        }
    pair = _line("pair, in a graph", checked(world, ranks, "pair", in_graph, sms, calls))
    yield {**pair, "note": f"{pair['time_us'] / kernels_us - 1:+.1%} to the two alone"}
    for verb in VERBS:
        yield _line(f"{verb} call, host", time_of(world, ranks, f"call_{verb}", sms, "host", calls))


def checked(world: World, ranks: list[Any], verb: str, measure: Callable[..., Timing], *arguments: Any) -> Timing:
    """Collective: the time of a call by `measure`: time_of or in_graph, whose further `arguments` follow. What the last
    calls made is checked.
    """
    world.on(ranks, lambda rank: rank.poison())
    timing = measure(world, ranks, f"call_{verb}", *arguments)
    world.on(ranks, lambda rank: rank.check(verb))
    return timing


def _line(name: str, timing: Timing) -> dict[str, Any]:
    return {"name": name, **ep.times(timing)}
