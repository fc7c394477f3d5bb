"""The benchmarks' arithmetic, their output, and the whole path on the NumPy backend."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cupyep.bench import plot, report, timed
from cupyep.bench.cases import MODES, Case, count_bytes
from cupyep.bench.ranks import Rank
from cupyep.bench.sweep import prediction_note
from cupyep.bench.timing import Timing, measure


def bench(*arguments: str, status: int = 0, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The real program; what it prints."""
    command = [sys.executable, "-m", "cupyep.bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == status, done.stdout + done.stderr
    return done


# --- what is counted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
def test_bytes_against_a_dense_count(rank):
    num_ranks, experts_per_rank = 3, 4
    case = Case(num_tokens=50, hidden=20, num_topk=3, num_experts=num_ranks * experts_per_rank, mode="fp32")
    topk_idx, weights = case.routing(rank)
    assert topk_idx.shape == weights.shape == (50, 3) and all(len(set(ids)) == 3 for ids in topk_idx.tolist())
    send_row, logical, wire = np.full((50, num_ranks), -1, np.int32), 0, 0
    for token, ids in enumerate(topk_idx):
        for destination in range(num_ranks):
            if any(expert // experts_per_rank == destination for expert in ids):
                send_row[token, destination] = 7
                logical += 20 * 4
                wire += 20 * 4 * (destination != rank)
    assert 0 < wire < logical
    assert count_bytes(send_row, rank, case.row_bytes) == (logical, wire)


@pytest.mark.parametrize("mode", MODES)
def test_rows_add_up_exactly_in_every_mode(mode):
    """A sum of up to 8 equal rows has no rounding, so that verification can be bit by bit."""
    case = Case(num_tokens=40, hidden=64, mode=mode)
    rows = case.rows(3)
    assert rows.dtype == MODES[mode].dtype and rows.nbytes == 40 * case.row_bytes and len(np.unique(rows)) > 200
    for times in (2, 3, 5, 7, 8):
        total = np.zeros(rows.shape, np.float32)
        for _ in range(times):
            total += rows.astype(np.float32)
        assert (total == rows.astype(np.float64) * times).all()
    assert (rows != case.rows(4)).any()


def test_many_tokens_repeat_rows():
    rows = Case(num_tokens=5000, hidden=8).rows(0)
    assert (rows[4093:] == rows[: 5000 - 4093]).all() and len(rows) == 5000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_topk": 33}, r"num_topk: expected 1\.\.32 \(experts: 256\), got 33"),
        ({"num_topk": 5, "num_experts": 4}, r"num_topk: expected 1\.\.4 \(experts: 4\), got 5"),
        ({"hidden": 0}, "hidden: expected at least 1, got 0"),
        ({"mode": "int4"}, "mode: expected one of bf16, .*, got 'int4'"),
    ],
)
def test_bad_cases(values, message):
    with pytest.raises(ValueError, match=message):
        Case(**values)


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


def test_curves_differ_in_one_thing_alone():
    curves = plot.curves(RESULTS, "num_sms", "logical_gbps")
    assert len(curves) == 8 and all([point["num_sms"] for point in points] == [1, 2, 8] for points in curves.values())
    assert "dispatch kernel, num_tokens 64, num_ranks 2".replace("num_", "") in {
        name.replace("num_", "") for name in curves
    }
    assert plot.curves(RESULTS[:1], "num_sms", "logical_gbps") == {}


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_plots_are_written(kind, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{kind}"
    assert plot.draw(path, RESULTS, "title") == ["bandwidth", "latency", "cost of ranks"]
    head = path.read_bytes()[:300]
    assert head.startswith(b"\x89PNG") if kind == "png" else b"<svg" in path.read_bytes()
    ceilings = [{"benchmark": "ceilings", "name": "TMA store", "num_sms": sms, "gbps": 60.0 * sms} for sms in (1, 8)]
    assert plot.draw(path, ceilings, "title") == ["hardware"]
    with pytest.raises(ValueError, match="--plot: expected results along SMs"):
        plot.draw(path, RESULTS[:1], "title")


def test_prediction_note():
    results = [{"time_us": 100.0, "predicted_us": predicted} for predicted in (110.0, 80.0, 99.0)]
    [note] = prediction_note(results)
    assert note["note"] == "2 of 3 predictions are within 15%; the worst is off by -20%"
    assert prediction_note([{"time_us": 1.0}]) == []


def test_a_rank_sees_a_wrong_result():
    """Verification can fail: one element changed by one bit."""
    case = Case(num_tokens=3, hidden=4, num_topk=2, num_experts=2)
    rows, send_row = case.rows(0), np.array([[0, -1], [1, 0], [-1, 1]], np.int32)
    x = (rows.astype(np.float32) * [[1], [2], [1]]).astype(rows.dtype)
    weights = np.ones((3, 2), np.float32)
    rank = Rank.__new__(Rank)
    rank.rank, rank.case, rank.rows, rank.topk_weights = 1, case, rows, weights
    rank.sent = SimpleNamespace(handle=SimpleNamespace(send_row=send_row))
    rank.combined = SimpleNamespace(combined_x=x, combined_topk_weights=weights.copy())
    rank.verify()
    x.view(np.uint16)[1, 2] ^= 1
    with pytest.raises(AssertionError, match=r"rank 1: combine\(dispatch\(x\)\): 1 of 12 elements are wrong"):
        rank.verify()


@pytest.mark.parametrize(("step", "in_graph"), [(1.0, False), (1e-6, True)])
def test_kernels_shorter_than_their_launch_are_measured_in_a_graph(step, in_graph, monkeypatch):
    """A launch of the graph takes as long here as one of the kernel, so a kernel of it takes a twentieth."""
    calls = [0]

    def launch(*_):
        calls[0] += 1

    rank = SimpleNamespace(push=launch, launch_graph=launch, graph=lambda action, sms, count: (action, sms, count))
    rank.barrier, rank.launcher = lambda sms: None, SimpleNamespace(check=lambda: None)
    world = SimpleNamespace(align=lambda: None, gather=lambda values: values)
    monkeypatch.setattr(timed, "_clock_on", lambda rank: FakeClock(calls, step))
    timing = timed.time_of(world, [rank], "push", 4, "kernel", 3)
    assert timing.in_graph == in_graph
    assert timing.mean == pytest.approx(step / timed.KERNELS_IN_GRAPH if in_graph else step)
