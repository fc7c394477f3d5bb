"""Options and fixtures of all tests, and the import path of what they share (reference, cases, multirank).

`pytest -m backend --backend=cuda` runs on the GPU every test that has a backend.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from multirank import launch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="200 schedules of every interpreted case instead of a few")
    parser.addoption("--backend", choices=["numpy", "cuda"], default="numpy", help="of the tests marked backend")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long"):
        os.environ.setdefault("CUPYEP_PTXSIM_SEEDS", "200")
    config.addinivalue_line("markers", "backend: runs the backend that --backend names (set by using the fixture)")


def pytest_sessionfinish() -> None:
    launch.close_all()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "backend" in getattr(item, "fixturenames", ()):
            item.add_marker("backend")


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """The --backend under test; cuda skips where there is no GPU."""
    name = request.config.getoption("--backend")
    if name == "cuda":
        cupy = pytest.importorskip("cupy")
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            pytest.skip(f"--backend=cuda: no usable GPU: {error}")
    return name


@pytest.fixture(params=["threads", "mpi"])
def run_ranks(request: pytest.FixtureRequest) -> Callable:
    """launch.threads or launch.mpi: `run_ranks(num_ranks, function, *args)` returns the ranks' results."""
    return getattr(launch, request.param)
