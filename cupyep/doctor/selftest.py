"""A dispatch and a combine of the NumPy backend between two processes: shared memory, mapping and handshake at work."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from cupyep.backends.base import Form, Run
from cupyep.backends.numpy.backend import NumpyBackend
from cupyep.backends.shapes import Outputs, Tokens
from cupyep.comm import Communicator
from cupyep.config import BufferConfig
from cupyep.errors import PeerTimeoutError

TIMEOUT_S = 10.0


class PipeCommunicator(Communicator):
    """Two ranks joined by a pipe: needs no MPI."""

    in_process = False
    size = 2

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self._connection = rank, connection

    def _exchange(self, value: Any, operation: str, timeout_s: float | None) -> list[Any]:
        self._connection.send(value)
        if not self._connection.poll(timeout_s):
            raise PeerTimeoutError(operation, 0, self.rank, 1 - self.rank, timeout_s or 0)
        theirs = self._connection.recv()
        return [value, theirs] if self.rank == 0 else [theirs, value]

    def free(self) -> None:
        """Nothing to give back: the pipe ends with the process."""


def run_rank(rank: int, connection: Connection) -> None:
    """One of the two ranks: its token goes to both, so that each rank adds its own row and the other's copy of it."""
    config = BufferConfig(backend="numpy", timeout_s=TIMEOUT_S)
    backend = NumpyBackend(PipeCommunicator(rank, connection), config)
    x, topk_idx = np.full((1, 8), 1 + rank, np.float32), np.array([[0, 1]])
    came, handle, *_ = backend.dispatch(Tokens(x, topk_idx=topk_idx), 2, Form(), Run())
    combined_x, _, _ = backend.combine(Outputs(came.x), handle, None, Run())
    got = came.x[:, 0].tolist(), combined_x[:, 0].tolist()
    backend.close(collective=True)
    expected = [1.0, 2.0], [2.0 * (1 + rank)]
    if got != expected:
        raise RuntimeError(f"rank {rank}: dispatch and combine: expected {expected}, got {got}")


def shared_memory() -> dict[str, Any]:
    """Runs both ranks, the second in a new process. Raises what went wrong."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run_rank, args=(1, theirs), daemon=True)
    process.start()
    theirs.close()
    run_rank(0, ours)
    process.join(TIMEOUT_S)
    if process.exitcode != 0:
        raise RuntimeError(f"the second process ended with status {process.exitcode}")
    return {"self_test": "dispatch and combine between two processes: ok"}
