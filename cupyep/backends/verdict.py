"""What ranks conclude from posts and abort words, as errors: the same on both backends, the same on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyep import abi
from cupyep.abi import AbortKind, Operation
from cupyep.errors import CupyepError, MismatchError, PeerError, PeerTimeoutError


def signature_mismatch(posts: np.ndarray) -> MismatchError | None:
    """The error that names the first rank and field that differ from rank 0's post, or None."""
    for rank in range(1, len(posts)):
        for field in abi.SIGNATURE_FIELDS:
            expected, got = int(posts[0][field]), int(posts[rank][field])
            if expected != got:
                operation = Operation(int(posts[0]["operation"]))
                if field == "handle_id" and operation == Operation.COUNT:
                    field = "num_worst_tokens"
                return MismatchError(operation.verb, rank, *_readable(field, expected, got))
    return None


def _readable(field: str, expected: int, got: int) -> tuple[str, Any, Any]:
    if field == "operation":
        return field, Operation(expected).verb, Operation(got).verb
    if field == "dtype":
        return field, _element(expected), _element(got)
    if field == "scales":
        names = [
            f"{value // 16} bytes of {abi.DType(value % 16).name.lower()}" if value else "none"
            for value in (expected, got)
        ]
        return field, names[0], names[1]
    if field == "flags":
        names = [str([flag.name.lower() for flag in abi.Flag if value & flag]) for value in (expected, got)]
        return field, names[0], names[1]
    return field, expected, got


def _element(value: int) -> str:
    """The dtype word: a combine in the expert layout has the type before the local reduction in its upper bits."""
    names = [abi.DType(part).name.lower() for part in (value // 16, value % 16) if part]
    return " reduced to ".join(names)


def abort_error(word: int, waited_s: float) -> CupyepError:
    """The exception for an abort word other than 0."""
    kind, operation, rank, peer, epoch = abi.unpack_abort(word)
    if kind == AbortKind.TIMEOUT:
        return PeerTimeoutError(operation.verb, epoch, rank, peer, waited_s)
    return PeerError(operation.verb, epoch, rank, peer, kind.reason)
