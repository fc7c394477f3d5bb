"""The handshake of one channel as a state machine, and an explorer that visits every interleaving of it.

On every rank an operation of a channel is one epoch e = previous epoch + 1 (docs/memory-model.md tells more):

  post     Into slot [e % 2][rank] of EVERY rank's control block go the words, a COUNT's counts, and last the epoch e.
  wait     Until the posts of ALL ranks have reached e, also of ranks it exchanges no row with; then read them.
  verdict  One is revoked: await the abort record and leave. Signatures differ: mismatch. One has FAILED: failure. Both
           end the operation with no row moved. All read the same posts, so all agree.
  rows     PUSH and PULL: accesses to a partner's block lie between its post of e and its end of e.
  done     PUSH and PULL that end well: store e at every rank, then wait until everybody's done word has reached e.
  abort    Past its deadline, a rank that waits revokes its posts of e and claims the abort by compare-and-swap on rank
           0's abort word: one record wins, and winner and losers store it at every rank. Every wait looks at its own
           abort word and leaves. The blocks of an aborted operation are never reused.

COUNT, BARRIER, agree (the post of a PUSH or PULL, to compare signatures), mismatch and failure end without done words:
the fastest rank may post e + 1 while the slowest has yet to read e (hence two slots, by parity), but waits there for
all, so it never gets to e + 2. "Reached" is by signed difference, as epochs wrap.

The model: a step is one store, read or wait of sequentially consistent memory. Words to oneself are left out; a post's
words and counts are one store, a wait for several ranks is one step; reads and accesses go by ascending rank: nobody
sees the difference. Stores go in any order. Who moves rows looks at its abort word at any time or never.
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
    NOT_TOLD = "a rank that has finished its last call does not find the others' abort in its abort word, at close()"


class Broken(Exception):
    """A property is broken; `trace` is the run that breaks it, one step a line."""

    def __init__(self, broken: Property, detail: str) -> None:
        self.property, self.detail, self.trace = broken, detail, list[str]()

    def __str__(self) -> str:
        return "\n  ".join([f"{self.property.name}: {self.property.value}", *self.trace, self.detail])


@dataclass(frozen=True)
class Call:
    """One operation. rows: (rank that accesses, owner of the block); failed, differs: the rank that does, if any;
    agree: it posts like a PUSH or PULL and moves nothing."""

    operation: Operation
    rows: tuple[tuple[int, int], ...] = ()
    failed: int | None = None
    differs: int | None = None
    agree: bool = False

    @property
    def moves(self) -> bool:
        return self.operation in (Operation.PUSH, Operation.PULL) and not self.agree

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

    wait_for_all: bool = True  # otherwise: PUSH and PULL wait for posts and done words of those they share rows with
    double_buffered: bool = True  # otherwise: one slot per rank
    epoch_last: bool = True  # otherwise: the words follow the epoch
    wait_done: bool = True  # otherwise: done words are stored, not waited for
    heed_revoked: bool = True  # otherwise: whoever reads a revoked post takes it for a ready one
    await_record: bool = True  # otherwise: whoever reads a revoked post leaves with what its abort word says then
    single_arbiter: bool = True  # otherwise: each rank claims the abort at its own abort word
    revoke: bool = True  # otherwise: posts stay as they are
    broadcast: bool = True  # otherwise: nobody stores the record at other ranks
    rebroadcast: bool = True  # otherwise: only the winner does
    keep_aborted_blocks: bool = True  # otherwise: a rank that left by abort reuses its block
    seeded_words: bool = True  # epochs and done words of a new arena hold the start epoch; otherwise: 0


class Phase(IntEnum):
    """What a rank does next. Up to READ_COUNTS it has not finished reading; from AWAIT_ABORT on it is leaving."""

    STORE_WORDS, RELEASE_EPOCH, AWAIT_POSTS, READ_POSTS, READ_COUNTS, ACCESS, STORE_DONE, AWAIT_DONE = range(8)
    AWAIT_ABORT, REVOKE, CLAIM, BROADCAST = range(8, 12)  # AWAIT_ABORT: it read a revoked post
    LEFT, TOLD, FINISHED = range(12, 15)  # LEFT: by its abort word; TOLD: after its own claim


STORES = {Phase.STORE_WORDS, Phase.RELEASE_EPOCH, Phase.STORE_DONE, Phase.REVOKE, Phase.BROADCAST}
WAITS = {Phase.AWAIT_POSTS, Phase.AWAIT_DONE, Phase.AWAIT_ABORT}
LOOKS = {Phase.ACCESS, *WAITS}  # at its abort word, as a new call does


class Model:
    """A scenario under rules. A state is a bytes object: every rank's position, then the memory that ranks share."""

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        self.scenario, self.rules, self.calls, self.ranks = scenario, rules, scenario.calls, range(scenario.num_ranks)
        self.everyone, self.modulus, byte = set(self.ranks), scenario.modulus, itertools.count()
        self.members = [[r for r in self.ranks if mask >> r & 1] for mask in range(1 << scenario.num_ranks)]
        # Private: phase, index of the call, peers that this phase has yet to serve (a mask), abort record (1 + finder).
        self.phase, self.call, self.todo, self.record = ([next(byte) for _ in self.ranks] for _ in range(4))
        self.abort = [next(byte) for _ in self.ranks]
        self.done = [[next(byte) for _ in self.ranks] for _ in self.ranks]  # [owner][sender]
        # Posts, [owner][parity][sender]. words: 1 + the call that stored them, what a reader would take for its own.
        self.epoch, self.status, self.words = (
            [[[next(byte) for _ in self.ranks] for _ in range(2)] for _ in self.ranks] for _ in range(3)
        )
        self.num_bytes = next(byte)
        self.peers = [len(self.members) - 1 - (1 << r) for r in self.ranks]  # masks
        self.plans = [[self.plan(r, call) for call in self.calls] for r in self.ranks]
        self.epochs = [(scenario.start + 1 + call) % self.modulus for call in range(len(self.calls))]
        self.slots = [epoch % 2 if rules.double_buffered else 0 for epoch in self.epochs]

    def heard(self, r: int, call: Call) -> set[int]:
        """The ranks whose posts `r` waits for and reads; itself (always there) when it would wait for none."""
        partners = {other for pair in call.rows if r in pair for other in pair} - {r}
        return partners or {r} if call.moves and not self.rules.wait_for_all else self.everyone - {r}

    def behind(self, state, words, r: int, peer: int, call: int) -> bool:
        """Whether `peer`'s epoch word is still before that of `call`, by signed difference."""
        return peer != r and (state[words[peer]] - self.epochs[call]) % self.modulus >= self.modulus // 2

    def plan(self, r: int, call: Call) -> list[tuple[Phase, int]]:
        """The phases of a call that ends well, each with the mask of the peers it concerns."""
        peers, heard = self.peers[r], sum(1 << s for s in self.heard(r, call))
        owners = sum(1 << owner for rank, owner in call.rows if rank == r)
        post = [(Phase.STORE_WORDS, peers), (Phase.RELEASE_EPOCH, peers)][:: 1 if self.rules.epoch_last else -1]
        counts = heard * (call.operation is Operation.COUNT)
        read = [(Phase.AWAIT_POSTS, heard), (Phase.READ_POSTS, heard), (Phase.READ_COUNTS, counts)]
        move = [(Phase.ACCESS, owners), (Phase.STORE_DONE, peers), (Phase.AWAIT_DONE, heard * self.rules.wait_done)]
        return [(phase, mask) for phase, mask in post + read + move * call.moves if mask]

    def initial(self) -> bytes:
        state = bytearray(self.num_bytes)
        for word in itertools.chain(*self.done, *itertools.chain(*self.epoch)):
            state[word] = self.scenario.start * self.rules.seeded_words
        for r in self.ranks:
            self.enter(state, r, *self.plans[r][0][0])
        return bytes(state)

    def steps(self, r: int, state: bytes) -> Iterator[tuple[str, int, bytes]]:
        """Everything that rank `r` can do next, with the peer that it concerns and the state after it."""
        phase, call, mask = Phase(state[self.phase[r]]), state[self.call[r]], state[self.todo[r]]
        if state[self.abort[r]] and (phase in LOOKS or (phase is Phase.STORE_WORDS and mask == self.peers[r])):
            yield "leaves by the abort word of", r, self.leave(bytearray(state), r)
        if phase in WAITS:
            words = self.done[r] if phase is Phase.AWAIT_DONE else self.epoch[r][self.slots[call]]
            late = [
                p for p in self.members[mask] if phase is Phase.AWAIT_ABORT or self.behind(state, words, r, p, call)
            ]
            if not late:
                yield f"{phase.name} ends for", r, self.served(bytearray(state), r, mask)
            elif r in self.scenario.deadlines:
                yield "gives up on", late[0], self.enter(bytearray(state), r, Phase.REVOKE, self.peers[r])
            return
        for peer in self.members[mask] if phase in STORES else self.members[mask][:1]:
            new, action, slot = bytearray(state), phase.name, self.slots[call]
            is_revoked = state[self.status[r][slot][peer]] == Status.REVOKED
            if phase in STORES:
                self.store(new, phase, r, peer)
                yield action, peer, self.served(new, r, 1 << peer)
            elif phase is Phase.CLAIM:  # here `peer` is the arbiter
                new[self.record[r]] = new[self.abort[peer]] = state[self.abort[peer]] or 1 + r
                tells = self.rules.broadcast and (self.rules.rebroadcast or not state[self.abort[peer]])
                others = (self.peers[r] & ~(1 << peer)) * tells
                yield action, peer, self.enter(new, r, Phase.BROADCAST if others else Phase.TOLD, others)
            elif phase is Phase.ACCESS:
                if is_revoked and self.rules.heed_revoked:
                    yield "sees revoked", peer, self.enter(bytearray(state), r, Phase.AWAIT_ABORT, 1 << peer)
                is_kept = state[self.phase[peer]] not in (Phase.LEFT, Phase.TOLD) or self.rules.keep_aborted_blocks
                if not (is_kept and state[self.call[peer]] == call and state[self.phase[peer]] > Phase.STORE_WORDS):
                    raise Broken(Property.OUTSIDE_WINDOW, f"rank {r} accesses {peer}'s block of call {call + 1}")
                yield action, peer, self.served(new, r, 1 << peer)
            elif is_revoked and phase is Phase.READ_POSTS and self.rules.heed_revoked:
                waits = self.rules.await_record
                after = self.enter(new, r, Phase.AWAIT_ABORT, 1 << peer) if waits else self.leave(new, r)
                yield "reads revoked", peer, after
            else:  # it reads
                tag = state[self.words[r][slot][peer]]
                if tag != call + 1 and peer != r:
                    raise Broken(Property.STALE, f"rank {r} in call {call + 1} reads {peer}'s words of call {tag}")
                if is_revoked and peer == self.calls[call].failed:
                    raise Broken(Property.VERDICTS_DIFFER, f"rank {r} in call {call + 1}: takes {peer} for ready")
                yield action, peer, self.served(new, r, 1 << peer)

    def store(self, new: bytearray, phase: Phase, r: int, d: int) -> None:
        """Rank `r` stores what `phase` says in the memory of rank `d`."""
        call, slot = new[self.call[r]], self.slots[new[self.call[r]]]
        if phase in (Phase.STORE_WORDS, Phase.RELEASE_EPOCH):
            old = new[self.words[d][slot][r]] - 1
            is_unread = (new[self.call[d]], new[self.phase[d]]) <= (old, Phase.READ_COUNTS)
            if old not in (-1, call) and is_unread and r in self.heard(d, self.calls[old]):
                raise Broken(Property.OVERWRITTEN, f"rank {r} posts call {call + 1} at {d}, which reads call {old + 1}")
        if phase is Phase.STORE_WORDS:
            new[self.words[d][slot][r]] = call + 1
            new[self.status[d][slot][r]] = Status.FAILED if self.calls[call].failed == r else Status.READY
        elif phase is Phase.RELEASE_EPOCH:
            new[self.epoch[d][slot][r]] = self.epochs[call]
        elif phase is Phase.STORE_DONE:
            new[self.done[d][r]] = self.epochs[call]
        elif phase is Phase.BROADCAST:
            new[self.abort[d]] = new[self.record[r]]
        elif self.rules.revoke:
            new[self.status[d][slot][r]] = Status.REVOKED

    def enter(self, new: bytearray, r: int, phase: Phase, todo: int = 0) -> bytes:
        new[self.phase[r]], new[self.todo[r]] = phase, todo
        return bytes(new)

    def leave(self, new: bytearray, r: int) -> bytes:
        new[self.record[r]] = new[self.abort[r]]
        return self.enter(new, r, Phase.LEFT)

    def served(self, new: bytearray, r: int, peers: int) -> bytes:
        """Fewer peers (a mask) to serve in this phase; after the last one comes the next phase, or the next call."""
        new[self.todo[r]] &= ~peers
        phase, index = new[self.phase[r]], new[self.call[r]]
        if new[self.todo[r]]:
            return bytes(new)
        if phase == Phase.REVOKE:
            return self.enter(new, r, Phase.CLAIM, 1 if self.rules.single_arbiter else 1 << r)
        if phase == Phase.BROADCAST:
            return self.enter(new, r, Phase.TOLD)
        plan, call = self.plans[r][index], self.calls[index]
        following = plan[[planned for planned, _ in plan].index(Phase(phase)) + 1 :]
        if phase == Phase.READ_POSTS:
            got, expected = call.verdict(self.heard(r, call) | {r}), call.verdict(self.everyone)
            if got != expected:
                raise Broken(Property.VERDICTS_DIFFER, f"rank {r} in call {index + 1}: expected {expected}, got {got}")
            following *= got == "ok"
        if not following:
            new[self.call[r]] = index + 1
            following = self.plans[r][index + 1] if index + 1 < len(self.calls) else [(Phase.FINISHED, 0)]
        return self.enter(new, r, *following[0])

    def check(self, state: bytes, movers: set[int]) -> None:
        """What must hold in `state`, where the ranks `movers` have a next step."""
        phases = [state[self.phase[r]] for r in self.ranks]
        has_told = Phase.TOLD in phases  # then everybody knows, whoever stops
        waiting = {r for r in self.ranks if phases[r] < Phase.LEFT} - movers
        if waiting and (not movers or (has_told and len(movers) == 1 and self.scenario.stops)):
            raise Broken(Property.STUCK, f"ranks {sorted(waiting)} wait for ever once ranks {sorted(movers)} stop")
        left = {state[self.record[r]] for r in self.ranks if phases[r] in (Phase.LEFT, Phase.TOLD)}
        found = {state[self.abort[r]] for r in self.ranks if phases[r] == Phase.FINISHED}
        records = [f"rank {record - 1}'s" if record else "none" for record in sorted(left | found - {0})]
        if len(records) > 1:
            raise Broken(Property.RECORDS_DIFFER, f"records: {', '.join(records)}")
        if left and 0 in found and (has_told or not movers):
            raise Broken(Property.NOT_TOLD, f"a rank that has finished does not find {records[0]} record")


def explore(scenario: Scenario, rules: Rules = Rules()) -> tuple[int, set[tuple[Phase, ...]]]:
    """All reachable states, breadth first: (how many, how the ranks may end). Broken: the shortest run that breaks."""
    model = Model(scenario, rules)
    queue, endings = [model.initial()], set()
    origins: dict[bytes, tuple[bytes, int, str, int] | None] = {queue[0]: None}  # the step that led to a state
    for state in queue:  # it grows as it is walked
        try:
            steps = [(r, *step) for r in model.ranks for step in model.steps(r, state)]
            model.check(state, {r for r, *_ in steps})
        except Broken as broken:
            while origin := origins[state]:
                state, r, action, peer = origin
                name = model.calls[state[model.call[r]]].operation.name
                broken.trace.insert(0, f"rank {r} in call {state[model.call[r]] + 1}, {name}: {action.lower()} {peer}")
            raise
        for r, action, peer, new in steps:
            if new not in origins:
                origins[new] = (state, r, action, peer)
                queue.append(new)
        if not steps:
            endings.add(tuple(Phase(state[model.phase[r]]) for r in model.ranks))
    return len(origins), endings
