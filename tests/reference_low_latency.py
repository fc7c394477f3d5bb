"""The oracle of the low-latency mode: plain loops, nothing of cupyep imported. Lists are indexed by rank.

fp8_reference.py has the rule of the casts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from reference import narrow, owner, widen


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
