"""The arrays of one dispatch or combine, and their shape: what a collective first use prepares.

Shapes are made once for each set of columns and types, and keep what is computed from them: calls look it up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from cupyep import abi, checks
from cupyep.layout import RowLayout


@dataclass(frozen=True)
class Shape:
    """What a collective first use prepares: the rows of one kind of dispatch or combine, equal on all ranks."""

    operation: abi.Operation  # PUSH or PULL
    hidden: int
    dtype: Any  # NumPy dtype
    rows: RowLayout
    scale_dtype: Any = None  # NumPy dtype of the scales that travel
    by_expert: bool = False  # received rows are grouped by expert
    local_dtype: Any = None  # by_expert, PULL: of the experts' outputs, which are reduced to dtype before they travel
    is_weighted: bool = False  # ... with weights, which then do not travel

    @cached_property
    def columns(self) -> dict[str, tuple[int, Any]]:
        """How many columns, and of what type, the array of each part of received rows has."""
        rows = self.rows
        found = {
            "rows": (self.hidden, self.dtype),
            "scales": (rows.scale_bytes // self.scale_dtype.itemsize if rows.scale_bytes else 0, self.scale_dtype),
            "idx": (rows.num_topk, np.dtype(f"i{rows.idx_bytes or 8}")),
            "weights": (rows.num_topk, np.dtype(np.float32)),
        }
        return {name: column for name, column in found.items() if name in rows.sizes}

    @cached_property
    def signature(self) -> dict[str, int]:
        """The words that every rank must post alike, apart from operation, num_experts and handle_id."""
        flags = abi.Flag.WEIGHTS * (self.rows.with_weights or self.is_weighted)
        flags |= abi.Flag.IDX64 * (self.rows.idx_bytes == 8) | abi.Flag.EXPERT_LAYOUT * self.by_expert
        return {
            "dtype": checks.DTYPES[self.dtype] + 16 * checks.DTYPES.get(self.local_dtype, 0),
            "row_bytes": self.rows.row_bytes,
            "num_topk": self.rows.num_topk,
            "flags": flags,
            "scales": self.rows.scale_bytes * 16 + checks.DTYPES[self.scale_dtype] if self.rows.scale_bytes else 0,
        }


@cache
def _push_shape(
    hidden: int, dtype: Any, num_topk: int, idx_bytes: int, with_weights: bool, num_scales: int, scale_dtype: Any,
    by_expert: bool,
) -> Shape:  # fmt: skip
    scale_bytes = num_scales * scale_dtype.itemsize if num_scales else 0
    rows = RowLayout(hidden * dtype.itemsize, num_topk, idx_bytes, with_weights, scale_bytes)
    return Shape(abi.Operation.PUSH, hidden, dtype, rows, scale_dtype, by_expert)


@cache
def _pull_shape(hidden: int, dtype: Any, num_topk: int, with_weights: bool, local_dtype: Any) -> Shape:
    by_expert = local_dtype is not None
    rows = RowLayout(hidden * dtype.itemsize, num_topk, 0, with_weights and not by_expert)
    is_weighted = with_weights and by_expert
    return Shape(abi.Operation.PULL, hidden, dtype, rows, None, by_expert, local_dtype, is_weighted)


class Tokens(NamedTuple):
    """What a dispatch sends, or what came of it. None: does not travel."""

    x: Any
    scales: Any = None
    topk_idx: Any = None
    topk_weights: Any = None

    def shape(self, by_expert: bool = False) -> Shape:
        """Of the PUSH that sends them."""
        x, scales, idx, weights = self
        num_topk, idx_bytes = (0, 0) if idx is None else (idx.shape[1], idx.dtype.itemsize)
        num_scales, scale_dtype = (0, None) if scales is None else (scales.shape[1], scales.dtype)
        with_weights = weights is not None
        return _push_shape(x.shape[1], x.dtype, num_topk, idx_bytes, with_weights, num_scales, scale_dtype, by_expert)

    def map(self, function: Callable[[Any], Any]) -> Tokens:
        """`function` of each array that travels."""
        return Tokens(*[None if array is None else function(array) for array in self])


class Outputs(NamedTuple):
    """What a combine brings home: rows, their weights or None, and up to two addends of the sums."""

    x: Any
    topk_weights: Any = None
    bias: tuple[Any, ...] = ()
    wire_dtype: Any = None  # NumPy dtype: in the expert layout x is reduced to it, with the weights, before it travels

    def shape(self, num_topk: int) -> Shape:
        """Of the PULL that adds them."""
        x, wire, with_weights = self.x, self.wire_dtype, self.topk_weights is not None
        if wire is None:
            return _pull_shape(x.shape[1], x.dtype, num_topk, with_weights, None)
        return _pull_shape(x.shape[1], wire, num_topk, with_weights, x.dtype)
