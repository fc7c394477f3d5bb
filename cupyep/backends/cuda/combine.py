"""Combine on the GPU: PULL."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from cupyep.abi import Operation
from cupyep.backends.base import Run
from cupyep.backends.cuda.arrays import plain
from cupyep.backends.cuda.blocks import offsets
from cupyep.backends.cuda.launcher import CudaHandle
from cupyep.backends.cuda.session import Session
from cupyep.backends.shapes import Outputs, Shape
from cupyep.errors import ArenaExhaustedError


class Combine(Session):
    """The verb combine of a CudaBackend."""

    def combine(self, outputs: Outputs, handle: CudaHandle, out: Any, run: Run) -> tuple:
        shape = outputs.shape(handle.num_topk)
        num_sms = self._num_sms(run, shape, handle.num_topk)
        not_captured = "" if (ready := shape in self._prepared) else self._not_loaded
        with cupy.cuda.Device(self._device), self._operation(Operation.PULL, run, not_captured) as current:
            if not ready:
                self._agree(shape, handle, current)
            where: Any
            if handle.expert_rows is None:
                where, staged = self._blocks.visible({"rows": outputs.x, "weights": outputs.topk_weights})
            else:
                where, staged = self._reduced(outputs, handle, shape)
            bias = tuple(plain(addend) for addend in outputs.bias)
            if out is None:
                out = self._blocks.lent((handle.num_tokens, shape.hidden), shape.dtype, current)
            out_weights = None
            if shape.rows.with_weights:
                out_weights = self._blocks.lent((handle.num_tokens, handle.num_topk), np.float32, current)
            with self._launching(Operation.PULL, current):
                self._launcher.pull(shape, handle.routing, out, out_weights, bias, where, num_sms)
            self._granted(where)
            event = self._finish(current, run, (outputs, out, bias))
            del staged
        return out, out_weights, event

    def _reduced(self, outputs: Outputs, handle: CudaHandle, shape: Shape) -> tuple[Any, Any]:
        """One row per received token, of the type that travels, in the arena: (its offset, what to keep)."""
        if not handle.num_recv_tokens:
            return {}, None
        stream = self._comm_stream.stream
        blocks = self._blocks.try_allocate(shape.rows.parts(handle.num_recv_tokens), stream)
        if isinstance(blocks, ArenaExhaustedError):
            return blocks, None
        weights = None if outputs.topk_weights is None else plain(outputs.topk_weights)
        self._experts.reduce(plain(outputs.x), handle, weights, shape, blocks["rows"].address)
        return offsets(blocks), (blocks, weights)
