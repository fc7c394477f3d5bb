"""What a Buffer needs from the world: a rank, a size, and host collectives that cannot hang."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from cupyep.errors import CupyepError, MismatchError, PeerError

T = TypeVar("T")


class Communicator(ABC):
    """A private group of ranks. Every collective has a deadline and names the operation in its error.

    Attributes:
        rank, size: this rank and the number of ranks.
        local_rank: this process's number among the job's on its host, for choosing a GPU; None for threads, which have
            a current device.
        in_process: whether the ranks are threads of one process, so that objects and raw addresses can be passed.
    """

    rank: int
    size: int
    local_rank: int | None = None
    in_process: bool
    watch: Callable[[], None] | None = None  # called in waits: raises when the group has been left

    def allgather(self, value: Any, *, operation: str = "allgather", timeout_s: float | None = 120) -> list[Any]:
        """Collective: every rank's `value`, in rank order (between threads the object itself, not a copy).

        Raises: PeerTimeoutError naming a rank that did not come; MismatchError, on all ranks, where some are here for
            another operation. All of them have made this step then, so the next one is a common one again.
        """
        everyone = self._exchange((operation, value), operation, timeout_s)
        calls = [call for call, _ in everyone]
        others = [rank for rank, call in enumerate(calls) if call != calls[0]]
        if others:  # whoever is in close() does not come back, so that is told first
            rank = next((rank for rank in others if calls[rank] == "close"), others[0])
            raise MismatchError(operation, rank, "operation", calls[0], calls[rank])
        return [theirs for _, theirs in everyone]

    @abstractmethod
    def _exchange(self, value: Any, operation: str, timeout_s: float | None) -> list[Any]:
        """allgather of whatever the ranks came for; `operation` is for errors only."""

    @abstractmethod
    def free(self) -> None:
        """Gives the group back; every rank must be done with it. Not called after an error."""

    def failed_peer(self) -> tuple[int, str] | None:
        """A rank that is known to have failed, and how; None while all seem well. Cheap enough for a spin loop."""
        return None

    def barrier(self, *, operation: str, timeout_s: float | None) -> None:
        """Collective: returns once every rank has called it."""
        self.allgather(None, operation=operation, timeout_s=timeout_s)

    def agree(self, operation: str, values: dict[str, Any], *, timeout_s: float | None) -> None:
        """Collective: raises MismatchError on every rank unless all gave equal `values` (by name)."""
        everyone = self.allgather(values, operation=operation, timeout_s=timeout_s)
        for rank, theirs in enumerate(everyone):
            for name, expected in everyone[0].items():
                if theirs[name] != expected:
                    raise MismatchError(operation, rank, name, expected, theirs[name])

    def together(self, operation: str, step: Callable[[], T], *, timeout_s: float | None) -> list[T]:
        """Collective: runs `step` on every rank and returns all results; if it raised anywhere, raises everywhere.

        The rank that failed raises its own error. The others raise the same error if it is one of cupyep's, which
        concern all ranks, else a PeerError that quotes it.
        """
        own_error: Exception | None = None
        result: T | None = None
        verdict: CupyepError | str | None = None  # what peers are told; foreign errors may not pickle, so their text
        try:
            result = step()
        except CupyepError as error:
            own_error = verdict = error
        except Exception as error:
            own_error, verdict = error, f"raised {type(error).__name__}: {error}"
        everyone = self.allgather((result, verdict), operation=operation, timeout_s=timeout_s)
        if own_error is not None:
            raise own_error
        for peer, (_, told) in enumerate(everyone):
            if isinstance(told, CupyepError):
                raise told
            if told is not None:
                raise PeerError(operation, 0, self.rank, peer, told)
        return [result for result, _ in everyone]
