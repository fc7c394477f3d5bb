"""The handshake holds in every interleaving of its steps, and each of its rules is needed: without it, some run breaks.

`pytest -s -k needed` prints those runs.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from handshake_model import Broken, Call, Phase, Property, Rules, Scenario, explore

from cupyep.abi import Operation

RING = ((0, 1), (1, 2), (2, 0))
SWAP = ((1, 2), (2, 1))  # rank 0 exchanges no row with anybody
BOTH = ((0, 1), (1, 0))
COUNT, BARRIER, AGREE = Call(Operation.COUNT), Call(Operation.BARRIER), Call(Operation.PULL, agree=True)


def dispatch(rows: tuple[tuple[int, int], ...]) -> tuple[Call, ...]:
    return COUNT, Call(Operation.PUSH, rows)


def dispatch_combine(rows: tuple[tuple[int, int], ...]) -> tuple[Call, ...]:
    return *dispatch(rows), Call(Operation.PULL, rows)


# Every call ends well: dispatch and combine with partners that change; a count that is made again; a combine whose
# shape is new, between barriers.
ORDINARY = {
    "differing": Scenario(3, dispatch_combine(SWAP) + dispatch_combine(RING)),
    "recount": Scenario(3, (COUNT, *dispatch_combine(SWAP))),
    "between": Scenario(3, (BARRIER, AGREE, Call(Operation.PULL, SWAP), BARRIER)),
}
ONE_CALL = Scenario(3, (Call(Operation.PUSH, RING),))
ALWAYS_DONE = Scenario(3, tuple(Call(Operation.PUSH, rows) for rows in (RING, SWAP, RING)))
TWO_RANKS = Scenario(2, (*dispatch_combine(BOTH), *dispatch(BOTH[:1]), BARRIER))
FAILED_FIRST = Scenario(3, (Call(Operation.PUSH, RING, failed=2), Call(Operation.PULL, SWAP)))
MISMATCH = Scenario(3, (Call(Operation.PUSH, SWAP, differs=2), Call(Operation.PUSH, RING)))
LAST_WITHOUT_DONE = Scenario(3, (Call(Operation.PULL, RING), BARRIER))

holds = functools.cache(explore)  # with every rule kept; each scenario is explored once


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """A quarter of the time would go into looking for cycles among the states; there are none."""
    gc.disable()
    yield
    gc.enable()


def any_rank_stops(scenario: Scenario, *deadlines: int) -> Scenario:
    """`scenario` with a rank that may stop for ever, and with deadlines: of all ranks, or of those given."""
    return replace(scenario, stops=True, deadlines=deadlines or tuple(range(scenario.num_ranks)))


def assert_all_finish(scenario: Scenario, **rules: bool) -> None:
    _, endings = explore(scenario, Rules(**rules))
    assert endings == {(Phase.FINISHED,) * scenario.num_ranks}


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize(
    "scenario", [*ORDINARY.values(), TWO_RANKS, FAILED_FIRST], ids=[*ORDINARY, "two_ranks", "failed_first"]
)
def test_all_ranks_finish_every_call_also_when_the_epoch_wraps(scenario: Scenario, start: int) -> None:
    assert_all_finish(replace(scenario, start=start, modulus=8))


@pytest.mark.parametrize("rank", range(3))
def test_calls_that_end_badly_end_alike_and_the_next_call_works(rank: int) -> None:
    other, good = (rank + 1) % 3, Call(Operation.PUSH, RING)
    failed, differs = Call(Operation.COUNT, failed=rank), Call(Operation.PUSH, SWAP, differs=rank)
    assert_all_finish(Scenario(3, (failed, differs, failed, good)))
    assert_all_finish(Scenario(3, (Call(Operation.PULL, RING, failed=other, differs=rank), good, differs, good)))


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(3, dispatch_combine(SWAP)),
        FAILED_FIRST,
        MISMATCH,
        LAST_WITHOUT_DONE,
        replace(TWO_RANKS, start=5, modulus=8),
    ],
    ids=["dispatch_combine", "failed_first", "mismatch", "last_without_done", "two_ranks"],
)
def test_when_a_rank_stops_anywhere_the_others_leave_with_one_record(scenario: Scenario) -> None:
    _, endings = holds(any_rank_stops(scenario))
    left = {Phase.LEFT, Phase.TOLD}
    assert any(left.issuperset(ending) for ending in endings)  # an abort reaches everybody,
    assert (Phase.FINISHED,) * scenario.num_ranks in endings  # comes too late for any wait,
    # or comes when some ranks have finished their last call: they find it in their abort words (NOT_TOLD).
    assert any(Phase.FINISHED in ending and left.intersection(ending) for ending in endings)


@pytest.mark.parametrize("rank", range(3))
def test_the_deadline_of_one_rank_frees_the_others(rank: int) -> None:
    _, endings = holds(any_rank_stops(Scenario(3, dispatch(SWAP)), rank))
    assert tuple(Phase.TOLD if r == rank else Phase.LEFT for r in range(3)) in endings


BLOCK = "rank . accesses .'s block of call 1"
MUTANTS = [
    *[
        ("wait_for_all", scenario, Property.OVERWRITTEN, "rank 0 posts call . at ., which reads call .")
        for scenario in ORDINARY.values()
    ],
    *[
        ("double_buffered", scenario, Property.OVERWRITTEN, "rank . posts call 2 at ., which reads call 1")
        for scenario in [*ORDINARY.values(), TWO_RANKS, FAILED_FIRST]
    ],
    ("wait_for_all", MISMATCH, Property.VERDICTS_DIFFER, "rank 0 in call 1: expected mismatch, got ok"),
    ("epoch_last", ORDINARY["differing"], Property.STALE, "rank . in call 1 reads .'s words of call 0"),
    ("wait_done", ONE_CALL, Property.OUTSIDE_WINDOW, BLOCK),
    ("keep_aborted_blocks", any_rank_stops(ONE_CALL), Property.OUTSIDE_WINDOW, BLOCK),
    # A rank fails, posts so, gives up on a late one and revokes: the late one must not go on as if nothing had failed.
    ("heed_revoked", any_rank_stops(FAILED_FIRST), Property.VERDICTS_DIFFER, "rank . in call 1: takes 2 for ready"),
    ("await_record", any_rank_stops(ONE_CALL), Property.RECORDS_DIFFER, "records: none, rank .'s"),
    ("single_arbiter", any_rank_stops(ONE_CALL), Property.RECORDS_DIFFER, "records: rank .'s, rank .'s"),
    ("broadcast", any_rank_stops(ONE_CALL), Property.NOT_TOLD, "a rank that has finished does not find rank .'s"),
    ("rebroadcast", any_rank_stops(ONE_CALL), Property.NOT_TOLD, "a rank that has finished does not find rank .'s"),
    # Rank 2 has no deadline. The other two have, and one of them stops: without telling, or just before it would tell.
    ("broadcast", any_rank_stops(ONE_CALL, 0, 1), Property.STUCK, "ranks .2. wait for ever once ranks .1. stop"),
    ("rebroadcast", any_rank_stops(ONE_CALL, 0, 1), Property.STUCK, "ranks .2. wait for ever once ranks .0. stop"),
    # Zero counts as an epoch that has been reached when epochs start just below the wrap.
    ("seeded_words", replace(ORDINARY["differing"], start=6, modulus=8), Property.STALE, "rank . in call 1 reads"),
]


@pytest.mark.parametrize(
    ("rule", "scenario", "broken", "detail"), MUTANTS, ids=[f"{rule}-{broken.name}" for rule, _, broken, _ in MUTANTS]
)
def test_each_rule_is_needed(rule: str, scenario: Scenario, broken: Property, detail: str) -> None:
    holds(scenario)
    with pytest.raises(Broken) as caught:
        explore(scenario, Rules(**{rule: False}))
    print(f"without {rule}: {caught.value}")
    assert caught.value.property is broken
    assert re.match(detail, caught.value.detail)
    assert all(re.match(r"rank \d in call \d, [A-Z]+: ", line) for line in caught.value.trace) and caught.value.trace


@pytest.mark.parametrize("rule", ["wait_for_all", "double_buffered"])
def test_two_rules_matter_only_where_a_call_ends_without_done_words(rule: str) -> None:
    assert_all_finish(ALWAYS_DONE, **{rule: False})


def test_revoking_spares_work_but_no_property_rests_on_it() -> None:
    explore(any_rank_stops(FAILED_FIRST), Rules(revoke=False))


def test_calls_without_done_words_may_not_take_done_words_half_a_turn_behind() -> None:
    """Of 8 epochs here, of 2**32 in the library."""
    assert_all_finish(Scenario(3, (BARRIER,) * 3 + ONE_CALL.calls, modulus=8))
    with pytest.raises(Broken, match="OUTSIDE_WINDOW"):
        explore(Scenario(3, (BARRIER,) * 4 + ONE_CALL.calls, modulus=8))
