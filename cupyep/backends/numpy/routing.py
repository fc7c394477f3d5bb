"""Who gets which token: the arithmetic of the count step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyep.handle import Handle


@dataclass(frozen=True)
class Route:
    """One rank's routing.

    Attributes:
        is_token_in_rank: `[num_tokens, num_ranks]` bool.
        order: `[num_tokens, num_ranks]`: how many earlier tokens go to the same rank.
        num_tokens_per_rank: `[num_ranks]` int32: a token counts once per rank.
        num_tokens_per_expert: `[num_experts]` int32: a token counts once per listing.
        bad_id: an id outside [-1, num_experts), treated as -1, or None.
    """

    is_token_in_rank: np.ndarray
    order: np.ndarray
    num_tokens_per_rank: np.ndarray
    num_tokens_per_expert: np.ndarray
    bad_id: int | None


@dataclass(frozen=True, eq=False)
class NumpyHandle(Handle):
    """A Handle whose rows are known as an array. rows: see Handle.send_row."""

    rows: np.ndarray
    recv_count: np.ndarray
    recv_count_per_expert: np.ndarray

    @property
    def send_row(self) -> np.ndarray:
        return self.rows


def route(topk_idx: np.ndarray, num_experts: int, num_ranks: int) -> Route:
    """Routes `topk_idx` `[num_tokens, num_topk]`; expert e lives on rank e // (num_experts / num_ranks)."""
    bad = (topk_idx < -1) | (topk_idx >= num_experts)
    listed = (topk_idx >= 0) & ~bad
    token, column = np.nonzero(listed)
    expert = topk_idx[token, column]
    is_token_in_rank = np.zeros((len(topk_idx), num_ranks), bool)
    is_token_in_rank[token, expert // (num_experts // num_ranks)] = True
    return Route(
        is_token_in_rank=is_token_in_rank,
        order=np.cumsum(is_token_in_rank, 0, dtype=np.int64) - 1,
        num_tokens_per_rank=is_token_in_rank.sum(0, dtype=np.int32),
        num_tokens_per_expert=np.bincount(expert, minlength=num_experts).astype(np.int32),
        bad_id=int(topk_idx[bad][0]) if bad.any() else None,
    )


def local_idx(topk_idx: np.ndarray, rank: int, num_local_experts: int) -> np.ndarray:
    """Global expert ids as local ids of `rank`, -1 for experts that live elsewhere; the type stays."""
    first = rank * num_local_experts
    return np.where((topk_idx >= first) & (topk_idx < first + num_local_experts), topk_idx - first, -1).astype(
        topk_idx.dtype
    )
