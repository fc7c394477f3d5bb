"""The folder of shared memory between CPU ranks: full, or none at all. Every rank raises, and the error names it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from multirank import launch

import cupyep

pytestmark = pytest.mark.timeout(120)


def _full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full(comm):
    with cupyep.Buffer(comm, backend="numpy", max_tokens_per_rank=4, timeout_s=30) as buffer:
        x, idx = np.ones((4, 8), np.float32), np.zeros((4, 1), np.int64)
        fallocate = os.posix_fallocate
        os.posix_fallocate = _full
        try:
            with pytest.raises(cupyep.ArenaExhaustedError, match="CUPYEP_SHM_DIR"):
                buffer.empty((4, 8), np.float32)
        finally:
            os.posix_fallocate = fallocate
        comm.Barrier()
        assert (buffer.dispatch(x, idx, num_experts=2).recv_x == 1).all()


def test_a_full_folder_of_processes():
    launch.mpi(2, full)


def no_folder(comm, path):
    os.environ["CUPYEP_SHM_DIR"] = path
    try:
        with pytest.raises(OSError, match="CUPYEP_SHM_DIR names another folder") as caught:
            cupyep.Buffer(comm, backend="numpy", max_tokens_per_rank=4, timeout_s=30)
    finally:
        del os.environ["CUPYEP_SHM_DIR"]
    return type(caught.value)


def test_a_file_in_place_of_the_folder_of_processes(tmp_path: Path):
    (tmp_path / "file").touch()
    assert launch.mpi(2, no_folder, str(tmp_path / "file")) == [NotADirectoryError] * 2
    assert launch.mpi(2, no_folder, str(tmp_path / "missing")) == [FileNotFoundError] * 2
