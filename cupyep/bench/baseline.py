"""What one would do without this library: gather rows with CuPy or NumPy, exchange them by MPI or NCCL, add them up.

Positions are known, as for the kernels of `ep`: no counts are exchanged and no order is computed. Times are of whole
exchanges on the host's clock, the GPU's work included. The results must equal Buffer's, bit by bit. An exchange through
host memory may take half a second, so a line takes BUDGET_S at most, or three calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from cupyep.bench import ep
from cupyep.bench.cases import VERBS, Case
from cupyep.bench.exchange import exchanges
from cupyep.bench.ranks import bits
from cupyep.bench.report import progress
from cupyep.bench.timing import REPETITIONS, HostClock, Timing, fitting_calls, measure, measure_slow
from cupyep.bench.world import World

BUDGET_S = 2.0  # for the calls of one line


class Plan:
    """One rank's rows by destination, as CuPy or NumPy indices, and how many go where."""

    def __init__(self, rank: Any) -> None:
        self.rank, self.xp = rank, rank.xp
        send_row = rank.sent.handle.send_row
        self.tokens = [self.xp.flatnonzero(send_row[:, peer] >= 0) for peer in range(rank.buffer.size)]
        self.order = self.xp.concatenate(self.tokens)
        self.send_counts = [len(tokens) for tokens in self.tokens]
        self.recv_counts = list(rank.sent.handle.num_recv_tokens_per_rank)

    def dispatch(self, exchange: Callable[..., Any]) -> list[Any]:
        """What came of x, or of its data and its scales."""
        return [exchange(part[self.order], self.send_counts, self.recv_counts) for part in _parts(self.rank.x)]

    def combine(self, exchange: Callable[..., Any]) -> list[Any]:
        rows = exchange(bits(self.rank.y), self.recv_counts, self.send_counts).view(self.rank.rows.dtype)
        total, start = self.xp.zeros(self.rank.rows.shape, np.float32), 0
        for tokens in self.tokens:  # by ascending rank, as Buffer does
            total[tokens] += rows[start : start + len(tokens)].astype(np.float32)
            start += len(tokens)
        return [bits(total.astype(self.rank.rows.dtype))]

    def check(self, exchange: Callable[..., Any]) -> None:
        """Raises AssertionError unless both give what Buffer gave."""
        for verb, got, expected in (
            ("dispatch", self.dispatch(exchange), self.rank.sent.recv_x),
            ("combine", self.combine(exchange), self.rank.combined.combined_x),
        ):
            if not all(bool((one == other).all()) for one, other in zip(got, _parts(expected), strict=True)):
                raise AssertionError(f"rank {self.rank.rank}: baseline {verb} differs from Buffer's")


def run(world: World, cases: list[Case], calls: int) -> Iterator[dict[str, Any]]:
    """Collective: dispatch and combine of each case over every exchange there is; a note for the others."""
    available = list(exchanges(world))
    for case in progress(cases, "baseline", show=world.is_first):
        ranks = ep.open_ranks(world, ep.rank_class(world), case, None)
        plans = world.on(ranks, Plan)
        moved = {verb: ep.moved_bytes(world, ranks, verb) for verb in VERBS}
        for name, exchange, why_not in available:
            common = {"benchmark": "baseline", "num_ranks": world.size, "ranks_per_device": world.ranks_per_device}
            if exchange is None:
                yield {**common, "name": name, "note": why_not}
                continue
            world.on(plans, partial(Plan.check, exchange=exchange))
            for verb in (Plan.dispatch, Plan.combine):
                timing, num_calls = time_of(world, plans, verb, exchange, calls)
                yield {
                    **common,
                    "name": f"{verb.__name__}, {name}",
                    "scope": "API",
                    **asdict(case),
                    "num_calls": num_calls,
                    **ep.times(timing),
                    **ep.rates(*moved[verb.__name__], timing),
                }
        world.on(ranks, lambda rank: rank.close())


def _parts(x: Any) -> list[Any]:
    return [bits(part) for part in (x if isinstance(x, tuple) else (x,))]


def time_of(
    world: World, plans: list[Plan], verb: Callable[..., Any], exchange: Callable[..., Any], calls: int
) -> tuple[Timing, int]:
    """Collective: the time of one exchange of every rank, and how many calls its mean is of."""

    def measured(method: Callable[..., list[Timing]], count: int) -> Timing:
        def one(plan: Plan) -> Timing:
            def call() -> None:
                verb(plan, exchange)
                world.synchronize()

            return method([call], [HostClock()], world.align, count)[0]

        return Timing.slowest(world.gather(world.on(plans, one)))

    few = fitting_calls(measured(measure_slow, 1).mean, calls, BUDGET_S)  # of the slowest rank: alike everywhere
    if few is None:
        return measured(measure, calls), REPETITIONS * calls
    return measured(measure_slow, few), few
