"""Every exception that cupyep raises on its own account, beside ValueError and TypeError for bad arguments.

All of them survive pickling, because ranks send each other the error that stopped them.
"""

from __future__ import annotations

from collections.abc import Sequence


class CupyepError(Exception):
    """Base class of the errors below."""


class StateError(CupyepError, RuntimeError):
    """A call that the object's state does not allow: after close(), after an abort, another buffer's handle."""


class MismatchError(CupyepError, RuntimeError):
    """Ranks called one collective operation with arguments that differ; no row was moved.

    Args:
        operation: the collective call, as this rank made it.
        rank: the first rank whose arguments differ from those of rank 0.
        field: what differs, for example "num_experts".
        expected: rank 0's value.
        got: the value of `rank`.
    """

    def __init__(self, operation: str, rank: int, field: str, expected: object, got: object) -> None:
        super().__init__(operation, rank, field, expected, got)
        self.operation, self.rank, self.field, self.expected, self.got = operation, rank, field, expected, got

    def __str__(self) -> str:
        return (
            f"{self.operation}: {self.field}: rank 0 has {self.expected!r}, rank {self.rank} has {self.got!r}; "
            "every rank must make the same call"
        )


class PeerError(CupyepError, RuntimeError):
    """A peer left the group: its program raised, or it met an error that no other rank has.

    Args:
        operation: what the rank that noticed was doing; of a rank that raised, what it did last.
        epoch: its number on its channel (0 for host collectives).
        rank: the rank that noticed first.
        peer: the rank at fault.
        reason: what the peer did, in a few words.
    """

    def __init__(self, operation: str, epoch: int, rank: int, peer: int, reason: str = "failed") -> None:
        super().__init__(operation, epoch, rank, peer, reason)
        self.operation, self.epoch, self.rank, self.peer, self.reason = operation, epoch, rank, peer, reason

    def __str__(self) -> str:
        operation = f"{self.operation} (epoch {self.epoch})" if self.epoch else self.operation
        witness = f"; noticed by rank {self.rank}" if self.rank != self.peer else ""  # it told us itself
        return f"{operation}: rank {self.peer} {self.reason}{witness}"


class PeerTimeoutError(PeerError, TimeoutError):
    """A peer did not arrive within the deadline. Attributes as PeerError, and waited_s in seconds."""

    def __init__(self, operation: str, epoch: int, rank: int, peer: int, waited_s: float) -> None:
        within = f"within {waited_s:.3g} s" if waited_s else "in time"  # another rank's, where ours has no deadline
        PeerError.__init__(self, operation, epoch, rank, peer, f"did not arrive {within}")
        self.args = (operation, epoch, rank, peer, waited_s)
        self.waited_s = waited_s


class ArenaExhaustedError(CupyepError, MemoryError):
    """Memory of fixed size does not suffice.

    Args:
        needed: what was asked for, in bytes; of num_worst_tokens, in rows.
        free: what there is in this unit: of an arena, in its largest gap.
        rank: where.
        argument: what fixed the size: "num_nvl_bytes" (the arena's), "num_rdma_bytes", "num_worst_tokens", or the
            folder of shared memory, which is full.
    """

    def __init__(self, needed: int, free: int, rank: int = 0, argument: str = "num_nvl_bytes") -> None:
        super().__init__(needed, free, rank, argument)
        self.needed, self.free, self.rank, self.argument = needed, free, rank, argument

    def __str__(self) -> str:
        if self.argument != "num_nvl_bytes":
            return f"rank {self.rank}: {self.argument}: expected at least {self.needed:,}, got {self.free:,}"
        return (
            f"rank {self.rank}: an arena block of {self.needed:,} bytes is needed, the largest free is {self.free:,}; "
            "drop received arrays, pass copy=True, or create the Buffer with more num_nvl_bytes"
        )


class TopologyError(CupyepError, RuntimeError):
    """Ranks that cannot reach each other's memory. `matrix[i][j]` is None or why rank i cannot reach rank j."""

    def __init__(self, message: str, matrix: Sequence[Sequence[str | None]] = ()) -> None:
        super().__init__(message, matrix)
        self.message, self.matrix = message, matrix

    def __str__(self) -> str:
        pairs = [
            f"rank {i} -> rank {j}: {why}" for i, row in enumerate(self.matrix) for j, why in enumerate(row) if why
        ]
        return "\n  ".join([self.message, *pairs])


class UnsupportedDeviceError(CupyepError, RuntimeError):
    """What was asked for needs another GPU. `what` was asked, `needed` and `found` are in words."""

    def __init__(self, what: str, needed: str, found: str) -> None:
        super().__init__(what, needed, found)
        self.what, self.needed, self.found = what, needed, found

    def __str__(self) -> str:
        return f"{self.what}: needs {self.needed}, found {self.found}"


class CompileError(CupyepError, RuntimeError):
    """NVRTC refused a kernel. `log` is its whole output, `name` the kernel's source file."""

    def __init__(self, name: str, log: str) -> None:
        super().__init__(name, log)
        self.name, self.log = name, log

    def __str__(self) -> str:
        return f"{self.name} does not compile:\n{self.log}"
