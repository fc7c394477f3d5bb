"""One rank of a benchmark, on either backend: its tokens, a dispatch and a combine behind it, and their check."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyep.backends.base import HEAP_STEP
from cupyep.bench.cases import MODES, VERBS, Case, count_bytes
from cupyep.bench.world import TIMEOUT_S
from cupyep.buffer import Buffer
from cupyep.layout import RowLayout, align


class BufferRank:
    """What every rank of a benchmark has: a Buffer."""

    buffer: Buffer

    def load(self) -> None:
        """Loads what else will be launched; nothing of this group runs yet."""

    def expect(self, name: str, got: Any, wanted: Any) -> None:
        """AssertionError unless two arrays agree bit by bit."""
        if wrong := int((bits(got) != bits(wanted)).sum()):
            raise AssertionError(f"rank {self.buffer.rank}: {name}: {wrong} of {wanted.size} elements are wrong")

    def close(self) -> None:
        """Collective. Lets go of all arrays first: the arena is freed with the last of them."""
        buffer = self.buffer
        vars(self).clear()
        buffer.close()


class Rank(BufferRank):
    """Collective, as Buffer is. After it the tokens have been there and back, and what came was right.

    Attributes: bytes: by verb, (logical, wire) of one call; memory_bytes: by action, bytes through memory.
    """

    OUTPUTS = 3  # that the arena holds, of the most rows there can be: received ones, ceilings' scratch, one under way

    def __init__(self, comm: Any, case: Case, backend: str, heap_bytes: int) -> None:
        self.case, self.xp = case, namespace(backend)
        self.buffer = Buffer(
            comm, heap_bytes, backend=backend, max_tokens_per_rank=case.num_tokens, timeout_s=TIMEOUT_S
        )
        self.rank = self.buffer.rank
        self.load()
        mode, made = MODES[case.mode], case.rows(self.rank)
        rows, self.topk_idx, self.topk_weights = map(self.xp.asarray, (made, *case.routing(self.rank)))
        self.x = mode.encode(rows)
        self.rows = mode.decode(self.x)
        if self.rows is not rows:
            check_encoding(on_host(self.rows), made)
        self.sent = self._dispatch()
        self.y = self._outputs(mode.decode(self.sent.recv_x))
        self.combined = self.buffer.combine(self.y, self.sent.handle, self.sent.recv_topk_weights)
        self.verify()
        send_row = on_host(self.sent.handle.send_row)
        self.bytes = {verb: count_bytes(send_row, self.rank, case.row_bytes(verb)) for verb in VERBS}
        self.memory_bytes: dict[str, int] = {}
        self.destinations = self.bytes["combine"][0] / case.row_bytes("combine") / case.num_tokens

    @classmethod
    def heap_bytes(cls, case: Case, num_ranks: int) -> int:
        """What the arena of such a rank needs. In fp8 mode, rows to combine are others than those that came."""
        rows, mode = RowLayout(case.row_bytes("combine"), case.num_topk, 8, True), MODES[case.mode]
        num_outputs = cls.OUTPUTS + (mode.sent is not None)
        return align(num_outputs * rows.offsets(num_ranks * case.num_tokens)["num_bytes"], HEAP_STEP)

    def _outputs(self, rows: Any) -> Any:
        """What the experts answer: `rows`, in the arena."""
        if rows is self.sent.recv_x:
            return rows
        outputs = self.buffer.empty(rows.shape, rows.dtype)
        self.xp.copyto(outputs, rows)
        return outputs

    def verify(self) -> None:
        """Every token has come back as often as it was sent, its weights once, bit by bit. Raises AssertionError."""
        self.expect("combine(dispatch(x))", self.combined.combined_x, self._sums(self.combined.combined_x.dtype))
        self.expect("combined_topk_weights", self.combined.combined_topk_weights, self.topk_weights)
        received = MODES[self.case.mode].decode(self.sent.recv_x)
        if received is not self.y:
            self.expect("dispatch(x)", received, self.y)

    def _sums(self, dtype: Any) -> Any:
        """What a combine of the received rows gives."""
        times = (self.sent.handle.send_row >= 0).sum(axis=1, keepdims=True).astype(np.float32)
        return (self.rows.astype(np.float32) * times).astype(dtype)

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
        self.buffer.combine(self.y, self.sent.handle, self.sent.recv_topk_weights, num_sms=num_sms)

    def call_barrier(self, num_sms: int | None) -> None:
        self.buffer.barrier()


def check_encoding(rows: np.ndarray, made: np.ndarray) -> None:
    """`rows`, after encode and decode, are the ones that were made, but for e4m3's three bits. Else AssertionError."""
    exact = made.astype(np.float32)
    if not (np.abs(rows.astype(np.float32) - exact) <= np.abs(exact) / 15).all():
        raise AssertionError("encode: expected rows that decode to within a fifteenth of what they were, got others")


def weighted_sums(
    rows: np.ndarray, topk_idx: np.ndarray, topk_weights: np.ndarray, num_local_experts: int
) -> np.ndarray:
    """What comes home where every rank first adds a token's rows of its own experts, each times its weight.

    Args: rows: `[num_tokens, hidden]`, which the experts answer as they got them; topk_idx, topk_weights: a Case's.
    Returns: the same shape and type; rounded once for the way and once at home, exact otherwise.
    """
    owners, total = topk_idx // num_local_experts, np.zeros(rows.shape, np.float32)
    for rank in range(owners.max() + 1):
        weights = (topk_weights * (owners == rank)).sum(axis=1, keepdims=True)
        total += (rows.astype(np.float32) * weights).astype(rows.dtype).astype(np.float32)
    return total.astype(rows.dtype)


def bits(array: Any) -> Any:
    """The elements as unsigned integers of their size: rows are opaque when they are moved or compared."""
    return array.view(f"u{array.dtype.itemsize}")


def on_host(array: Any) -> np.ndarray:
    """A copy from the GPU where it lies there."""
    return array.get() if hasattr(array, "get") else array


def namespace(backend: str) -> Any:
    """The array library of a backend."""
    if backend == "numpy":
        return np
    import cupy

    return cupy
