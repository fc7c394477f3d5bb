"""The launcher of MPI jobs itself: results, failures, hangs and lost ranks must all show."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from multirank import launch


def rank_and_size(comm, offset):
    return comm.rank + offset, comm.size, os.getpid()


def fail_on_rank_1(comm):
    if comm.rank == 1:
        raise KeyError("what went wrong")
    comm.barrier()


def hang_on_rank_1(comm, folder):
    (Path(folder) / str(os.getpid())).touch()
    if comm.rank == 1:
        time.sleep(100)
    comm.barrier()


def exit_on_rank_1(comm):
    comm.barrier()
    if comm.rank == 1:
        os._exit(3)
    time.sleep(1)  # long enough to be killed, if ranks were killed when one exits
    return comm.rank


def fail_where_ranks_may_be_lost(comm):
    if comm.rank == 0:
        time.sleep(0.3)
        raise KeyError("what went wrong")


class Crash:
    """Ends the process when the garbage collector finds it."""

    def __init__(self):
        self.cycle = self

    def __del__(self):
        os._exit(7)


def leave_garbage(comm):
    gc.collect()
    gc.disable()
    Crash()
    gc.enable()


def print_line(comm, line):
    print(line)
    if "later" in line:
        raise KeyError(line)


def time_until_the_alarm(comm):
    return signal.getitimer(signal.ITIMER_REAL)[0]


def test_results_come_in_rank_order():
    results = launch.mpi(3, rank_and_size, 10)
    assert [result[:2] for result in results] == [(10, 3), (11, 3), (12, 3)]
    assert len({pid for *_, pid in results} | {os.getpid()}) == 4


def test_ranks_are_used_again_unless_they_failed_or_must_be_fresh():
    def pids(**options):
        return {pid for *_, pid in launch.mpi(2, rank_and_size, 0, **options)}

    first = pids()
    assert pids() == first
    fresh = pids(is_fresh=True)
    assert not fresh & first and pids() == first
    assert not pids(env={"CUPYEP_OTHER": "1"}) & first
    with pytest.raises(launch.RanksFailed):
        launch.mpi(2, fail_on_rank_1)
    assert not pids() & (first | fresh)


def test_a_failing_rank_fails_the_job_and_is_named():
    with pytest.raises(launch.RanksFailed, match=r"\[rank-1\] KeyError: 'what went wrong'"):
        launch.mpi(2, fail_on_rank_1)


def test_what_a_function_left_is_its_own():
    """A crash over its garbage, and what it has printed, are not the next function's."""
    with pytest.raises(launch.RanksFailed, match=r"leave_garbage on 2 ranks: exit status 7"):
        launch.mpi(2, leave_garbage)
    launch.mpi(2, print_line, "an earlier line")
    with pytest.raises(launch.RanksFailed, match=r"\[rank-1\] a later line") as caught:
        launch.mpi(2, print_line, "a later line")
    assert "earlier" not in str(caught.value)


def test_ranks_end_when_their_parent_was_killed(tmp_path):
    """They wait for a function then; one that hangs in it has an alarm."""
    program = """if True:
        import os, signal, sys
        from pathlib import Path
        from multirank import launch, test_launch
        for *_, pid in launch.mpi(2, test_launch.rank_and_size, 0):
            (Path(sys.argv[1]) / str(pid)).touch()
        print(launch._kept[0]._folder, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, str(tmp_path)]
    killed = subprocess.run(command, env=environment, timeout=60, stdout=subprocess.PIPE, text=True)
    assert killed.returncode == -signal.SIGKILL
    assert_ended(tmp_path)
    assert not Path(killed.stdout.strip()).exists()
    for left_s in launch.mpi(2, time_until_the_alarm, timeout_s=50):
        assert 50 < left_s < 90


def assert_ended(folder):
    """Both ranks, which have left their process ids in `folder`."""
    pids = [int(path.name) for path in folder.iterdir()]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while (alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def test_a_hanging_job_is_killed_and_shows_where_it_hangs(tmp_path):
    start = time.monotonic()
    with pytest.raises(launch.RanksFailed, match=r"no end within 4 s(.|\n)*\[rank-1\].*hang_on_rank_1"):
        launch.mpi(2, hang_on_rank_1, str(tmp_path), timeout_s=4)
    assert time.monotonic() - start < 10
    assert_ended(tmp_path)


def test_the_others_go_on_when_a_rank_may_be_lost():
    assert launch.mpi(3, exit_on_rank_1, may_lose_ranks=True) == [0, None, 2]
    with pytest.raises(launch.RanksFailed, match="exit status"):
        launch.mpi(3, exit_on_rank_1)
    with pytest.raises(launch.RanksFailed, match=r"\[rank-0\] KeyError: 'what went wrong'"):
        launch.mpi(3, fail_where_ranks_may_be_lost, may_lose_ranks=True)
