"""The oracle of the expert layout: loops over received rows and listings. Imports nothing from cupyep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import reference


@dataclass
class Expanded:
    """What one rank gets: `places` of listings (row, column), offsets of groups, rows by place (None: a gap)."""

    offsets: list[int]
    row_map: np.ndarray
    rows: list[np.ndarray | None]


def expand(received: reference.Received, alignment: int) -> Expanded:
    """One row per listing, grouped by expert, each group from a multiple of `alignment` on."""
    num_local = len(received.num_recv_tokens_per_expert)
    row_map = np.full(received.topk_idx.shape, -1, np.int32)
    offsets: list[int] = [0]
    rows: list[np.ndarray | None] = []
    for expert in range(num_local):
        for row, ids in enumerate(received.topk_idx.tolist()):
            for column, listed in enumerate(ids):
                if listed == expert:
                    row_map[row, column] = len(rows)
                    rows.append(received.x[row])
        while len(rows) % alignment:
            rows.append(None)
        offsets.append(len(rows))
    return Expanded(offsets, row_map, rows)


def reduce(y: np.ndarray, row_map: np.ndarray, weights: np.ndarray | None, wire: np.dtype) -> np.ndarray:
    """Per received row, weight times expanded row, added in float32 from +0 by column, rounded once to `wire`."""
    result = np.empty((len(row_map), y.shape[1]), wire)
    for row, places in enumerate(row_map.tolist()):
        total = np.zeros(y.shape[1], np.float32)
        for column, place in enumerate(places):
            if place >= 0:
                with np.errstate(over="ignore", invalid="ignore"):
                    value = reference.widen(y[place])
                    if weights is not None:
                        value = np.multiply(weights[row, column], value, dtype=np.float32)
                    total = np.add(total, value, dtype=np.float32)
        result[row] = reference.narrow(total, wire)
    return result
