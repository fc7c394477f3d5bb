"""What a dispatch or combine costs: the slowest of SMs, memory and link, plus the handshake.

An SM's time for a row is bytes over the port that moves them, plus a fixed cost for each row. The fixed costs were
fitted to kernels on an H200 (docs/performance.md: rows of 14,336 and 4,096 bytes, 2 and 4 ranks) and scale with the
clock; everything else is a rate of Machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cupyep import checks
from cupyep.model import reals
from cupyep.model.machine import PULL_MEMORY_SHARE, PUSH_MEMORY_SHARE, Machine

# Clocks of one SM. PUSH: the row's load delays the stores of others a little; ids, weights and the turn itself are 30
# ns. PULL: adding is bound by issue slots: 3.1 ns per KiB of a row and 62 ns for each row, then 10 ns per KiB of sum.
PUSH_ROW_CLOCKS, PUSH_LOAD_BYTES_PER_CLOCK = 59.0, 250.0
PULL_ROW_CLOCKS, PULL_ADD_BYTES_PER_CLOCK, PULL_OUT_BYTES_PER_CLOCK = 123.0, 163.0, 50.5
HANDSHAKE_US = 4.8  # posts, then done words: two meetings of all ranks, each like a barrier of 8 ranks (2.4 us)


@dataclass(frozen=True)
class Traffic:
    """One rank's part of a dispatch or combine, the same for all ranks.

    num_tokens per rank; row_bytes: payload of one row; num_ranks; ranks_per_device: ranks that share a GPU (and have no
    link between them); num_topk; destinations: ranks that a token goes to on average, None: of random experts.
    Raises: TypeError, ValueError.
    """

    num_tokens: int
    row_bytes: int
    num_ranks: int
    ranks_per_device: int = 1
    num_topk: int = 8
    destinations: float | None = None

    def __post_init__(self) -> None:
        checks.integer("num_tokens", self.num_tokens, 0)
        checks.integer("row_bytes", self.row_bytes, 1)
        checks.integer("num_ranks", self.num_ranks, 1)
        checks.integer("ranks_per_device", self.ranks_per_device, 1, self.num_ranks)
        checks.integer("num_topk", self.num_topk, 1)
        if self.destinations is not None:
            reals.nonnegative("destinations", self.destinations)

    @property
    def fan(self) -> float:
        """Rows per token."""
        if self.destinations is not None:
            return self.destinations
        return self.num_ranks * (1 - (1 - 1 / self.num_ranks) ** self.num_topk)

    @property
    def logical_bytes(self) -> float:
        """Rows pushed or pulled, the local rank's included."""
        return self.num_tokens * self.fan * self.row_bytes

    @property
    def wire_bytes(self) -> float:
        """Rows that cross a link: those of ranks on other GPUs."""
        return self.logical_bytes * (1 - self.ranks_per_device / self.num_ranks)


@dataclass(frozen=True)
class Estimate:
    """Seconds of an operation, and of each thing that could limit it."""

    seconds: float
    terms: dict[str, float] = field(compare=False)

    @property
    def limit(self) -> str:
        """The term that decides."""
        return max(self.terms, key=self.terms.__getitem__)


def dispatch_time(traffic: Traffic, num_sms: int, machine: Machine | None = None) -> Estimate:
    """Time of PUSH: every row is loaded once and stored to each of its destinations."""
    machine = machine or Machine()

    def row_clocks(fan: float, row_bytes: int) -> float:
        stored = fan * row_bytes * machine.clock_ghz / machine.sm_store_gbps
        return stored + row_bytes / PUSH_LOAD_BYTES_PER_CLOCK + PUSH_ROW_CLOCKS

    return _estimate(traffic, num_sms, machine, row_clocks, PUSH_MEMORY_SHARE)


def combine_time(traffic: Traffic, num_sms: int, machine: Machine | None = None) -> Estimate:
    """Time of PULL: a token's rows are loaded from where they lie and added, the sum is written once."""
    machine = machine or Machine()

    def token_clocks(fan: float, row_bytes: int) -> float:
        loaded = fan * row_bytes * machine.clock_ghz / machine.sm_load_gbps
        added = fan * (row_bytes / PULL_ADD_BYTES_PER_CLOCK + PULL_ROW_CLOCKS) + row_bytes / PULL_OUT_BYTES_PER_CLOCK
        return max(loaded, added)

    return _estimate(traffic, num_sms, machine, token_clocks, PULL_MEMORY_SHARE)


def _estimate(
    traffic: Traffic, num_sms: int, machine: Machine, clocks: Callable[[float, int], float], memory_share: float
) -> Estimate:
    """Both directions touch memory alike: one row on the token's side, `fan` rows on the experts' side."""
    checks.integer("num_sms", num_sms, 1)
    tokens, fan, row_bytes = traffic.num_tokens, traffic.fan, traffic.row_bytes
    moved = tokens * row_bytes * (1 + fan) * traffic.ranks_per_device  # bytes through one GPU's memory
    terms = {
        "SMs": tokens * clocks(fan, row_bytes) / (num_sms * machine.clock_ghz * 1e9),
        "memory": moved / (memory_share * machine.memory_gbps * 1e9),
        # Ranks of one GPU share its link. What they send is what they receive, so one direction decides.
        "link": traffic.wire_bytes * traffic.ranks_per_device / (machine.usable_link_gbps * 1e9),
    }
    return Estimate(max(terms.values()) + HANDSHAKE_US * 1e-6, terms)
