"""The handshake holds in every interleaving of its steps, and each of its rules is needed: without it, some run breaks.

`pytest -s -k needed` prints those runs.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
from handshake_model import Broken, Call, Phase, Property, Rules, Scenario, explore

from cupyep.abi import Operation

RING = ((0, 1), (1, 2), (2, 0))
SWAP = ((1, 2), (2, 1))  # rank 0 exchanges no row with anybody
BOTH = ((0, 1), (1, 0))
DIFFERING = Scenario(3, (Call(Operation.PUSH, RING), Call(Operation.COUNT, SWAP[:1]), Call(Operation.PULL, SWAP)))
TWO_RANKS = Scenario(2, (Call(Operation.COUNT, BOTH), Call(Operation.PUSH, BOTH), Call(Operation.PULL, BOTH[:1]),
                         Call(Operation.BARRIER)))
# The first call ends without done words, so that rank 0, which then has no partner, may run ahead.
FAILED_FIRST = Scenario(3, (Call(Operation.PUSH, RING, failed=2), *[Call(Operation.PULL, SWAP)] * 2))
MISMATCH = Scenario(3, (Call(Operation.PUSH, SWAP, differs=2), Call(Operation.PUSH, RING)))
ONE_CALL = replace(DIFFERING, calls=DIFFERING.calls[:1])


holds = functools.cache(explore)  # with every rule kept; each scenario is explored once


def any_rank_stops(scenario: Scenario, *deadlines: int) -> Scenario:
    """`scenario` with a rank that may stop for ever, and with deadlines: of all ranks, or of those given."""
    return replace(scenario, stops=True, deadlines=deadlines or tuple(range(scenario.num_ranks)))


def assert_all_finish(scenario: Scenario, **rules: bool) -> None:
    _, endings = explore(scenario, Rules(**rules))
    assert endings == {(Phase.FINISHED,) * scenario.num_ranks}


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize("scenario", [DIFFERING, TWO_RANKS, FAILED_FIRST], ids=["differing", "two", "failed_first"])
def test_all_ranks_finish_every_call_also_when_the_epoch_wraps(scenario: Scenario, start: int) -> None:
    assert_all_finish(replace(scenario, start=start, modulus=8))


@pytest.mark.parametrize("rank", range(3))
def test_calls_that_end_badly_end_alike_and_the_next_call_works(rank: int) -> None:
    other, good = (rank + 1) % 3, Call(Operation.PUSH, RING)
    failed, differs = Call(Operation.COUNT, RING, failed=rank), Call(Operation.PUSH, SWAP, differs=rank)
    assert_all_finish(Scenario(3, (failed, differs, failed, good)))
    assert_all_finish(Scenario(3, (Call(Operation.PULL, RING, failed=other, differs=rank), good, differs, good)))


@pytest.mark.parametrize(
    "scenario",
    [DIFFERING, replace(DIFFERING, calls=FAILED_FIRST.calls[:2]), MISMATCH, replace(TWO_RANKS, start=5, modulus=8)],
    ids=["differing", "failed_first", "mismatch", "two_ranks"],
)
def test_when_a_rank_stops_anywhere_the_others_leave_with_one_record(scenario: Scenario) -> None:
    _, endings = holds(any_rank_stops(scenario))
    assert (Phase.LEFT,) * scenario.num_ranks in endings  # an abort reaches everybody,
    assert (Phase.FINISHED,) * scenario.num_ranks in endings  # comes too late for any wait,
    assert any(len(set(ending)) == 2 for ending in endings)  # or comes when some ranks have finished


@pytest.mark.parametrize("rank", range(3))
def test_the_deadline_of_one_rank_frees_the_others(rank: int) -> None:
    _, endings = holds(any_rank_stops(DIFFERING, rank))
    assert (Phase.LEFT,) * 3 in endings


MUTANTS = [
    ("wait_for_all", FAILED_FIRST, Property.OVERWRITTEN, "rank 0 posts call 3 at ., which reads call 1"),
    ("wait_for_all", MISMATCH, Property.VERDICTS_DIFFER, "rank 0 in call 1: expected mismatch, got ok"),
    ("double_buffered", FAILED_FIRST, Property.OVERWRITTEN, "rank . posts call 2 at ., which reads call 1"),
    ("epoch_last", DIFFERING, Property.STALE, "rank . in call 1 reads .'s words of call 0"),
    ("wait_done", DIFFERING, Property.OUTSIDE_WINDOW, "rank . accesses .'s block of call 1"),
    ("keep_aborted_blocks", any_rank_stops(ONE_CALL), Property.OUTSIDE_WINDOW, "rank . accesses .'s block of call 1"),
    ("single_arbiter", any_rank_stops(ONE_CALL), Property.RECORDS_DIFFER, "rank (.) gave up on . / rank (?!\\1)"),
    # Rank 0 has the deadline: as its abort word is the arbiter, it would learn of the record without any broadcast.
    ("broadcast", any_rank_stops(DIFFERING, 0), Property.STUCK, "ranks .[12]. wait for ever once ranks .[12]. stop"),
    ("broadcast", any_rank_stops(ONE_CALL), Property.RECORDS_DIFFER, "no record / rank . gave up on ."),
    # Zero counts as an epoch that has been reached, or even as the one awaited, when epochs start just below the wrap.
    ("seeded_words", replace(DIFFERING, start=5, modulus=8), Property.OUTSIDE_WINDOW, "rank . accesses .'s block"),
    ("seeded_words", replace(DIFFERING, start=6, modulus=8), Property.STALE, "rank . in call 2 reads .'s words"),
]


@pytest.mark.parametrize(
    ("rule", "scenario", "broken", "detail"), MUTANTS, ids=[f"{rule}-{broken.name}" for rule, _, broken, _ in MUTANTS])
def test_each_rule_is_needed(rule: str, scenario: Scenario, broken: Property, detail: str) -> None:
    holds(scenario)
    with pytest.raises(Broken) as caught:
        explore(scenario, Rules(**{rule: False}))
    print(f"without {rule}: {caught.value}")
    assert caught.value.property is broken
    assert re.fullmatch(f"{detail}.*", caught.value.detail)
    assert all(re.match(r"rank \d in call \d, [A-Z]+: ", line) for line in caught.value.trace) and caught.value.trace


@pytest.mark.parametrize("rule", ["wait_for_all", "double_buffered"])
def test_two_rules_matter_only_where_a_call_ends_without_done_words(rule: str) -> None:
    assert_all_finish(DIFFERING, **{rule: False})
