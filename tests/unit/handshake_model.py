"""The handshake of one channel as a state machine, and an explorer that visits every interleaving of it.

Read it to learn the protocol. Every operation of a channel is, on every rank, one epoch e = previous epoch + 1:

  post     Into slot [e % 2][rank] of EVERY rank's control block go the words (signature, status, offsets), a COUNT's
           counts, and last, with release, the epoch e, which makes the rest valid.
  wait     until the posts of ALL ranks carry e, also of ranks it exchanges no row with; then read them.
  verdict  A signature unlike rank 0's: all leave with a mismatch. A FAILED status: all leave with a failure. All read
           the same posts, so all agree; the epoch counts as finished and no row has moved.
  rows     Accesses to a partner's block lie between its post of e (the block is there) and its end of e (it is reused).
  done     Store e at every rank, then wait until everybody's done word reaches e, by signed difference: epochs wrap.
  abort    A rank whose wait passes its deadline first REVOKES its posts of e, then claims the abort by compare-and-swap
           on rank 0's abort word, so that one record wins. The winner stores it to every rank's abort word, a loser
           takes it from rank 0's. Every wait, and a writer before each access, looks at its own word and leaves with
           that record. A writer may have looked just before: blocks of an aborted operation are never reused.

`done` alone keeps posts from being overwritten. Mismatch and failure end without it: the fastest rank may post e + 1
while the slowest has yet to read e (hence two slots, by parity), but waits there for all, so it never gets to e + 2.

The model: a step is one store, read or wait, and memory is sequentially consistent: fences are the kernels' business.
Words to oneself are left out, as nobody else sees them. A post's words and counts are one store, as nobody reads them
before the epoch. Reads and accesses go by ascending rank, as nobody sees their order; stores and waits go in any order.
Each step moves its rank forward, so every run ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum

from cupyep.abi import Operation, Status


class Property(Enum):
    """What must never happen."""

    OVERWRITTEN = "a slot is overwritten before its owner has finished reading the operation it belongs to"
    STALE = "a rank reads words of another epoch than the one it waited for"
    STUCK = "a rank waits for ever"
    RECORDS_DIFFER = "ranks name different abort records"
    OUTSIDE_WINDOW = "a block is accessed that is not open"
    VERDICTS_DIFFER = "a rank's verdict is not that of the posts of all ranks"


class Broken(Exception):
    """A property is broken; `trace` is the run that breaks it, one step a line."""

    def __init__(self, broken: Property, detail: str) -> None:
        super().__init__(broken, detail)
        self.property, self.detail, self.trace = broken, detail, list[str]()

    def __str__(self) -> str:
        return "\n  ".join([f"{self.property.name}: {self.property.value}", *self.trace, self.detail])


@dataclass(frozen=True)
class Call:
    """One operation. rows: (rank that accesses, owner of the block); failed, differs: the rank that does, if any."""

    operation: Operation
    rows: tuple[tuple[int, int], ...] = ()
    failed: int | None = None
    differs: int | None = None

    def verdict(self, ranks: set[int]) -> str:
        """What the posts of `ranks` say together."""
        return "mismatch" if self.differs in ranks and len(ranks) > 1 else "failed" if self.failed in ranks else "ok"


@dataclass(frozen=True)
class Scenario:
    """Who does what. deadlines: ranks whose waits may give up, at any time; stops: any one rank may stop for ever,
    anywhere; start: the channel's epoch before the first call; epochs count modulo `modulus`."""

    num_ranks: int
    calls: tuple[Call, ...]
    deadlines: tuple[int, ...] = ()
    stops: bool = False
    start: int = 0
    modulus: int = 64


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol. A mutant has one of them taken away."""

    wait_for_all: bool = True  # otherwise: for the posts and done words of the ranks it exchanges rows with
    double_buffered: bool = True  # otherwise: one slot per rank
    epoch_last: bool = True  # otherwise: the words follow the epoch
    wait_done: bool = True  # otherwise: done words are stored, not waited for
    single_arbiter: bool = True  # otherwise: each rank claims the abort at its own abort word
    broadcast: bool = True  # otherwise: the winner stores the record at no other rank
    keep_aborted_blocks: bool = True  # otherwise: a rank that left by abort reuses its block
    seeded_words: bool = True  # epochs and done words of a new arena hold the start epoch; otherwise: 0


class Phase(IntEnum):
    """What a rank does next. Up to READ_COUNTS it has not finished reading; from AWAIT_ABORT on it is leaving."""

    STORE_WORDS, RELEASE_EPOCH, AWAIT_POSTS, READ_POSTS, READ_COUNTS, CHECK, ACCESS, STORE_DONE, AWAIT_DONE = range(9)
    AWAIT_ABORT, REVOKE, CLAIM, BROADCAST, LEFT, FINISHED = range(9, 15)  # AWAIT_ABORT: it met a revoked post


STORES = {Phase.STORE_WORDS, Phase.RELEASE_EPOCH, Phase.STORE_DONE, Phase.REVOKE, Phase.BROADCAST}
WAITS = {Phase.AWAIT_POSTS, Phase.AWAIT_DONE, Phase.AWAIT_ABORT}


class Model:
    """A scenario under rules. A state is a bytes object: every rank's position, then the memory that ranks share."""

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        self.scenario, self.rules, self.calls, self.ranks = scenario, rules, scenario.calls, range(scenario.num_ranks)
        self.everyone, byte = set(self.ranks), itertools.count()
        self.members = [[r for r in self.ranks if mask >> r & 1] for mask in range(1 << scenario.num_ranks)]
        # Private: phase, index of the call, peers that this phase has yet to serve (a mask), abort record.
        self.phase, self.call, self.todo, self.record = ([next(byte) for _ in self.ranks] for _ in range(4))
        self.abort = [next(byte) for _ in self.ranks]
        self.done = [[next(byte) for _ in self.ranks] for _ in self.ranks]  # [owner][sender]
        # Posts, [owner][parity][sender]. words: 1 + the call that stored them, what a reader would take for its own.
        self.epoch, self.status, self.words = (
            [[[next(byte) for _ in self.ranks] for _ in range(2)] for _ in self.ranks] for _ in range(3))
        self.num_bytes = next(byte)
        self.plans = [[self.plan(r, call) for call in self.calls] for r in self.ranks]
        self.epochs = [(scenario.start + 1 + call) % scenario.modulus for call in range(len(self.calls))]
        self.slots = [epoch % 2 if rules.double_buffered else 0 for epoch in self.epochs]

    def heard(self, r: int, call: Call) -> set[int]:
        """The ranks whose posts `r` waits for and reads; itself (always there) when it would wait for none."""
        partners = {other for pair in call.rows if r in pair for other in pair} - {r}
        return self.everyone - {r} if self.rules.wait_for_all else partners or {r}

    def plan(self, r: int, call: Call) -> list[tuple[Phase, int]]:
        """The phases of a call that ends well, each with the mask of the peers it concerns."""
        is_count = call.operation is Operation.COUNT
        peers, heard = self.mask_without(r), sum(1 << s for s in self.heard(r, call))
        owners = sum(1 << owner for rank, owner in call.rows if rank == r and not is_count)
        post = [(Phase.STORE_WORDS, peers), (Phase.RELEASE_EPOCH, peers)][:: 1 if self.rules.epoch_last else -1]
        rest = [(Phase.AWAIT_POSTS, heard), (Phase.READ_POSTS, heard), (Phase.READ_COUNTS, heard * is_count),
                (Phase.CHECK, owners), (Phase.STORE_DONE, peers), (Phase.AWAIT_DONE, heard * self.rules.wait_done)]
        return [(phase, mask) for phase, mask in post + rest if mask]

    def mask_without(self, *ranks: int) -> int:
        return sum(1 << r for r in self.everyone.difference(ranks))

    def initial(self) -> bytes:
        state = bytearray(self.num_bytes)
        for word in itertools.chain(*self.done, *itertools.chain(*self.epoch)):
            state[word] = self.scenario.start * self.rules.seeded_words
        for r in self.ranks:
            self.enter(state, r, *self.plans[r][0][0])
        return bytes(state)

    def steps(self, r: int, state: bytes) -> Iterator[tuple[str, bytes]]:
        """Everything that rank `r` can do next, with the state after it."""
        phase, call, todo = Phase(state[self.phase[r]]), state[self.call[r]], self.members[state[self.todo[r]]]
        if state[self.abort[r]] and (phase in WAITS or phase is Phase.CHECK):
            yield "leaves by its abort word", self.leave(bytearray(state), r, state[self.abort[r]])
            todo = todo if phase in WAITS else []  # a spin looks at it now and then, a writer before every access
        for peer in todo if phase in STORES | WAITS else todo[:1]:
            new, action, slot = bytearray(state), f"{phase.name.lower()} {peer}", self.slots[call]
            is_revoked = state[self.status[r][slot][peer]] == Status.REVOKED
            if phase in STORES:
                self.store(new, phase, r, peer)
                yield action, self.served(new, r, peer)
            elif phase in WAITS:
                if self.is_met(state, phase, r, peer):
                    yield action, self.served(new, r, peer)
                elif r in self.scenario.deadlines:
                    new[self.record[r]] = 1 + peer + len(self.ranks) * (r + len(self.ranks) * call)
                    yield f"gives up on {peer}", self.enter(new, r, Phase.REVOKE, self.mask_without(r))
            elif phase is Phase.CLAIM and state[self.abort[peer]]:  # here `peer` is the arbiter
                yield "comes too late with its claim", self.leave(new, r, state[self.abort[peer]])
            elif phase is Phase.CLAIM:
                new[self.abort[peer]] = state[self.record[r]]
                others = self.mask_without(peer, r) * self.rules.broadcast
                yield action, self.enter(new, r, Phase.BROADCAST if others else Phase.LEFT, others)
            elif phase is Phase.ACCESS:
                is_kept = state[self.phase[peer]] != Phase.LEFT or self.rules.keep_aborted_blocks
                if not (is_kept and state[self.call[peer]] == call and state[self.phase[peer]] > Phase.STORE_WORDS):
                    raise Broken(Property.OUTSIDE_WINDOW, f"rank {r} accesses {peer}'s block of call {call + 1}")
                new[self.phase[r]] = Phase.CHECK
                yield action, self.served(new, r, peer)
            elif phase is not Phase.READ_COUNTS and is_revoked:
                yield f"sees the revoked post of {peer}", self.enter(new, r, Phase.AWAIT_ABORT, 1 << peer)
            elif phase is Phase.CHECK:
                yield action, self.enter(new, r, Phase.ACCESS, state[self.todo[r]])
            else:  # it reads
                tag = state[self.words[r][slot][peer]]
                if tag != call + 1 and peer != r:
                    raise Broken(Property.STALE, f"rank {r} in call {call + 1} reads {peer}'s words of call {tag}")
                yield action, self.served(new, r, peer)

    def is_met(self, state: bytes, phase: Phase, r: int, peer: int) -> bool:
        """Whether `r` need not wait for `peer` any more; nothing but the abort word ends AWAIT_ABORT."""
        call, modulus = state[self.call[r]], self.scenario.modulus
        if phase is Phase.AWAIT_POSTS:
            return peer == r or state[self.epoch[r][self.slots[call]][peer]] == self.epochs[call]
        is_done = (state[self.done[r][peer]] - self.epochs[call]) % modulus < modulus // 2  # signed difference >= 0
        return phase is Phase.AWAIT_DONE and (peer == r or is_done)

    def store(self, new: bytearray, phase: Phase, r: int, d: int) -> None:
        """Rank `r` stores what `phase` says in the memory of rank `d`."""
        call, slot = new[self.call[r]], self.slots[new[self.call[r]]]
        if phase in (Phase.STORE_WORDS, Phase.RELEASE_EPOCH):
            old = new[self.words[d][slot][r]] - 1
            is_reading = new[self.call[d]] == old and new[self.phase[d]] <= Phase.READ_COUNTS
            is_unread = (new[self.call[d]] < old or is_reading) and r in self.heard(d, self.calls[old])
            if old not in (-1, call) and is_unread:
                raise Broken(Property.OVERWRITTEN, f"rank {r} posts call {call + 1} at {d}, which reads call {old + 1}")
        if phase is Phase.STORE_WORDS:
            new[self.words[d][slot][r]] = call + 1
            new[self.status[d][slot][r]] = Status.FAILED if self.calls[call].failed == r else Status.READY
        elif phase is Phase.RELEASE_EPOCH:
            new[self.epoch[d][slot][r]] = self.epochs[call]
        elif phase is Phase.STORE_DONE:
            new[self.done[d][r]] = self.epochs[call]
        elif phase is Phase.REVOKE:
            new[self.status[d][slot][r]] = Status.REVOKED
        else:
            new[self.abort[d]] = new[self.record[r]]

    def enter(self, new: bytearray, r: int, phase: Phase, todo: int = 0) -> bytes:
        """Rank `r` goes on to `phase` in `new`, the state being built."""
        new[self.phase[r]], new[self.todo[r]] = phase, todo
        return bytes(new)

    def leave(self, new: bytearray, r: int, record: int) -> bytes:
        new[self.record[r]] = record
        return self.enter(new, r, Phase.LEFT)

    def served(self, new: bytearray, r: int, peer: int) -> bytes:
        """One peer less to serve in this phase; after the last one comes the next phase, or the next call."""
        new[self.todo[r]] &= ~(1 << peer)
        phase, call = new[self.phase[r]], new[self.call[r]]
        if new[self.todo[r]]:
            return bytes(new)
        if phase == Phase.REVOKE:
            return self.enter(new, r, Phase.CLAIM, 1 if self.rules.single_arbiter else 1 << r)
        if phase == Phase.BROADCAST:
            return self.enter(new, r, Phase.LEFT)
        plan = self.plans[r][call]
        following = plan[[planned for planned, _ in plan].index(Phase(phase)) + 1 :]
        if phase == Phase.READ_POSTS:
            got = self.calls[call].verdict(self.heard(r, self.calls[call]) | {r})
            expected = self.calls[call].verdict(self.everyone)
            if got != expected:
                raise Broken(Property.VERDICTS_DIFFER, f"rank {r} in call {call + 1}: expected {expected}, got {got}")
            following = following if got == "ok" else []
        if not following:
            new[self.call[r]] = call = call + 1
            following = self.plans[r][call] if call < len(self.calls) else [(Phase.FINISHED, 0)]
        return self.enter(new, r, *following[0])

    def check(self, state: bytes, movers: set[int]) -> None:
        """What must hold in `state`, where the ranks `movers` have a next step."""
        phases = [state[self.phase[r]] for r in self.ranks]
        waiting = {r for r in self.ranks if phases[r] < Phase.LEFT} - movers
        # A rank without a deadline counts on one that has a deadline, runs, and has not finished its last call.
        rescuers = [d for d in self.scenario.deadlines if d not in movers and phases[d] != Phase.FINISHED]
        if waiting and (not movers or (len(movers) == 1 and self.scenario.stops and rescuers)):
            raise Broken(Property.STUCK, f"ranks {sorted(waiting)} wait for ever once ranks {sorted(movers)} stop")
        named = {state[self.record[r]] for r in self.ranks if phases[r] == Phase.LEFT}
        if named and not movers:  # who had finished finds the record in its abort word, at its next call
            named |= {state[self.abort[r]] for r in self.ranks if phases[r] == Phase.FINISHED}
        if len(named) > 1:
            raise Broken(Property.RECORDS_DIFFER, " / ".join(map(self.tell, sorted(named))))

    def tell(self, record: int) -> str:
        finder, culprit = divmod((record - 1) % len(self.ranks) ** 2, len(self.ranks))
        return f"rank {finder} gave up on {culprit}" if record else "no record"


def explore(scenario: Scenario, rules: Rules = Rules()) -> tuple[int, set[tuple[Phase, ...]]]:
    """Visit every reachable state, breadth first; raises Broken with the shortest run that breaks a property.

    Returns the number of states, and every combination of phases in which the ranks may end.
    """
    model = Model(scenario, rules)
    queue, endings = [model.initial()], set()
    origins: dict[bytes, tuple[bytes, int, str] | None] = {queue[0]: None}  # the step that led to a state
    for state in queue:  # it grows as it is walked
        try:
            steps = [(r, action, new) for r in model.ranks for action, new in model.steps(r, state)]
            model.check(state, {r for r, _, _ in steps})
        except Broken as broken:
            while origin := origins[state]:
                state, r, action = origin
                call = state[model.call[r]]
                broken.trace.insert(0, f"rank {r} in call {call + 1}, {model.calls[call].operation.name}: {action}")
            raise
        for r, action, new in steps:
            if new not in origins:
                origins[new] = (state, r, action)
                queue.append(new)
        if not steps:
            endings.add(tuple(Phase(state[model.phase[r]]) for r in model.ranks))
    return len(origins), endings
