"""Importing cupyep compiles, and neither initialises CUDA nor takes long. Each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.gpu

INITIALISED = """
from cupy.cuda import driver
try:
    driver.ctxGetCurrent()
    print("initialised")
except driver.CUDADriverError as error:
    print(error)
"""

CREATION = """
import time, cupy, cupyep
cupy.zeros(1)
cupyep.Buffer(backend="cuda").close()
start = time.perf_counter()
with cupyep.Buffer(backend="cuda"):
    print(time.perf_counter() - start)
"""


def run(code: str, cache: str) -> str:
    environment = os.environ | {"CUPYEP_CACHE_DIR": cache}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    ).stdout


def test_cuda_would_be_seen(tmp_path):
    code = "import cupy; cupy.cuda.runtime.getDeviceCount()" + INITIALISED
    assert run(code, str(tmp_path)).strip() == "initialised"


def test_import_builds_kernels_without_initialising_cuda(tmp_path):
    assert "NOT_INITIALIZED" in run("import cupyep" + INITIALISED, str(tmp_path))
    assert list(tmp_path.glob("count-*.cubin")) and list(tmp_path.glob("barrier-*.cubin"))


def test_warm_import_and_warm_creation_take_less_than_a_second_each(tmp_path):
    run("import cupyep", str(tmp_path))
    bare = timed("import numpy, ml_dtypes, cupy", str(tmp_path))
    assert timed("import cupyep", str(tmp_path)) - bare < 1
    assert float(run(CREATION, str(tmp_path))) < 1


def timed(code: str, cache: str) -> float:
    start = time.perf_counter()
    run(code, cache)
    return time.perf_counter() - start
