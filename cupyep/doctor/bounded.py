"""Runs one probe in a process of its own, so that a library that hangs, crashes or aborts costs one line of the report.

It also keeps this process clean: importing mpi4py.MPI starts MPI, and a CUDA context takes memory on the device.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

_CHILD = "from cupyep.doctor import bounded; bounded.answer()"


def call(function: str, *, timeout_s: float) -> dict[str, Any]:
    """What `package.module:name` returns, a dict of plain values; {"error": why} if it raises, dies or is late."""
    command = [sys.executable, "-c", _CHILD, function]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {timeout_s:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the probe and whatever it started
    for line in reversed(out.splitlines()):  # libraries may print before and after
        if line.startswith('{"answer": '):
            return json.loads(line)["answer"]
    last = err.strip().splitlines()[-1:] or ["no message"]
    return {"error": f"the probe ended with status {process.returncode}: {last[0]}"}


def answer() -> None:
    """The child: calls the function that the command line names and prints what it returns."""
    module, _, name = sys.argv[1].partition(":")
    try:
        result = getattr(importlib.import_module(module), name)()
    except Exception as error:
        result = {"error": one_line(error)}
    print(json.dumps({"answer": result}), flush=True)


def one_line(error: BaseException) -> str:
    """An exception as one line of text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
