"""Argument checks. Each error names the argument, what was expected and what came."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupyep import abi

# Element types that travel. Those of ADDABLE can be summed, the others are opaque and come with scales.
DTYPES = {np.dtype(getattr(ml_dtypes, name, name)): abi.DType[name.upper()] for name in (
    "float32", "float16", "bfloat16", "uint8", "int8", "int32", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"
)}  # fmt: skip
ADDABLE = tuple(dtype for dtype, number in DTYPES.items() if number <= abi.DType.BFLOAT16)
IDX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))

MAX_TIMEOUT_S = 1_000_000  # eleven days; whoever wants longer wants None
MAX_TOKENS = 2**31 - 1  # of a rank: places are 32-bit
MAX_ROW_BYTES = 2**31 - 1
MAX_ALIGNMENT = 2**16  # rows
MAX_SCALE_BYTES = 2**16  # of a token


def unmasked(name: str, value: Any) -> Any:
    """`value`, unless NumPy would lose its mask."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array, got a MaskedArray, whose mask would be lost; try filled()")
    return value


def host_array(name: str, value: Any) -> np.ndarray:
    """`value` as a NumPy array, without a copy where possible."""
    unmasked(name, value)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:  # rows of different lengths, a list of arrays on a GPU
        raise TypeError(f"{name}: expected an array, got {type(value).__name__}: {error}") from error
    if array.dtype.kind in "OSU":
        of = f" of {array.dtype}" if isinstance(value, np.ndarray) else ""
        raise TypeError(f"{name}: expected an array, got {type(value).__name__}{of}")
    return array


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int within [low, high]."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}: expected {f'at least {low}' if high is None else f'{low}..{high}'}, got {value}")
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """`value`, which is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {value!r}")
    return value


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """`value`, which is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")
    return value


def dtype(name: str, value: Any) -> np.dtype:
    """The element type that `value` is or names."""
    try:
        found = None if value is None else np.dtype(value)  # NumPy's None is float64
    except (TypeError, ValueError, SyntaxError):  # the last for "f4,,"
        found = None
    if found is None or found.hasobject or not found.itemsize:
        raise TypeError(f"{name}: expected an element type, got {value!r}")
    return found


def addable(name: str, value: Any) -> np.dtype:
    """The element type that `value` is or names, one that combine can add."""
    if (found := dtype(name, value)) not in ADDABLE:
        raise TypeError(f"{name}: expected float32, float16 or bfloat16, got {found}")
    return found


def timeout(value: Any) -> None:
    """Seconds, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"timeout_s: expected a number of seconds or None, got {value!r}")
    if not 0 < value <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s: expected a positive number of seconds or None, got {value!r}")


def matrix(name: str, array: Any) -> None:
    """`array` has two dimensions."""
    if array.ndim != 2:
        raise ValueError(f"{name}: expected 2 dimensions, got shape {tuple(array.shape)}")


def payload(name: str, array: Any) -> None:
    """`array` is a matrix of at least one column, of a type that combine can add."""
    matrix(name, array)
    addable_rows(name, array)


def addable_rows(name: str, array: Any) -> None:
    """The last axis of `array` is a row of at least one element, of a type that combine can add."""
    if array.dtype not in ADDABLE:
        raise TypeError(f"{name}: expected float32, float16 or bfloat16, got {array.dtype}")
    _row(name, array)


def with_scales(data: Any, scales: Any) -> None:
    """`data` and `scales` are matrices of the same number of rows; neither need be of a type that can be added."""
    for name, array in (("x[0]", data), ("x[1]", scales)):
        matrix(name, array)
        if array.dtype not in DTYPES:
            known = ", ".join(dtype.name for dtype in DTYPES)
            raise TypeError(f"{name}: expected one of {known}, got {array.dtype}")
        _row(name, array)
    rows("x[1]", scales, data.shape[0], "num_tokens of x[0]")
    if scales.shape[1] * scales.dtype.itemsize > MAX_SCALE_BYTES:
        raise ValueError(f"x[1]: expected rows of at most 64 KiB, got shape {tuple(scales.shape)} of {scales.dtype}")


def _row(name: str, array: Any) -> None:
    """A row of `array` has at least one element, and a size that the kernels can count."""
    length = array.shape[-1]
    if length == 0:
        raise ValueError(f"{name}: expected at least 1 column, got shape {tuple(array.shape)}")
    if length * array.dtype.itemsize > MAX_ROW_BYTES:
        raise ValueError(f"{name}: expected rows of less than 2 GiB, got shape {tuple(array.shape)} of {array.dtype}")


def rows(name: str, array: Any, expected: int, what: str) -> None:
    """`array` has as many rows as something else has."""
    if array.shape[0] != expected:
        raise ValueError(f"{name}: expected {expected} rows ({what}), got {array.shape[0]}")


def topk_idx(array: Any, num_tokens: int) -> None:
    """Expert ids: int32 or int64, one row per token, 1..32 columns. Their range is the count's business."""
    matrix("topk_idx", array)
    if array.dtype not in IDX_DTYPES:
        raise TypeError(f"topk_idx: expected int32 or int64, got {array.dtype}")
    rows("topk_idx", array, num_tokens, "num_tokens of x")
    integer("num_topk", array.shape[1], 1, abi.MAX_TOPK)


def topk_weights(array: Any, shape: tuple[int, ...]) -> None:
    """Weights: float32 of the given shape."""
    if array.dtype != np.float32:
        raise TypeError(f"topk_weights: expected float32, got {array.dtype}")
    if tuple(array.shape) != shape:
        raise ValueError(f"topk_weights: expected shape {shape}, got {tuple(array.shape)}")


def num_experts(value: Any, num_ranks: int) -> int:
    """A multiple of the number of ranks, at most 16,384 in all and 1,024 per rank."""
    value = integer("num_experts", value, 1, abi.MAX_EXPERTS)
    if value % num_ranks:
        raise ValueError(f"num_experts: expected a multiple of the {num_ranks} ranks, got {value}")
    integer("num_experts / num_ranks", value // num_ranks, 1, abi.MAX_LOCAL_EXPERTS)
    return value


def like(name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """`array` has this shape and type."""
    if array.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, the type of combined_x, got {array.dtype}")
    if tuple(array.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(array.shape)}")


def same(name: str, got: Any, expected: Any) -> None:
    """An array that the caller computed equals our own (validate=True)."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        raise ValueError(f"{name}: expected shape {expected.shape}, got {got.shape}")
    if not np.array_equal(got, expected):
        where = tuple(int(i) for i in np.argwhere(got != expected)[0])
        raise ValueError(f"{name}: expected {expected[where]} at {where}, got {got[where]}")
