"""Ranks as threads of one process: for notebooks, debuggers and tests. See cupyep.run_local."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from cupyep import checks
from cupyep.comm.base import Communicator
from cupyep.errors import PeerError, PeerTimeoutError

_WATCH_S = 0.05  # between two looks at what the group's kernels have told

callers: set[int] = set()  # native ids of threads that wait in run_threads, and do nothing else


class _Group:
    """What the threads share: one mailbox per collective step, subgroups, and who has failed."""

    def __init__(self, size: int, failures: dict[int, str], condition: threading.Condition) -> None:
        self.size = size
        self.failures = failures  # rank -> reason; a subgroup has its own ranks, hence its own dict
        self.condition = condition  # one for the whole run, so that a failure wakes every waiter
        self.steps: dict[int, dict[int, Any]] = {}
        self.children: list[_Group] = []
        self.members: list[tuple[_Group, dict[int, int]]] = []  # subgroups and their numbering of our ranks

    def child(self, numbering: dict[int, int]) -> _Group:
        """A group of some of our ranks; `numbering` maps our rank to the child's. Call with the condition held."""
        failures = {numbering[rank]: why for rank, why in self.failures.items() if rank in numbering}
        group = _Group(len(numbering), failures, self.condition)
        self.members.append((group, numbering))
        return group

    def fail(self, rank: int, reason: str) -> None:
        """Marks `rank` as failed here and in every subgroup. Call with the condition held."""
        self.failures.setdefault(rank, reason)
        for group, numbering in self.members:
            if rank in numbering:
                group.fail(numbering[rank], reason)


class LocalComm(Communicator):
    """One thread's membership of a group of threads; `cupyep.run_local` makes them."""

    in_process = True

    def __init__(self, group: _Group, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size
        self._step = 0
        self._num_duplicates = 0

    def _exchange(self, value: Any, operation: str, timeout_s: float | None) -> list[Any]:
        group, step = self._group, self._step
        self._step += 1
        start = time.monotonic()
        with group.condition:
            box = group.steps.setdefault(step, {})
            box[self.rank] = value
            if len(box) == self.size:
                del group.steps[step]  # the waiters hold the box itself
                group.condition.notify_all()
        while len(box) < self.size:
            if failed := self.failed_peer():
                raise PeerError(operation, 0, self.rank, *failed)
            waited = time.monotonic() - start
            late = timeout_s is not None and waited >= timeout_s
            if late and (missing := [rank for rank in range(self.size) if rank not in box]):  # none: it came just now
                raise PeerTimeoutError(operation, 0, self.rank, missing[0], waited)
            if self.watch is not None and waited > _WATCH_S:
                self.watch()
            left = math.inf if timeout_s is None else timeout_s - waited
            with group.condition:
                if len(box) < self.size and not self.failed_peer():
                    group.condition.wait(min(left, _WATCH_S))
        return [box[rank] for rank in range(self.size)]

    def duplicate(self) -> LocalComm:
        """Collective, without waiting: a group of the same threads with steps of its own."""
        index = self._num_duplicates
        self._num_duplicates += 1
        with self._group.condition:
            while len(self._group.children) <= index:
                self._group.children.append(self._group.child({rank: rank for rank in range(self.size)}))
            return LocalComm(self._group.children[index], self.rank)

    def Split(self, color: int = 0, key: int = 0) -> LocalComm:
        """Collective: the group of the ranks that gave the same color, ordered by (key, rank), as in MPI."""
        everyone = self.allgather((color, key), operation="Split")
        ranks = sorted((k, rank) for rank, (c, k) in enumerate(everyone) if c == color)
        numbering = {rank: new for new, (_, rank) in enumerate(ranks)}
        group = None
        if numbering[self.rank] == 0:
            with self._group.condition:
                group = self._group.child(numbering)
        groups = self.allgather(group, operation="Split")
        return LocalComm(groups[ranks[0][1]], numbering[self.rank])

    def failed_peer(self) -> tuple[int, str] | None:
        return next(((rank, why) for rank, why in self._group.failures.items() if rank != self.rank), None)

    def free(self) -> None:
        pass


def single() -> LocalComm:
    """A group of one rank alone."""
    return LocalComm(_Group(1, {}, threading.Condition()), 0)


def run_threads(
    fn: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    timeout_s: float | None,
    context: Callable[[int], AbstractContextManager[None]],
) -> list[Any]:
    """As cupyep.run_local, each thread within `context(rank)`."""
    num_ranks = checks.integer("num_ranks", num_ranks, 1)
    group = _Group(num_ranks, {}, threading.Condition())
    results: list[Any] = [None] * num_ranks
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            with context(rank):
                results[rank] = fn(LocalComm(group, rank), *args)
        except BaseException as error:
            with group.condition:
                errors[rank] = error
                group.fail(rank, f"raised {type(error).__name__}: {error}")
                group.condition.notify_all()

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"cupyep-rank-{rank}", daemon=True)
        for rank in range(num_ranks)
    ]
    callers.add(caller := threading.get_native_id())  # before any of them can look
    try:
        for thread in threads:
            thread.start()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for rank, thread in enumerate(threads):
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive() and not errors:
                raise TimeoutError(f"run_local: rank {rank} is still running after {timeout_s} s")
    except BaseException:  # also Ctrl-C: the threads must not wait for each other any longer
        with group.condition:
            for rank in range(num_ranks):
                group.fail(rank, "was given up by run_local")
            group.condition.notify_all()
        raise
    finally:
        callers.discard(caller)
    if errors:
        own = [rank for rank in sorted(errors) if not isinstance(errors[rank], PeerError)]
        raise errors[own[0] if own else min(errors)]
    return results
