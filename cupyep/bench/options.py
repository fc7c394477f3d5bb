"""What the options of dispatch and combine cost: each beside what it is to be compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cupyep.bench import ep
from cupyep.bench.cases import Case
from cupyep.bench.ep import Line
from cupyep.bench.option_ranks import OptionRank
from cupyep.bench.report import progress
from cupyep.bench.world import World

PLAIN = (
    Line("dispatch", "kernel", "push"),
    Line("combine", "kernel", "pull"),
    Line("dispatch, cached", "API", "call_cached_dispatch"),
    Line("dispatch", "API", "call_dispatch"),
)
BF16 = (
    *PLAIN,
    Line("dispatch, num_worst_tokens", "API", "call_fixed_dispatch"),
    Line("dispatch, expert layout", "API", "call_expert_dispatch"),
    Line("expansion to the expert layout", "kernel", "expand"),
    Line("combine, arena input", "API", "call_combine"),
    Line("combine, staged input", "API", "call_staged_combine"),
    Line("combine, out=", "API", "call_combine_out"),
    Line("combine, expert layout", "API", "call_expert_combine"),
    Line("matmul + combine", "API", "call_product"),
    Line("matmul + combine, allocator", "API", "call_product_in_arena"),
    Line("quantize_fp8", "API", "call_quantize"),
    Line("dispatch + combine", "graph", "call_pair"),  # the last: arrays made later may lie in what a graph uses
)
# (verb, scope) of a line -> those whose times, added up, it stands beside
BESIDE = {
    ("dispatch, cached", "API"): [("dispatch", "kernel")],
    ("dispatch", "API"): [("dispatch, cached", "API")],
    ("dispatch, num_worst_tokens", "API"): [("dispatch, cached", "API")],
    ("dispatch, expert layout", "API"): [("dispatch", "API"), ("expansion to the expert layout", "kernel")],
    ("combine, arena input", "API"): [("combine", "kernel")],
    ("combine, staged input", "API"): [("combine, arena input", "API")],
    ("combine, out=", "API"): [("combine, arena input", "API")],
    ("combine, expert layout", "API"): [("combine, arena input", "API")],
    ("matmul + combine, allocator", "API"): [("matmul + combine", "API")],
    ("dispatch + combine", "graph"): [("dispatch", "kernel"), ("combine", "kernel")],
}


def run(world: World, cases: list[Case], num_sms: list[int], calls: int) -> Iterator[dict[str, Any]]:
    """Collective: each case in bf16 with all options, then its plain calls in fp8.

    On the NumPy backend, of whole calls alone, and of those that it has.
    """
    num_sms = ep.fitting(world, num_sms)
    modes = {"bf16": (rank_class(world), BF16), "fp8": (ep.rank_class(world), PLAIN)}
    work = [
        (replace(case, mode=mode), kind, ep.possible(lines, kind))
        for case in cases
        for mode, (kind, lines) in modes.items()
    ]
    steps = iter(progress(range(len(num_sms) * sum(len(lines) for *_, lines in work)), "options", show=world.is_first))
    for case, kind, lines in work:
        ranks = ep.open_ranks(world, kind, case, max(num_sms, key=lambda sms: sms or 0))
        for sms in num_sms:
            if world.backend == "cuda":
                ep.verify_kernels(world, ranks, sms)
            for line in lines:
                next(steps)
                if line.scope == "graph":
                    verify_graph(world, ranks, line.action, sms)
                yield {"benchmark": "options", **ep.result(world, case, ranks, sms, line, calls)}
        world.on(ranks, lambda rank: rank.close())
    next(steps, None)


def rank_class(world: World) -> type[OptionRank]:
    """Of a rank on the world's backend."""
    if world.backend == "numpy":
        return OptionRank
    from cupyep.bench.option_kernels import CudaOptionRank

    return CudaOptionRank


def verify_graph(world: World, ranks: list[Any], action: str, num_sms: int) -> None:
    """Collective: that a replay makes right what was made wrong. Raises AssertionError."""
    graphs = [rank.graph(action, num_sms, 1) for rank in ranks]
    for rank in ranks:
        rank.poison_out()
    world.align()
    for rank, graph in zip(ranks, graphs, strict=True):
        rank.launch_graph(graph)
    world.align()
    world.on(ranks, lambda rank: rank.check_out())


def compared(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results, with a note on those that stand beside others of the same case, mode and number of SMs."""
    known = {_key(result, result["verb"], result["scope"], result["mode"]): result for result in results}
    notes = [_note(result, known) for result in results]
    return [{**result, "note": note} if note else result for result, note in zip(results, notes, strict=True)]


def _key(result: dict[str, Any], verb: str, scope: str, mode: str) -> tuple[Any, ...]:
    """Of another line that was measured at the point where `result` was."""
    return verb, scope, mode, result["num_sms"], result["num_tokens"], result["hidden"]


def _note(result: dict[str, Any], known: dict[tuple[Any, ...], dict[str, Any]]) -> str | None:
    verb, scope, mode = result["verb"], result["scope"], result["mode"]
    if (verb, scope, mode) == ("dispatch", "kernel", "fp8"):
        bf16 = known.get(_key(result, verb, scope, "bf16"))
        return None if bf16 is None else f"{result['logical_gbps'] / bf16['logical_gbps']:.0%} of bf16's GB/s"
    names = BESIDE.get((verb, scope), [])
    others = [known.get(_key(result, *name, mode)) for name in names]
    times_us = [other["time_us"] for other in others if other is not None]
    if not names or len(times_us) < len(names):
        return None
    change_us = result["time_us"] - sum(times_us)
    text = " + ".join(f"{verb} ({scope})" for verb, scope in names)
    return f"{change_us:+.1f} us ({change_us / sum(times_us):+.1%}) to {text}"
