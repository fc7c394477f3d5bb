"""The results as one picture: a row of panels for each kind of curve, a facet for each case, legends beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupyep.bench.curves import Kind, Panel, Result, panels

COLUMNS = 3  # facets beside each other
WIDTH, HEIGHT, LEGEND = 4.2, 3.1, 3.4  # inches: of a facet, and of the legends beside them
MARKERS = "os^Dv<>Pph"  # hollow, so that one shows behind another
BESIDE = {"ceiling_gbps": "ceiling", "predicted_us": "predicted", "goal_us": "goal"}
LABELS = {
    "num_sms": "SMs per rank",
    "hidden": "hidden, elements",
    "num_tokens": "tokens per rank",
    "num_ranks": "ranks",
    "logical_gbps": "GB/s per rank, logical",
    "gbps": "GB/s",
    "time_us": "µs",
    "us_per_mb": "µs per MB, logical",
}


def draw(path: Path, results: Sequence[Result], title: str) -> list[str]:
    """Writes the panels for which there is something to draw; returns their titles. Needs matplotlib.

    Raises: ModuleNotFoundError without it; ValueError if nothing varies or the file's kind is unknown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = panels(results)
    if not found:
        raise ValueError("--plot: expected results along SMs, hidden, tokens or ranks, got one point of each")
    lines = _lines(found)
    heights = [max(_rows(panel) for panel in line) * HEIGHT + 0.4 for line in lines]
    figure = Figure(figsize=(COLUMNS * WIDTH + LEGEND, sum(heights) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    parts = figure.subfigures(len(lines), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, line in zip(parts, lines, strict=True):
        for place, panel in zip(part.subfigures(1, 2 if len(line) > 1 else 1, squeeze=False)[0], line, strict=True):
            _draw(place, panel)
    figure.savefig(path, dpi=120)
    return [panel.kind.title for panel in found]


def _lines(found: list[Panel]) -> list[list[Panel]]:
    """Panels of one facet share a line, two and two."""
    lines: list[list[Panel]] = []
    for panel in found:
        if len(panel.facets) == 1 and lines and len(lines[-1]) == 1 and len(lines[-1][0].facets) == 1:
            lines[-1].append(panel)
        else:
            lines.append([panel])
    return lines


def _rows(panel: Panel) -> int:
    return -(-len(panel.facets) // COLUMNS)


def _draw(figure: Any, panel: Panel) -> None:
    kind = panel.kind
    left_out = f" ({panel.left_out} cases more in the table)" if panel.left_out else ""
    figure.suptitle(f"{panel.benchmark + ': ' if panel.benchmark else ''}{kind.title}{left_out}", fontsize="medium")
    columns = min(COLUMNS, len(panel.facets))
    grid = figure.subplots(_rows(panel), columns, squeeze=False, sharey=True)
    names = dict.fromkeys(what for curves in panel.facets.values() for what in curves)
    looks = {what: (f"C{i % 10}", MARKERS[i % len(MARKERS)]) for i, what in enumerate(names)}
    handles: dict[str, Any] = {}
    for axes, (title, curves) in zip(grid.flat, panel.facets.items(), strict=False):
        for what, points in curves.items():
            color, marker = looks[what]
            xs = [point[kind.x] for point in points]
            line = {"color": color, "linewidth": 1.2}
            [handles[what]] = axes.plot(
                xs, [point[kind.y] for point in points], marker=marker, markersize=5, fillstyle="none", **line
            )
            for field, style in kind.beside.items():
                if _has(points, field):
                    axes.plot(xs, [point.get(field, math.nan) for point in points], style, **line)
        axes.set_title(title, fontsize="small")
        axes.set_xlabel(LABELS[kind.x], fontsize="small")
        _scale(axes, kind)
    if kind.title != "latency":
        grid[0, 0].set_ylim(bottom=0)  # of all, and only now, as it ends the search for the top
    for axes in grid.flat[len(panel.facets) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel(LABELS[kind.y], fontsize="small")
    drawn = [points for curves in panel.facets.values() for points in curves.values()]
    for field, style in kind.beside.items():
        if any(_has(points, field) for points in drawn):
            [handles[BESIDE[field]]] = grid[0, 0].plot([], [], style, color="gray")
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="x-small", frameon=False)


def _has(points: Sequence[Result], field: str) -> bool:
    return any(field in point for point in points)


def _scale(axes: Any, kind: Kind) -> None:
    if kind.x in ("num_tokens", "hidden"):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if kind.title == "latency":
        axes.set_yscale("log")
    axes.tick_params(labelsize="small")
    axes.grid(alpha=0.3)
