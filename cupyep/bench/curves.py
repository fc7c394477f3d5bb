"""What of the results is drawn: panels of facets, and the curves in each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Result = dict[str, Any]
Curves = dict[str, list[Result]]  # what was measured -> its points in the order of x

FIXED = ("mode", "num_tokens", "hidden", "num_ranks", "num_sms")  # what a facet's curves have in common, but for x
MOST_VALUES = 3  # of one of FIXED that become facets: the first, the middle, the last
UNITS = {"num_sms": "SMs", "hidden": "elements", "num_tokens": "tokens", "num_ranks": "ranks"}


@dataclass(frozen=True)
class Kind:
    """y over x. beside: fields of the same points that are drawn with y, and the style of their line."""

    title: str
    x: str
    y: str
    beside: dict[str, str] = field(default_factory=dict)


KINDS = (
    Kind("bandwidth", "num_sms", "logical_gbps", {"ceiling_gbps": ":"}),
    Kind("row size", "hidden", "logical_gbps", {"ceiling_gbps": ":"}),
    Kind("latency", "num_tokens", "time_us", {"predicted_us": "--", "goal_us": ":"}),
    Kind("cost of ranks", "num_ranks", "us_per_mb"),
    Kind("hardware", "num_sms", "gbps"),
)


@dataclass(frozen=True)
class Panel:
    """The curves of one kind and one benchmark. facets: title -> curves; left_out: facets that are not drawn."""

    kind: Kind
    benchmark: str
    facets: dict[str, Curves]
    left_out: int


def panels(results: Sequence[Result]) -> list[Panel]:
    """All that the results give, benchmark by benchmark in the order of their first results."""
    benchmarks = dict.fromkeys(result.get("benchmark", "") for result in results)
    found = [
        panel(kind, benchmark, [result for result in results if result.get("benchmark", "") == benchmark])
        for benchmark in benchmarks
        for kind in KINDS
    ]
    return [one for one in found if one.facets]


def panel(kind: Kind, benchmark: str, results: Sequence[Result]) -> Panel:
    """Curves are results that differ in x alone, two points at least. Those that differ in their name share a facet."""
    fixed = [name for name in FIXED if name != kind.x]
    groups: dict[tuple[Any, ...], Curves] = {}
    for result in results:
        is_along = "axis" not in result or kind.x.endswith(result["axis"])  # a sweep moves along one axis at a time
        if result.get(kind.x) is None or kind.y not in result or not is_along:
            continue
        what = result.get("name") or f"{result['verb']} {result['scope']}"
        groups.setdefault(tuple(result.get(name) for name in fixed), {}).setdefault(what, []).append(result)
    cases = {key: curves for key, group in groups.items() if (curves := _in_order(group, kind.x))}
    values = [sorted({key[i] for key in cases}, key=lambda v: (v is not None, v)) for i in range(len(fixed))]
    shown = [of if name == "mode" else _spread(of) for name, of in zip(fixed, values, strict=True)]
    varying = [i for i, of in enumerate(values) if len(of) > 1]
    facets = {
        ", ".join(_named(fixed[i], key[i]) for i in varying if key[i] is not None): cases[key]
        for key in itertools.product(*shown)  # in order, the last of FIXED fastest
        if key in cases
    }
    return Panel(kind, benchmark, facets, len(cases) - len(facets))


def _in_order(group: Curves, x: str) -> Curves:
    ordered = {what: sorted(points, key=lambda point: point[x]) for what, points in group.items()}
    return {what: points for what, points in ordered.items() if points[0][x] < points[-1][x]}


def _spread(values: list[Any]) -> list[Any]:
    if len(values) <= MOST_VALUES:
        return values
    return [values[i * (len(values) - 1) // (MOST_VALUES - 1)] for i in range(MOST_VALUES)]


def _named(name: str, value: Any) -> str:
    unit = UNITS.get(name, "")
    return f"{value:,} {unit.removesuffix('s') if value == 1 else unit}" if unit else str(value)
