"""What a dispatch or combine costs: the slowest of SMs, memory and link, plus the handshake.

An SM's time for a row is bytes over the port that moves them, plus a fixed cost for each row. The fixed costs were
fitted to kernels on one H200 (`python -m cupyep.bench sweep`: 2 and 4 ranks, rows of 2,048 to 32,768 bytes) and scale
with the clock; the handshake does not; everything else is a rate of Machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cupyep import checks
from cupyep.model import reals
from cupyep.model.machine import PULL_LINK_SHARE, PULL_MEMORY_SHARE, PUSH_LINK_SHARE, PUSH_MEMORY_SHARE, Machine

# Clocks of one SM. PUSH: the row's load delays the stores of others a little; ids, weights and the turn itself are 13
# ns. PULL: adding is bound by issue slots: 5.7 ns per KiB of a row and 18 ns for each row, then 12 ns per KiB of sum.
PUSH_ROW_CLOCKS, PUSH_LOAD_BYTES_PER_CLOCK = 25.0, 250.0
PULL_ROW_CLOCKS, PULL_ADD_BYTES_PER_CLOCK, PULL_OUT_BYTES_PER_CLOCK = 36.0, 90.0, 42.0
# Of a call with next to nothing to move, PUSH and PULL alike: its launch in a CUDA graph, posts, the way of a first
# row, done words. More for each rank on the GPU: 7, 8, 12 and 15 us with 1, 2, 4 and 8. More again where ranks are on
# several GPUs: 11.6 to 11.9 us on four, measured with kernels that took 3 us longer on one GPU than these do.
HANDSHAKE_US, RANK_US, LINK_US = 6.3, 1.25, 3.5


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
            if self.destinations > self.num_ranks:
                raise ValueError(
                    f"destinations: expected at most {self.num_ranks} (num_ranks), got {self.destinations}"
                )

    @property
    def fan(self) -> float:
        """Rows per token; experts are drawn with replacement, so a little fewer than where they are distinct."""
        if self.destinations is not None:
            return self.destinations
        return self.num_ranks * (1 - (1 - 1 / self.num_ranks) ** self.num_topk)

    @property
    def logical_bytes(self) -> float:
        """Rows pushed or pulled, the local rank's included."""
        return self.num_tokens * self.fan * self.row_bytes

    @property
    def remote_fan(self) -> float:
        """Those rows of a token that cross a link: to ranks on other GPUs."""
        return self.fan * (1 - self.ranks_per_device / self.num_ranks)

    @property
    def handshake_us(self) -> float:
        """Microseconds of a call that has nothing to move."""
        has_link = self.ranks_per_device < self.num_ranks
        return HANDSHAKE_US + RANK_US * self.ranks_per_device + LINK_US * has_link

    @property
    def wire_bytes(self) -> float:
        """Rows that cross a link."""
        return self.num_tokens * self.remote_fan * self.row_bytes


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
    """Time of PUSH: every row is loaded once and stored to each of its destinations, at another rate on other GPUs.

    Args: num_sms: of each rank; machine: None: an H200. Raises: TypeError, ValueError.
    """
    machine = Machine.given(machine)
    remote = traffic.remote_fan
    stored = (traffic.fan - remote) / machine.sm_store_gbps + remote / machine.sm_remote_store_gbps
    per_byte = stored * machine.clock_ghz + 1 / PUSH_LOAD_BYTES_PER_CLOCK
    token_clocks = traffic.row_bytes * per_byte + PUSH_ROW_CLOCKS
    return _estimate(traffic, num_sms, machine, token_clocks, PUSH_MEMORY_SHARE, PUSH_LINK_SHARE)


def combine_time(traffic: Traffic, num_sms: int, machine: Machine | None = None) -> Estimate:
    """Time of PULL: a token's rows are loaded from where they lie and added, the sum is written once.

    Args, Raises: as of dispatch_time.
    """
    machine = Machine.given(machine)
    fan, row_bytes = traffic.fan, traffic.row_bytes
    loaded = fan * row_bytes * machine.clock_ghz / machine.sm_load_gbps
    added = fan * (row_bytes / PULL_ADD_BYTES_PER_CLOCK + PULL_ROW_CLOCKS) + row_bytes / PULL_OUT_BYTES_PER_CLOCK
    return _estimate(traffic, num_sms, machine, max(loaded, added), PULL_MEMORY_SHARE, PULL_LINK_SHARE)


def _estimate(
    traffic: Traffic, num_sms: int, machine: Machine, token_clocks: float, memory_share: float, link_share: float
) -> Estimate:
    """token_clocks: an SM's. Both directions touch memory alike: one row on the token's side, `fan` on the experts'."""
    checks.integer("num_sms", num_sms, 1)
    moved = traffic.num_tokens * traffic.row_bytes * (1 + traffic.fan) * traffic.ranks_per_device  # in one GPU's memory
    terms = {
        "SMs": traffic.num_tokens * token_clocks / (num_sms * machine.clock_ghz * 1e9),
        "memory": moved / (memory_share * machine.memory_gbps * 1e9),
        # Ranks of one GPU share its link. What they send is what they receive, so one direction decides.
        "link": traffic.wire_bytes * traffic.ranks_per_device / (link_share * machine.link_gbps * 1e9),
    }
    return Estimate(max(terms.values()) + traffic.handshake_us * 1e-6, terms)
