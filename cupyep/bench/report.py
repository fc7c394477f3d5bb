"""Results for people and programs: a table, a JSON file with the facts of the machine, and progress on stderr."""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyep import env
from cupyep.doctor import bounded

SCHEMA = 1  # of the JSON file
_PROBE = "cupyep.backends.cuda.probe"


def facts() -> dict[str, Any]:
    """What the figures depend on: GPUs, driver, CuPy, NVRTC, git revision. Blocks for seconds; no CUDA in here."""
    from cupyep import __version__

    has_cupy = importlib.util.find_spec("cupy") is not None
    asked = {name: bounded.call(f"{_PROBE}:{name}", timeout_s=60) for name in ("libraries", "gpus", "devices")}
    if not has_cupy:
        asked["libraries"] = {}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "cupyep": __version__,
        "git": git_revision(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": asked["libraries"].get("version"),
        "nvrtc": asked["libraries"].get("nvrtc"),
        "driver": asked["gpus"].get("driver"),
        "gpus": [gpu["name"] for gpu in asked["gpus"].get("gpus", [])],
        "mover": env.mover(),
        "num_sms": [device["num_sms"] for device in asked["devices"].get("devices", [])],
        "host": platform.platform(),
    }


def git_revision() -> str | None:
    """The checkout's revision, with a + if something in it was changed; None where there is none."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty=+",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def write_json(path: Path, known: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    """{"schema", "command", "facts", "results"}; every result is a flat object with its units in the names."""
    whole = {"schema": SCHEMA, "command": sys.argv[1:], "facts": known, "results": list(results)}
    path = path.resolve()  # a link stays one
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(whole, indent=1) + "\n")
    part.replace(path)  # a reader finds all of it, or what was there before


def check_files(json_path: Path | None, plot_path: Path | None) -> None:
    """Before anything is measured: raises ValueError if the results could not be written."""
    for name, path in (("json", json_path), ("plot", plot_path)):
        if path is None:
            continue
        if (path.exists() and not path.is_file()) or not path.resolve().parent.is_dir():
            raise ValueError(f"--{name}: expected a file in an existing folder, got {path}")
        try:
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
        except OSError as error:
            raise ValueError(f"--{name}: expected a folder to write to, got {path} ({error.strerror})") from None
    if plot_path is not None:
        if plot_path.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot: expected a name that ends in .png, .svg or .pdf, got {plot_path}")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot: expected matplotlib, which the extra bench of cupyep brings")


def collect(results: Iterable[dict[str, Any]], path: Path | None) -> list[dict[str, Any]]:
    """All `results`. What is there is written to `path` every other second: the time may run out."""
    collected, written = [], time.monotonic()
    for result in results:
        collected.append(result)
        if path is not None and time.monotonic() > written + 2:
            write_json(path, {}, collected)
            written = time.monotonic()
    if path is not None:
        write_json(path, {}, collected)
    return collected


def publish(results: Sequence[dict[str, Any]], path: Path | None) -> dict[str, Any]:
    """Prints the facts and the results, and writes them to `path`; returns the facts."""
    known = facts()
    print(" · ".join(f"{name} {value}" for name, value in known.items() if value))
    who = {
        f"{result['backend']} backend, ranks are {result['ranks_are']}" for result in results if "ranks_are" in result
    }
    print(*sorted(who), sep="\n")
    for part in parts(results):
        print(f"\n{table(part)}")
    if path is not None:
        write_json(path, known, results)
    return known


def draw(results: Sequence[dict[str, Any]], known: dict[str, Any], path: Path) -> None:
    """The results as a picture, with what they were measured on as its title."""
    from cupyep.bench import plot

    gpus = sorted(set(known["gpus"])) or ["no GPU"]
    plot.draw(path, results, f"cupyep {known['git'] or known['cupyep']}, {', '.join(gpus)}")


# field of a result -> (heading, format). A table has the columns of which a line has a value.
COLUMNS = {
    "benchmark": ("", "s"),
    "name": ("what", "s"),
    "scope": ("time of", "s"),
    "mode": ("mode", "s"),
    "num_ranks": ("ranks", "d"),
    "ranks_per_device": ("per GPU", "d"),
    "num_sms": ("SMs", "d"),
    "num_tokens": ("tokens", "d"),
    "hidden": ("hidden", "d"),
    "num_calls": ("calls", "d"),
    "time_us": ("us", ".1f"),
    "min_us": ("min", ".1f"),
    "p50_us": ("p50", ".1f"),
    "p99_us": ("p99", ".1f"),
    "gbps": ("GB/s", ".4g"),
    "logical_gbps": ("GB/s logical", ".4g"),
    "wire_gbps": ("wire", ".4g"),
    "ceiling_gbps": ("ceiling", ".4g"),
    "predicted_us": ("predicted us", ".1f"),
    "bytes_us": ("bytes us", ".1f"),
    "goal_us": ("goal us", ".1f"),
    "note": ("", "s"),
}


def parts(results: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The results by benchmark, in the order in which these first appear."""
    names = dict.fromkeys(result["benchmark"] for result in results)
    return [[result for result in results if result["benchmark"] == name] for name in names]


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as text, a line each, with the columns that any of them has; what has no name has a verb."""
    results = [{"name": result.get("verb"), **result} for result in results]
    names = [name for name in COLUMNS if any(result.get(name) is not None for result in results)]
    lines = [[COLUMNS[name][0] for name in names]]
    for result in results:
        values = [(result.get(name), COLUMNS[name][1]) for name in names]
        lines.append(["" if value is None else format(value, kind) for value, kind in values])
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    left = {i for i, name in enumerate(names) if COLUMNS[name][1] == "s"}
    return "\n".join(
        "  ".join(cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in columns).rstrip()
        for columns in (list(enumerate(zip(line, widths, strict=True))) for line in lines)
    )


def progress(steps: Iterable[Any], name: str, *, show: bool = True) -> Iterable[Any]:
    """`steps`, shown on stderr as they come: by tqdm, or a line for each tenth without it."""
    if not show:
        return steps
    if importlib.util.find_spec("tqdm") is not None:
        from tqdm import tqdm

        return tqdm(steps, desc=name, file=sys.stderr)
    return _lines(list(steps), name)


def _lines(steps: list[Any], name: str) -> Iterable[Any]:
    for i, step in enumerate(steps):
        if i * 10 // len(steps) != (i - 1) * 10 // len(steps):
            print(f"{name}: {i} of {len(steps)}", file=sys.stderr, flush=True)
        yield step
