"""A low-latency rank on a GPU: its calls in CUDA graphs, and a copy that tells what memory gives."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from cupyep.bench.gpu import GpuRank
from cupyep.bench.low_latency_ranks import LowLatencyRank

COPY_BYTES = 1 << 28


class CudaLowLatencyRank(GpuRank, LowLatencyRank):
    """A LowLatencyRank on a GPU. Its calls allocate nothing, so they can be captured again and again."""

    def __init__(self, comm: Any, *args: Any) -> None:
        super().__init__(comm, *args)
        self.copied = cupy.zeros((2, COPY_BYTES), np.uint8)

    @property
    def max_num_sms(self) -> int:
        """What a call takes if nobody says."""
        return self.buffer._backend.low_latency.max_num_sms

    def check_kernels(self) -> None:
        super().check_kernels()
        self.buffer._backend.low_latency.check_launched()

    def check(self, what: str) -> None:
        with self.device:
            cupy.cuda.get_current_stream().synchronize()
            self.check_kernels()
            super().check(what)

    def poison(self) -> None:
        with self.device:
            super().poison()
            cupy.cuda.get_current_stream().synchronize()

    def copy(self, num_sms: int | None) -> None:
        """COPY_BYTES from one place of our memory to another."""
        source, target = (part.data.ptr for part in self.copied)
        with self.device:
            runtime.memcpyAsync(target, source, COPY_BYTES, runtime.memcpyDeviceToDevice, self.stream.ptr)
