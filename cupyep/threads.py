"""run_local: ranks as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupyep.backends import rank_context
from cupyep.comm import run_threads


def run_local(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float | None = None) -> list[Any]:
    """Runs `fn(comm, *args)` in `num_ranks` threads, one per rank, and returns their results in rank order.

    Args:
        fn: the program of one rank; `comm` is its LocalComm, to be given to `cupyep.Buffer`. On a GPU machine its
            thread has a device (rank modulo GPUs) and a non-blocking current stream of its own.
        num_ranks: number of threads, at least 1. More than 8 on one GPU need CUDA_DEVICE_MAX_CONNECTIONS=32 in the
            environment before CUDA starts.
        args: passed on to every rank as they are.
        timeout_s: how long to wait for all ranks, in seconds; None waits for ever.

    Returns: the results, a list in rank order.
    Raises: what a rank raised (the lowest rank's, and a rank's own error rather than one that it got because a peer
        failed). The other ranks are released from cupyep's waits at once. TimeoutError after timeout_s.
    Sync: blocks until every thread has ended.
    """
    return run_threads(fn, num_ranks, args, timeout_s, rank_context)
