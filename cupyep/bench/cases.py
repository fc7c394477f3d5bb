"""What is benchmarked: the tokens of a case, the modes that move them, and how bytes are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from cupyep.quantize import dequantize_fp8, quantize_fp8

VERBS = ("dispatch", "combine")


@dataclass(frozen=True)
class Mode:
    """A way to dispatch and combine. Another mode is another entry of MODES.

    dtype: of the rows that are made and that combine adds; options: further keywords of Buffer.dispatch. Where dispatch
    sends something else, encode makes its x of rows, decode makes rows of what it received, and sent is the type of its
    data.
    """

    dtype: np.dtype
    options: dict[str, Any] = field(default_factory=dict)
    encode: Callable[[Any], Any] = lambda rows: rows
    decode: Callable[[Any], Any] = lambda received: received
    sent: np.dtype | None = None

    def row_bytes(self, verb: str, hidden: int) -> int:
        """Payload of a row of one of VERBS; scales, ids and weights do not count."""
        dtype = self.sent if self.sent is not None and verb == "dispatch" else self.dtype
        return hidden * dtype.itemsize


BF16 = np.dtype(ml_dtypes.bfloat16)
MODES = {
    "bf16": Mode(BF16),
    "fp16": Mode(np.dtype(np.float16)),
    "fp32": Mode(np.dtype(np.float32)),
    "fp8": Mode(
        BF16,
        encode=quantize_fp8,
        decode=lambda received: dequantize_fp8(*received),
        sent=np.dtype(ml_dtypes.float8_e4m3fn),
    ),
}


@dataclass(frozen=True)
class Case:
    """The tokens of every rank: `num_tokens` rows of `hidden` elements, each to `num_topk` of `num_experts`."""

    num_tokens: int = 4096
    hidden: int = 7168
    num_topk: int = 8
    num_experts: int = 256
    mode: str = "bf16"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {self.mode!r}")
        if not 1 <= self.num_topk <= min(32, self.num_experts):
            most = min(32, self.num_experts)
            raise ValueError(f"num_topk: expected 1..{most} (experts: {self.num_experts}), got {self.num_topk}")
        for name in ("num_tokens", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    def row_bytes(self, verb: str) -> int:
        """Payload of a row of one of VERBS."""
        return MODES[self.mode].row_bytes(verb, self.hidden)

    def routing(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """topk_idx `[num_tokens, num_topk]` int64, distinct in a row, and topk_weights float32, both random.

        Weights are sixteenths up to 1, so that sums of weighted rows are exact in float32.
        """
        rng = np.random.default_rng(rank)
        scores = rng.random((self.num_tokens, self.num_experts), dtype=np.float32)
        idx = np.argpartition(scores, self.num_topk - 1, axis=1)[:, : self.num_topk].astype(np.int64)
        return idx, rng.integers(1, 17, idx.shape).astype(np.float32) / 16

    def rows(self, rank: int) -> np.ndarray:
        """`[num_tokens, hidden]`: multiples of 1/32 below 4, so that the sum of any 8 is exact in every mode.

        Beyond 4,093 tokens rows come again: making them would take longer than all measurements.
        """
        rng = np.random.default_rng(1000 + rank)
        small = rng.integers(-127, 128, (min(self.num_tokens, 4093), self.hidden), dtype=np.int8)
        rows = (small.astype(np.float32) / 32).astype(MODES[self.mode].dtype)
        return rows[np.arange(self.num_tokens) % len(rows)]


def count_bytes(send_row: np.ndarray, rank: int, row_bytes: int) -> tuple[int, int]:
    """(logical, wire) bytes of one rank: `send_row[token, destination] >= 0` is a row pushed, and later pulled.

    Logical counts each (token, destination rank) once; wire leaves out the rank itself.
    """
    goes = np.asarray(send_row) >= 0
    logical = int(goes.sum()) * row_bytes
    return logical, logical - int(goes[:, rank].sum()) * row_bytes
