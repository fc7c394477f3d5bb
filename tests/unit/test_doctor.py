"""`cupyep doctor`: the real program in a process of its own, with parts of the machine hidden; and its verdicts."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cupyep import doctor
from cupyep.doctor import bounded

LAST_LINE = re.compile(r"ready \(cuda\)|ready \(numpy only: .+\)|fix: .+")
HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cupyep", "doctor", *arguments]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=200)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def facts_of(**variables: str) -> dict[str, Any]:
    done = run("--json", **variables)
    facts = json.loads(done.stdout)
    assert LAST_LINE.fullmatch(facts["verdict"])
    assert done.returncode == (0 if facts["ready"] else 1)
    return facts


@pytest.fixture
def hide(tmp_path):
    """hide("cupy", ...): the environment of a machine where these cannot be imported."""

    def hidden(*modules: str) -> dict[str, str]:
        # Every interpreter reads this first, also those that the doctor starts. None: such a module cannot be found.
        (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({modules}))")
        return {"PYTHONPATH": str(tmp_path)}

    return hidden


def test_text_ends_with_the_verdict_and_json_has_the_same_facts():
    done, facts = run(), facts_of()
    assert LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert facts["verdict"] == done.stdout.splitlines()[-1]
    assert done.returncode == (0 if facts["ready"] else 1)
    for fact in (
        facts["cupyep"],
        facts["numpy"],
        facts["python"]["executable"],
        facts["mpi"]["library"],
        facts["cupy"]["nvrtc"],
        facts["shared_memory"]["self_test"],
    ):
        assert fact in done.stdout
    assert facts["shared_memory"]["self_test"].endswith("ok")
    assert facts["mpi"]["thread_level"] == "multiple"
    if not HAS_GPU:
        assert facts["verdict"] == "ready (numpy only: no NVIDIA GPU)"


def test_with_cupy_and_nvml_hidden(hide):
    facts = facts_of(**hide("cupy", "pynvml", "cuda"))
    assert facts["cupy"]["error"].startswith("ModuleNotFoundError: import of cupy halted")
    assert "nvml: import of pynvml halted" in facts["gpus"]["error"]
    assert facts["ready"] is not HAS_GPU


@pytest.mark.skipif(HAS_GPU, reason="the verdict of a machine without a GPU")
def test_with_mpi4py_hidden_ranks_are_threads(hide):
    facts = facts_of(**hide("mpi4py"))
    assert facts["mpi"]["error"].startswith("ModuleNotFoundError: import of mpi4py halted")
    assert facts["verdict"] == "ready (numpy only: no NVIDIA GPU)"


def test_mpi4py_without_a_library_is_to_be_fixed(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    done = run(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("fix: mpi4py does not load its MPI library (RuntimeError: cannot")


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"  # below a plain file: not even root can write there
    facts = facts_of(CUPYEP_CACHE_DIR=str(folder))
    assert facts["cache"] == {"folder": str(folder), "num_bytes": 0, "error": facts["cache"]["error"]}
    assert "Error" in facts["cache"]["error"]
    assert facts["ready"] is not HAS_GPU


def test_a_cache_that_is_not_there_yet_is_not_made(tmp_path):
    facts = facts_of(CUPYEP_CACHE_DIR=str(tmp_path / "a" / "b"), HOME="/proc/nonexistent")
    assert facts["cache"] == {"folder": str(tmp_path / "a" / "b"), "num_bytes": 0, "writable": True}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(HAS_GPU, reason="CUDA needs no shared-memory folder")
def test_shared_memory_that_does_not_work_is_to_be_fixed(tmp_path):
    verdict = facts_of(CUPYEP_SHM_DIR=str(tmp_path / "missing"))["verdict"]
    assert re.fullmatch(r"fix: processes cannot share memory in .*/missing \(FileNotFoundError.*", verdict)


def test_a_wrong_setting_is_to_be_fixed():
    assert facts_of(CUPYEP_MOVER="tmma")["verdict"] == "fix: CUPYEP_MOVER: expected auto, tma or vector, got 'tmma'"


def hang():
    time.sleep(100)


def die():
    os.abort()


def chat():
    print("a library's greeting")
    os.write(1, b"and one more\n")
    return {"number": 1}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("hang", "no answer within 3 s"), ("die", "ended with status -6"), ("missing", "AttributeError")],
)
def test_a_probe_that_fails_costs_only_its_answer(monkeypatch, name, expected):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    start = time.monotonic()
    assert expected in bounded.call(f"test_doctor:{name}", timeout_s=3)["error"]
    assert time.monotonic() - start < 20


def test_a_probe_may_print(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    assert bounded.call("test_doctor:chat", timeout_s=30) == {"number": 1}


# The facts of a machine with two GPUs where all is well. Each verdict below comes from one thing that is not.
GPU_FACTS: dict[str, Any] = {
    "cupyep": "0.1.0",
    "python": {"version": "3.12.1", "executable": "/usr/bin/python"},
    "host": {"system": "Linux", "cores": 16},
    "numpy": "2.3.0",
    "ml_dtypes": "0.5.0",
    "cupy": {"wheels": ["cupy-cuda12x 14.2.0"], "version": "14.2.0", "nvrtc": "12.9"},
    "gpus": {
        "device_files": 2,
        "source": "NVML",
        "driver": "580.1",
        "driver_cuda": "13.0",
        "gpus": [{"name": "NVIDIA H200", "compute_capability": "9.0", "memory_bytes": 139 * 2**30}] * 2,
    },
    "mps": {"state": "on"},
    "mpi": {"mpiexec": None, "mpi4py": "4.1.2", "library": "MPICH Version: 5.0.2", "thread_level": "multiple"},
    "shared_memory": {"folder": "/dev/shm", "free_bytes": 2**30, "self_test": "ok"},
    "limits": {"open_files": 1024, "locked_bytes": None},
    "cache": {"folder": "/root/.cache/cupyep", "num_bytes": 5, "writable": True},
    "cuda": {
        "devices": [{"compute_capability": "9.0", "num_sms": 132}] * 2,
        "peer_access": [[True, True], [False, True]],
    },
    "ipc": {"self_test": "2 device(s), two processes: ok"},
    "backend": {"cuda_usable": True},
    "kernels": {"mover_setting": "auto", "movers": ["tma"] * 2, "num_sms": [16, 16], "num_sms_rule": "min(model, SMs)"},
}


@pytest.mark.parametrize(
    ("section", "value", "expected"),
    [
        ("mps", {"state": "off", "why": "?"}, r"ready \(cuda\)"),
        ("mpi", {"mpiexec": None, "error": "ModuleNotFoundError: No module named 'mpi4py'"}, r"ready \(cuda\)"),
        ("shared_memory", {"folder": "/dev/shm", "free_bytes": 0, "error": "full"}, r"ready \(cuda\)"),
        (
            "cupy",
            {"wheels": [], "error": "ModuleNotFoundError"},
            r"fix: .* GPU but no CuPy; the extra cuda13 brings it",
        ),
        ("cupy", {"wheels": ["cupy-cuda12x 14", "cupy-cuda13x 14"], "nvrtc": "13.0"}, r"fix: uninstall all but one .*"),
        ("cupy", {"wheels": ["cupy-cuda12x 14"], "error": "OSError: nvrtc"}, r"fix: cupy-cuda12x 14 does not load .*"),
        ("cuda", {"error": "cudaErrorInsufficientDriver"}, r"fix: CUDA does not start on this GPU \(cudaError.*"),
        ("cuda", {"devices": [], "peer_access": []}, r"ready \(numpy only: CUDA_VISIBLE_DEVICES hides every GPU\)"),
        ("ipc", {"error": "invalid argument"}, r"fix: CUDA IPC between two processes failed \(invalid argument\); .*"),
        ("cache", {"folder": "/x", "num_bytes": 0, "error": "denied"}, r"fix: the kernel cache cannot be written .*"),
        ("backend", {"error": "ImportError"}, r"fix: the CUDA backend does not load \(ImportError\)"),
        ("backend", {"cuda_usable": False}, r"ready \(numpy only: this version's CUDA backend does not run here\)"),
        ("kernels", {"mover_setting": "tma", "error": "ValueError: tma needs 9.0"}, r"fix: ValueError: tma needs 9\.0"),
        ("gpus", {"device_files": 1, "error": "nvml: not found"}, r"ready \(cuda\)"),
        ("gpus", {"device_files": 0, "error": "nvml: not found"}, r"ready \(numpy only: no NVIDIA GPU\)"),
    ],
)
def test_verdicts_of_a_gpu_machine(section, value, expected):
    facts = copy.deepcopy(GPU_FACTS)
    facts[section] = value
    facts["verdict"] = doctor.verdict(facts)
    assert re.fullmatch(expected, facts["verdict"])
    assert doctor.as_text(facts).splitlines()[-1] == facts["verdict"]
    assert json.loads(doctor.as_json(facts)) == facts


def test_text_of_a_gpu_machine_shows_peer_access_and_what_kernels_would_use():
    facts = {**GPU_FACTS, "verdict": doctor.verdict(GPU_FACTS)}
    lines = doctor.as_text(facts).splitlines()
    assert [line for line in lines if line.startswith("cuda device")] == [
        "cuda device 0  9.0, 132 SMs; peer access to 0, 1, ...: yes yes",
        "cuda device 1  9.0, 132 SMs; peer access to 0, 1, ...: no yes",
    ]
    assert "mover          tma, tma (by device; CUPYEP_MOVER: auto)" in lines
    assert "SMs per rank   min(model, SMs) = [16, 16] for one rank per device" in lines
