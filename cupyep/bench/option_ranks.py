"""A rank that dispatches and combines with the options that the command `options` compares."""

from __future__ import annotations

from typing import Any

from cupyep.bench.ranks import Rank, weighted_sums
from cupyep.quantize import quantize_fp8

ALIGNMENT = 128  # rows: of each expert's group


class OptionRank(Rank):
    """A Rank, every option of which has been right once."""

    OUTPUTS = 6  # beside Rank's: a staged input, a matrix product's output, what a graph keeps

    def __init__(self, comm: Any, *args: Any) -> None:
        super().__init__(comm, *args)
        self.most_rows = self.buffer.size * self.case.num_tokens
        self.experts = self._dispatch(layout="expert", expert_alignment=ALIGNMENT)
        self.elsewhere, self.out = self.y.copy(), self.xp.empty_like(self.rows)
        self.verify_options()

    def verify_options(self) -> None:
        """Each option gives what the plain calls give. Raises AssertionError."""
        sums = self._sums(self.rows.dtype)
        self.expect("combine of a staged input", self._combine(self.elsewhere).combined_x, sums)
        self.expect("combine with out=", self._combine(self.y, out=self.out).combined_x, sums)
        fixed = self._dispatch(num_worst_tokens=self.most_rows).recv_x[: len(self.y)]
        self.expect("dispatch with num_worst_tokens", fixed, self.sent.recv_x)
        num_local_experts = self.case.num_experts // self.buffer.size
        wanted = weighted_sums(self.case.rows(self.rank), *self.case.routing(self.rank), num_local_experts)
        self.expect("combine by expert", self._combine_experts().combined_x, self.xp.asarray(wanted))

    def _combine(self, y: Any, **options: Any) -> Any:
        return self.buffer.combine(y, self.sent.handle, self.sent.recv_topk_weights, **options)

    def _combine_experts(self, **options: Any) -> Any:
        experts = self.experts
        return self.buffer.combine(experts.recv_x, experts.handle, experts.recv_topk_weights, **options)

    # what is timed

    def call_fixed_dispatch(self, num_sms: int | None) -> None:
        self._dispatch(num_worst_tokens=self.most_rows, num_sms=num_sms)

    def call_expert_dispatch(self, num_sms: int | None) -> None:
        self._dispatch(layout="expert", expert_alignment=ALIGNMENT, num_sms=num_sms)

    def call_staged_combine(self, num_sms: int | None) -> None:
        self._combine(self.elsewhere, num_sms=num_sms)

    def call_combine_out(self, num_sms: int | None) -> None:
        self._combine(self.y, out=self.out, num_sms=num_sms)

    def call_expert_combine(self, num_sms: int | None) -> None:
        self._combine_experts(num_sms=num_sms)

    def call_quantize(self, num_sms: int | None) -> None:
        quantize_fp8(self.rows)
