"""The options that only a GPU has: the expansion alone, products into the arena, and a graph of both verbs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import cupy
import numpy as np

from cupyep.bench.kernels import CudaRank
from cupyep.bench.option_ranks import OptionRank


class CudaOptionRank(OptionRank, CudaRank):
    """An OptionRank on a GPU. Its experts multiply float16 rows by the identity; CuPy has no bfloat16 product."""

    def __init__(self, comm: Any, *args: Any) -> None:
        super().__init__(comm, *args)
        self.half = self.y.astype(np.float32).astype(np.float16)
        self.identity = cupy.asarray(np.eye(self.case.hidden, dtype=np.float16))
        for where in (nullcontext(), self.buffer.allocator()):
            self.expect("combine of a product", self._product(where).combined_x, self._sums(np.float16))
        with self.buffer.allocator():
            self._offset(self._multiplied())  # raises where it lies elsewhere
        num_rows = len(self.y) + sum(self.experts.num_recv_tokens_per_expert_list)
        self.memory_bytes["expand"] = num_rows * self.case.row_bytes("combine")

    def _multiplied(self) -> Any:
        return cupy.matmul(self.half, self.identity)

    def _product(self, where: AbstractContextManager[None], num_sms: int | None = None) -> Any:
        with where:
            y = self._multiplied()
        return self.buffer.combine(y, self.sent.handle, num_sms=num_sms)

    # what is timed

    def expand(self, num_sms: int) -> None:
        """Received rows to their experts' groups, by the whole GPU: each read once, written once per listing."""
        experts: Any = self.buffer._backend._experts
        with self.device, self.stream:
            experts.expand(self.sent.recv_x, self.experts.handle, False, self.stream)

    def call_product(self, num_sms: int | None) -> None:
        self._product(nullcontext(), num_sms)

    def call_product_in_arena(self, num_sms: int | None) -> None:
        self._product(self.buffer.allocator(), num_sms)

    def call_pair(self, num_sms: int | None) -> None:
        """What a graph can hold: the host waits for no counts."""
        came = self._dispatch(num_worst_tokens=self.most_rows, num_sms=num_sms)
        options = {"out": self.out, "num_sms": num_sms}
        self.buffer.combine(came.recv_x, came.handle, came.recv_topk_weights, **options)

    # the graph's check

    def poison_out(self) -> None:
        with self.device:
            self.out.view(np.uint8).fill(0xFF)  # NaN
            cupy.cuda.get_current_stream().synchronize()

    def check_out(self) -> None:
        """Raises what the kernels have met, or AssertionError unless the pair has made its sums right."""
        self.check_kernels()
        self.expect("a graph of dispatch and combine", self.out, self._sums(self.out.dtype))
