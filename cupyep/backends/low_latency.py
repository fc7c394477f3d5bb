"""What both backends share of the low-latency mode: shapes, where things lie, and whose turn it is.

The flow is told in docs/low-latency.md. Everything a call needs is there before it: receive regions in an arena of this
mode's own, and memory for the results of the last two calls of a verb. So a call allocates nothing and agrees on
nothing, unless its shape is new; then all ranks meet once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cupyep import low_latency_abi
from cupyep.abi import Operation, Phase
from cupyep.backends.low_latency_shape import (
    CHANNEL_OF_SLOT,
    CHANNELS,
    COMBINE,
    DISPATCH,
    NUM_REGIONS,
    NUM_SLOTS,
    LowLatencyShape,
    Parts,
    offsets,
    signature,
)
from cupyep.comm import Communicator
from cupyep.config import BufferConfig
from cupyep.errors import ArenaExhaustedError, StateError
from cupyep.handle import LowLatencyHandle
from cupyep.layout import ALIGNMENT, Channel


@dataclass(eq=False)
class LowLatencyCall:
    """One call, in one launch or two. arrays: inputs by the kernel's names, None where nothing is given."""

    operation: Operation
    slot: int
    shape: LowLatencyShape
    num_tokens: int
    with_weights: bool  # the weights travel with this call
    inputs: dict[str, Any]
    results: dict[str, Any]
    tables: dict[str, Any]
    tables_slot: int  # of the dispatch that left them, or leaves them
    num_sms: int | None
    channel: Channel = field(init=False)

    def __post_init__(self) -> None:
        self.channel = CHANNEL_OF_SLOT[self.operation, self.slot]

    @property
    def signature(self) -> int:
        return signature(self.shape, self.with_weights, self.tables_slot)


