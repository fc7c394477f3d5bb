"""One rank of a benchmark, on either backend: its tokens, a dispatch and a combine behind it, and their check."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyep.bench.cases import MODES, Case, count_bytes
from cupyep.bench.world import TIMEOUT_S
from cupyep.buffer import Buffer


class Rank:
    """Collective, as Buffer is. After it the tokens have been there and back, and what came was right."""

    def __init__(self, comm: Any, case: Case, backend: str) -> None:
        self.case, self.xp = case, _namespace(backend)
        self.buffer = Buffer(comm, backend=backend, max_tokens_per_rank=case.num_tokens, timeout_s=TIMEOUT_S)
        self.rank = self.buffer.rank
        self.load()
        mode, (idx, weights) = MODES[case.mode], case.routing(self.rank)
        self.rows = self.xp.asarray(case.rows(self.rank))
        self.x, self.topk_idx, self.topk_weights = mode.encode(self.rows), *map(self.xp.asarray, (idx, weights))
        self.sent = self._dispatch()
        self.combined = self.buffer.combine(self.sent.recv_x, self.sent.handle, self.sent.recv_topk_weights)
        self.verify()
        send_row = self.sent.handle.send_row
        send_row = send_row.get() if hasattr(send_row, "get") else send_row
        self.logical_bytes, self.wire_bytes = count_bytes(send_row, self.rank, case.row_bytes)
        self.destinations = self.logical_bytes / case.row_bytes / case.num_tokens

    def load(self) -> None:
        """Loads what else will be launched; nothing of this group runs yet."""

    def verify(self) -> None:
        """Every token has come back as often as it was sent, its weights once, bit by bit. Raises AssertionError."""
        times = (self.sent.handle.send_row >= 0).sum(axis=1, keepdims=True).astype(np.float32)
        expected = (self.rows.astype(np.float32) * times).astype(self.combined.combined_x.dtype)
        for name, got, wanted in (
            ("combine(dispatch(x))", self.combined.combined_x, expected),
            ("combined_topk_weights", self.combined.combined_topk_weights, self.topk_weights),
        ):
            if wrong := int((bits(got) != bits(wanted)).sum()):
                raise AssertionError(f"rank {self.rank}: {name}: {wrong} of {wanted.size} elements are wrong")

    def _dispatch(self, **options: Any) -> Any:
        options |= MODES[self.case.mode].options
        return self.buffer.dispatch(
            self.x, self.topk_idx, self.topk_weights, num_experts=self.case.num_experts, **options
        )

    # what is timed: public calls

    def call_dispatch(self, num_sms: int | None) -> None:
        self._dispatch(num_sms=num_sms)

    def call_cached_dispatch(self, num_sms: int | None) -> None:
        self.buffer.dispatch(self.x, handle=self.sent.handle, num_sms=num_sms)

    def call_combine(self, num_sms: int | None) -> None:
        self.buffer.combine(self.sent.recv_x, self.sent.handle, self.sent.recv_topk_weights, num_sms=num_sms)

    def call_barrier(self, num_sms: int | None) -> None:
        self.buffer.barrier()

    def close(self) -> None:
        """Collective. Lets go of all arrays first: the arena is freed with the last of them."""
        buffer = self.buffer
        vars(self).clear()
        buffer.close()


def bits(array: Any) -> Any:
    """The elements as unsigned integers of their size: rows are opaque when they are moved or compared."""
    return array.view(f"u{array.dtype.itemsize}")


def _namespace(backend: str) -> Any:
    if backend == "numpy":
        return np
    import cupy

    return cupy
