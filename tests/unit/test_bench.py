"""The benchmarks' clocks, their output, and the whole path on the NumPy backend."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyep.bench import barrier, baseline, low_latency, options, report, timed
from cupyep.bench.cases import Case
from cupyep.bench.low_latency_ranks import LowLatencyRank
from cupyep.bench.sweep import prediction_note
from cupyep.bench.timing import Timing, fitting_calls, measure, measure_slow
from cupyep.threads import run_local


def bench(*arguments: str, status: int = 0, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The real program; what it prints."""
    command = [sys.executable, "-m", "cupyep.bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == status, done.stdout + done.stderr
    return done


# --- what is timed ---------------------------------------------------------------------------------------------------


def test_percentiles_are_over_calls_and_the_slowest_rank_counts():
    calls = list(range(1, 102))
    timing = Timing.of([5.0, 1.0, 3.0], calls)
    assert timing == Timing(3.0, 1.0, 51.0, 100.0)
    assert Timing.slowest([timing, Timing(1.0, 2.0, 1.0, 200.0)]) == Timing(3.0, 2.0, 51.0, 200.0)
    assert Timing(8.0, 4.0, 6.0, 10.0).over(2) == Timing(4.0, 2.0, 3.0, 5.0)


class FakeClock:
    """Time is the number of calls so far, times a step."""

    def __init__(self, calls: list[int], step: float) -> None:
        self.calls, self.step, self.marks = calls, step, []

    def mark(self) -> None:
        self.marks.append(self.calls[0] * self.step)

    def seconds(self) -> list[float]:
        marks, self.marks = self.marks, []
        return np.diff(marks).tolist()


def test_series_leave_the_first_call_out():
    calls, aligned = [0], [0]

    def action() -> None:
        calls[0] += 1

    def align() -> None:
        aligned[0] += 1

    one, other = measure([action], [FakeClock(calls, 2.0), FakeClock(calls, 3.0)], align, 10)
    assert one == Timing(2.0, 2.0, 2.0, 2.0) and other == Timing(3.0, 3.0, 3.0, 3.0)
    assert aligned == [6] and calls == [5 * 11 + 41]


def test_slow_calls_are_few():
    """102 calls of 12 a series: 10 ms each fit two seconds, 20 ms do not."""
    assert fitting_calls(0.010, 12, 2.0) is None
    assert [fitting_calls(seconds, 12, 2.0) for seconds in (0.02, 0.1, 0.42, 5.0)] == [99, 19, 3, 3]
    calls = [0]

    def action() -> None:
        calls[0] += 1

    [timing] = measure_slow([action], [FakeClock(calls, 2.0)], lambda: None, 3)
    assert timing == Timing(2.0, 2.0, 2.0, 2.0) and calls == [4]


@pytest.mark.parametrize(("seconds", "expected"), [(1e-3, 60), (0.5, 3)])
def test_baseline_takes_as_many_calls_as_fit(seconds, expected, monkeypatch):
    now = [0.0]

    def exchange() -> None:
        now[0] += seconds

    monkeypatch.setattr("cupyep.bench.timing.time.perf_counter", lambda: now[0])
    world = SimpleNamespace(align=lambda: None, synchronize=lambda: None, gather=lambda values: values)
    world.on = lambda plans, function: [function(plan) for plan in plans]
    timing, num_calls = baseline.time_of(world, [None], lambda plan, exchange: exchange(), exchange, 12)
    assert num_calls == expected and timing.mean == pytest.approx(seconds)
    assert now[0] < 2 * baseline.BUDGET_S


# --- what comes out --------------------------------------------------------------------------------------------------


FIELDS = {
    "benchmark": str,
    "verb": str,
    "scope": str,
    "backend": str,
    "num_ranks": int,
    "ranks_per_device": int,
    "num_tokens": int,
    "hidden": int,
    "num_topk": int,
    "num_experts": int,
    "mode": str,
    "time_us": float,
    "min_us": float,
    "p50_us": float,
    "p99_us": float,
}
SMALL = ("--hidden", "32", "--calls", "2", "--backend", "numpy")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What `ep` writes for two cases on two ranks."""
    path = tmp_path_factory.mktemp("bench") / "ep.json"
    done = bench("ep", "--ranks", "2", "--tokens", "4", "16", *SMALL, "--json", str(path))
    return json.loads(path.read_text()), done


def test_json_schema(written):
    whole, _ = written
    assert set(whole) == {"schema", "command", "facts", "results"} and whole["schema"] == report.SCHEMA
    assert {"git", "cupyep", "cupy", "nvrtc", "driver", "gpus", "num_sms", "numpy"} <= set(whole["facts"])
    lines = [(result["verb"], result["scope"], result["num_tokens"]) for result in whole["results"]]
    verbs = ("dispatch", "dispatch, cached", "combine", "barrier")
    assert lines == [(verb, "API", tokens) for tokens in (4, 16) for verb in verbs]
    for result in whole["results"]:
        assert {name: type(result[name]) for name in FIELDS} == FIELDS
        assert 0 < result["min_us"] <= result["p50_us"] <= result["p99_us"]
        if result["verb"] != "barrier":
            rate = result["logical_bytes"] / result["time_us"] / 1e3
            assert result["logical_gbps"] == pytest.approx(rate)
            assert result["us_per_mb"] == pytest.approx(1e3 / rate)
            assert result["wire_gbps"] < result["logical_gbps"]
            assert 32 * 2 * result["num_tokens"] <= result["logical_bytes"] <= 2 * 32 * 2 * result["num_tokens"]


def test_the_table_has_a_line_for_each_result(written):
    whole, done = written
    assert report.table(whole["results"]) in done.stdout
    lines = report.table(whole["results"]).splitlines()
    assert len(lines) == 1 + len(whole["results"]) and "GB/s logical" in lines[0] and "SMs" not in lines[0]
    assert "ep" in done.stderr  # progress


def test_tables_show_what_there_is():
    results = [
        {"benchmark": "a", "name": "x", "num_sms": 8, "gbps": 1234.5},
        {"benchmark": "b", "name": "y", "note": "none"},
        {"benchmark": "a", "name": "zz", "num_sms": 16, "gbps": 0.25},
    ]
    first, second = report.parts(results)
    assert report.table(first).splitlines() == ["   what  SMs  GB/s", "a  x       8  1234", "a  zz     16  0.25"]
    assert report.table(second).splitlines()[-1] == "b  y     none"


def test_progress_without_tqdm(monkeypatch, capsys):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert list(report.progress(range(20), "sweep")) == list(range(20))
    assert capsys.readouterr().err.splitlines() == [f"sweep: {i} of 20" for i in range(0, 20, 2)]
    assert list(report.progress(range(3), "sweep", show=False)) == [0, 1, 2]


def test_git_revision_of_a_checkout():
    revision = report.git_revision()
    assert revision is None or len(revision.rstrip("+")) >= 7


RESULTS = [
    {"verb": verb, "scope": "kernel", "mode": "bf16", "num_ranks": ranks, "num_sms": sms, "num_tokens": tokens,
     "hidden": 7168, "time_us": 100.0 / sms + tokens, "logical_gbps": 50.0 * sms, "ceiling_gbps": 60.0 * sms,
     "predicted_us": 1.0, "us_per_mb": 20.0 / sms}
    for verb in ("dispatch", "combine") for ranks in (2, 4) for sms in (1, 2, 8) for tokens in (64, 128)
]  # fmt: skip


def test_prediction_note():
    results = [{"time_us": 100.0, "predicted_us": predicted} for predicted in (110.0, 80.0, 99.0)]
    [note] = prediction_note(results)
    assert note["note"] == "2 of 3 predictions are within 15%; the worst is off by -20%"
    assert prediction_note([{"time_us": 1.0}]) == []


def test_what_options_stand_beside():
    """Lines of one case, mode and number of SMs, and fp8's kernel beside bf16's."""

    def line(verb, scope, time_us, mode="bf16", **more):
        case = {"num_sms": 8, "num_tokens": 64, "hidden": 256}
        return {"verb": verb, "scope": scope, "mode": mode, "time_us": time_us, **case, **more}

    results = [
        line("dispatch", "kernel", 100.0, logical_gbps=400.0),
        line("combine", "kernel", 50.0),
        line("dispatch, cached", "API", 104.0),
        line("dispatch, cached", "API", 90.0, num_sms=16),
        line("dispatch + combine", "graph", 153.0),
        line("dispatch, expert layout", "API", 500.0),
        line("dispatch", "kernel", 51.0, "fp8", logical_gbps=390.0),
        line("dispatch, cached", "API", 54.0, "fp8"),
    ]
    notes = [result.get("note") for result in options.compared(results)]
    assert notes == [
        None,
        None,
        "+4.0 us (+4.0%) to dispatch (kernel)",
        None,
        "+3.0 us (+2.0%) to dispatch (kernel) + combine (kernel)",
        None,
        "98% of bf16's GB/s",
        "+3.0 us (+5.9%) to dispatch (kernel)",
    ]


@pytest.mark.parametrize(("step", "in_graph"), [(1.0, False), (1e-6, True)])
def test_kernels_shorter_than_their_launch_are_measured_in_a_graph(step, in_graph, monkeypatch):
    """A launch of the graph takes as long here as one of the kernel, so a kernel of it takes a twentieth."""
    calls = [0]

    def launch(*_):
        calls[0] += 1

    rank = SimpleNamespace(push=launch, launch_graph=launch, graph=lambda action, sms, count: (action, sms, count))
    rank.barrier, rank.check_kernels = lambda sms: None, lambda: None
    world = SimpleNamespace(align=lambda: None, gather=lambda values: values)
    monkeypatch.setattr(timed, "_clock_on", lambda rank: FakeClock(calls, step))
    timing = timed.time_of(world, [rank], "push", 4, "kernel", 3)
    assert timing.in_graph == in_graph
    assert timing.mean == pytest.approx(step / timed.KERNELS_IN_GRAPH if in_graph else step)
    timing = timed.time_of(world, [rank], "push", 4, "graph", 3)
    assert timing.in_graph and timing.mean == pytest.approx(step)


def test_what_calls_cost_the_host(monkeypatch):
    """It is on the host's clock, whatever the backend."""
    world = SimpleNamespace(backend="cuda", align=lambda: None, gather=lambda values: values)
    world.on = lambda ranks, function: [function(rank) for rank in ranks]
    monkeypatch.setattr(timed, "_current_clock", None)
    rank = SimpleNamespace(call=lambda sms: time.sleep(1e-3))
    assert timed.time_of(world, [rank], "call", None, "host", 2).minimum >= 1e-3


def test_the_goal_of_low_latency(monkeypatch):
    """Bytes at the rate of the copy (which reads and writes), and three bare barriers; the pair beside its parts."""
    kernels = pytest.importorskip("cupyep.bench.low_latency_kernels", exc_type=ImportError)
    seconds = {"barriers": 256 * 4e-6, "copy": 1e-3, "call_dispatch": 40e-6, "call_combine": 60e-6, "call_pair": 110e-6}

    def time_of(world, ranks, action, *_):
        return Timing(*[seconds[action]] * 4)

    for module, name in ((low_latency, "time_of"), (low_latency, "in_graph"), (barrier, "time_of")):
        monkeypatch.setattr(module, name, time_of)
    moved = {"dispatch": kernels.COPY_BYTES / 100, "combine": kernels.COPY_BYTES / 50}
    checked: list[str] = []
    rank = SimpleNamespace(memory_bytes=moved, poison=lambda: None, check=checked.append)
    world = SimpleNamespace(size=1, ranks_per_device=1, gather=lambda values: values)
    world.on = lambda ranks, function: [function(rank) for rank in ranks]
    lines = list(low_latency.on_gpu(world, [rank], None, 3))
    assert len(lines) == low_latency.NUM_LINES["cuda"] and checked == ["dispatch", "combine", "pair"]
    goals = {line["name"]: line["goal_us"] for line in lines if "goal_us" in line}
    assert goals == pytest.approx({"dispatch, in a graph": 5 + 12, "combine, in a graph": 10 + 12})
    assert [line["note"] for line in lines if "note" in line] == ["+10.0% to the two alone"]
    assert lines[1]["gbps"] == pytest.approx(2 * kernels.COPY_BYTES / 1e-3 / 1e9)


def test_low_latency_notices_a_wrong_dispatch():
    """Rows that the timed dispatch brought are compared, not only the sums of those that came before."""

    def body(comm: Any) -> str:
        rank = LowLatencyRank(comm, Case(8, 128, 2, 4, "fp8"), "numpy")
        rank.there_and_back(None)
        rank.poison()
        for _ in range(2):  # each has a place of its own
            rank.call_pair(None)
        rank.check("pair")
        rank.poison()
        rank.x[...] = 0
        for _ in range(2):  # each has a place of its own
            rank.call_pair(None)
        with pytest.raises(AssertionError) as caught:
            rank.check("pair")
        rank.close()
        return str(caught.value)

    assert [text.split(":")[1] for text in run_local(body, 2)] == [" low_latency_dispatch(x)"] * 2
