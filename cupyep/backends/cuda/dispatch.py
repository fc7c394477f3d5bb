"""Dispatch on the GPU: COUNT and PUSH.

A dispatch launches COUNT and, back to back, PUSH into blocks for the worst case, or as large as the arena can give;
while rows are moving the host waits for the counts, cuts the exact views and gives the tails back. If some rank's block
turns out too small, COUNT tells all ranks and the PUSH behind it does nothing. When a shape is new, or the arena has to
grow, the counts are read first and PUSH follows with exact blocks. With num_worst_tokens the caller has named the worst
case, blocks keep that size, and the host waits for nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from cupyep.abi import Operation, Verdict
from cupyep.backends.base import Form, Run, Shape, Tokens
from cupyep.backends.cuda.arena import Block
from cupyep.backends.cuda.arrays import plain
from cupyep.backends.cuda.blocks import offsets, received
from cupyep.backends.cuda.launcher import CudaHandle, Routing
from cupyep.backends.cuda.session import Session
from cupyep.errors import ArenaExhaustedError

_ANY = 2**32 - 1  # capacity in COUNT of an arena that is yet to be sized; tokens, where any number will do


class Dispatch(Session):
    """The verb dispatch of a CudaBackend."""

    _handle_id = 1  # of the next dispatch; equal on all ranks

    def dispatch(self, tokens: Tokens, num_experts: int, form: Form, run: Run) -> tuple:
        shape, size, fixed = tokens.shape(form.by_expert), self._comm.size, form.num_worst_tokens
        rows = shape.rows
        num_sms, num_local, num_tokens = self._num_sms(run), num_experts // size, len(tokens.x)
        early, capacity, free = shape in self._prepared, fixed or _ANY, self._arena.largest
        not_captured = "" if early and fixed else f"num_worst_tokens= is needed, and {self._not_loaded}"
        with self._operation(Operation.COUNT, run, not_captured) as current:
            sent, handle_id = tokens.map(plain), self._handle_id
            order = self._blocks.lent((num_tokens, size), np.int32, current)
            words = self._blocks.lent((2 + size + 1 + num_local,), np.int32, current)
            routing = Routing(handle_id, num_experts, order, words, capacity)

            def push(blocks: dict[str, Block] | ArenaExhaustedError, capacity: int) -> None:
                if fixed and isinstance(blocks, dict) and blocks:  # no row comes to the tail: -1 stays there
                    idx = blocks["idx"]
                    runtime.memsetAsync(idx.address, 0xFF, idx.size, self._comm_stream.stream.ptr)
                self._launcher.push(shape, replace(routing, capacity=capacity), sent, offsets(blocks), num_sms)

            blocks: dict[str, Block] | ArenaExhaustedError = {}
            if early:
                if fixed:
                    blocks = self._blocks.try_allocate(rows.parts(fixed), current)
                    capacity = fixed if isinstance(blocks, dict) else 0
                elif capacity := min(size * self.capacity.max_tokens_per_rank, rows.fitting(free)):
                    blocks = self._blocks.allocate(rows.parts(capacity), current)
            with self._launching(Operation.COUNT, current):
                most = _ANY if fixed else self.capacity.max_tokens_per_rank
                counting = replace(routing, capacity=capacity)
                self._launcher.count(shape, counting, sent.topk_idx, most, free, form)
                counted_event = self._comm_stream.record()
                if early:
                    push(blocks, capacity)
            if early and fixed and isinstance(blocks, dict):
                self._handle_id += 1
                facts: dict[str, Any] = {"num_recv_tokens": fixed, "num_recv_tokens_per_rank": []}
                facts["num_recv_tokens_per_expert"], bad_id = [], None
            else:
                self._host_wait(counted_event)
                counted = self._launcher.counted(shape, num_local)
                self._handle_id, bad_id = handle_id + 1, counted.bad_id
                facts = {"num_recv_tokens": fixed or sum(counted.rows)}
                facts["num_recv_tokens_per_rank"] = [] if fixed else counted.rows
                facts["num_recv_tokens_per_expert"] = [] if fixed else counted.experts
                if not early or counted.verdict == Verdict.GROW:
                    blocks = {}  # of an arena that may be replaced now
                    blocks = self._push_counted(
                        shape, counted.most_tokens, facts["num_recv_tokens"], words, push, current
                    )
            if isinstance(blocks, ArenaExhaustedError):  # no peer has a row for us, or COUNT would have told all ranks
                raise blocks
            routing = replace(routing, capacity=facts["num_recv_tokens"])
            handle = CudaHandle(
                num_tokens, rows.num_topk, num_experts, **facts, handle_id=handle_id, owner=self, routing=routing
            )
            came = received(blocks, shape, handle.num_recv_tokens)
            if form.by_expert:
                listings = handle.num_recv_tokens_per_expert
                placed = self._experts.arrange(came.topk_idx, handle.recv_count, listings, num_local, form, current)
                handle = replace(handle, expert_rows=placed)
            came = self._formed(came, handle, form, current)
            event = self._finish(current, run, (tokens, sent, form))
        return came, handle, event, bad_id

    def _push_counted(
        self, shape: Shape, most_tokens: int, num_rows: int, words: Any, push: Any, current: Any
    ) -> dict[str, Block]:
        """PUSH where the counts are known already. A rank may have no block: then all ranks raise, at once."""
        self.prepare(shape, most_tokens)
        granted = self._blocks.try_allocate(shape.rows.parts(num_rows), current)
        with self._launching(Operation.PUSH, current):
            runtime.memsetAsync(words.data.ptr, 0, 4, self._comm_stream.stream.ptr)  # COUNT may have set skip
            push(granted, num_rows)
        self._host_wait(self._comm_stream.record())
        self._launcher.check()
        assert isinstance(granted, dict)
        return granted

    def cached_dispatch(self, tokens: Tokens, handle: CudaHandle, form: Form, run: Run) -> tuple:
        num_sms, num_recv = self._num_sms(run), handle.num_recv_tokens
        shape = tokens.shape(handle.expert_rows is not None)
        not_captured = "" if shape in self._prepared else self._not_loaded
        with self._operation(Operation.PUSH, run, not_captured) as current:
            self._agree(shape, handle, current)
            sent, blocks = tokens.map(plain), self._blocks.try_allocate(shape.rows.parts(num_recv), current)
            with self._launching(Operation.PUSH, current):
                self._launcher.push(shape, handle.routing, sent, offsets(blocks), num_sms)
            came = self._formed(received(self._granted(blocks), shape, num_recv), handle, form, current)
            return came, self._finish(current, run, (tokens, sent))

    def _formed(self, came: Tokens, handle: CudaHandle, form: Form, current: Any) -> Tokens:
        """What was received, as the caller wants it; copies are made in the communication stream's order."""
        if handle.expert_rows is not None:
            x, scales = (self._experts.expand(part, handle, form.zero_gaps, current) for part in (came.x, came.scales))
            came = replace(came, x=x, scales=scales)

        def copy(array: Any, order: str = "C") -> Any:
            result = self._blocks.lent(array.shape, array.dtype, current, order)
            cupy.copyto(result, array)
            return result

        if form.copy and handle.expert_rows is not None:
            came = replace(Tokens(None, None, came.topk_idx, came.topk_weights).map(copy), x=came.x, scales=came.scales)
        elif form.copy:
            came = came.map(copy)
        if came.scales is not None and form.scales_order == "F":
            came = replace(came, scales=copy(came.scales, "F"))
        return came
