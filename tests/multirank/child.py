"""One rank of an MpiJob of launch.py: `child.py FOLDER PARENT`, started by `mpiexec -n N python -m mpi4py`.

Takes the calls 0, 1, ... from the folders of those names until there is an end, or the process PARENT is no more. It
sends its own output to rank-R.log there, and leaves what the function returned in rank-R.result, once its garbage is
gone. An exception leaves rank-R.failed, is printed, and ends the whole job by the hook of `python -m mpi4py`.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import pickle
import shutil
import signal
import sys
import time
from pathlib import Path

from mpi4py import MPI

GRACE_S = 30  # after the deadline; the launcher ends a job within 13


def main(job: Path, parent: int) -> None:
    MPI.COMM_WORLD.Barrier()  # all ranks have mapped MPICH's shared memory file by now; a killed job would leave it
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/mpich_shm_" in line:
            Path(line.split()[5]).unlink(missing_ok=True)
    for number in itertools.count():
        folder, pause_s = job / str(number), 0.002
        while not folder.exists():
            if (job / "end").exists():
                return
            if not Path(f"/proc/{parent}").exists():  # nobody else clears up
                return shutil.rmtree(job, ignore_errors=True)
            time.sleep(pause_s)
            pause_s = min(0.1, pause_s * 1.05)  # two dozen ranks may wait for long, beside others that are timed
        run(MPI.COMM_WORLD, folder)


def run(comm: MPI.Intracomm, folder: Path) -> None:
    log = os.open(folder / f"rank-{comm.rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    with open(folder / "call", "rb") as call:
        sys.path[:], deadline, may_lose_ranks = pickle.load(call)  # the path first: the function may lie anywhere on it
        left_s = deadline - time.monotonic()  # the clock is the host's, so it may be compared between processes
        faulthandler.dump_traceback_later(max(0.1, left_s - 1))  # where a rank hangs, before the launcher kills it
        signal.alarm(max(1, int(left_s) + GRACE_S))  # the end of it, where no launcher is left to kill it
        function, args = pickle.load(call)
    try:
        result = function(comm, *args)
    except BaseException:
        (folder / f"rank-{comm.rank}.failed").touch()
        raise
    part = folder / f"rank-{comm.rank}.part"
    part.write_bytes(pickle.dumps(result))
    del function, args, result
    gc.collect()  # what the function left is gone before the next, and a crash over it is this function's
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    sys.stdout.flush()  # into this log, not the next one's
    part.rename(folder / f"rank-{comm.rank}.result")
    if may_lose_ranks:
        os._exit(0)  # MPI_Finalize would wait for the lost ranks


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
