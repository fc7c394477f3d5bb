"""Buffer.peer_arrays: ranks write into each other's arenas and read from them, by tma.copy and copy_rows."""

from __future__ import annotations

import numpy as np
import pytest
from multirank import checks

import cupyep
from cupyep import tma

NUM_RANKS, ROWS, COLUMNS = 3, 40, 100


def content(xp, rank):
    return (xp.arange(ROWS * COLUMNS, dtype=np.int32) + 1_000_000 * rank).reshape(ROWS, COLUMNS)


def exchange(comm, backend):
    xp = checks.namespace(backend)
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    with cupyep.Buffer(comm, 1 << 20, backend=backend, timeout_s=checks.TIMEOUT_S) as buffer:
        ours, rows = buffer.empty((ROWS, COLUMNS), np.int32), buffer.empty((comm.rank + 1, COLUMNS), np.int32)
        ours[...], rows[...] = -1, 0
        every, every_rows = buffer.peer_arrays(ours), buffer.peer_arrays(rows)
        assert [theirs.shape for theirs in every_rows] == [(rank + 1, COLUMNS) for rank in range(comm.size)]
        buffer.barrier().synchronize()
        tma.copy(every[right], content(xp, comm.rank), num_sms=2).synchronize()
        buffer.barrier().synchronize()
        assert (ours == content(xp, left)).all()  # pushed
        fetched = xp.zeros((ROWS, COLUMNS), np.int32)
        tma.copy_rows(fetched, None, every[left], list(range(ROWS))[::-1], num_sms=2).synchronize()
        assert (fetched[::-1] == content(xp, (left - 1) % comm.size)).all()  # pulled
        buffer.barrier().synchronize()
        for turn in range(comm.size):  # one adds to everybody, then the next
            for theirs in every_rows if turn == comm.rank else ():
                tma.reduce_add(theirs[:1], xp.ones((1, COLUMNS), np.int32), num_sms=1).synchronize()
            buffer.barrier().synchronize()
        assert (rows[:1] == comm.size).all() and not rows[1:].any()
        with pytest.raises(ValueError, match="array: expected a C-contiguous one of this Buffer's arena"):
            buffer.peer_arrays(xp.zeros(4, np.int32))
        buffer.barrier().synchronize()


def odd_arrays(comm, backend):
    """Received arrays without rows, and slices that start anywhere."""
    xp = checks.namespace(backend)
    with cupyep.Buffer(comm, 1 << 20, backend=backend, timeout_s=checks.TIMEOUT_S) as buffer:
        x, topk_idx = xp.full((2, 4), 7, np.float32), xp.zeros((2, 1), np.int64)  # all tokens go to rank 0
        for options in ({}, {"copy": True}) if comm.rank else ({}, {}):
            every = buffer.peer_arrays(buffer.dispatch(x, topk_idx, num_experts=comm.size, **options).recv_x)
            assert [theirs.shape for theirs in every] == [(2 * comm.size, 4)] + [(0, 4)] * (comm.size - 1)
            assert (every[0] == 7).all()
            buffer.barrier().synchronize()
        ours = buffer.empty((3, 3), np.float32)
        ours[...] = comm.rank
        every = buffer.peer_arrays(ours[1:])
        buffer.barrier().synchronize()
        assert [theirs[1, 2].item() for theirs in every] == list(range(comm.size))
        with pytest.raises(ValueError, match="got one that is not contiguous"):
            buffer.peer_arrays(ours[:, 1:])
        buffer.barrier().synchronize()


def test_arrays_without_rows_and_slices(run_ranks, backend):
    run_ranks(NUM_RANKS, odd_arrays, backend)


def test_copies_between_arenas(run_ranks, backend):
    run_ranks(NUM_RANKS, exchange, backend)
