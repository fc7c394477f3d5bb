"""One rank of the command `low-latency`, on either backend: its tokens, its calls, and their check."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from cupyep import checks
from cupyep.backends.low_latency_shape import SCALE_GROUP
from cupyep.bench.cases import MODES, Case
from cupyep.bench.ranks import BufferRank, namespace, weighted_sums
from cupyep.bench.world import TIMEOUT_S
from cupyep.buffer import Buffer


class LowLatencyRank(BufferRank):
    """Collective, as Buffer is. The weights go with the dispatch; the sums come home into `out`.

    Attributes: memory_bytes: by verb, what one call moves through memory, everything that is read or written once.
    """

    def __init__(self, comm: Any, case: Case, backend: str) -> None:
        self.case, self.xp, mode = case, namespace(backend), MODES[case.mode]
        self.buffer = Buffer(comm, low_latency_mode=True, backend=backend, timeout_s=TIMEOUT_S)
        self.load()
        size = self.buffer.size
        num_local_experts = checks.num_experts(case.num_experts, size) // size
        rows, (idx, weights) = case.rows(self.buffer.rank), case.routing(self.buffer.rank)
        owners = idx // num_local_experts
        destinations = sum(int((owners == rank).any(axis=1).sum()) for rank in range(size)) / case.num_tokens
        self.memory_bytes = memory_bytes(case, destinations)
        wanted = weighted_sums(mode.decode(mode.encode(rows)), idx, weights, num_local_experts)
        self.wanted, self.x, self.topk_idx, self.topk_weights = map(self.xp.asarray, (wanted, rows, idx, weights))
        self.out = self.xp.empty_like(self.x)
        self._results: deque[Any] = deque(maxlen=2)  # of dispatches: as many hold memory at a time

    def there_and_back(self, num_sms: int | None) -> None:
        """Collective: experts answer with what they got; what comes home is right, bit by bit, or AssertionError."""
        self.call_dispatch(num_sms)
        self.y = self._rows(self._results[-1].recv_x)
        self.poison()
        self.call_combine(num_sms)
        self.check("combine")

    def poison(self) -> None:
        """Makes rows received and sums wrong, so that `check` shows whether the calls that follow make them right."""
        for result in self._results:
            rows, scales = result.recv_x if isinstance(result.recv_x, tuple) else (result.recv_x, None)
            rows.view(np.uint8).fill(0xFF)  # NaN
            if scales is not None:
                scales.fill(np.nan)
        self.out.view(np.uint8).fill(0xFF)

    def check(self, what: str) -> None:
        """Raises what calls have met, or AssertionError if the last dispatch, combine or pair made something wrong."""
        if what != "combine":
            for result in self._results:
                there = self.xp.arange(self.y.shape[1]) < self.xp.asarray(result.recv_count)[:, None]
                self.expect("low_latency_dispatch(x)", self._rows(result.recv_x)[there], self.y[there])
        if what != "dispatch":
            self.expect("low_latency_combine(low_latency_dispatch(x))", self.out, self.wanted)

    def _rows(self, recv_x: Any) -> Any:
        """What was received, as rows `[num_local_experts, num_ranks * num_tokens, hidden]` of their own."""
        if not isinstance(recv_x, tuple):
            return recv_x.copy()
        codes, scales = (part.reshape(-1, part.shape[-1]) for part in recv_x)
        return MODES[self.case.mode].decode((codes, scales)).reshape(recv_x[0].shape)

    def _dispatch(self, num_sms: int | None) -> Any:
        return self.buffer.low_latency_dispatch(
            self.x,
            self.topk_idx,
            self.case.num_tokens,
            self.case.num_experts,
            use_fp8=MODES[self.case.mode].sent is not None,
            topk_weights=self.topk_weights,
            num_sms=num_sms,
        )

    # what is timed

    def call_dispatch(self, num_sms: int | None) -> None:
        self._results.append(self._dispatch(num_sms))

    def call_combine(self, num_sms: int | None) -> None:
        self.buffer.low_latency_combine(
            self.y, self.topk_idx, None, self._results[-1].handle, out=self.out, num_sms=num_sms
        )

    def call_pair(self, num_sms: int | None) -> None:
        self.call_dispatch(num_sms)
        self.call_combine(num_sms)


def memory_bytes(case: Case, destinations: float) -> dict[str, float]:
    """By verb: rows and scales that are read or written, on a rank that sends its tokens to so many ranks on average.

    A dispatch reads a row, writes it at each destination, reads it there, and writes it once for each listing. A
    combine reads a row of each listing, writes their sum at home, reads it there, and writes the sum of sums. Ids,
    weights and counts are left out.
    """
    row, wire = case.row_bytes("combine"), case.row_bytes("dispatch")
    if MODES[case.mode].sent is not None:
        wire += 4 * case.hidden // SCALE_GROUP
    dispatch = row + 2 * destinations * wire + case.num_topk * wire
    combine = case.num_topk * row + 2 * destinations * row + row
    return {"dispatch": case.num_tokens * dispatch, "combine": case.num_tokens * combine}
