"""The expert layout in NumPy: the twin of arrange.cu, expand.cu and reduce.cu."""

from __future__ import annotations

import numpy as np

from cupyep.backends.base import Form
from cupyep.handle import ExpertRows
from cupyep.layout import align


def arrange(topk_idx: np.ndarray, listings: np.ndarray, form: Form) -> ExpertRows:
    """Gives each listing of the received `topk_idx` a row: by expert, then by received row, then by column."""
    offsets = np.zeros(len(listings) + 1, np.int32)
    for expert, count in enumerate(listings):
        offsets[expert + 1] = offsets[expert] + align(int(count), form.expert_alignment)
    expert_of = topk_idx.reshape(-1)
    row_map = np.full(expert_of.shape, -1, np.int32)
    for expert in np.unique(expert_of[expert_of >= 0]):
        entries = np.flatnonzero(expert_of == expert)
        row_map[entries] = offsets[expert] + np.arange(len(entries))
    num_rows = form.num_worst_rows(topk_idx.shape, len(listings)) if form.num_worst_tokens else int(offsets[-1])
    return ExpertRows(num_rows, form.expert_alignment, offsets, row_map.reshape(topk_idx.shape))


def expand(rows: np.ndarray, experts: ExpertRows, listings: np.ndarray, zero_gaps: bool) -> np.ndarray:
    """Received rows at the places that arrange gave them."""
    expanded = np.empty((experts.num_rows, rows.shape[1]), rows.dtype)
    if zero_gaps:
        for expert, count in enumerate(listings):
            expanded[experts.offsets[expert] + count : experts.offsets[expert + 1]] = np.zeros((), rows.dtype)
    row, column = np.nonzero(experts.row_map >= 0)
    expanded[experts.row_map[row, column]] = rows[row]
    return expanded


def reduce(expanded: np.ndarray, experts: ExpertRows, weights: np.ndarray | None, wire_dtype: np.dtype) -> np.ndarray:
    """Each received row: its experts' rows times their weights, added in fp32 from +0 by column, rounded once."""
    total = np.zeros((len(experts.row_map), expanded.shape[1]), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities are the caller's business
        for column, places in enumerate(experts.row_map.T):
            rows = np.flatnonzero(places >= 0)
            values = expanded[places[rows]].astype(np.float32)
            if weights is not None:
                values *= weights[rows, column][:, None]
            total[rows] += values
        return total.astype(wire_dtype)
