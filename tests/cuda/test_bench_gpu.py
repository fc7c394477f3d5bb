"""The benchmarks' kernels as they are compiled, and the benchmarks themselves on a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from compile_helpers import needs_nvrtc, sass
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cupy", exc_type=ImportError)

from cupyep import abi
from cupyep.backends.cuda import jit, plan
from cupyep.bench import ceilings, ep, low_latency, multi_gpu, options

KB = 1024
REQUESTS = {
    f"{kernel} {arch}": jit.Request(kernel, arch, plan.prelude(num_ranks, constants))
    for arch, smem in (("sm_80", 163 * KB), ("sm_90", 227 * KB), ("sm_100", 227 * KB))
    for kernel, num_ranks, constants in (
        ("ceilings", 1, ceilings.ring(14336, smem)),
        ("barriers", 8, {"kNumBarriers": 256}),
    )
}


@needs_nvrtc
@pytest.mark.parametrize("name", REQUESTS)
def test_kernels_spill_nothing_and_read_no_memory_as_constant(name):
    request = REQUESTS[name]
    usages = jit.resource_usage(request)
    assert set(usages) == (
        {"barriers"} if "barriers" in name else {"copy"} if "sm_80" in name else {"copy", "fan", "mix"}
    )
    assert not [kernel for kernel, usage in usages.items() if usage.spill_bytes or usage.num_registers > 128]
    for code in sass(jit.build(request).read_bytes()).values():
        assert not re.findall(r"\b(?:LDL|STL)\b|\bLDG\S*\.CONSTANT", code)


@settings(deadline=None, max_examples=300)
@given(row_bytes=st.integers(1, 8000).map(lambda n: 16 * n), limit=st.sampled_from([99 * KB, 163 * KB, 227 * KB]))
def test_rings_fit(row_bytes, limit):
    """Bulk copies are aligned, a unit is a row or a part of one, and a CTA can be launched."""
    chosen = ceilings.ring(row_bytes, limit)
    assert 0 < chosen["kChunkBytes"] <= row_bytes and chosen["kChunkBytes"] % 16 == 0
    assert chosen["kSlotBytes"] >= chosen["kChunkBytes"] and chosen["kSlotBytes"] % 128 == 0
    assert ceilings.smem_bytes(chosen) <= limit - KB
    assert len(abi.CEILING_PARAMS()["src"]) == abi.CEILING_ARRAYS


def bench(tmp_path: Any, *arguments: str, launcher: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The results of a real run."""
    path = tmp_path / "results.json"
    program = ("-m", "mpi4py", "-m") if launcher else ("-m",)
    command = [
        *launcher,
        sys.executable,
        *program,
        "cupyep.bench",
        *arguments,
        "--json",
        str(path),
        "--time-limit",
        "80",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = json.loads(path.read_text())
    assert whole["facts"]["gpus"] and whole["facts"]["num_sms"]
    return whole["results"]


CASE = ("--tokens", "2048", "--hidden", "2048", "--sms", "2", "--calls", "4")


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_ceilings(tmp_path):
    results = bench(tmp_path, "ceilings", "--sms", "1", "8", "--calls", "4")
    rates = {(result["name"], result["num_sms"]): result["gbps"] for result in results}
    assert {name for name, _ in rates} <= set(ceilings.LINES) and ("vector copy", 8) in rates
    for name, sms in rates:
        assert sms == 1 or rates[name, 8] > 4 * rates[name, 1], name


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_ceilings_between_ranks(tmp_path):
    results = bench(tmp_path, "ceilings", "--peer", "--ranks", "2", "--sms", "2", "--calls", "2")
    names = {result["name"] for result in results}
    assert {"store to peer, one", "load from all peers, all", "cudaMemcpyAsync to peer, all"} <= names
    assert all(result["gbps"] > 1 for result in results)


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["bf16", "fp8"])
def test_ep(mode, tmp_path):
    results = {(r["verb"], r["scope"]): r for r in bench(tmp_path, "ep", "--ranks", "2", "--mode", mode, *CASE)}
    assert len(results) == len(ep.LINES)
    assert results["count", "kernel"]["time_us"] < results["dispatch, count and push", "kernel"]["time_us"]
    for verb in ("dispatch", "combine"):
        kernel = results[verb, "kernel"]
        assert kernel["num_sms"] == 2 and kernel["time_us"] < results[verb, "API"]["time_us"] * 1.1
        assert kernel["predicted_us"] > 0
        assert kernel.get("ceiling_gbps", 1e9) > 0.8 * kernel["logical_gbps"]
    ratio = results["combine", "kernel"]["logical_bytes"] / results["dispatch", "kernel"]["logical_bytes"]
    assert ratio == (2 if mode == "fp8" else 1)


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_options(tmp_path):
    """Every line is there, and a graph's replay takes about what its kernels take."""
    results = bench(tmp_path, "options", "--ranks", "2", *CASE)
    lines = {(r["mode"], r["verb"], r["scope"]): r for r in results}
    assert len(lines) == len(results) == len(options.BF16) + len(options.PLAIN)
    kernels_us = sum(lines["bf16", verb, "kernel"]["time_us"] for verb in ("dispatch", "combine"))
    assert 0.7 * kernels_us < lines["bf16", "dispatch + combine", "graph"]["time_us"] < 2 * kernels_us
    assert lines["bf16", "expansion to the expert layout", "kernel"]["gbps"] > 100
    assert {(r["verb"], r["scope"]) for r in results if "note" in r} == set(options.BESIDE) | {("dispatch", "kernel")}


