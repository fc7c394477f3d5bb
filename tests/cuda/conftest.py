"""Marks and fixtures of the CUDA tests. What needs a GPU carries the mark gpu and skips where CuPy finds none.

Ranks that wait for each other run in processes of their own, with a deadline: see gpu_helpers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cupyep import env

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # compile_helpers

MARKS = {
    "gpu": "needs a GPU that CuPy can use",
    "alone": "looks at the GPU's free memory, or at times: nothing else may use the GPU",
    "no_mps": "kills a process with GPU work outstanding, which leaves other clients of MPS undefined: MPS must be off",
}


def pytest_configure(config: pytest.Config) -> None:
    for name, text in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and (why := why_no_gpu()):
            item.add_marker(pytest.mark.skip(reason=why))
        elif item.get_closest_marker("no_mps") and (env.mps_pipe_dir() / "control").exists():
            item.add_marker(pytest.mark.skip(reason=MARKS["no_mps"]))


@functools.cache
def why_no_gpu() -> str | None:
    """Why no test can use a GPU here, or None. Makes no CUDA context."""
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        return f"no CuPy: {error}"
    try:
        return None if runtime.getDeviceCount() else "CuPy finds no GPU"
    except runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU: {error}"


@pytest.fixture(params=["threads", "mpi"])
def run_ranks(request: pytest.FixtureRequest) -> Callable:
    """As the fixture of all tests, with each job of threads in a process of its own."""
    import gpu_helpers

    return getattr(gpu_helpers, request.param)
