"""How cost grows: with SMs, hidden, tokens and ranks, one at a time around one case, each beside the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cupyep.bench import ep
from cupyep.bench.cases import Case
from cupyep.bench.world import World

SMS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
HIDDEN = (1024, 2048, 4096, 7168, 16384)
TOKENS = (1, 8, 64, 128, 512, 1024, 4096, 8192, 16384, 32768)
RANKS = (1, 2, 4, 8)


def run(world: World, case: Case, num_sms: int, axes: list[str], calls: int) -> Iterator[dict[str, Any]]:
    """Collective: the kernels of dispatch and combine (calls, on the NumPy backend) along every axis of `axes`.

    Ranks can be varied where they are threads.
    """
    scope = "kernel" if world.backend == "cuda" else "API"
    lines = tuple(line for line in ep.LINES if line.scope == scope and line.verb in ("dispatch", "combine"))

    def along(axis: str, here: World, cases: list[Case], sms: list[int]) -> Iterator[dict[str, Any]]:
        for result in ep.run(here, cases, sms, calls, lines):
            yield {**result, "benchmark": "sweep", "axis": axis}

    def left_out(axis: str, why: str) -> dict[str, Any]:
        return {"benchmark": "sweep", "name": axis, "note": f"not run: {why}"}

    if "sms" in axes:
        if world.backend == "cuda":
            yield from along("sms", world, [case], list(SMS))
        else:
            yield left_out("sms", "needs a GPU")
    if "hidden" in axes:
        yield from along("hidden", world, [replace(case, hidden=hidden) for hidden in HIDDEN], [num_sms])
    if "tokens" in axes:
        yield from along("tokens", world, [replace(case, num_tokens=tokens) for tokens in TOKENS], [num_sms])
    if "ranks" in axes:
        for ranks in () if world.is_mpi else RANKS:
            yield from along("ranks", World(ranks, world.backend), [case], [num_sms])
        if world.is_mpi:
            yield left_out("ranks", "their number is mpirun's; start it without")


def prediction_note(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How far the model was off, at worst, over the results that have a prediction."""
    known = [result for result in results if "predicted_us" in result]
    if not known:
        return []
    errors = [result["predicted_us"] / result["time_us"] - 1 for result in known]
    within = sum(abs(error) <= 0.15 for error in errors)
    text = f"{within} of {len(known)} predictions are within 15%; the worst is off by {max(errors, key=abs):+.0%}"
    return [{"benchmark": "sweep", "name": "model", "note": text}]
