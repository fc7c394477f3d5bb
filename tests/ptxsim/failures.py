"""Ranks that do not come, stop on the way or are told to leave: who must name whom."""

from __future__ import annotations

import functools

from cases import Case

from cupyep import abi, layout
from cupyep.errors import PeerError, PeerTimeoutError
from ptxsim.harness import Group, Job, Rank
from ptxsim.sources import Patch


def check_failures(group: Group) -> None:
    """After a job with a rank that did not come, or not in time: everyone who waited names it, with one record."""
    at = group.job.absent or group.job.stalled
    if at is None:
        return
    missing, name = at
    words = {rank.abort_word() for rank in group.ranks}
    assert len(words) == 1, f"abort words differ: {words}"
    word = words.pop()
    if group.job.stalled and not word:  # it came through before it stopped
        assert all(rank.error is None for rank in group.ranks), "an error without a record"
        return
    kind, operation, reporter, peer, _ = abi.unpack_abort(word)
    assert (kind, peer) == (abi.AbortKind.TIMEOUT, missing) and reporter != missing, f"record {word:#x}"
    assert group.job.stalled or operation.name == name.upper(), f"operation {operation}"
    for rank in group.ranks:
        through = group.job.stalled or rank.rank == missing  # may have been through before anybody gave up
        assert isinstance(rank.error, PeerTimeoutError) or (rank.error is None and through), f"{rank.error}"
        assert rank.error is None or (rank.error.peer, rank.error.rank) == (missing, reporter), f"{rank.error}"


def run_barriers(num_ranks: int, seed: int) -> None:
    """Two BARRIERs of all ranks, then one that rank 0 ends by an abort in place of coming."""
    group, arrived = Group(Job(Case(num_ranks=num_ranks, tokens=1)), seed), []

    def arrive(rank: Rank) -> None:
        arrived.append(rank.rank)
        rank.launcher.barrier()

    def through(rank: Rank, number: int) -> None:
        rank.launcher.check()
        assert len(arrived) >= number * num_ranks, f"through barrier {number} after {arrived}"

    group.scheduler.run({rank.rank: [step for number in (1, 2) for step in (
        functools.partial(arrive, rank), functools.partial(through, rank, number))] for rank in group.ranks})
    first, *others = group.ranks
    group.scheduler.run({0: [lambda: first.launcher.abort(abi.AbortKind.CLOSED, 0, None)]} | {
        rank.rank: [rank.launcher.barrier, functools.partial(rank.attempt, rank.launcher.check)] for rank in others})
    assert len({rank.abort_word() for rank in group.ranks}) == 1
    for rank in others:
        assert isinstance(rank.error, PeerError) and rank.error.peer == 0, f"rank {rank.rank}: {rank.error}"


def run_unordered(seed: int, num_bursts: int, patch: Patch = ()) -> bool:
    """Two BARRIERs of one rank with nothing to order them; while the first runs, the other gets `num_bursts` turns.

    Either one ran after the other, or the record says that they overlapped: returned.
    """
    group = Group(Job(Case(num_ranks=1, tokens=1), patch=patch), seed)
    (rank,) = group.ranks

    def both() -> None:
        rank.launcher.barrier()
        rank.launcher.barrier()
        first, second = group.scheduler.ctas
        turns = iter(range(num_bursts))
        group.scheduler.stalls = lambda cta: (  # type: ignore[method-assign]
            cta is second and first in group.scheduler.ctas and next(turns, None) is None)

    group.scheduler.run({0: [both]})
    region = layout.ControlLayout(1).region(layout.Channel.BARRIER, "state")
    state = rank.space.read(0, rank.arena + region.offset, (), layout.CHANNEL_STATE.dtype)
    if word := rank.abort_word():
        assert abi.unpack_abort(word)[0] == abi.AbortKind.OVERLAP, f"record {word:#x}"
    else:
        assert int(state["epoch"]) == 2, f"both ended well, at epoch {state['epoch']}"
    assert not state["busy"]
    return word != 0