class LowLatency(ABC):
    """One rank's end of the low-latency mode."""

    max_num_sms: int | None = None  # CTAs of one launch, where there are such

    def __init__(self, comm: Communicator, config: BufferConfig) -> None:
        if not config.low_latency_mode:
            raise StateError("low_latency_mode: expected a Buffer that was created with True")
        self._comm, self._config = comm, config
        self.timeout_s, self.masks_on_timeout = config.timeout_s, False
        self._region_bytes = config.num_rdma_bytes // NUM_REGIONS // ALIGNMENT * ALIGNMENT
        self._prepared: set[tuple[Operation, LowLatencyShape]] = set()
        self._numbers = dict.fromkeys(CHANNELS, 0)  # calls so far
        self._pending: dict[Channel, LowLatencyCall] = {}  # whose hook has not been called
        self._memory: dict[tuple[Any, ...], Any] = {}  # results by (operation, slot)
        self._views: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._kept: list[Any] = []  # outgrown memory: captured graphs may still use it
        if self._region_bytes:
            self._resize(self._region_bytes)

    # --- the verbs ----------------------------------------------------------------------------------------------------

    def dispatch(
        self, shape: LowLatencyShape, inputs: dict[str, Any], *, num_sms: int | None, async_finish: bool, split: bool
    ) -> tuple[dict[str, Any], LowLatencyHandle, Any, Callable[[], None] | None]:
        """(results by name, handle, event, hook). inputs: x, topk_idx, topk_weights, stats."""
        with_weights = inputs["topk_weights"] is not None
        slot = self._claim(DISPATCH, shape, topk_weights="some" if with_weights else "none")
        results = self._results(DISPATCH, slot, shape)
        tables = results["tables"]
        num_tokens = len(inputs["x"])
        call = LowLatencyCall(DISPATCH, slot, shape, num_tokens, with_weights, inputs, results, tables, slot, num_sms)
        event, hook = self._start(call, async_finish, split)
        handle = LowLatencyHandle(
            src_info=results["src_info"],
            layout_range=results["layout_range"],
            num_max_dispatch_tokens_per_rank=shape.max_tokens,
            hidden=shape.hidden,
            num_experts=shape.num_experts,
            num_tokens=num_tokens,
            num_topk=shape.num_topk,
            with_weights=with_weights,
            number=self._numbers[DISPATCH],
            owner=self,
            tables=tables,
        )
        return results, handle, event, hook

    def combine(
        self,
        shape: LowLatencyShape,
        inputs: dict[str, Any],
        handle: LowLatencyHandle,
        *,
        num_sms: int | None,
        async_finish: bool,
        split: bool,
    ) -> tuple[Any, Any, Callable[[], None] | None]:
        """(combined_x, event, hook). inputs: x, topk_weights (None if they went with the dispatch), out or None."""
        slot = self._claim(COMBINE, shape)
        results = self._results(COMBINE, slot, shape)
        out = inputs.pop("out")
        if out is None:
            out = results["out"][: handle.num_tokens]
        with_weights, tables = inputs["topk_weights"] is not None, (handle.tables, (handle.number - 1) % NUM_SLOTS)
        results, num_tokens = {"out": out}, handle.num_tokens
        call = LowLatencyCall(COMBINE, slot, shape, num_tokens, with_weights, inputs, results, *tables, num_sms)
        return out, *self._start(call, async_finish, split)

    def next_combine_buffer(self, shape: LowLatencyShape) -> Any:
        """`[num_local_experts, num_rows, hidden]`, the same for every second combine of one shape."""
        parts: Parts = {"x": ((shape.num_local_experts, shape.num_rows, shape.hidden), shape.dtype)}
        return self._carve(("x", self._numbers[COMBINE] % NUM_SLOTS), shape, lambda: parts)["x"]

    def check_valid(self, handle: LowLatencyHandle) -> None:
        """Its tables must be ours, and not have been written over by the second-next dispatch."""
        if handle.owner is not self:
            raise StateError("handle: expected one from this Buffer's low_latency_dispatch, got another Buffer's")
        latest = self._numbers[DISPATCH]
        if handle.number <= latest - NUM_SLOTS:
            raise StateError(
                f"handle: expected one of the last {NUM_SLOTS} low-latency dispatches, "
                f"got number {handle.number} of {latest}"
            )

    def check_handle(self, handle: LowLatencyHandle) -> None:
        """It must be valid, and its tables complete."""
        self.check_valid(handle)
        if any(call.tables is handle.tables for call in self._waiting(DISPATCH)):  # of its slot, so of itself
            raise StateError("handle: its dispatch is not complete; call the hook first")

    # --- turns --------------------------------------------------------------------------------------------------------

    def _claim(self, operation: Operation, shape: LowLatencyShape, **more: str) -> int:
        """The slot of the next call; nobody may still need what lies there. Collective where the shape is new: ranks
        then compare it and `more`, arguments beside it.
        """
        slot = self._numbers[operation] % NUM_SLOTS
        if self._pending:
            self._check_pending(operation, slot)
        if (operation, shape) not in self._prepared:
            self._prepare(operation, shape, more)
        return slot

    def _check_pending(self, operation: Operation, slot: int) -> None:
        """Calls that wait for their hooks leave `slot` alone."""
        if any(call.slot == slot for call in self._waiting(operation)):
            raise StateError(
                f"{operation.verb}: the call before the last one still waits for its hook; call that first"
            )
        if operation == DISPATCH and any(call.tables_slot == slot for call in self._waiting(COMBINE)):
            raise StateError(
                f"{operation.verb}: would write over the tables of the dispatch before the last one, "
                "which a combine that waits for its hook still needs; call that hook first"
            )

    def _waiting(self, operation: Operation) -> list[LowLatencyCall]:
        """Calls of `operation` whose hooks have not been called."""
        return [call for call in self._pending.values() if call.operation == operation]

    def _prepare(self, operation: Operation, shape: LowLatencyShape, more: dict[str, str]) -> None:
        if self._capturing():
            raise StateError(
                f"{operation.verb}: a shape's first call is collective and cannot be captured; make it before"
            )
        if masked := [rank for rank, flag in enumerate(self.masks().tolist()) if flag]:
            raise StateError(
                f"{operation.verb}: a shape's first call is a step of all ranks, and rank {masked[0]} is masked here; "
                "make first calls before ranks are masked, or unmask it if it takes part"
            )
        # A dispatch also prepares the combine of its own type, which may come while the next dispatch is open.
        shapes = {operation: shape, COMBINE: replace(shape, fp8=False, round_scale=False, ue8m0=False)}
        needed = max(offsets(each.region(verb))["num_bytes"] for verb, each in shapes.items())
        grows = needed > self._region_bytes
        if grows and self._pending and not self._config.num_rdma_bytes:  # before peers without open hooks are met
            raise StateError(f"{operation.verb}: a larger shape than ever needs all earlier hooks to have been called")
        self._comm.agree(operation.verb, shape.arguments | more, timeout_s=self._config.timeout_s)
        if grows:
            if self._config.num_rdma_bytes:
                given = self._config.num_rdma_bytes
                raise ArenaExhaustedError(NUM_REGIONS * needed, given, self._comm.rank, "num_rdma_bytes")
            self._resize(needed)
            self._region_bytes = needed
        for verb, each in shapes.items():
            if (verb, each) not in self._prepared:
                self._load(verb, each)
                for slot in range(NUM_SLOTS):
                    self._results(verb, slot, each)
                self._prepared.add((verb, each))

    def _results(self, operation: Operation, slot: int, shape: LowLatencyShape) -> dict[str, Any]:
        views = self._carve((operation, slot), shape, lambda: shape.results(operation))
        if operation == DISPATCH and "tables" not in views:
            views["scales"] = views["recv_scales"].swapaxes(1, 2)  # as users get them
            views["tables"] = {name: views[name] for name in low_latency_abi.TABLES.fields}
        return views

    def _carve(self, key: tuple[Any, ...], shape: LowLatencyShape, make: Callable[[], Parts]) -> dict[str, Any]:
        """Arrays over the memory of `key`, which grows as needed; a shape stays where it was, for graphs' sake."""
        if (views := self._views.get((key, shape))) is not None:
            return views
        parts = make()
        places, old = offsets(parts), self._memory.get(key)
        if old is None or old.size < places["num_bytes"]:
            self._kept.append(old)
            self._memory[key] = self._allocate(max(places["num_bytes"], ALIGNMENT))
        memory = self._memory[key]
        views = {}
        for name, (extents, dtype) in parts.items():
            num_bytes = int(np.prod(extents, dtype=np.int64)) * np.dtype(dtype).itemsize
            views[name] = memory[places[name] : places[name] + num_bytes].view(dtype).reshape(extents)
        return self._views.setdefault((key, shape), views)

    def _start(self, call: LowLatencyCall, async_finish: bool, split: bool) -> tuple[Any, Callable[[], None] | None]:
        event = self._run(call, Phase.SEND if split else Phase.SEND | Phase.RECEIVE, async_finish)
        self._numbers[call.operation] += 1  # not if it was refused: our calls must stay in step with the peers'
        if not split:
            return event, None
        self._pending[call.channel] = call

        def hook() -> None:
            if self._pending.get(call.channel) is not call:
                raise StateError(f"hook of {call.operation.verb}: called a second time")
            del self._pending[call.channel]
            self._run(call, Phase.RECEIVE, async_finish)

        return event, hook

    # --- a backend's part ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _run(self, call: LowLatencyCall, phases: int, async_finish: bool) -> Any:
        """Runs or launches halves of a call; returns an event."""

    @abstractmethod
    def _resize(self, region_bytes: int) -> None:
        """Collective: a new arena with four regions; outgrown ones are kept until close."""

    @abstractmethod
    def _allocate(self, num_bytes: int) -> Any:
        """`num_bytes` of local memory as uint8, aligned as the parts in it."""

    @abstractmethod
    def address(self, array: Any) -> int:
        """Where an array of this backend begins."""

    @abstractmethod
    def _load(self, operation: Operation, shape: LowLatencyShape) -> None:
        """Collective: what a shape's first use has to load."""

    def _capturing(self) -> bool:
        return False

    @abstractmethod
    def set_mask(self, rank: int, masked: bool) -> None:
        """Leaves `rank` out from the next call on, or takes it in again."""

    @abstractmethod
    def masks(self) -> Any:
        """`[num_ranks]` int32, 1 for masked ranks."""

    @abstractmethod
    def check_ids(self) -> None:
        """Raises ValueError for an expert id out of range that a complete call has met."""

    @abstractmethod
    def check(self) -> None:
        """Raises what a peer has told, or a complete operation has met."""

    @abstractmethod
    def abort(self) -> None:
        """Tells the peers that this rank leaves for good."""

    @abstractmethod
    def close(self, *, collective: bool) -> None:
        """Gives the arenas back."""
