"""Shapes of the low-latency mode: how many rows there are, where they lie in a receive region and in the results."""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyep.abi import Operation
from cupyep.layout import Channel, align

DISPATCH, COMBINE = Operation.LOW_LATENCY_DISPATCH, Operation.LOW_LATENCY_COMBINE
NUM_SLOTS = 2  # calls of one verb whose results are valid, and channels of that verb
CHANNELS = {DISPATCH: Channel.LOW_LATENCY_DISPATCH_0, COMBINE: Channel.LOW_LATENCY_COMBINE_0}  # of slot 0
CHANNEL_OF_SLOT = {(verb, slot): Channel(first + slot) for verb, first in CHANNELS.items() for slot in range(NUM_SLOTS)}
NUM_REGIONS = 4  # one for each channel, of equal size
SCALE_GROUP = 128  # values of a row that share a scale
EXPERT_BITS = 10  # of a meta word; the place stands above them
GIVEN = ("recv_x", "recv_scales", "recv_count", "src_info", "layout_range")  # what a dispatch gives to the user
Parts = dict[str, tuple[tuple[int, ...], Any]]  # name -> (shape, dtype)


@dataclass(frozen=True)
class LowLatencyShape:
    """What decides kernels and layout, equal on all ranks. dtype: NumPy, of x; fp8: rows are cast for the wire."""

    num_ranks: int
    max_tokens: int
    hidden: int
    dtype: Any
    num_topk: int
    num_experts: int
    fp8: bool = False
    round_scale: bool = False
    ue8m0: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(tuple(vars(self).values())))  # a call looks up half a dozen things by us

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def arguments(self) -> dict[str, Any]:
        """By the names that callers know."""
        return {
            "num_max_dispatch_tokens_per_rank": self.max_tokens,
            "hidden": self.hidden,
            "dtype": self.dtype.name,
            "num_topk": self.num_topk,
            "num_experts": self.num_experts,
            "use_fp8": self.fp8,
            "round_scale": self.round_scale,
            "use_ue8m0": self.ue8m0,
        }

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def num_rows(self) -> int:
        """Rows of a receive region, and of each expert in recv_x: one for every token that any rank may have."""
        return self.num_ranks * self.max_tokens

    @property
    def wire_bytes(self) -> int:
        return self.hidden if self.fp8 else self.hidden * self.dtype.itemsize

    @property
    def num_scale_words(self) -> int:
        return self.hidden // (SCALE_GROUP * (4 if self.ue8m0 else 1)) if self.fp8 else 0

    def region(self, operation: Operation) -> Parts:
        """The receive region: rows by (source rank, place), of a combine by (rank, token of ours)."""
        rows = (self.num_ranks, self.max_tokens)
        side = (1 + 2 * self.num_topk, np.uint32) if operation == DISPATCH else (self.num_topk, np.float32)
        return {
            "rows": ((*rows, self.wire_bytes), np.uint8),
            "scales": ((*rows, self.num_scale_words), np.uint32),
            "side": ((*rows, side[0]), side[1]),
        }

    def results(self, operation: Operation) -> Parts:
        """What a call leaves at its own rank: results for the user, and a dispatch's tables for its combine."""
        if operation == COMBINE:
            return {"out": ((self.max_tokens, self.hidden), self.dtype)}
        local, rows, ranks = self.num_local_experts, self.num_rows, self.num_ranks
        return {
            "recv_x": ((local, rows, self.hidden), np.dtype(np.uint8) if self.fp8 else self.dtype),
            "recv_scales": ((local, self.num_scale_words, rows), np.int32 if self.ue8m0 else np.float32),
            "recv_count": ((local,), np.int32),
            "src_info": ((local, rows), np.int32),
            "layout_range": ((local, ranks), np.int64),
            "token_ranks": ((self.max_tokens, -(-ranks // 32)), np.uint32),
            "num_rows": ((ranks,), np.uint32),
            "tokens": ((rows,), np.int32),
            "positions": ((rows, self.num_topk), np.int32),
            "weights": ((rows, self.num_topk), np.float32),
        }


shape_of = functools.cache(LowLatencyShape)  # the same one for the same fields: calls look it up


@functools.cache
def signature(shape: LowLatencyShape, with_weights: bool, tables_slot: int) -> int:
    """16 bits that peers compare: what all ranks must have alike."""
    return zlib.crc32(repr((shape, with_weights, tables_slot)).encode()) & 0xFFFF


def offsets(parts: Parts) -> dict[str, int]:
    """Byte offsets of `parts` laid one behind the other, and all bytes as `num_bytes`."""
    found, end = {}, 0
    for name, (shape, dtype) in parts.items():
        found[name] = end
        end = align(end + math.prod(shape) * np.dtype(dtype).itemsize)
    return {**found, "num_bytes": end}


def size_hint(shape: LowLatencyShape) -> int:
    """Bytes of the four receive regions, for dispatch and combine of `shape`."""
    return NUM_REGIONS * max(offsets(shape.region(operation))["num_bytes"] for operation in CHANNELS)
