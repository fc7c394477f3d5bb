"""How times are taken: between two marks for the mean, with a mark behind every call for the percentiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

REPETITIONS = 5  # of a series of back-to-back calls; the median counts
SINGLES = 4  # times as many single calls, for the percentiles, as a series has


@dataclass(frozen=True)
class Timing:
    """Seconds of one call. mean: of back-to-back calls; the others: of single calls, marks between them included.

    in_graph: a call was one of many equal kernels in a CUDA graph, and the percentiles are of such graphs.
    """

    mean: float
    minimum: float
    p50: float
    p99: float
    in_graph: bool = False

    @classmethod
    def of(cls, means: Sequence[float], calls: Sequence[float]) -> Timing:
        """From the means of several series, and the times of single calls."""
        p50, p99 = np.percentile(calls, (50, 99))
        return cls(float(np.median(means)), float(min(calls)), float(p50), float(p99))

    @classmethod
    def slowest(cls, timings: Sequence[Timing]) -> Timing:
        """The largest of each figure, over ranks."""
        names = ("mean", "minimum", "p50", "p99")
        return cls(*(max(getattr(timing, name) for timing in timings) for name in names))

    def over(self, count: int, *, in_graph: bool = False) -> Timing:
        """Of one of `count` equal parts of a call."""
        return Timing(self.mean / count, self.minimum / count, self.p50 / count, self.p99 / count, in_graph)


class Clock(Protocol):
    """Marks points in time. `seconds` waits for them all and returns the intervals between them."""

    def mark(self) -> None: ...

    def seconds(self) -> list[float]: ...


class HostClock:
    """For calls that are complete when they return."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        marks, self._marks = self._marks, []
        return np.diff(marks).tolist()


class CudaClock:
    """Events on a stream of the device that is current when the clock is made."""

    def __init__(self, stream: Any) -> None:
        import cupy

        self._device, self._stream, self._marks = cupy.cuda.Device(), stream, []  # type: ignore[var-annotated]

    def mark(self) -> None:
        import cupy

        with self._device:
            self._marks.append(cupy.cuda.Event())
            self._marks[-1].record(self._stream)

    def seconds(self) -> list[float]:
        import cupy

        marks, self._marks = self._marks, []
        with self._device:
            marks[-1].synchronize()
            return [cupy.cuda.get_elapsed_time(start, end) * 1e-3 for start, end in pairwise(marks)]


def measure(
    actions: Sequence[Callable[[], None]], clocks: Sequence[Clock], align: Callable[[], None], calls: int
) -> list[Timing]:
    """One Timing per clock, of one call of every action. `align`: until all ranks are here and nothing runs."""
    means: list[list[float]] = [[] for _ in clocks]
    for _ in range(REPETITIONS):
        for mean, seconds in zip(means, _series(actions, clocks, align, calls, every=False), strict=True):
            mean.append(seconds[0] / calls)
    singles = _series(actions, clocks, align, SINGLES * calls, every=True)
    return [Timing.of(mean, single) for mean, single in zip(means, singles, strict=True)]


def measure_slow(
    actions: Sequence[Callable[[], None]], clocks: Sequence[Clock], align: Callable[[], None], calls: int
) -> list[Timing]:
    """As measure, from one series: for calls beside which marks and the ranks' different starts are nothing."""
    singles = _series(actions, clocks, align, calls, every=True)
    return [Timing.of([float(np.mean(single))], single) for single in singles]


def fitting_calls(seconds: float, calls: int, budget_s: float) -> int | None:
    """How many calls measure_slow should take, if measure with `calls` of `seconds` each takes longer than budget_s.

    None: it does not. Otherwise as many as fit, and three at least.
    """
    if ((REPETITIONS + SINGLES) * calls + REPETITIONS + 1) * seconds <= budget_s:
        return None
    return max(3, int(budget_s / seconds) - 1)  # the first does not count


def _series(
    actions: Sequence[Callable[[], None]],
    clocks: Sequence[Clock],
    align: Callable[[], None],
    calls: int,
    *,
    every: bool,
) -> list[list[float]]:
    align()
    for call in range(calls + 1):  # the first absorbs the ranks' different starts
        for action in actions:
            action()
        if every or call in (0, calls):
            for clock in clocks:
                clock.mark()
    return [clock.seconds() for clock in clocks]
