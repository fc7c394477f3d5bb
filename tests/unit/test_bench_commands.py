"""The benchmarks as commands: their errors, the whole path on the NumPy backend, and multi-gpu's steps."""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
from test_bench import RESULTS, SMALL, bench

from cupyep.bench import __main__, multi_gpu

# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "required: {ep,sweep,"),
        (("ep", "--sms", "0"), "argument --sms: expected a positive integer, got '0'"),
        (("ep", "--mode", "int4"), "argument --mode: invalid choice: 'int4'"),
        (("low-latency", "--mode", "fp16"), "argument --mode: invalid choice: 'fp16'"),
        (("options", "--mode", "fp8"), "unrecognized arguments: --mode fp8"),
        (("low-latency", "--hidden", "100", "--backend", "numpy"), "cupyep.bench: hidden: expected a multiple of 128"),
        (("ep", "--topk", "40"), "cupyep.bench: num_topk: expected 1..32 (experts: 256), got 40"),
        (("ep", "--plot", "x.txt"), "cupyep.bench: --plot: expected "),
        (("sweep", "--sms", "4", "8"), "--sms: expected one value, around which sweep goes, got 4 8"),
        (("ep", "--time-limit", "9" * 20), "argument --time-limit: expected at most 604800 seconds"),
        (("multi-gpu", "--time-limit", "10"), "--time-limit: expected at least 60 for multi-gpu, got 10"),
        (("ep", "--json", "/"), "cupyep.bench: --json: expected a file in an existing folder, got /"),
        (("ep", "--json", "/proc/x.json"), "cupyep.bench: --json: expected a folder to write to, got /proc/x.json"),
        (("ep", "--json", "/nonexistent/x.json"), "cupyep.bench: --json: expected a file in an existing folder"),
    ],
)
def test_command_line_errors(arguments, expected):
    assert expected in " ".join(bench(*arguments, status=2).stderr.split())


def test_a_wrong_mover_is_told_before_anything_is_measured(monkeypatch):
    monkeypatch.setenv("CUPYEP_MOVER", "cart")
    done = bench("ep", "--ranks", "1", "--tokens", "4", "--hidden", "32", "--backend", "numpy", status=2)
    assert done.stderr == "cupyep.bench: CUPYEP_MOVER: expected auto, tma or vector, got 'cart'\n"


@pytest.mark.skipif(any(os.path.exists(f"/dev/nvidia{i}") for i in range(16)), reason="there is a GPU")
@pytest.mark.parametrize("command", ["ceilings", "ep", "options", "low-latency"])
def test_cuda_without_a_gpu(command):
    arguments = [] if command == "ceilings" else ["--backend", "cuda"]
    assert "GPU" in bench(command, *arguments, status=2).stderr


def test_time_limit_ends_the_process():
    done = bench("sweep", "--ranks", "2", "--backend", "numpy", "--time-limit", "3", status=1, timeout=60)
    assert "Timeout" in done.stderr and "--time-limit: 3 s are over" in done.stderr


def test_drawing_has_a_time_of_its_own(tmp_path, monkeypatch, capsys):
    """When it begins, the table is printed, the file is written, and the limit is another."""
    limits, path = [], tmp_path / "x.json"
    watch = SimpleNamespace(
        dump_traceback_later=lambda seconds, exit: limits.append(seconds),
        cancel_dump_traceback_later=lambda: limits.append(None),
    )
    monkeypatch.setattr(__main__, "faulthandler", watch)
    monkeypatch.setattr(__main__.env, "set_default_connections", lambda: None)

    def draw(results, known, plot):
        assert json.loads(path.read_text())["results"] == results and known["cupyep"]
        assert "dispatch, cached" in capsys.readouterr().out and limits == [77, __main__.PLOT_S]
        plot.write_text("drawn")

    monkeypatch.setattr(__main__.report, "draw", draw)
    files = ("--json", str(path), "--plot", str(tmp_path / "x.png"))
    pytest.importorskip("matplotlib")
    assert __main__.main(["barrier", "--ranks", "2", "--tokens", "1", "2", *SMALL, *files, "--time-limit", "77"]) == 0
    assert (tmp_path / "x.png").read_text() == "drawn" and limits[-1] is None


@pytest.mark.parametrize(
    ("arguments", "num_results"),
    [
        (("barrier", "--ranks", "2", "--tokens", "1"), 4),
        (("sweep", "--ranks", "2", "--tokens", "4", "--axes", "ranks"), 8),
        (("baseline", "--ranks", "2", "--tokens", "4"), 1),
        (("ep", "--ranks", "2", "--tokens", "4", "--mode", "fp8"), 4),
        (("low-latency", "--ranks", "2", "--tokens", "4", "--mode", "bf16"), 2),
    ],
)
def test_the_other_commands_on_numpy(arguments, num_results, tmp_path):
    path = tmp_path / "x.json"
    bench(*arguments, *SMALL, "--json", str(path))
    assert len(json.loads(path.read_text())["results"]) == num_results


