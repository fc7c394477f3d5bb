"""The low-latency handshake as a state machine: every interleaving of two or three ranks; what breaks without a rule.

A rank's program is a list of halves, ("send" or "receive", channel). A step is one wait, one write to a peer, one read
of our own memory. As in handshake_model.py, memory is sequentially consistent: fences are another matter.
"""

from __future__ import annotations

import itertools

import pytest

Step = tuple  # (kind, channel, epoch, peer)
TWO_OPEN = [("send", 0), ("send", 1), ("receive", 0), ("receive", 1)]  # one turn of a program that keeps two calls open
ONE_AFTER_ANOTHER = [("send", 0), ("receive", 0), ("send", 1), ("receive", 1)]
LATE_FIRST = [("send", 0), ("send", 1), ("receive", 1), ("receive", 0)]


def steps(halves: list[tuple[str, int]], num_ranks: int, rank: int) -> list[Step]:
    """The program of `rank`, step by step. Epochs are counted per channel, from 1."""
    program, epochs = [], {0: 0, 1: 0}
    peers = [(rank + i) % num_ranks for i in range(num_ranks)]
    for half, channel in halves:
        if half == "send":
            epochs[channel] += 1
        epoch = epochs[channel]
        kinds = ("await_consumed", "write", "publish") if half == "send" else ("await_arrival", "read", "tell_done")
        program += [(kind, channel, epoch, peer) for kind in kinds for peer in peers]
    return program


def explore(programs: list[list[Step]], without: str = "") -> str | None:
    """What goes wrong in some interleaving, or None. `without`: a rule that is left out.

    State: how far each rank is, and per (owner, sender, channel): the epoch of the rows, of the word, of the done word.
    """
    num_ranks = len(programs)
    cells = list(itertools.product(range(num_ranks), range(num_ranks), (0, 1)))
    place = {cell: index for index, cell in enumerate(cells)}
    start = ((0,) * num_ranks, (0,) * len(cells), (0,) * len(cells), (0,) * len(cells))
    seen, todo = {start}, [start]
    while todo:
        at, rows, words, done = todo.pop()
        moved = False
        for rank in range(num_ranks):
            if at[rank] == len(programs[rank]):
                continue
            kind, channel, epoch, peer = programs[rank][at[rank]]
            mine, theirs = place[rank, peer, channel], place[peer, rank, channel]
            after = [rows, words, done]
            if kind == "await_consumed":
                if without != "await_consumed" and done[mine] < epoch - 1:
                    continue
            elif kind == "write":
                after[0] = put(rows, theirs, epoch)
            elif kind == "publish":
                after[1] = put(words, theirs, epoch)
            elif kind == "await_arrival":
                if without != "await_arrival" and words[mine] < epoch:
                    continue
            elif kind == "read":
                if rows[mine] != epoch:
                    return f"rank {rank} reads rows of epoch {rows[mine]} of rank {peer}, wants {epoch}"
            else:
                after[2] = put(done, theirs, epoch)
            moved = True
            state = (put(at, rank, at[rank] + 1), *after)
            if state not in seen:
                seen.add(state)
                todo.append(state)
        if not moved and any(position < len(program) for position, program in zip(at, programs, strict=True)):
            return f"nobody can go on at {at}"
    return None


def put(values: tuple, index: int, value: int) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def programs(num_ranks: int, *halves: list[tuple[str, int]]) -> list[list[Step]]:
    """Rank r runs halves[r]; the last ones are for the others as well."""
    return [steps(halves[min(rank, len(halves) - 1)], num_ranks, rank) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    "halves",
    [
        (ONE_AFTER_ANOTHER * 3,),
        (TWO_OPEN * 3,),
        (LATE_FIRST * 2, TWO_OPEN * 2),
        (ONE_AFTER_ANOTHER * 2, LATE_FIRST * 2),
    ],
    ids=["one after another", "two open", "hooks in another order", "mixed"],
)
def test_two_ranks(halves):
    """Also where ranks call their hooks in different orders, or one has two calls open and the other has not."""
    assert explore(programs(2, *halves)) is None


def test_three_ranks():
    assert explore(programs(3, ONE_AFTER_ANOTHER[:2] * 2)) is None


@pytest.mark.parametrize("rule", ["await_consumed", "await_arrival"])
def test_each_wait_is_needed(rule):
    assert "reads rows of epoch" in str(explore(programs(2, TWO_OPEN * 2), without=rule))
