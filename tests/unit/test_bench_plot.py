"""The benchmarks' picture: which curves share a facet, what is left out, and that files are written."""

from __future__ import annotations

import warnings

import pytest
from test_bench import RESULTS

from cupyep.bench import curves, plot

BANDWIDTH, _, LATENCY, *_ = curves.KINDS


def test_curves_differ_in_one_thing_alone():
    """Verbs share a facet; tokens and ranks have their own; two modes do not become one curve."""
    facets = curves.panel(BANDWIDTH, "", RESULTS).facets
    assert list(facets) == [f"{tokens} tokens, {ranks} ranks" for tokens in (64, 128) for ranks in (2, 4)]
    for number, facet in enumerate(facets.values()):
        assert list(facet) == ["dispatch kernel", "combine kernel"]
        for points in facet.values():
            assert [point["num_sms"] for point in points] == [1, 2, 8]
            assert {(p["num_tokens"], p["num_ranks"]) for p in points} == {((64, 128)[number // 2], (2, 4)[number % 2])}
    both = RESULTS + [{**result, "mode": "fp8"} for result in RESULTS]
    facets = curves.panel(BANDWIDTH, "", both).facets
    assert len(facets) == 8 and "fp8, 64 tokens, 2 ranks" in facets
    assert all(
        {p["mode"] for p in points} == {title.split(",")[0]} for title in facets for points in facets[title].values()
    )
    assert curves.panels(RESULTS[:1]) == []


def test_of_many_values_three_are_drawn():
    """Nine numbers of SMs: the first, the middle and the last, in their order; the rest is counted."""
    one = {"benchmark": "ep", "verb": "dispatch", "scope": "kernel", "mode": "bf16", "time_us": 1.0}
    sms = (1, 2, 4, 6, 8, 12, 16, 24, 32)
    panel = curves.panel(LATENCY, "ep", [{**one, "num_sms": n, "num_tokens": t} for n in sms[::-1] for t in (8, 64)])
    assert list(panel.facets) == ["1 SM", "8 SMs", "32 SMs"] and panel.left_out == 6


def test_benchmarks_and_axes_of_a_sweep_stay_apart():
    swept = [{**result, "benchmark": "sweep", "axis": "sms"} for result in RESULTS]
    assert [(one.benchmark, one.kind) for one in curves.panels(swept)] == [("sweep", BANDWIDTH)]
    barriers = [{"benchmark": "barrier", "name": "bare", "num_tokens": n, "time_us": 2.0} for n in (1, 8)]
    assert [(one.benchmark, one.kind) for one in curves.panels(swept + barriers)][1:] == [("barrier", LATENCY)]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_plots_are_written(kind, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{kind}"
    assert plot.draw(path, RESULTS, "title") == ["bandwidth", "latency", "cost of ranks"]
    head = path.read_bytes()[:300]
    assert head.startswith(b"\x89PNG") if kind == "png" else b"<svg" in path.read_bytes()
    ceilings = [{"benchmark": "ceilings", "name": "TMA store", "num_sms": sms, "gbps": 60.0 * sms} for sms in (1, 8)]
    assert plot.draw(path, ceilings, "title") == ["hardware"]
    many = [
        {**RESULTS[0], "benchmark": benchmark, "name": f"line {i}", "mode": mode, "num_sms": sms, "num_tokens": tokens}
        for benchmark in ("ep", "peers") for i in range(12) for mode in ("bf16", "fp8") for sms in (1, 2, 4, 8)
        for tokens in (1, 8, 64, 128)
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as: axes sizes collapsed to zero
        assert plot.draw(path, many, "title") == ["bandwidth", "latency"] * 2
    with pytest.raises(ValueError, match="--plot: expected results along SMs"):
        plot.draw(path, RESULTS[:1], "title")