def test_options(tmp_path):
    """All calls that the NumPy backend has, in both modes, and what they stand beside."""
    path = tmp_path / "x.json"
    done = bench("options", "--ranks", "2", "--tokens", "8", *SMALL, "--json", str(path))
    results = json.loads(path.read_text())["results"]
    assert {result["scope"] for result in results} == {"API"}
    lines = {(result["mode"], result["verb"]): result for result in results}
    assert len(lines) == len(results) == 11
    assert {verb for mode, verb in lines if mode == "fp8"} == {"dispatch", "dispatch, cached"}
    assert lines["bf16", "dispatch"]["logical_bytes"] == 2 * lines["fp8", "dispatch"]["logical_bytes"]
    assert "logical_bytes" not in lines["bf16", "quantize_fp8"]
    assert "to combine, arena input (API)" in lines["bf16", "combine, staged input"]["note"]
    assert "to combine, arena input (API)" in done.stdout and "options" in done.stderr


def among_processes(path, *arguments):
    """The results of a command whose two ranks are processes."""
    pytest.importorskip("mpi4py")
    program = ["-m", "mpi4py", "-m", "cupyep.bench", *arguments, "--calls", "2", "--backend", "numpy"]
    launcher = multi_gpu.mpi_launcher(2)
    assert multi_gpu.bounded_run([*launcher, sys.executable, *program, "--json", str(path)], 100) == ""
    return json.loads(path.read_text())["results"]


@pytest.mark.parametrize("mode", ["bf16", "fp8"])
def test_baseline_among_processes(mode, tmp_path):
    """MPI.Alltoallv gives what Buffer gives, and is timed."""
    results = among_processes(tmp_path / "x.json", "baseline", "--tokens", "8", "--hidden", "32", "--mode", mode)
    assert [result["name"] for result in results] == ["dispatch, MPI.Alltoallv", "combine, MPI.Alltoallv"]


def test_low_latency_among_processes(tmp_path):
    results = among_processes(tmp_path / "x.json", "low-latency", "--tokens", "1", "8", "--hidden", "128")
    assert [(result["name"], result["num_tokens"]) for result in results] == [
        (f"{verb} call", tokens) for tokens in (1, 8) for verb in ("dispatch", "combine")
    ]
    assert {result["mode"] for result in results} == {"fp8"}


# --- multi-gpu -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [(), ("--threads",)])
def test_multi_gpu_dry_run(threads, tmp_path):
    """Doctor, then every step as a job of its own; what needs a GPU says so."""
    if not threads:
        pytest.importorskip("mpi4py")
    path = tmp_path / "x.json"
    options = ("--ranks", "2", "--tests", "none", "--quick", "--tokens", "8", *threads, "--json", str(path), *SMALL)
    bench("multi-gpu", *options, timeout=200)
    results = json.loads(path.read_text())["results"]
    notes = {result["name"]: result["note"] for result in results if "note" in result}
    assert notes["ceilings of one GPU"] == "not run: needs a GPU" and notes["doctor"].startswith("ready")
    assert not [note for note in notes.values() if "failed" in note or "no end" in note]
    assert {result["benchmark"] for result in results} == {"multi-gpu", "ep", "baseline"}


def test_bounded_run_ends_what_it_started(tmp_path):
    child = f"import time; time.sleep(9); open({str(tmp_path / 'late')!r}, 'w')"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert multi_gpu.bounded_run([sys.executable, "-c", script], 5) == "no end within 5 s"
    time.sleep(6)
    assert not (tmp_path / "late").exists()
    assert multi_gpu.bounded_run([sys.executable, "-c", "raise SystemExit(3)"], 20) == "failed with status 3"
    late = "import time; time.sleep(3); raise SystemExit(1)"  # as a benchmark that reaches its own time limit
    assert multi_gpu.bounded_run([sys.executable, "-c", late], 5) == "no end within 5 s"
    assert multi_gpu.bounded_run(["true"], 1) == "not run: no time left"


def test_summary():
    kernels = [{"benchmark": "ep", **result} for result in RESULTS if result["num_ranks"] == 2]
    peers = [
        {"benchmark": "peers", "name": f"{name}, all", "num_sms": 8, "gbps": rate}
        for name, rate in (("store to all peers", 380.0), ("load from all peers", 370.0))
    ]
    times = {"benchmark": "barrier", "time_us": 2.34, "p99_us": 5.0}
    barriers = [{**times, "name": "bare"}, *({**times, "name": "graph", "num_tokens": n} for n in (8, 128))]
    notes = [line["note"] for line in multi_gpu.summary(kernels + barriers + peers)]
    assert notes[2:4] == ["2.3 us, p99 5.0 us", "2.3 us, p99 5.0 us, 128 tokens"]
    assert notes[:2] == ["peak 400 GB/s logical, 95% of it with 8 SMs"] * 2
    assert notes[4:] == ["combine by push at most 380 GB/s on the wire, by pull at most 370 (8 SMs)"]


def test_steps_of_multi_gpu_are_valid_commands():
    """Every step's arguments pass the parser: a child must not fail for them on a machine that was waited for."""
    parsed = []
    for step in multi_gpu.steps([128, 4096], 7168, quick=False, calls=2):
        arguments = __main__.parser().parse_args([*step.arguments, "--backend", "auto", "--json", "x", "--ranks", "2"])
        parsed.append(arguments.run.__name__)
    assert parsed == ["_ep", "_barrier", "_ceilings", "_ceilings", "_baseline"]
    assert sum(step.limit_s for step in multi_gpu.steps([128], 64, quick=True, calls=2)) <= 480
