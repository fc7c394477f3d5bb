"""What every rank on a GPU has: a device and a stream, barriers alone, and what it does as a CUDA graph."""

from __future__ import annotations

from typing import Any

import cupy

from cupyep.backends.cuda import jit, plan
from cupyep.backends.cuda.kernels import Kernel
from cupyep.bench.ranks import BufferRank

NUM_BARRIERS = 256  # in one launch of `barriers`


class GpuRank(BufferRank):
    """A rank with a Buffer. Launches go to the Buffer's own stream and leave the host running."""

    def load(self) -> None:
        backend: Any = self.buffer._backend
        self.device, self.stream = cupy.cuda.Device(), self.buffer.get_comm_stream()
        if backend._device != self.device.id:
            rank, expected = self.buffer.rank, self.device.id
            raise AssertionError(f"rank {rank}: expected its Buffer on GPU {expected}, got {backend._device}")
        arch = f"sm_{self.device.compute_capability}"
        prelude = plan.prelude(self.buffer.size, {"kNumBarriers": NUM_BARRIERS})
        module = jit.load(jit.build(jit.Request("barriers", arch, prelude)))
        self._barriers = Kernel(jit.function(module, "barriers"), 32, 0)

    @property
    def launcher(self) -> Any:
        return self.buffer._backend._launcher

    def check_kernels(self) -> None:
        """Raises what the kernels behind us have met."""
        self.launcher.check()

    def barrier(self, num_sms: int) -> None:
        with self.device:
            self.launcher.barrier()

    def barriers(self, num_sms: int) -> None:
        """NUM_BARRIERS of them in one launch."""
        with self.device:
            self._barriers.launch(1, self.launcher._barrier, self.stream)

    def graph(self, action: str, num_sms: int | None, count: int) -> Any:
        """`count` actions of one kind as a CUDA graph, uploaded: its first launch must not wait for anything."""
        with self.device, self.stream:
            self.stream.begin_capture()
            try:
                for _ in range(count):
                    getattr(self, action)(num_sms)
            finally:
                graph = self.stream.end_capture()
            graph.upload(self.stream)
            self.stream.synchronize()
        return graph

    def launch_graph(self, graph: Any) -> None:
        with self.device:
            graph.launch(self.stream)
