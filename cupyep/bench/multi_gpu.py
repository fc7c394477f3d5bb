"""One command for one host with several GPUs: is it sound, is it right, how fast is it. One rank per GPU.

Each step is a process (or an MPI job) of its own with a deadline; a step that fails is reported, and the others run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cupyep import doctor
from cupyep.bench.cases import MODES
from cupyep.doctor.checks import mpiexec
from cupyep.layout import align

SMALL_BATCH = 128  # tokens
EARLY_S = 2  # that a child ends itself before it would be ended
SMS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
TESTS = Path(__file__).resolve().parents[2] / "tests"
QUICK_TESTS = (  # in tests/multirank, behind "test_": one or two of each mode, with ranks that are processes
    "dispatch_combine.py::test_processes[2-True]",
    "lifetimes.py::test_lifetimes[mpi-thousand_calls]",
    "quantize.py::test_pairs[mpi-fp8]",
    "options.py::test_bias_with_processes",
    "options.py::test_fixed_size[mpi]",
    "expert_layout.py::test_expert_layout_with_processes",
    "peer_arrays.py::test_copies_between_arenas[mpi]",
    "low_latency.py::test_shapes_that_change[mpi-4]",
    "low_latency.py::test_dispatch_and_combine_overlap[mpi]",
)


@dataclass(frozen=True)
class Step:
    """A child's arguments of `python -m cupyep.bench`, and the seconds it may take at most."""

    name: str
    arguments: tuple[str, ...]
    limit_s: int
    alone: bool = False  # one process on one GPU instead of all ranks


def steps(tokens: list[int], hidden: int, *, quick: bool, calls: int) -> list[Step]:
    """The measurements; `quick` keeps every kind and drops most of the SMs."""
    sms = tuple(map(str, SMS[3:5] if quick else SMS))
    case = ("--tokens", *map(str, tokens), "--hidden", str(hidden))
    row_bytes = ("--row-bytes", str(align(MODES["bf16"].row_bytes("dispatch", hidden), 16)))
    planned = [
        Step("dispatch and combine", ("ep", "--mode", "bf16", "fp8", "--sms", *sms, *case), 180),
        Step("barrier and small batches", ("barrier", "--hidden", str(hidden)), 60),
        Step("ceilings between GPUs", ("ceilings", "--peer", "--sms", *sms, *row_bytes), 90),
        Step("ceilings of one GPU", ("ceilings", "--sms", "1", "8", "32", "132", *row_bytes), 60, alone=True),
        Step("what one would do instead", ("baseline", *case), 90),
    ]
    return [replace(step, arguments=(*step.arguments, "--calls", str(calls))) for step in planned]


def run(
    num_ranks: int | None, *, threads: bool, tests: str, steps: list[Step], backend: str, limit_s: float
) -> list[dict[str, Any]]:
    """Doctor, tests ("none", "quick" or "full") and `steps`, within `limit_s` seconds.

    Args: num_ranks: None: as many as GPUs; threads: ranks are threads of one process instead of an MPI job.
    Returns: the results of all steps, and a note for each that did not succeed.
    Raises: ValueError if the machine is not ready, or has no mpiexec.
    """
    deadline, results = time.monotonic() + limit_s, []
    _say("doctor")
    facts = doctor.examine()
    _say(facts["verdict"])
    is_cuda = facts["verdict"] == "ready (cuda)" and backend != "numpy"
    if not facts["ready"] or (backend != "numpy" and not is_cuda):
        verdict = facts["verdict"]
        raise ValueError(f"multi-gpu: expected a machine that is ready (cuda), or --backend numpy, got: {verdict}")
    results.append(_note("doctor", facts["verdict"]))
    num_ranks = num_ranks or len(facts["cuda"].get("devices", ())) or 2
    if tests != "none":
        why = _run_tests(tests, num_ranks, "cuda" if is_cuda else "numpy", deadline)
        results.append(_note(f"tests, {tests}", why or "passed", failed=bool(why) and not why.startswith("skipped")))
        _say(f"tests: {results[-1]['note']}")
    with tempfile.TemporaryDirectory(prefix="cupyep-bench-") as folder:
        for number, step in enumerate(steps):
            left_s = min(step.limit_s, deadline - time.monotonic())
            _say(f"{step.name} (at most {left_s:.0f} s)")
            if not is_cuda and step.arguments[0] == "ceilings":
                results.append(_note(step.name, "not run: needs a GPU"))
                continue
            path = Path(folder, f"{number}.json")
            command = _command(step, num_ranks, threads, backend, left_s, path)
            why = bounded_run(command, left_s, stdout=subprocess.DEVNULL)  # its tables are printed with the others
            if path.exists():  # also of a step that ran out of time: what it had by then
                results += json.loads(path.read_text())["results"]
            if why:
                results.append(_note(step.name, why, failed=True))
                _say(f"{step.name}: {why}")
    return results + summary(results)


