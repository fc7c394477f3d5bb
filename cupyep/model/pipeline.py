"""How long a pipeline of loads and computations takes, and how far a measured one agrees.

Times are in any one unit. The model, for tile i of a ring of `stages` slots:

    load i begins    when tile i - stages has been computed (its slot is free)
    tile i arrives   t_latency later, but not before tile i - 1; then its bytes pass: t_load - t_latency
    tile i is done   t_compute after it has arrived and tile i - 1 is done

So latencies overlap, bytes share one path, and one tile is computed at a time. docs/overlap.md says where that breaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cupyep import checks
from cupyep.model import reals


def serial_time(t_load: float, t_compute: float, num_tiles: int) -> float:
    """The time of all tiles one after the other: num_tiles (t_load + t_compute). Raises: TypeError, ValueError."""
    _check(t_load, t_compute, num_tiles, 1, 0)
    return num_tiles * (t_load + t_compute)


def pipeline_time(t_load: float, t_compute: float, num_tiles: int, stages: int = 2, *, t_latency: float = 0.0) -> float:
    """The time of all tiles with loads and computation overlapped.

    Two stages without latency: first load + first compute + (num_tiles - 1) times the slower of the two. One stage is
    serial_time.

    Args: t_load: of one tile alone, t_latency of it before its first byte; t_compute: of one tile; num_tiles; stages:
        slots of the ring, and so the most tiles in flight.
    Raises: TypeError, ValueError. Source: the recurrence above; Little's law is its steady state (see interval).
    """
    _check(t_load, t_compute, num_tiles, stages, t_latency)
    done = [0.0] * min(stages, num_tiles)  # of the last tile in each slot that is used
    arrived = last = 0.0
    for i in range(num_tiles):
        begin = done[i % stages]
        arrived = max(begin + t_latency, arrived) + (t_load - t_latency)
        last = done[i % stages] = max(arrived, last) + t_compute
    return last


def interval(t_load: float, t_compute: float, stages: int = 2, *, t_latency: float = 0.0) -> float:
    """The time between two tiles in the steady state: the slowest of the path, the computation and the ring.

    The ring is Little's law: `stages` tiles in flight, each for t_load + t_compute. Raises: TypeError, ValueError.
    """
    _check(t_load, t_compute, 1, stages, t_latency)
    return max(t_load - t_latency, t_compute, (t_load + t_compute) / stages)


def bytes_in_flight(gbps: float, latency_us: float) -> float:
    """Bytes that must be under way to move `gbps` GB/s with `latency_us` microseconds: rate x latency.

    Raises: TypeError, ValueError.
    """
    reals.nonnegative("gbps", gbps)
    reals.nonnegative("latency_us", latency_us)
    return gbps * 1e3 * latency_us


def stages_needed(t_load: float, t_compute: float, *, t_latency: float = 0.0) -> int:
    """The fewest stages with which only the slower of path and computation is left.

    Raises: TypeError; ValueError, also where neither takes time but latency does: then no number is enough.
    """
    _check(t_load, t_compute, 1, 1, t_latency)
    slower = max(t_load - t_latency, t_compute)
    if slower == 0 and t_latency > 0:
        raise ValueError(f"t_latency: expected less than t_load ({t_load}) where t_compute is 0, got {t_latency}")
    return max(1, math.ceil((t_load + t_compute) / slower - 1e-9)) if slower > 0 else 1


def load_time(
    tile_bytes: int, *, latency_us: float, gbps_per_sm: float, num_sms: int = 1, gbps_total: float = math.inf
) -> float:
    """Microseconds to load a tile while `num_sms` SMs do so too: latency, then bytes at the SM's rate or its share.

    Raises: TypeError, ValueError.
    """
    checks.integer("tile_bytes", tile_bytes, 0)
    reals.nonnegative("latency_us", latency_us)
    reals.positive("gbps_per_sm", gbps_per_sm)
    checks.integer("num_sms", num_sms, 1)
    reals.positive("gbps_total", gbps_total)
    return latency_us + tile_bytes / (min(gbps_per_sm, gbps_total / num_sms) * 1e3)


@dataclass(frozen=True)
class Row:
    """One number of stages: seconds predicted and measured, and seconds of the same work without overlap."""

    stages: int
    predicted_s: float
    measured_s: float
    serial_s: float

    @property
    def error(self) -> float:
        """Prediction against measurement, as a fraction of the latter."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. t_*: of one tile, in seconds."""

    rows: tuple[Row, ...]
    t_load: float
    t_compute: float
    t_latency: float

    @property
    def largest_error(self) -> float:
        """Over the rows that were predicted; one stage and the calibration of it agree by construction."""
        return max((abs(row.error) for row in self.rows if row.stages > 1), default=0.0)

    def __str__(self) -> str:
        times = (f"{name} {1e6 * value:.3g} us" for name, value in self._times())
        lines = [f"one tile: {', '.join(times)}", "stages  predicted us  measured us   error  against serial"]
        lines += [
            f"{row.stages:6}  {1e6 * row.predicted_s:12.1f}  {1e6 * row.measured_s:11.1f}  {row.error:+6.1%}"
            f"  {row.serial_s / row.measured_s:13.2f}x"
            for row in self.rows
        ]
        return "\n".join(lines)

    def _times(self) -> list[tuple[str, float]]:
        return [("load", self.t_load), ("of that latency", self.t_latency), ("compute", self.t_compute)]


def compare(
    run: Callable[[int, int], float], num_tiles: int, work: int, stages: Iterable[int] = range(1, 9)
) -> Comparison:
    """Runs a real pipeline with 1..8 stages and predicts each from three runs.

    Args: run: `run(stages, work)`, seconds of a pipeline over num_tiles tiles with so much computation per tile, 0 for
            next to none: tma.Overlap() on a GPU, ThreadPipeline() on a CPU; num_tiles: that follow each other;
        work: the computation to predict; stages: to run.
    Returns: a Comparison; print it. Load and computation come from one stage without and with work, latency from the
        most stages without work.
    Raises: TypeError, ValueError, also for what run returns. Sync: as run.
    """
    checks.integer("num_tiles", num_tiles, 1)
    checks.integer("work", work, 0)
    if not isinstance(stages, Iterable):
        raise TypeError(f"stages: expected a sequence of ints, got {stages!r}")
    chosen = sorted({1, *(checks.integer("stages", number, 1) for number in stages)})

    def measure(number: int, amount: int) -> float:
        seconds = run(number, amount)
        reals.positive(f"run({number}, {amount})", seconds)
        return seconds

    idle, serial, fast = (measure(*arguments) / num_tiles for arguments in ((1, 0), (1, work), (chosen[-1], 0)))
    t_load, t_compute = idle, max(0.0, serial - idle)
    t_latency = max(0.0, t_load - fast)
    rows = []
    for number in chosen:
        predicted = pipeline_time(t_load, t_compute, num_tiles, number, t_latency=t_latency)
        measured = serial * num_tiles if number == 1 else measure(number, work)
        rows.append(Row(number, predicted, measured, serial * num_tiles))
    return Comparison(tuple(rows), t_load, t_compute, t_latency)


def _check(t_load: float, t_compute: float, num_tiles: int, stages: int, t_latency: float) -> None:
    reals.nonnegative("t_load", t_load)
    reals.nonnegative("t_compute", t_compute)
    checks.integer("num_tiles", num_tiles, 0)
    checks.integer("stages", stages, 1)
    reals.nonnegative("t_latency", t_latency)
    if t_latency > t_load:
        raise ValueError(f"t_latency: expected 0..t_load ({t_load}), got {t_latency}")
