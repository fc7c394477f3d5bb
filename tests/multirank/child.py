"""One rank of a job of launch.mpi: `child.py FOLDER`, started by `mpiexec -n N python -m mpi4py`.

Reads the job from FOLDER, sends its own output to rank-R.log there, and leaves what the function returned in
rank-R.result. An exception leaves rank-R.failed, is printed, and ends the whole job by the hook of `python -m mpi4py`.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import time
from pathlib import Path

from mpi4py import MPI


def main(folder: Path) -> None:
    comm = MPI.COMM_WORLD
    log = os.open(folder / f"rank-{comm.rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    comm.Barrier()  # all ranks have mapped MPICH's shared memory file by now; a killed job would leave it behind
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/mpich_shm_" in line:
            Path(line.split()[5]).unlink(missing_ok=True)
    with open(folder / "job", "rb") as job:
        sys.path[:], deadline, may_lose_ranks = pickle.load(job)  # the path first: the function may lie anywhere on it
        left_s = deadline - time.monotonic()  # the clock is the host's, so it may be compared between processes
        faulthandler.dump_traceback_later(max(0.1, left_s - 1))  # where a rank hangs, before the launcher kills it
        function, args = pickle.load(job)
    try:
        result = function(comm, *args)
    except BaseException:
        (folder / f"rank-{comm.rank}.failed").touch()
        raise
    part = folder / f"rank-{comm.rank}.part"
    part.write_bytes(pickle.dumps(result))
    part.rename(folder / f"rank-{comm.rank}.result")
    faulthandler.cancel_dump_traceback_later()
    if may_lose_ranks:
        os._exit(0)  # MPI_Finalize would wait for the lost ranks


if __name__ == "__main__":
    main(Path(sys.argv[1]))
