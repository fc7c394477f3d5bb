"""A rank whose kernels can be launched alone, again and again: PUSH, PULL, BARRIER, and the ceilings of its traffic."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from cupyep import abi
from cupyep.abi import Operation
from cupyep.backends.base import Shape, Tokens
from cupyep.backends.cuda import jit, plan
from cupyep.backends.cuda.kernels import Kernel
from cupyep.bench.ceilings import Probe
from cupyep.bench.ranks import Rank
from cupyep.layout import RowLayout

NUM_BARRIERS = 256  # in one launch of `barriers`


class CudaRank(Rank):
    """A Rank on a GPU. Launches go to the Buffer's own stream and leave the host running."""

    def load(self) -> None:
        backend: Any = self.buffer._backend
        self.device, self.stream = cupy.cuda.Device(), self.buffer.get_comm_stream()
        if backend._device != self.device.id:
            raise AssertionError(
                f"rank {self.rank}: expected its Buffer on GPU {self.device.id}, got {backend._device}"
            )
        self.probe = Probe(self.case.row_bytes, self.stream) if Probe.able(self.case.row_bytes) else None
        arch = f"sm_{self.device.compute_capability}"
        prelude = plan.prelude(self.buffer.size, {"kNumBarriers": NUM_BARRIERS})
        module = jit.load(jit.build(jit.Request("barriers", arch, prelude)))
        self._barriers = Kernel(jit.function(module, "barriers"), 32, 0)

    def prepare(self) -> int:
        """After the first dispatch and combine: their shapes, and memory for the ceilings. Returns its arena offset."""
        case, dtype = self.case, self.rows.dtype
        rows = RowLayout(case.row_bytes, case.num_topk, 8, True)
        self._push_shape = Shape(Operation.PUSH, case.hidden, dtype, rows)
        self._pull_shape = Shape(Operation.PULL, case.hidden, dtype, RowLayout(case.row_bytes, case.num_topk, 0, True))
        if self.probe is None:
            return 0
        self._scratch = self.buffer.empty((self.rows.nbytes * self.buffer.size,), np.uint8)  # a part for each rank
        return self._offset(self._scratch)

    @property
    def launcher(self) -> Any:
        return self.buffer._backend._launcher

    def _offset(self, array: Any) -> int:
        return self.buffer._backend._arena.offset_of(array) or 0  # an array of no rows lies nowhere

    # what is timed: kernels

    def push(self, num_sms: int) -> None:
        where = dict(zip(("rows", "idx", "weights"), map(self._offset, self.sent[:3]), strict=True))
        routing = self.sent.handle.routing
        with self.device:
            tokens = Tokens(self.x, topk_idx=self.topk_idx, topk_weights=self.topk_weights)
            self.launcher.push(self._push_shape, routing, tokens, where, num_sms)

    def pull(self, num_sms: int) -> None:
        where = {"rows": self._offset(self.sent.recv_x), "weights": self._offset(self.sent.recv_topk_weights)}
        out, out_weights, _ = self.combined
        with self.device:
            self.launcher.pull(self._pull_shape, self.sent.handle.routing, out, out_weights, (), where, num_sms)

    def barrier(self, num_sms: int) -> None:
        with self.device:
            self.launcher.barrier()

    def barriers(self, num_sms: int) -> None:
        """NUM_BARRIERS of them in one launch."""
        call = self.launcher._barrier
        call.post({}, operation=Operation.BARRIER)
        with self.device:
            self._barriers.launch(1, call, self.stream)

    def graph(self, action: str, num_sms: int, count: int) -> Any:
        """`count` kernels of one kind as a CUDA graph, uploaded: its first launch must not wait for anything."""
        with self.device, self.stream:
            self.stream.begin_capture()
            for _ in range(count):
                getattr(self, action)(num_sms)
            graph = self.stream.end_capture()
            graph.upload(self.stream)
            self.stream.synchronize()
        return graph

    def launch_graph(self, graph: Any) -> None:
        with self.device:
            graph.launch(self.stream)

    def poison(self) -> None:
        """Makes every row and sum wrong, so that `verify` shows whether the kernels that follow make them right."""
        with self.device:
            for array in (self.sent.recv_x, self.sent.recv_topk_weights, *self.combined[:2]):
                array.view(np.uint8).fill(0xFF)  # NaN
            cupy.cuda.get_current_stream().synchronize()

    def check(self) -> None:
        """Raises what the kernels have met, or AssertionError if they made something wrong."""
        self.launcher.check()
        self.verify()

    # ceilings: the same bytes between the same memories, without the protocol; see docs/benchmarks.md

    def connect(self, offsets: list[int]) -> None:
        """Once all ranks' scratch offsets are known: our part of every rank's scratch."""
        part = self.rows.nbytes * self.rank
        order = [(self.rank + i) % self.buffer.size for i in range(min(self.buffer.size, abi.CEILING_ARRAYS))]
        with self.device:
            peers = self.buffer._backend._arena.peers.get()
        self._parts = [int(peers[rank]) + offsets[rank] + part for rank in order]

    def push_ceiling(self, num_sms: int) -> None:
        self._ceiling("fan", num_sms, [self.rows.data.ptr], self._parts, writes=self._fan)

    def pull_ceiling(self, num_sms: int) -> None:
        self._ceiling("mix", num_sms, self._parts, [self.combined.combined_x.data.ptr], reads=self._fan)

    @property
    def _fan(self) -> int:
        return max(1, min(len(self._parts), round(self.destinations)))

    @property
    def ceiling_bytes(self) -> int:
        """What one launch of either moves, in the units of logical_bytes."""
        assert self.probe is not None
        return self.rows.nbytes // self.probe.chunk_bytes * self.probe.chunk_bytes * self._fan

    def _ceiling(self, kernel: str, num_sms: int, src: list[int], dst: list[int], **counts: int) -> None:
        assert self.probe is not None
        with self.device:
            self.probe.launch(kernel, num_sms, src, dst, self.rows.nbytes, **counts)
