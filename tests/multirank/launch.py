"""Runs `function(comm, *args)` on N ranks: processes of an MPI job (mpi) or threads of this process (threads).

Both return the ranks' results in order. The parent of an MPI job never imports MPI: it starts mpiexec in a process
group of its own, waits with a deadline, and kills the group when that passes: a test fails instead of hanging.

An MPI job takes seconds to start, so its ranks wait for the next function: a few jobs of one environment are kept. One
that fails, or may lose ranks, is never used again.
"""

from __future__ import annotations

import atexit
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
MOST_KEPT = 3  # jobs

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
    is_fresh: bool = False,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """One process per rank. `function` must be importable; it, `args` and the results travel as pickles.

    may_lose_ranks: a rank may exit without a result, which is then None, and the others go on without it.
    is_fresh: processes that nothing has run in, and that nothing will run in later.
    """
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = os.environ | one_thread | (env or {})
    environment.pop("PYTEST_CURRENT_TEST", None)
    is_kept = not (is_fresh or may_lose_ranks)
    alike = [job for job in _kept if is_kept and (job.num_ranks, job.environment) == (num_ranks, environment)]
    if alike:
        _kept.remove(job := alike[0])
    else:
        for other in [job for job in _kept if job.environment != environment]:  # hardly of use again
            _kept.remove(other)
            other.close()  # each process holds channels of the GPU, which has about 500
        job = MpiJob(num_ranks, environment, may_lose_ranks)
    try:
        results = job.run(function, args, timeout_s)
    except BaseException:
        job.close(grace_s=0)
        raise
    if is_kept:
        _kept.append(job)
        if len(_kept) > MOST_KEPT:
            _kept.pop(0).close()
    else:
        job.close(grace_s=0 if may_lose_ranks else 5)
    return results


_kept: list[MpiJob] = []  # the one used last comes last


@atexit.register
def close_all() -> None:
    while _kept:
        _kept.pop().close()


class MpiJob:
    """Ranks that wait for functions. Each call has a folder of its own, by its number, in the job's."""

    def __init__(self, num_ranks: int, environment: dict[str, str], may_lose_ranks: bool) -> None:
        self.num_ranks, self.environment, self._may_lose_ranks = num_ranks, environment, may_lose_ranks
        self._folder, self._num_calls = Path(tempfile.mkdtemp(prefix="cupyep-mpi-")), 0
        keeper = ["sh", "-c", KEEPER, str(self._folder)] if may_lose_ranks else []
        child = [sys.executable, "-m", "mpi4py", str(CHILD), str(self._folder), str(os.getpid())]
        with open(self._folder / "mpiexec.log", "wb") as log:
            self._process = subprocess.Popen(
                [mpiexec(), *flags(), "-n", str(num_ranks), *keeper, *child],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, function: Callable[..., Any], args: tuple, timeout_s: float) -> list[Any]:
        """The ranks' results. RanksFailed unless all have one in time, or may be lost."""
        folder, hidden = self._folder / str(self._num_calls), self._folder / "next"
        self._num_calls += 1
        hidden.mkdir()
        call = pickle.dumps((sys.path, time.monotonic() + timeout_s, self._may_lose_ranks))
        (hidden / "call").write_bytes(call + pickle.dumps((function, args)))
        hidden.rename(folder)
        paths = [folder / f"rank-{rank}.result" for rank in range(self.num_ranks)]
        status = self._wait(paths, timeout_s)
        is_whole = self._may_lose_ranks or all(path.exists() for path in paths)
        if status or any(folder.glob("*.failed")) or not is_whole:
            self._kill()  # so that all has been printed
            raise RanksFailed(f"{function.__qualname__} on {self.num_ranks} ranks: {status}\n{self._logs(folder)}")
        results = [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]
        shutil.rmtree(folder, ignore_errors=True)  # what ranks still print goes nowhere
        return results

    def _wait(self, results: list[Path], timeout_s: float) -> str:
        """How the job ended, "" if well: every rank has a result or, if ranks may be lost, has ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if all(path.exists() for path in results) and not self._may_lose_ranks:
                return ""
            if len(list(self._folder.glob("*.ended"))) == self.num_ranks:
                return ""
            with contextlib.suppress(subprocess.TimeoutExpired):
                return f"exit status {self._process.wait(0.005)}"
        return f"no end within {timeout_s:g} s"

    def close(self, grace_s: float = 5) -> None:
        """Tells the ranks to end, waits so long for them, and ends those that are left."""
        (self._folder / "end").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        """Ends what is left of the job: first politely, so that mpiexec ends its ranks, then by force."""
        for number, grace_s in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # ranks that outlived mpiexec

    def _logs(self, folder: Path) -> str:
        """The output of mpiexec and of every rank, each line with its rank in front."""
        return "\n".join(
            f"[{log.stem}] {line}"
            for log in (self._folder / "mpiexec.log", *sorted(folder.glob("*.log")))
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
