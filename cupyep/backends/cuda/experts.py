"""The expert layout on the GPU: where each listing goes, received rows there, experts' outputs back to one row a token.

These kernels wait for nobody, so they may take the whole GPU. They run on the communication stream, between PUSH and
what the caller does, and between that and PULL.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from cupyep import abi
from cupyep.backends.base import Form
from cupyep.backends.cuda.blocks import Blocks
from cupyep.backends.cuda.kernels import Call, Kernels
from cupyep.backends.cuda.launcher import CudaHandle
from cupyep.backends.shapes import Shape
from cupyep.handle import ExpertRows
from cupyep.layout import align

MAX_ARRANGE_CTAS = 64  # each adds up the histograms of those before it


class Experts:
    """Launches the kernels of the expert layout."""

    def __init__(self, kernels: Kernels, blocks: Blocks, stream: cupy.cuda.Stream, num_sms: int) -> None:
        self._kernels, self._blocks, self._stream, self._num_sms = kernels, blocks, stream, num_sms

    def arrange(
        self, topk_idx: cupy.ndarray, recv_count: cupy.ndarray, listings: list[int], num_local: int, form: Form,
        current: Any,
    ) -> ExpertRows:  # fmt: skip
        """Gives each listing a row. `listings`: of each local expert, where the host knows them."""
        num_rows = sum(align(count, form.expert_alignment) for count in listings)
        if form.num_worst_tokens:
            num_rows = form.num_worst_rows(topk_idx.shape, num_local)
        offsets = self._blocks.lent((num_local + 1,), np.int32, current)
        row_map = self._blocks.lent(topk_idx.shape, np.int32, current)
        num_ctas = min(self._num_sms, MAX_ARRANGE_CTAS)
        histograms = self._blocks.lent((num_ctas, num_local), np.int32, current)
        experts = ExpertRows(num_rows, form.expert_alignment, offsets, row_map)
        call = Call(abi.ARRANGE_PARAMS, {})
        call.set(
            topk_idx=topk_idx.data.ptr,
            histograms=histograms.data.ptr,
            idx_bytes=topk_idx.itemsize,
            alignment=form.expert_alignment,
            **_row_map(experts, recv_count),
        )
        for name in ("arrange_count", "arrange_place"):
            self._kernels.local(name).launch(num_ctas, call, self._stream)
        return experts

    def expand(self, rows: Any, handle: CudaHandle, zero_gaps: bool, current: Any) -> Any:
        """Received rows, or their scales, grouped by expert."""
        if rows is None:
            return None
        experts = handle.expert_rows
        assert experts is not None
        expanded = self._blocks.lent((experts.num_rows, rows.shape[1]), rows.dtype, current)
        call = Call(abi.EXPAND_PARAMS, {})
        call.set(
            rows=rows.data.ptr,
            expanded=expanded.data.ptr,
            zero_gaps=int(zero_gaps),
            **_row_map(experts, handle.recv_count),
        )
        kernel = self._kernels.local("expand", rows.shape[1] * rows.itemsize)
        kernel.launch(2 * self._num_sms, call, self._stream)
        return expanded

    def reduce(self, expanded: cupy.ndarray, handle: CudaHandle, weights: Any, shape: Shape, rows: int) -> None:
        """Writes at the address `rows` one row per received token, of the type that travels."""
        experts = handle.expert_rows
        assert experts is not None
        call = Call(abi.REDUCE_PARAMS, {})
        call.set(
            expanded=expanded.data.ptr,
            rows=rows,
            weights=0 if weights is None else weights.data.ptr,
            **_row_map(experts, handle.recv_count),
        )
        kernel = self._kernels.local("reduce", shape.hidden, shape.local_dtype, shape.dtype)
        kernel.launch(4 * self._num_sms, call, self._stream)


def _row_map(experts: ExpertRows, recv_count: cupy.ndarray) -> dict[str, int]:
    return {
        "row_map": experts.row_map.data.ptr,
        "offsets": experts.offsets.data.ptr,
        "received": recv_count.data.ptr,
        "num_topk": experts.row_map.shape[1],
        "num_local_experts": len(experts.offsets) - 1,
        "capacity": experts.row_map.shape[0],
    }
