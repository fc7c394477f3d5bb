"""What an error in a collective call means for the Buffer: it stays usable, or its end, of which the peers are told."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from cupyep.errors import ArenaExhaustedError, CupyepError, MismatchError, PeerError, StateError


class Watch:
    """Around each collective call of one Buffer; a class, as generators cost each call microseconds.

    left: gives the last error that all ranks raised alike: they are in step after it. Weak, for its traceback holds
    arrays.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.left: Callable[[], CupyepError | None] = lambda: None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, StateError):
            return  # the latter maybe of this rank alone: where it ends a `with`, the peers are told
        if isinstance(error, (MismatchError, ArenaExhaustedError)):  # before anything was sent
            self.left = weakref.ref(error)
            if isinstance(error, MismatchError) and "close" in (error.expected, error.got):
                self._backend.broken = error  # whoever was in close() does not come back
        else:  # also out of memory, Ctrl-C: the operation is half done
            self.abandon(error, tell=not isinstance(error, PeerError))  # a peer's failure has been told

    def abandon(self, error: BaseException, *, tell: bool) -> None:
        """This rank leaves the group for good; `tell`: it tells the peers."""
        if self._backend.broken is None:
            is_ours = isinstance(error, CupyepError)
            name = type(error).__name__
            self._backend.broken = error if is_ours else StateError(f"{name} was raised here: {error}")
            if tell:
                self._backend.abort()
