"""A rank whose kernels can be launched alone, again and again: PUSH, PULL, and the ceilings of its traffic."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from cupyep import abi
from cupyep.backends.base import Form
from cupyep.backends.shapes import Outputs, Tokens
from cupyep.bench.cases import VERBS
from cupyep.bench.ceilings import Probe
from cupyep.bench.gpu import GpuRank
from cupyep.bench.ranks import Rank


class CudaRank(GpuRank, Rank):
    """A Rank on a GPU."""

    def load(self) -> None:
        super().load()
        sizes = {self.case.row_bytes(verb) for verb in VERBS}
        self._probes = {size: Probe(size, self.stream) for size in sizes if Probe.able(size)}

    def prepare(self) -> int:
        """After the first dispatch and combine: what kernels take, and memory for the ceilings. Its arena offset."""
        sent, case, weights = self.sent, self.case, self.sent.recv_topk_weights
        self._tokens = Tokens(*_pair(self.x), self.topk_idx, self.topk_weights)
        self._push_shape, self._pull_shape = self._tokens.shape(), Outputs(self.y, weights).shape(case.num_topk)
        rows, scales = _pair(sent.recv_x)
        self._received = {"rows": rows, "idx": sent.recv_topk_idx, "weights": weights}
        if scales is not None:
            self._received["scales"] = scales
        self._into = {name: self._offset(part) for name, part in self._received.items()}
        self._from = {"rows": self._offset(self.y), "weights": self._offset(weights)}
        self._scratch = self.buffer.empty((self.rows.nbytes * self.buffer.size,), np.uint8)  # a part for each rank
        return self._offset(self._scratch)

    def _offset(self, array: Any) -> int:
        offset = self.buffer._backend._arena.offset_of(array)
        if offset is None and array.size:
            raise AssertionError(f"rank {self.rank}: expected an array in the arena, got one of {array.nbytes} bytes")
        return offset or 0  # an array of no rows lies nowhere

    # what is timed: kernels

    def push(self, num_sms: int) -> None:
        with self.device:
            self.launcher.push(self._push_shape, self.sent.handle.routing, self._tokens, self._into, num_sms)

    def count(self, num_sms: int) -> None:
        routing = self.sent.handle.routing
        with self.device:
            self.launcher.count(self._push_shape, routing, self.topk_idx, self.case.num_tokens, 0, Form())

    def count_and_push(self, num_sms: int) -> None:
        self.count(num_sms)
        self.push(num_sms)

    def pull(self, num_sms: int) -> None:
        out, out_weights, _ = self.combined
        with self.device:
            self.launcher.pull(self._pull_shape, self.sent.handle.routing, out, out_weights, (), self._from, num_sms)

    def poison(self) -> None:
        """Makes every row and sum wrong, so that `check` shows whether the kernels that follow make them right."""
        received = [part for name, part in self._received.items() if name != "idx"]
        with self.device:
            for array in (*received, *self.combined[:2]):
                array.view(np.uint8).fill(0xFF)  # NaN
            cupy.cuda.get_current_stream().synchronize()

    def check(self) -> None:
        """Raises what the kernels have met, or AssertionError if they made something wrong."""
        self.check_kernels()
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
        self._ceiling("fan", num_sms, "dispatch", [self._tokens.x.data.ptr], self._parts, writes=self._fan)

    def pull_ceiling(self, num_sms: int) -> None:
        self._ceiling("mix", num_sms, "combine", self._parts, [self.combined.combined_x.data.ptr], reads=self._fan)

    def ceiling_bytes(self, verb: str) -> int:
        """What one launch of that verb's ceiling moves, in the units of `bytes`; 0: there is none for such rows."""
        size = self.case.row_bytes(verb)
        if size not in self._probes:
            return 0
        chunk = self._probes[size].chunk_bytes
        return self.case.num_tokens * size // chunk * chunk * self._fan

    @property
    def _fan(self) -> int:
        return max(1, min(len(self._parts), round(self.destinations)))

    def _ceiling(self, kernel: str, num_sms: int, verb: str, src: list[int], dst: list[int], **counts: int) -> None:
        size = self.case.row_bytes(verb)
        with self.device:
            self._probes[size].launch(kernel, num_sms, src, dst, self.case.num_tokens * size, **counts)


def _pair(x: Any) -> tuple[Any, Any]:
    """What a dispatch takes or gives, as (data, scales or None)."""
    return x if isinstance(x, tuple) else (x, None)
