"""Several expert-parallel groups in one job: MPI communicators and thread groups from Split, and comm=None."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from cases import Case
from multirank import checks, launch

import cupyep

EVEN = Case(num_ranks=2, hidden=128, tokens="uneven", dtype="bfloat16", seed=600)
ODD = Case(num_ranks=2, hidden=2048, tokens=50, dtype="float16", num_topk=8, idx_dtype="int32", weights=False, seed=601)
THREE = Case(num_ranks=3, hidden=100, tokens="none on one rank", num_topk=4, seed=602)
ONE = Case(num_ranks=1, hidden=7, tokens=9, seed=603)
WHOLE = Case(num_ranks=4, hidden=64, tokens=20, num_topk=8, seed=604)


def two_pairs(comm, backend):
    """Ranks 0 and 2, and ranks 1 and 3: different jobs at the same time, then all four together, interleaved."""
    part = comm.Split(color=comm.rank % 2, key=comm.rank)
    case = ODD if comm.rank % 2 else EVEN
    assert (part.rank, part.size) == (comm.rank // 2, 2)
    with checks.open_buffer(comm, WHOLE, backend) as whole, checks.open_buffer(part, case, backend) as buffer:
        for _ in range(10 + 10 * (comm.rank % 2)):  # the groups need not make the same number of calls
            checks.run_case(part, case, backend, buffer)
        for _ in range(5):
            checks.run_case(part, case, backend, buffer)
            checks.run_case(comm, WHOLE, backend, whole)


def three_and_one(comm, backend):
    """A group of three whose ranks count backwards, and a group of one."""
    part = comm.Split(color=comm.rank == 1, key=-comm.rank)
    case = ONE if comm.rank == 1 else THREE
    assert (part.rank, part.size) == ((0, 1) if comm.rank == 1 else ({3: 0, 2: 1, 0: 2}[comm.rank], 3))
    for _ in range(3):
        checks.run_case(part, case, backend)


ONE_GROUP = "expected one group of threads at a time on GPU"  # a group's library calls may wait for another's kernels


def test_two_pairs(run_ranks, backend):
    if backend == "cuda" and run_ranks is launch.threads and num_gpus() < 4:
        run_ranks(4, second_group, backend)
    else:
        run_ranks(4, two_pairs, backend)


def second_group(comm, backend):
    """Refused while another group of threads has a Buffer open at the same GPU, which goes on."""
    with checks.open_buffer(comm, WHOLE, backend) as whole:
        with pytest.raises(cupyep.StateError, match=ONE_GROUP):
            checks.open_buffer(comm.Split(color=comm.rank % 2, key=comm.rank), EVEN, backend)
        checks.run_case(comm, WHOLE, backend, whole)


def num_gpus():
    import cupy

    return cupy.cuda.runtime.getDeviceCount()


def one_beside_three(comm, backend):
    """Also a rank alone is refused beside a group of other threads, and may be where one of them has a Buffer more."""
    part = comm.Split(color=comm.rank == 1, key=comm.rank)
    if comm.rank != 1:
        with checks.open_buffer(part, THREE, backend) as buffer:
            comm.allgather(None)
            comm.allgather(None)
            if comm.rank == 0:
                checks.open_buffer(comm.Split(color=0), ONE, backend).close()
            else:
                comm.Split(color=comm.rank)
            checks.run_case(part, THREE, backend, buffer)
    else:
        comm.allgather(None)
        with pytest.raises(cupyep.StateError, match=ONE_GROUP):
            checks.open_buffer(part, ONE, backend)
        comm.allgather(None)
        comm.Split(color=comm.rank)


def test_three_and_one(run_ranks, backend):
    if backend == "cuda" and run_ranks is launch.threads and num_gpus() < 4:
        run_ranks(4, one_beside_three, backend)
    else:
        run_ranks(4, three_and_one, backend)


def default_comm(comm, case, backend):
    """comm=None in a job that an MPI launcher started is all of its ranks."""
    with cupyep.Buffer(None, backend=backend, timeout_s=checks.TIMEOUT_S) as buffer:
        assert (buffer.rank, buffer.size) == (comm.rank, comm.size)
        checks.run_case(comm, case, backend, buffer)


def test_no_comm_is_the_whole_mpi_job(backend):
    launch.mpi(3, default_comm, THREE, backend)


def test_no_comm_is_one_rank_alone(backend):
    with cupyep.Buffer(backend=backend) as buffer:
        assert (buffer.rank, buffer.size) == (0, 1)
        checks.run_case(SimpleNamespace(rank=0), ONE, backend, buffer)


def test_thread_groups_side_by_side(backend):
    """Two run_local at once share nothing. On a GPU they may not meet: then one of them is refused, and only that."""
    failures = []

    def run(case):
        try:
            launch.threads(2, checks.run_cases, (case,) * 10, backend, True)
        except Exception as error:
            failures.append(error)

    groups = [threading.Thread(target=run, args=(case,)) for case in (EVEN, ODD)]
    for group in groups:
        group.start()
    for group in groups:
        group.join(checks.TIMEOUT_S)
    assert not any(group.is_alive() for group in groups)
    if backend == "cuda" and len(failures) == 1:
        assert ONE_GROUP in str(failures[0])
    else:
        assert not failures
