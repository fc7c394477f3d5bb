"""The oracle: dispatch and combine as plain loops over tokens, ranks and experts, for all ranks at once.

Nothing here is shared with the library: no import of cupyep, no vectorised routing, and bfloat16 is widened and rounded
by bit arithmetic. Lists are indexed by rank; expert e lives on rank e // num_local_experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Received:
    """What dispatch gives one rank. Rows are ordered by (source rank, source token).

    `sources[row]` is that pair; `send_row[token, rank]` is the row at which this rank's own token lies in the output of
    `rank`, or -1. The weights are None when none were given.
    """

    x: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray | None
    num_recv_tokens_per_expert: list[int]
    num_recv_tokens_per_rank: list[int]
    sources: list[tuple[int, int]]
    send_row: np.ndarray


@dataclass
class Layout:
    """What one rank will send, as get_dispatch_layout tells it."""

    num_tokens_per_rank: list[int]
    num_tokens_per_expert: list[int]
    is_token_in_rank: np.ndarray


def owner(expert: int, num_experts: int, num_ranks: int) -> int | None:
    """The rank on which `expert` lives; None for -1 and for every other id that is no expert's."""
    return expert // (num_experts // num_ranks) if 0 <= expert < num_experts else None


def layout(topk_idx: np.ndarray, num_experts: int, num_ranks: int) -> Layout:
    """Tokens per rank (a token counts once), listings per expert, and who gets which token, of one rank's ids."""
    per_rank, per_expert = [0] * num_ranks, [0] * num_experts
    is_in_rank = np.zeros((len(topk_idx), num_ranks), bool)
    for token, ids in enumerate(topk_idx.tolist()):
        owners = [owner(expert, num_experts, num_ranks) for expert in ids]
        for expert, rank in zip(ids, owners, strict=True):
            if rank is not None:
                per_expert[expert] += 1
        for rank in range(num_ranks):
            if rank in owners:
                per_rank[rank] += 1
                is_in_rank[token, rank] = True
    return Layout(per_rank, per_expert, is_in_rank)


def dispatch(
    xs: list[np.ndarray], topk_idxs: list[np.ndarray], topk_weightss: list[np.ndarray] | None, num_experts: int
) -> list[Received]:
    """Every rank's received tokens. Per rank: x [T, H], ids [T, K] (int32 or int64), float32 weights [T, K] or None."""
    num_ranks = len(xs)
    num_local_experts = num_experts // num_ranks
    send_rows = [np.full((len(x), num_ranks), -1, np.int32) for x in xs]
    results = []
    for rank in range(num_ranks):
        rows, idx_rows, weight_rows, sources = [], [], [], []
        per_expert, per_source = [0] * num_local_experts, [0] * num_ranks
        for source in range(num_ranks):
            for token, ids in enumerate(topk_idxs[source].tolist()):
                local_ids, weights = [], []
                for choice, expert in enumerate(ids):
                    is_here = owner(expert, num_experts, num_ranks) == rank
                    local_ids.append(expert - rank * num_local_experts if is_here else -1)
                    if topk_weightss is not None:
                        weights.append(topk_weightss[source][token, choice] if is_here else np.float32(0))
                if all(expert == -1 for expert in local_ids):
                    continue
                for expert in local_ids:
                    if expert != -1:
                        per_expert[expert] += 1
                send_rows[source][token, rank] = len(rows)
                per_source[source] += 1
                rows.append(xs[source][token])
                idx_rows.append(local_ids)
                weight_rows.append(weights)
                sources.append((source, token))
        count, topk = len(rows), topk_idxs[rank].shape[1]
        x = np.empty((count, xs[rank].shape[1]), xs[rank].dtype)
        for row, values in enumerate(rows):
            x[row] = values
        idx = np.array(idx_rows, topk_idxs[rank].dtype).reshape(count, topk)
        weights_out = None if topk_weightss is None else np.array(weight_rows, np.float32).reshape(count, topk)
        results.append(Received(x, idx, weights_out, per_expert, per_source, sources, send_rows[rank]))
    return results


def combine(
    ys: list[np.ndarray],
    received: list[Received],
    num_tokens: list[int],
    biases: list[list[np.ndarray]] | None = None,
) -> list[np.ndarray]:
    """Every rank's combined tokens: per home rank [num_tokens[rank], width], of the rows `ys[rank]` [N, width].

    A token's rows are added in float32, in ascending order of the rank they come back from, starting at +0 and the home
    rank's biases [num_tokens[rank], width] in their order, and rounded once to ys' dtype. For the weights pass float32
    [N, K] arrays as ys.
    """
    dtype, width = ys[0].dtype, ys[0].shape[1]
    outputs = []
    for home, count in enumerate(num_tokens):
        output = np.empty((count, width), dtype)
        for token in range(count):
            total = np.zeros(width, np.float32)
            for bias in biases[home] if biases else ():
                with np.errstate(over="ignore", invalid="ignore"):
                    total = np.add(total, widen(bias[token]), dtype=np.float32)
            for rank, row in enumerate(received[home].send_row[token].tolist()):
                if row >= 0:
                    with np.errstate(over="ignore", invalid="ignore"):  # inf - inf and sums past the largest float
                        total = np.add(total, widen(ys[rank][row]), dtype=np.float32)
            output[token] = narrow(total, dtype)
        outputs.append(output)
    return outputs


def widen(row: np.ndarray) -> np.ndarray:
    """`row` as float32: exact for all three dtypes."""
    if row.dtype == np.float32:
        return row
    if row.dtype == np.float16:
        return row.astype(np.float32)
    if row.dtype.name == "bfloat16":
        return (np.ascontiguousarray(row).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    raise TypeError(f"row: expected float32, float16 or bfloat16, got {row.dtype}")


def narrow(row: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 `row` rounded once to `dtype`, ties to even."""
    if dtype == np.float32:
        return row
    if dtype == np.float16:
        with np.errstate(over="ignore"):
            return row.astype(np.float16)
    return bfloat16_bits(row).view(dtype)


def bfloat16_bits(row: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, ties to even, as uint16. Denormals are kept, NaN becomes a quiet NaN."""
    bits = np.ascontiguousarray(row, np.float32).view(np.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    odd = (bits >> 16) & 1  # the last bit that stays: decides a tie
    rounded = (bits.astype(np.uint64) + 0x7FFF + odd) >> 16  # carries into the exponent: the largest floats become inf
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)
