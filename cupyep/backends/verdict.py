"""What ranks conclude from posts and abort words, as errors: the same on both backends, the same on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyep import abi, checks
from cupyep.abi import AbortKind, Flag, Operation
from cupyep.errors import CupyepError, MismatchError, PeerError, PeerTimeoutError

_ITEMSIZES = {int(number): dtype.itemsize for dtype, number in checks.DTYPES.items()}


def signature_mismatch(posts: np.ndarray) -> MismatchError | None:
    """The error that names the first rank and field that differ from rank 0's post, or None."""
    for rank in range(1, len(posts)):
        for field in abi.SIGNATURE_FIELDS:
            expected, got = int(posts[0][field]), int(posts[rank][field])
            if expected != got:
                operation, dtype = Operation(int(posts[0]["operation"])), int(posts[0]["dtype"])
                if field == "handle_id" and operation == Operation.COUNT:
                    field = "num_worst_tokens"
                return MismatchError(operation.verb, rank, *_readable(field, expected, got, dtype))
    return None


_CALLS: dict[int, str] = {Operation.PUSH: "dispatch with a handle"}  # COUNT is what a dispatch without one begins with

# What a flag tells of which argument: where it is not set, and where it is.
_FLAGS = {
    Flag.WEIGHTS: ("topk_weights", "none", "some"),
    Flag.IDX64: ("topk_idx", "int32", "int64"),
    Flag.EXPERT_LAYOUT: ("layout", "rank", "expert"),
}


def _readable(field: str, expected: int, got: int, dtype: int) -> tuple[str, Any, Any]:
    """(argument, rank 0's value, the other's) of a field of two posts whose earlier fields, `dtype` too, agree."""
    if field == "operation":
        return field, _CALLS.get(expected, Operation(expected).verb), _CALLS.get(got, Operation(got).verb)
    if field == "dtype":
        return field, _element(expected), _element(got)
    if field == "scales":
        names = [
            f"{value // 16} bytes of {abi.DType(value % 16).name.lower()}" if value else "none"
            for value in (expected, got)
        ]
        return field, names[0], names[1]
    if field == "flags":
        flag = next(flag for flag in Flag if (expected ^ got) & flag)
        argument, *values = _FLAGS[flag]
        return argument, values[bool(expected & flag)], values[bool(got & flag)]
    if field == "row_bytes":
        size = _ITEMSIZES[dtype % 16]
        return "hidden", expected // size, got // size
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
