"""Runs `function(comm, *args)` on N ranks: processes of an MPI job (mpi) or threads of this process (threads).

Both return the ranks' results in order. The parent of an MPI job never imports MPI: it starts mpiexec in a process
group of its own, waits with a deadline, and kills the group when that passes: a test fails instead of hanging.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
CHILD = Path(__file__).with_name("child.py")

# An MPI launcher ends the whole job when a rank dies. Where that is the very thing to test, a shell between the two
# holds the rank's place (and its socket to the launcher) until all ranks have ended and the job is killed.
KEEPER = '"$@"; touch "$0/$$.ended"; exec sleep 600'


class RanksFailed(AssertionError):
    """An MPI job that failed or did not end in time; the text is what each rank printed."""


def threads(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """One thread per rank."""
    import cupyep

    return cupyep.run_local(function, num_ranks, *args, timeout_s=timeout_s)


def mpi(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    may_lose_ranks: bool = False,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """One process per rank. `function` must be importable; it, `args` and the results travel as pickles.

    may_lose_ranks: a rank may exit without a result, which is then None, and the others go on without it.
    """
    with tempfile.TemporaryDirectory(prefix="cupyep-mpi-") as name:
        folder = Path(name)
        job = pickle.dumps((sys.path, time.monotonic() + timeout_s, may_lose_ranks)) + pickle.dumps((function, args))
        (folder / "job").write_bytes(job)
        keeper = ["sh", "-c", KEEPER, name] if may_lose_ranks else []
        child = [sys.executable, "-m", "mpi4py", str(CHILD), name]
        command = [mpiexec(), *flags(), "-n", str(num_ranks), *keeper, *child]
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with open(folder / "mpiexec.log", "wb") as log:
            process = subprocess.Popen(
                command,
                env=os.environ | one_thread | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                status = wait(process, folder, num_ranks, timeout_s)
            except subprocess.TimeoutExpired:
                status = f"no end within {timeout_s:g} s"
            finally:
                kill_group(process)
        results = [folder / f"rank-{rank}.result" for rank in range(num_ranks)]
        is_whole = may_lose_ranks or all(result.exists() for result in results)
        if status not in ("exit status 0", "all ended") or any(folder.glob("*.failed")) or not is_whole:
            raise RanksFailed(f"{function.__qualname__} on {num_ranks} ranks: {status}\n{tagged_logs(folder)}")
        return [pickle.loads(result.read_bytes()) if result.exists() else None for result in results]


def wait(process: subprocess.Popen[bytes], folder: Path, num_ranks: int, timeout_s: float) -> str:
    """How the job ended: with an exit status, or with all ranks ended before their keepers. Raises TimeoutExpired."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"exit status {process.wait(0.05)}"
        if len(list(folder.glob("*.ended"))) == num_ranks:
            return "all ended"
    raise subprocess.TimeoutExpired(process.args, timeout_s)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the job: first politely, so that mpiexec ends its ranks, then by force."""
    for number, grace_s in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # ranks that outlived mpiexec


def tagged_logs(folder: Path) -> str:
    """The output of mpiexec and of every rank, each line with its rank in front."""
    return "\n".join(
        f"[{log.stem}] {line}"
        for log in sorted(folder.glob("*.log"))
        for line in log.read_text(errors="replace").splitlines()
    )


@functools.cache
def mpiexec() -> str:
    """The environment's own mpiexec, else the one on PATH."""
    own = Path(sys.executable).with_name("mpiexec")
    found = str(own) if own.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError("mpiexec: expected one beside the Python interpreter or on PATH, got none")
    return found


@functools.cache
def is_open_mpi() -> bool:
    version = subprocess.run([mpiexec(), "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    return "Open MPI" in version or "OpenRTE" in version


def flags() -> list[str]:
    """Open MPI refuses root, and more ranks than cores, unless told."""
    return ["--allow-run-as-root", "--oversubscribe"] if is_open_mpi() else []
