"""Gather and scatter of rows by bulk copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyep.tma import arrays, copies
from cupyep.tma import launch as launches

MAX_ROWS = 2**31 - 1


def copy_rows(
    dst: Any, dst_rows: Any, src: Any, src_rows: Any, *, num_sms: int = copies.DEFAULT_NUM_SMS, stream: Any = None
) -> Any:
    """dst[dst_rows[i]] = src[src_rows[i]] for every i: a gather, a scatter or both, by TMA and with few SMs.

    Args:
        dst, src: `[rows, ...]` arrays of one dtype and row shape, rows contiguous, that share no memory. As of copy.
        dst_rows, src_rows: `[num_rows]` int32 or int64 where the arrays are, or a list of ints; None: 0, 1, 2... A
            pair with an index outside of its array, as -1, is skipped. A row written twice gets either value.
        num_sms, stream: as of copy.

    Returns: an event. Raises: TypeError, ValueError naming the argument. Lists and NumPy arrays of indices are checked
        to be within -1..rows-1; indices on a GPU are not read by the host.
    Sync: on `stream`; the host does not wait. NumPy arrays are copied when it returns.
    Source: PTX ISA, cp.async.bulk. Rows need 16-byte aligned addresses and sizes; others take the vector path.
    """
    launches.check(stream, num_sms)
    dst, src = arrays.pair(dst, src)
    for name, array in (("dst", dst), ("src", src)):
        _check_rows(name, array)
    if dst.shape[1:] != src.shape[1:]:
        raise ValueError(f"src: expected rows of shape {dst.shape[1:]} as dst has, got {src.shape[1:]}")
    with launches.on(stream):  # indices that are brought to the GPU belong to the stream
        to, of = _same_type(_indices("dst_rows", dst_rows, dst), _indices("src_rows", src_rows, src))
        num_rows = _num_rows(dst, to, src, of)
        if arrays.is_numpy(dst):
            to, of = (np.arange(num_rows) if index is None else index for index in (to, of))
            there = (to >= 0) & (of >= 0)
            dst[to[there]] = src[of[there]]
            return launches.done()
        rows = copies.Rows(
            arrays.address(dst),
            arrays.address(src),
            row_bytes=dst.itemsize * int(np.prod(dst.shape[1:], dtype=np.int64)),
            num_rows=num_rows,
            dst_pitch=_pitch(dst),
            src_pitch=_pitch(src),
            dst_rows=0 if to is None else arrays.address(to),
            src_rows=0 if of is None else arrays.address(of),
            num_dst_rows=len(dst),
            num_src_rows=len(src),
            idx_bytes=next((index.itemsize for index in (to, of) if index is not None), 8),
        )
        return copies.run(rows, (dst, src), num_sms)


def _num_rows(dst: Any, to: Any, src: Any, of: Any) -> int:
    """How many pairs there are; an index that is not given counts its array's rows, as far as they are wanted."""
    if to is not None and of is not None and len(to) != len(of):
        raise ValueError(f"src_rows: expected {len(to)} indices as dst_rows has, got {len(of)}")
    num_rows = next((len(index) for index in (to, of) if index is not None), len(dst))
    for name, array, index in (("dst", dst, to), ("src", src, of)):
        if index is None and num_rows > len(array):
            raise ValueError(f"{name}: expected at least {num_rows} rows without {name}_rows, got {len(array)}")
    return num_rows


def _pitch(array: Any) -> int:
    return array.strides[0] if len(array) > 1 else 0


def _check_rows(name: str, array: Any) -> None:
    if array.ndim < 1 or len(array) > MAX_ROWS:
        raise ValueError(f"{name}: expected 1..{MAX_ROWS:,} rows, got shape {array.shape}")
    if len(array) and not array[0].flags.c_contiguous:
        raise ValueError(f"{name}: expected contiguous rows, got strides {array.strides} for shape {array.shape}")
    if len(array) > 1 and array.strides[0] < 0:
        raise ValueError(f"{name}: expected rows in ascending order, got a stride of {array.strides[0]} bytes")


def _indices(name: str, value: Any, array: Any) -> Any:
    """Checked indices where `array` is, or None."""
    if value is None:
        return None
    on_host = isinstance(value, (list, tuple, range, np.ndarray))
    if isinstance(value, (list, tuple, range)):
        try:
            value = np.asarray(value, None if value else np.int64)
        except (TypeError, ValueError) as error:  # rows of different lengths, a list of arrays on a GPU
            raise TypeError(f"{name}: expected one dimension of int32 or int64, got {value!r}: {error}") from error
    index = arrays.asarray(name, value)
    if index.ndim != 1 or index.dtype not in (np.int32, np.int64):
        raise TypeError(f"{name}: expected one dimension of int32 or int64, got {index.ndim} of {index.dtype}")
    if len(index) > MAX_ROWS:
        raise ValueError(f"{name}: expected at most {MAX_ROWS:,} indices, got {len(index):,}")
    if on_host:
        wrong = np.flatnonzero((index < -1) | (index >= len(array)))
        if wrong.size:
            raise ValueError(f"{name}: expected -1..{len(array) - 1}, got {index[wrong[0]]} at {wrong[0]}")
    if on_host == arrays.is_numpy(array):
        return index
    if not on_host:
        raise TypeError(f"{name}: expected a list or a NumPy array as dst is one, got a CUDA array")
    import cupy

    return cupy.asarray(index)


def _same_type(to: Any, of: Any) -> tuple[Any, Any]:
    """Contiguous, and of one integer type: the kernel has one."""
    given = [index for index in (to, of) if index is not None]
    if not given or all(arrays.is_numpy(index) for index in given):
        return to, of
    import cupy

    wide = np.result_type(*(index.dtype for index in given))
    to, of = (None if index is None else cupy.ascontiguousarray(index, dtype=wide) for index in (to, of))
    return to, of