def _command(step: Step, num_ranks: int, threads: bool, backend: str, left_s: float, path: Path) -> list[str]:
    limits = ["--json", str(path), "--time-limit", str(max(1, int(left_s - EARLY_S)))]
    program = ["cupyep.bench", *step.arguments, "--backend", backend, *limits]
    if step.alone or threads:
        return [sys.executable, "-m", *program, "--ranks", str(1 if step.alone else num_ranks)]
    return [*mpi_launcher(num_ranks), sys.executable, "-m", "mpi4py", "-m", *program]


def mpi_launcher(num_ranks: int) -> list[str]:
    """mpiexec with what lets it start `num_ranks` here. ValueError if there is none."""
    found = mpiexec()
    if found is None:
        raise ValueError("multi-gpu: expected mpiexec beside Python or on PATH, found none; --threads needs no MPI")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30).stdout
    is_open_mpi = "Open MPI" in version or "OpenRTE" in version  # which refuses root, and more ranks than cores
    return [found, *(["--allow-run-as-root", "--oversubscribe"] if is_open_mpi else []), "-n", str(num_ranks)]


def bounded_run(command: list[str], limit_s: float, cwd: Path | None = None, stdout: int | None = None) -> str:
    """Runs it with our stderr, and stdout if None; "" or what went wrong. Its whole process group ends with it."""
    if limit_s < 5:
        return "not run: no time left"
    late = time.monotonic() + limit_s - EARLY_S - 1  # a limit of whole seconds is up to one shorter
    nothing = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=cwd, stdin=nothing, stdout=stdout, start_new_session=True) as process:
        try:
            status = process.wait(limit_s)
            if status == 0:
                return ""
            return f"failed with status {status}" if time.monotonic() < late else f"no end within {limit_s:.0f} s"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # mpiexec then ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
            return f"no end within {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _run_tests(which: str, num_ranks: int, backend: str, deadline: float) -> str:
    """pytest on ranks that are processes, so that each has a GPU of its own; "" or what went wrong."""
    if not TESTS.is_dir():
        return "skipped: an installed package has no tests; use a checkout"
    if not all(map(importlib.util.find_spec, ("pytest", "pytest_timeout", "hypothesis"))):
        return "skipped: needs the extra test-tools"
    quick = [*QUICK_TESTS]
    quick += ["dispatch_combine.py::test_processes[4-False]"] * (num_ranks >= 4)
    quick += ["dispatch_combine.py::test_eight_processes"] * (num_ranks >= 8)
    paths = [f"tests/multirank/test_{test}" for test in quick]
    chosen = paths if which == "quick" else ["tests/multirank", "tests/misuse", "-k", "mpi or process"]
    left_s = min(100 if which == "quick" else 400, deadline - time.monotonic())
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--backend={backend}",
        "--timeout=90",
        *chosen,
    ]
    return bounded_run(command, left_s, cwd=TESTS.parent)


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the tables come to: peaks, the SMs that reach 95% of them, latency, push against pull by ceilings."""
    lines = []
    kernels = [r for r in results if r["benchmark"] == "ep" and r["scope"] == "kernel" and "logical_gbps" in r]
    for verb, mode in dict.fromkeys((r["verb"], r["mode"]) for r in kernels):
        mine = [r for r in kernels if (r["verb"], r["mode"]) == (verb, mode)]
        peak = max(r["logical_gbps"] for r in mine)
        enough = min(r["num_sms"] for r in mine if r["logical_gbps"] >= 0.95 * peak)
        lines.append(_note(f"{verb}, {mode}", f"peak {peak:.0f} GB/s logical, 95% of it with {enough} SMs"))
    for result in results:
        if result["benchmark"] == "barrier" and result.get("num_tokens", SMALL_BATCH) == SMALL_BATCH:
            text = f"{result['time_us']:.1f} us, p99 {result['p99_us']:.1f} us, {SMALL_BATCH} tokens"
            lines.append(_note(result["name"], text if "num_tokens" in result else text.rpartition(",")[0]))
    rates = {(r["name"], r["num_sms"]): r["gbps"] for r in results if r["benchmark"] == "peers"}
    for sms in sorted(sms for name, sms in rates if name == "store to all peers, all"):
        push, pull = rates["store to all peers, all", sms], rates["load from all peers, all", sms]
        # A combine that pushed would store every row to its home and add there: at best the store ceiling.
        text = f"combine by push at most {push:.0f} GB/s on the wire, by pull at most {pull:.0f} ({sms} SMs)"
        lines.append(_note("push against pull", text))
    return lines


def _note(name: str, text: str, *, failed: bool = False) -> dict[str, Any]:
    return {"benchmark": "multi-gpu", "name": name, "note": text, "failed": failed}


def _say(text: str) -> None:
    print(f"multi-gpu: {text}", file=sys.stderr, flush=True)
