"""The oracle of the low-latency mode: plain loops, nothing of cupyep imported. Lists are indexed by rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from reference import narrow, owner, widen

GROUP = 128
# e4m3 by its definition: 4 exponent bits with bias 7, 3 mantissa bits; all ones is NaN, so the largest is 448.
E4M3 = np.array(
    [(code & 7) * 2.0**-9 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7) for code in range(127)]
)


@dataclass
class Expert:
    """What one expert gets: its rows' (source rank, source token), and how many come from each rank."""

    sources: list[tuple[int, int]]
    num_from_rank: list[int]


def dispatch(
    topk_idxs: list[np.ndarray], num_experts: int, masked: set[tuple[int, int]] | None = None
) -> list[list[Expert]]:
    """[rank][local expert]. `masked`: pairs (rank, masked by it); neither gives the other anything."""
    num_ranks = len(topk_idxs)
    num_local = num_experts // num_ranks
    result = []
    for rank in range(num_ranks):
        experts = []
        for expert in range(rank * num_local, (rank + 1) * num_local):
            sources = [
                (source, token)
                for source in range(num_ranks)
                if not apart(source, rank, masked)
                for token, ids in enumerate(topk_idxs[source].tolist())
                if expert in ids
            ]
            experts.append(Expert(sources, [sum(s == source for s, _ in sources) for source in range(num_ranks)]))
        result.append(experts)
    return result


def apart(one: int, other: int, masked: set[tuple[int, int]] | None) -> bool:
    """Whether one of two ranks has masked the other."""
    return masked is not None and bool({(one, other), (other, one)} & masked)


def combine(
    ys: list[np.ndarray],
    experts: list[list[Expert]],
    topk_idxs: list[np.ndarray],
    topk_weights: list[np.ndarray],
    num_experts: int,
    masked: set[tuple[int, int]] | None = None,
) -> list[np.ndarray]:
    """Every rank's tokens. ys: [num_local_experts, rows, hidden]; sums in float32, rounded per rank and at the end."""
    num_ranks, dtype, hidden = len(ys), ys[0].dtype, ys[0].shape[2]
    outputs = []
    for home, idx in enumerate(topk_idxs):
        output = np.empty((len(idx), hidden), dtype)
        for token, ids in enumerate(idx.tolist()):
            total = np.zeros(hidden, np.float32)
            owners = [owner(expert, num_experts, num_ranks) for expert in ids]
            with np.errstate(over="ignore", invalid="ignore"):
                for rank in range(num_ranks):
                    if rank not in owners or apart(home, rank, masked):
                        continue
                    part = np.zeros(hidden, np.float32)
                    for column, expert in enumerate(ids):
                        if owners[column] == rank:
                            local = expert - rank * (num_experts // num_ranks)
                            row = experts[rank][local].sources.index((home, token))
                            part = part + topk_weights[home][token, column] * widen(ys[rank][local, row])
                    total = total + widen(narrow(part, dtype))
            output[token] = narrow(total, dtype)
        outputs.append(output)
    return outputs


def quantize(x: np.ndarray, round_scale: bool) -> tuple[np.ndarray, np.ndarray]:
    """(e4m3 codes uint8, scales float32) of rows, 128 values at a time."""
    codes = np.empty(x.shape, np.uint8)
    scales = np.empty((len(x), x.shape[1] // GROUP), np.float32)
    for row in range(len(x)):
        for group in range(scales.shape[1]):
            part = slice(group * GROUP, (group + 1) * GROUP)
            values = widen(x[row, part])
            known = np.abs(values[~np.isnan(values)])
            amax = max(known.max() if known.size else np.float32(0), np.float32(1e-4))
            with np.errstate(invalid="ignore", divide="ignore"):
                scale, inverse = np.float32(amax / np.float32(448)), np.float32(np.float32(448) / amax)
                if round_scale:
                    mantissa, exponent = np.frexp(scale)
                    if np.isfinite(scale):
                        scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
                    inverse = np.float32(1) / scale
                codes[row, part] = nearest(values * inverse)
            scales[row, group] = scale
    return codes, scales


def nearest(values: np.ndarray) -> np.ndarray:
    """The e4m3 codes next to float32 `values`; of two equally near the even one; past the largest, the largest."""
    distance = np.abs(E4M3 - np.minimum(np.abs(values.astype(np.float64)), 448.0)[:, None])
    code = distance.argmin(1)  # the lower of two
    after = np.minimum(code + 1, len(E4M3) - 1)
    is_tie = (after > code) & (distance[np.arange(len(code)), after] == distance.min(1))
    code = np.where(is_tie & (code % 2 == 1), after, code) | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)
