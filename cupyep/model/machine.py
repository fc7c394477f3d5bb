"""What a GPU can do, as few physical rates.

Measured on H200s (132 SMs, 1.98 GHz, 4.9 TB/s, NVLink of 450 GB/s each way), alone, two and four of a host, see
docs/performance.md and `python -m cupyep.bench ceilings`. SM rates are bytes per clock, so they scale with the clock;
memory and link rates are shares of the nominal ones. On other GPUs this is an extrapolation.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupyep import checks
from cupyep.model import reals

STORE_BYTES_PER_CLOCK = 30.3  # of an SM, in PUSH: 60 GB/s at 1.98 GHz. Bare TMA stores do 62; the port is 32 bytes wide
# Of an SM that stores to another GPU: 53 GB/s. Bare stores to a peer do 50, from one SM to six; in PUSH a part of their
# time is that of the rows' loads, which is counted already. 27 explains PUSH of 7 and 14 KB rows with 1 to 12 SMs.
REMOTE_STORE_BYTES_PER_CLOCK = 27.0
LOAD_BYTES_PER_CLOCK = 83.3  # of an SM: 165 GB/s; bare TMA loads do 190 from one SM and 155 from each of 8
PUSH_MEMORY_SHARE = 0.68  # 3,300 GB/s read and written together, when every rank pushes within one memory
PULL_MEMORY_SHARE = 0.79  # 3,900 GB/s; reads are cheaper than writes
# Of the link's nominal rate, payload in one direction while every rank sends and receives.
PUSH_LINK_SHARE = 0.70  # 315 of 450 GB/s: PUSH does 310 to 328 beyond its handshake, bare stores 350
PULL_LINK_SHARE = 0.72  # 324 GB/s: PULL does 317 to 334, bare loads 336 between two GPUs and 325 among four

# NVLink per direction, nominal, by compute capability (NVIDIA's data sheets: half of the bidirectional figure).
LINK_GBPS = {80: 300.0, 90: 450.0, 100: 900.0}


@dataclass(frozen=True)
class Machine:
    """One GPU and its link to each other. The defaults are an H200's.

    num_sms; clock_ghz: the SMs' highest clock; memory_gbps: nominal; link_gbps: nominal, to all peers together, in one
    direction. Raises: TypeError, ValueError for what is not positive and finite.
    """

    num_sms: int = 132
    clock_ghz: float = 1.98
    memory_gbps: float = 4917.0
    link_gbps: float = 450.0

    def __post_init__(self) -> None:
        checks.integer("num_sms", self.num_sms, 1)
        for name in ("clock_ghz", "memory_gbps", "link_gbps"):
            reals.positive(name, getattr(self, name), finite=True)

    @classmethod
    def given(cls, machine: Machine | None) -> Machine:
        """`machine`, an H200 for None. Raises: TypeError for anything else."""
        if machine is not None and not isinstance(machine, cls):
            raise TypeError(f"machine: expected a Machine or None, got {machine!r}")
        return machine or cls()

    @classmethod
    def of(cls, compute_capability: int, num_sms: int, clock_ghz: float, memory_gbps: float) -> Machine:
        """A GPU as the driver describes it (capability 90 for 9.0); 0 for a rate that the driver does not tell."""
        link = LINK_GBPS[max((known for known in LINK_GBPS if known <= compute_capability), default=80)]
        return cls(num_sms, clock_ghz or cls.clock_ghz, memory_gbps or cls.memory_gbps, link)

    @property
    def sm_store_gbps(self) -> float:
        """What one SM can store in its own GPU's memory."""
        return STORE_BYTES_PER_CLOCK * self.clock_ghz

    @property
    def sm_remote_store_gbps(self) -> float:
        """What one SM can store in another GPU's memory."""
        return REMOTE_STORE_BYTES_PER_CLOCK * self.clock_ghz

    @property
    def sm_load_gbps(self) -> float:
        """What one SM can load."""
        return LOAD_BYTES_PER_CLOCK * self.clock_ghz
