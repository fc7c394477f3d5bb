"""The examples and the README's sample, run as a user would: in processes of their own, with threads and with MPI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from multirank import launch

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"tokens": 48, "hidden": 64, "ffn": 32, "experts": 8, "topk": 2, "steps": 2, "checked": 20}
SMALL = ["--backend=numpy", *(f"--{name}={size}" for name, size in SIZES.items())]


def python(launcher: str, num_ranks: int) -> list[str]:
    """The head of a command that runs a script on `num_ranks` ranks."""
    if launcher == "threads":
        return [sys.executable]
    return [launch.mpiexec(), *launch.flags(), "-n", str(num_ranks), sys.executable, "-m", "mpi4py"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs `command` away from the checkout, without stdin."""
    return subprocess.run(
        command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=launch.TIMEOUT_S
    )


@pytest.mark.parametrize(("launcher", "num_ranks"), [("threads", 4), ("mpi", 2)])
def test_hello_dispatch(launcher, num_ranks):
    done = run(*python(launcher, num_ranks), str(ROOT / "examples/01_hello_dispatch.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"rank 0 of {num_ranks} got 3 rows; its tokens came back as\n[[1. 1.")
    assert done.stdout.count("rank") == 1


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "dtype"),
    [("threads", 4, "float32"), ("mpi", 2, "bfloat16"), ("mpi", 1, "float16")],
)
def test_moe_layer(launcher, num_ranks, dtype):
    done = run(*python(launcher, num_ranks), str(ROOT / "examples/moe_layer.py"), *SMALL, "--dtype", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 8  # one rank speaks
    assert lines[0] == f"{num_ranks} ranks, numpy backend, {dtype}; 48 tokens per rank, hidden 64"
    rows, local = map(int, re.findall(r"per rank: (\d+) of .* which (\d+)", lines[2])[0])
    assert 48 <= rows <= 96 and (rows == local == 48 if num_ranks == 1 else local < rows)
    assert re.fullmatch(r"step [\d.]+ ms: router [\d.]+, dispatch [\d.]+, experts [\d.]+, combine [\d.]+", lines[3])
    number = rf"relative error of {20 * num_ranks} tokens: [\d.]+e-\d\d against a dense loop, ok \(limit .*\)"
    assert re.fullmatch(number, lines[7])
    assert "2/2" in done.stderr  # the progress bar


def test_moe_layer_fails_when_the_error_is_too_large():
    done = run(sys.executable, str(ROOT / "examples/moe_layer.py"), *SMALL, "--tolerance", "1e-30")
    assert done.returncode == 1
    assert "TOO LARGE (limit 1e-30)" in done.stdout


@pytest.mark.parametrize(("launcher", "num_ranks", "options"), [("threads", 4, ["--fp8"]), ("mpi", 2, [])])
def test_decode_loop(launcher, num_ranks, options):
    sizes = ["--tokens=5", "--hidden=128", "--experts=8", "--topk=2", "--layers=3", "--steps=2", "--backend=numpy"]
    done = run(*python(launcher, num_ranks), str(ROOT / "examples/decode_loop.py"), *sizes, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    kind = "fp8" if options else "bfloat16"
    assert lines[0] == f"{num_ranks} ranks, numpy backend, {kind}; 2 x 5 tokens"
    assert re.fullmatch(r"[\d,]+ tokens/s, [\d.]+ ms a step \(slowest rank\)", lines[2])
    assert re.fullmatch(r"relative error [\d.]+e-\d\d against the normal mode, ok \(limit .*\)", lines[3])
    failed = run(sys.executable, str(ROOT / "examples/decode_loop.py"), *sizes, "--tolerance", "1e-30")
    assert failed.returncode == 1 and "TOO LARGE" in failed.stdout


def test_sample_of_the_readme():
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(code) == 1
    done = run(sys.executable, "-W", "error", "-c", code[0])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[True, True, True, True]"


@pytest.mark.parametrize(("launcher", "num_ranks"), [("threads", 4), ("mpi", 2)])
def test_moe_training(launcher, num_ranks):
    script = str(ROOT / "examples/moe_training.py")
    done = run(*python(launcher, num_ranks), script, "--backend=numpy", "--steps=120")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"{num_ranks} ranks, numpy backend, 8 experts, top-2" and len(lines) == 9
    assert re.fullmatch(r"largest relative difference of 120 losses: [\d.]+e-\d\d, ok \(limit 1e-03\)", lines[-1])


@pytest.mark.parametrize(
    ("options", "word"), [(["--steps=3"], "NOT LEARNT"), (["--tolerance=0", "--rate=1"], "TOO LARGE")]
)
def test_moe_training_fails_when_it_should(options, word):
    done = run(sys.executable, str(ROOT / "examples/moe_training.py"), "--backend=numpy", "--steps=120", *options)
    assert done.returncode == 1 and word in done.stdout, done.stdout + done.stderr


def test_overlap():
    sizes = ["--tokens=32", "--hidden=64", "--size=64", "--steps=2", "--backend=numpy"]
    done = run(sys.executable, str(ROOT / "examples/overlap.py"), *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and lines[0] == "2 ranks, numpy backend, 32 tokens of 64 float16 per rank"
    assert all(re.search(r"SMs: dispatch \d+ us, product \d+ us, .* saved -?\d+ us$", line) for line in lines[1:])
