"""The launcher of MPI jobs itself: results, failures, hangs and lost ranks must all show."""

from __future__ import annotations

import os
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


def test_a_hanging_job_is_killed_and_shows_where_it_hangs(tmp_path):
    start = time.monotonic()
    with pytest.raises(launch.RanksFailed, match=r"no end within 4 s(.|\n)*\[rank-1\].*hang_on_rank_1"):
        launch.mpi(2, hang_on_rank_1, str(tmp_path), timeout_s=4)
    assert time.monotonic() - start < 10
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while (alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def test_the_others_go_on_when_a_rank_may_be_lost():
    assert launch.mpi(3, exit_on_rank_1, may_lose_ranks=True) == [0, None, 2]
    with pytest.raises(launch.RanksFailed, match="exit status"):
        launch.mpi(3, exit_on_rank_1)
    with pytest.raises(launch.RanksFailed, match=r"\[rank-0\] KeyError: 'what went wrong'"):
        launch.mpi(3, fail_where_ranks_may_be_lost, may_lose_ranks=True)
