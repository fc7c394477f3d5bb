"""The results as pictures: GB/s against SMs with the ceiling, latency against tokens, cost against ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
# title -> (x, y, the lines besides the measured one: field and style). A panel is drawn where x varies.
PANELS = {
    "bandwidth": ("num_sms", "logical_gbps", {"ceiling_gbps": ":"}),
    "row size": ("hidden", "logical_gbps", {"ceiling_gbps": ":"}),
    "latency": ("num_tokens", "time_us", {"predicted_us": "--", "goal_us": ":"}),
    "cost of ranks": ("num_ranks", "us_per_mb", {}),
    "hardware": ("num_sms", "gbps", {}),
}
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
_AXES = ("num_sms", "hidden", "num_tokens", "num_ranks")
_STYLES = {"ceiling_gbps": "ceiling", "predicted_us": "predicted", "goal_us": "goal"}


def draw(path: Path, results: Sequence[Result], title: str) -> list[str]:
    """Writes the panels for which there is something to draw; returns their titles. Needs matplotlib.

    Raises: ModuleNotFoundError without it; ValueError if nothing varies or the file's kind is unknown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {name: lines for name, panel in PANELS.items() if (lines := curves(results, *panel[:2]))}
    if not panels:
        raise ValueError("--plot: expected results along SMs, hidden, tokens or ranks, got one point of each")
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="small")
    for axes, (name, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        x, y, beside = PANELS[name]
        for label, points in lines.items():
            [line] = axes.plot([p[x] for p in points], [p[y] for p in points], "o-", label=label, markersize=3)
            for field, style in beside.items():
                known = [p for p in points if field in p]
                if known:
                    axes.plot(
                        [p[x] for p in known],
                        [p[field] for p in known],
                        style,
                        color=line.get_color(),
                        label=f"{label}, {_STYLES[field]}",
                    )
        axes.set(title=name, xlabel=LABELS[x], ylabel=LABELS[y])
        if x in ("num_tokens", "hidden"):
            axes.set_xscale("log", base=2)
        if name == "latency":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.savefig(path)
    return list(panels)


def curves(results: Sequence[Result], x: str, y: str) -> dict[str, list[Result]]:
    """The curves of `y` over `x`: results that differ in `x` alone, in its order, two points at least; by label."""
    others = [name for name in _AXES if name != x]
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        if result.get(x) is None or y not in result or ("axis" in result and not x.endswith(result["axis"])):
            continue
        what = result.get("name") or f"{result['verb']} {result['scope']}"
        fixed = tuple(result.get(name) for name in others)
        groups.setdefault((what, result.get("mode"), *fixed), []).append(result)
    chosen = {key: sorted(points, key=lambda point: point[x]) for key, points in groups.items() if len(points) > 1}
    varying = [i for i in range(len(others)) if len({key[2 + i] for key in chosen}) > 1]
    labels = {
        key: ", ".join([key[0], *(f"{others[i].removeprefix('num_')} {key[2 + i]}" for i in varying)]) for key in chosen
    }
    return {labels[key]: points for key, points in chosen.items()}
