"""Dispatch on the GPU: COUNT and PUSH.

A dispatch launches COUNT and, back to back, PUSH into blocks for the worst case, or as large as the arena can give;
while rows are moving the host waits for the counts, cuts the exact views and gives the tails back. If some rank's block
turns out too small, COUNT tells all ranks and the PUSH behind it does nothing. When a shape is new, or the arena has to
grow, the counts are read first and PUSH follows with exact blocks. With num_worst_tokens the caller has named the worst
case, blocks keep that size, and the host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from cupyep.abi import Operation, Verdict
from cupyep.backends.base import Form, Run
from cupyep.backends.cuda.arena import Block
from cupyep.backends.cuda.arrays import plain
from cupyep.backends.cuda.blocks import offsets, received
from cupyep.backends.cuda.launcher import CudaHandle, Routing
from cupyep.backends.cuda.session import Session
from cupyep.backends.shapes import Shape, Tokens
from cupyep.errors import ArenaExhaustedError, CupyepError
from cupyep.layout import ALIGNMENT, align

_ANY = 2**32 - 1  # capacity in COUNT of an arena that is yet to be sized; tokens, where any number will do


class Dispatch(Session):
    """The verb dispatch of a CudaBackend."""

    _handle_id = 1  # of the next dispatch; equal on all ranks

    def dispatch(self, tokens: Tokens, num_experts: int, form: Form, run: Run) -> tuple:
        shape, size, fixed = tokens.shape(form.by_expert), self._comm.size, form.num_worst_tokens
        num_sms = self._num_sms(run, shape, shape.rows.num_topk)
        num_local, num_tokens = num_experts // size, len(tokens.x)
        ready, free = self._is_prepared(shape, fixed), self._arena.largest
        not_captured = ""
        if not (ready and fixed):
            not_captured = f"num_worst_tokens= is needed, no more than the arena was sized for, and {self._not_loaded}"
        with cupy.cuda.Device(self._device), self._operation(Operation.COUNT, run, not_captured) as current:
            sent = tokens.map(plain)
            num_words = 2 + size + 1 + num_local
            start = align(num_words, ALIGNMENT // 4)
            memory = self._blocks.lent((start + num_tokens * size,), np.int32, current)
            words, order = memory[:num_words], memory[start:].reshape(num_tokens, size)
            routing = Routing(self._handle_id, num_experts, order, words, fixed or _ANY)
            blocks: dict[str, Block] | ArenaExhaustedError = {}
            if ready:
                blocks, capacity = self._blocks_ahead(shape, fixed, free, current)
                routing = routing._replace(capacity=capacity)
            with self._launching(Operation.COUNT, current):
                most_tokens = _ANY if fixed else self.capacity.max_tokens_per_rank
                self._launcher.count(shape, routing, sent.topk_idx, most_tokens, free, form)
                counted_event = self._comm_stream.record()
                if ready:
                    self._push(shape, routing, sent, blocks, fixed, num_sms)
            self._handle_id += 1  # here, where all ranks are: some may learn only later that this dispatch has failed
            counted = None
            if not (ready and fixed) or isinstance(blocks, ArenaExhaustedError):
                self._host_wait(counted_event)
                try:
                    counted = self._launcher.counted(shape, num_local)
                except CupyepError:
                    blocks = {}  # whoever keeps the error must not keep them
                    raise
            num_recv = fixed or sum(counted.rows)  # type: ignore[union-attr]
            routing = routing._replace(capacity=num_recv)
            if counted and (not ready or counted.verdict == Verdict.GROW):
                blocks = {}  # of an arena that may be replaced now
                self.prepare(shape, counted.most_tokens, fixed)
                blocks = self._push_counted(shape, routing, sent, fixed, num_sms, current)
            if isinstance(blocks, ArenaExhaustedError):  # no peer has a row for us, or COUNT would have told all ranks
                raise blocks
            came, placed = received(blocks, shape, num_recv), None
            listings = counted.experts if counted and not fixed else []
            if form.by_expert:
                placed = self._experts.arrange(came.topk_idx, routing.recv_count, listings, num_local, form, current)
            handle = CudaHandle(
                num_tokens=num_tokens,
                num_topk=shape.rows.num_topk,
                num_experts=num_experts,
                num_recv_tokens=num_recv,
                num_recv_tokens_per_rank=counted.rows if counted and not fixed else [],
                num_recv_tokens_per_expert=listings,
                handle_id=routing.handle_id,
                owner=self,
                expert_rows=placed,
                routing=routing,
            )
            came = self._formed(came, handle, form, current)
            event = self._finish(current, run, (tokens, sent, form))
        return came, handle, event, counted.bad_id if counted else None

    def _blocks_ahead(self, shape: Shape, fixed: int, free: int, current: Any) -> tuple:
        """(blocks for rows that are not counted yet, or why there are none; how many rows they hold)."""
        if fixed:
            blocks = self._blocks.try_allocate(shape.rows.parts(fixed), current)
            return blocks, 0 if isinstance(blocks, ArenaExhaustedError) else fixed
        capacity = min(self._comm.size * self.capacity.max_tokens_per_rank, shape.rows.fitting(free))
        return self._blocks.allocate(shape.rows.parts(capacity), current) if capacity else {}, capacity

    def _push(self, shape: Shape, routing: Routing, sent: Tokens, blocks: Any, fixed: int, num_sms: int) -> None:
        """Launches PUSH. Ids of rows that will not come are -1 beforehand."""
        if fixed and isinstance(blocks, dict):
            idx = blocks["idx"]
            runtime.memsetAsync(idx.address, 0xFF, idx.size, self._comm_stream.stream.ptr)
        self._launcher.push(shape, routing, sent, offsets(blocks), num_sms)

    def _push_counted(
        self, shape: Shape, routing: Routing, sent: Tokens, fixed: int, num_sms: int, current: Any
    ) -> dict[str, Block]:
        """PUSH where the counts are known. A rank may have no block: then all ranks raise, at once."""
        granted = self._blocks.try_allocate(shape.rows.parts(routing.capacity), current)
        with self._launching(Operation.PUSH, current):
            runtime.memsetAsync(routing.words.data.ptr, 0, 4, self._comm_stream.stream.ptr)  # COUNT may have set skip
            self._push(shape, routing, sent, granted, fixed, num_sms)
        self._host_wait(self._comm_stream.record())
        self._launcher.check()
        assert isinstance(granted, dict)
        return granted

    def cached_dispatch(self, tokens: Tokens, handle: CudaHandle, form: Form, run: Run) -> tuple:
        shape, num_recv = tokens.shape(handle.expert_rows is not None), handle.num_recv_tokens
        num_sms = self._num_sms(run, shape, handle.num_topk)
        not_captured = "" if (ready := shape in self._prepared) else self._not_loaded
        with cupy.cuda.Device(self._device), self._operation(Operation.PUSH, run, not_captured) as current:
            if not ready:
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
            came = came._replace(x=x, scales=scales)

        def copy(array: Any, order: str = "C") -> Any:
            result = self._blocks.lent(array.shape, array.dtype, current, order)
            cupy.copyto(result, array)
            return result

        if form.copy and handle.expert_rows is not None:
            copies = Tokens(None, None, came.topk_idx, came.topk_weights).map(copy)
            came = copies._replace(x=came.x, scales=came.scales)
        elif form.copy:
            came = came.map(copy)
        if came.scales is not None and form.scales_order == "F":
            came = came._replace(scales=copy(came.scales, "F"))
        return came