LOW_LATENCY = ("low-latency", "--tokens", "16", "--hidden", "1024", "--experts", "32", "--calls", "4")


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["bf16", "fp8"])
def test_low_latency(mode, tmp_path):
    check_low_latency(bench(tmp_path, *LOW_LATENCY, "--ranks", "2", "--mode", mode))


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_low_latency_among_processes(tmp_path):
    check_low_latency(bench(tmp_path, *LOW_LATENCY, launcher=tuple(multi_gpu.mpi_launcher(2))))


def check_low_latency(results):
    lines = {result["name"]: result for result in results}
    assert len(lines) == len(results) == low_latency.NUM_LINES["cuda"]
    bare = lines["barrier, bare"]["time_us"]
    for verb in ("dispatch", "combine"):
        kernel = lines[f"{verb}, in a graph"]
        assert 0 < kernel["time_us"] < lines["pair, in a graph"]["time_us"]
        assert kernel["goal_us"] == pytest.approx(kernel["bytes_us"] + 3 * bare) and kernel["bytes_us"] > 0
        assert 1 < lines[f"{verb} call, host"]["time_us"] < 10_000


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_barrier_and_small_batches(tmp_path):
    results = {r["name"]: r for r in bench(tmp_path, "barrier", "--ranks", "2", *CASE, "--tokens", "1")}
    assert 0.1 < results["barrier, bare"]["time_us"] < results["barrier, in a graph"]["time_us"]
    assert results["dispatch, in a graph"]["time_us"] < results["dispatch, whole call"]["time_us"]


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_baseline_among_processes(tmp_path):
    launcher = tuple(multi_gpu.mpi_launcher(2))
    results = bench(tmp_path, "baseline", "--tokens", "256", "--hidden", "512", "--calls", "2", launcher=launcher)
    assert {"dispatch, MPI.Alltoallv through host memory", "NCCL send/recv"} & {r["name"] for r in results}


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_ep_among_processes(tmp_path):
    launcher = tuple(multi_gpu.mpi_launcher(2))
    results = bench(tmp_path, "ep", *CASE, launcher=launcher)
    assert len(results) == len(ep.LINES) and {result["ranks_are"] for result in results} == {"processes"}
