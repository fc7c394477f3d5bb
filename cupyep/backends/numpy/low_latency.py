"""The low-latency verbs in NumPy, half by half, each the twin of a half of a kernel of that name."""

from __future__ import annotations

import numpy as np

from cupyep import env
from cupyep.abi import AbortKind, Arrival, Operation, Phase
from cupyep.backends.low_latency import LowLatency, LowLatencyCall
from cupyep.backends.low_latency_shape import (
    DISPATCH,
    EXPERT_BITS,
    GIVEN,
    NUM_REGIONS,
    SCALE_GROUP,
    LowLatencyShape,
    offsets,
)
from cupyep.backends.numpy import fp8
from cupyep.backends.numpy.low_latency_channel import LowLatencyChannel
from cupyep.backends.numpy.memory import create_arena
from cupyep.comm import Communicator
from cupyep.config import BufferConfig
from cupyep.handle import EventOverlap
from cupyep.layout import ALIGNMENT, ControlLayout
from cupyep.layout import Channel as ChannelId

_NONE = 0xFFFFFFFF  # no expert of this rank, in a meta word


class _Event(EventOverlap):
    def __init__(self, owner: NumpyLowLatency) -> None:
        self._owner = owner

    def synchronize(self) -> None:
        self._owner.check_ids()


class NumpyLowLatency(LowLatency):
    """One rank on the CPU."""

    def __init__(self, comm: Communicator, config: BufferConfig) -> None:
        self.masked = np.zeros(comm.size, np.int32)
        self._control = ControlLayout(comm.size)
        self._bad_id: str | None = None
        self._channels: dict[ChannelId, LowLatencyChannel] = {}
        super().__init__(comm, config)

    def _resize(self, region_bytes: int) -> None:
        initial = self._control.initial()
        arena = create_arena(self._comm, initial, NUM_REGIONS * region_bytes, self._config.timeout_s)
        regions: list[np.ndarray] = []  # taken before anybody sends: a full file system shows now
        reserve = lambda: regions.append(arena.block(NUM_REGIONS * region_bytes))  # noqa: E731
        self._comm.together("create arena", reserve, timeout_s=self._config.timeout_s)
        self._kept.append(getattr(self, "_arena", None))  # from here on nothing fails
        self._arena, self._start_bytes, self._stride = arena, initial.nbytes, region_bytes
        self._channels = {
            channel: LowLatencyChannel(arena, self._control, self._comm, channel, self)
            for channel in ChannelId
            if channel not in (ChannelId.NORMAL, ChannelId.BARRIER)
        }

    def _load(self, operation: Operation, shape: LowLatencyShape) -> None:
        pass  # nothing to compile

    def _allocate(self, num_bytes: int) -> np.ndarray:
        raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + num_bytes]

    def address(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def _run(self, call: LowLatencyCall, phases: int, async_finish: bool) -> _Event:
        channel = self._channels[call.channel]
        channel.start(call.operation, phases)
        halves = (
            (self._send_rows, self._receive_rows)
            if call.operation == DISPATCH
            else (self._send_sums, self._receive_sums)
        )
        for phase, half in zip((Phase.SEND, Phase.RECEIVE), halves, strict=True):
            if phases & phase:
                half(call, channel)
        if phases & Phase.RECEIVE:
            channel.leave()
        return _Event(self)

    def _region(self, call: LowLatencyCall, rank: int) -> dict[str, np.ndarray]:
        """The receive region of the call's channel at `rank`."""
        start = self._start_bytes + (call.channel - ChannelId.LOW_LATENCY_DISPATCH_0) * self._stride
        parts = call.shape.region(call.operation)
        places, memory = offsets(parts), self._arena.memories[rank]
        views = {}
        for name, (shape, dtype) in parts.items():
            first = start + places[name]
            num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            views[name] = memory[first : first + num_bytes].view(dtype).reshape(shape)
        return views

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def _send_rows(self, call: LowLatencyCall, channel: LowLatencyChannel) -> None:
        shape, rank, local = call.shape, self._comm.rank, call.shape.num_local_experts
        open_to = channel.await_consumed()
        experts, owners = self._route(call)
        ranks = (owners[:, :, None] == np.arange(shape.num_ranks)).any(1)
        ranks[:, [peer for peer in range(shape.num_ranks) if peer not in open_to]] = False
        lists = np.zeros((call.num_tokens, shape.num_experts), bool)
        token, column = np.nonzero(experts >= 0)
        lists[token, experts[token, column]] = True
        places = np.take_along_axis(np.cumsum(lists, 0) - lists, np.maximum(experts, 0), axis=1)
        entries = (places << EXPERT_BITS | experts % local).astype(np.uint32)
        rows, scales = self._wire(call)
        for peer in open_to:
            region, tokens = self._region(call, peer), np.flatnonzero(ranks[:, peer])
            ours = slice(0, len(tokens))
            region["rows"][rank, ours] = rows[tokens]
            region["scales"][rank, ours] = scales[tokens]
            region["side"][rank, ours, 0] = tokens
            region["side"][rank, ours, 1 : 1 + shape.num_topk] = np.where(owners == peer, entries, _NONE)[tokens]
            if call.with_weights:
                weights = np.ascontiguousarray(call.inputs["topk_weights"]).view(np.uint32)
                region["side"][rank, ours, 1 + shape.num_topk :] = weights[tokens]
            counts = channel.counts[peer][0, rank]
            counts[shape.num_ranks :][:local] = lists[:, peer * local : (peer + 1) * local].sum(0)
        call.tables["token_ranks"][: call.num_tokens] = _bits(ranks)
        channel.publish(Arrival.ROWS, call.signature, ranks.sum(0))

    def _route(self, call: LowLatencyCall) -> tuple[np.ndarray, np.ndarray]:
        """(expert or -1, its rank or -1) of every listing; ids out of range count as -1."""
        idx, num_experts = call.inputs["topk_idx"], call.shape.num_experts
        bad = (idx < -1) | (idx >= num_experts)
        if bad.any():
            self._bad_id = f"topk_idx: expected ids in -1..{num_experts - 1}, got {int(idx[bad][0])}"
        experts = np.where(bad, -1, idx).astype(np.int64)
        return experts, experts // call.shape.num_local_experts

    def _wire(self, call: LowLatencyCall) -> tuple[np.ndarray, np.ndarray]:
        """Rows as they travel, as bytes, and their scales as words."""
        shape, x = call.shape, np.ascontiguousarray(call.inputs["x"])
        if not shape.fp8:
            return x.view(np.uint8).reshape(len(x), shape.wire_bytes), np.empty((len(x), 0), np.uint32)
        codes, scales = fp8.quantize(x, SCALE_GROUP, shape.round_scale, shape.ue8m0)
        return codes, scales.view(np.uint32)

    def _receive_rows(self, call: LowLatencyCall, channel: LowLatencyChannel) -> None:
        shape, local, results, tables = call.shape, call.shape.num_local_experts, call.results, call.tables
        if env.poison():
            for name in GIVEN:
                results[name].view(np.uint8)[...] = 0xFF
        num_rows = channel.await_arrivals(Arrival.ROWS, call.signature)
        region = self._region(call, self._comm.rank)
        counts = channel.counts[self._comm.rank][0][:, shape.num_ranks :][:, :local].astype(np.int64)
        counts[num_rows == 0] = 0
        begin = np.cumsum(counts, 0) - counts
        results["recv_count"][:] = counts.sum(0)
        results["layout_range"][:] = (begin << 32 | counts).T
        if call.inputs["stats"] is not None:
            call.inputs["stats"][:] += results["recv_count"]
        tables["num_rows"][:] = num_rows
        recv_x = results["recv_x"].view(np.uint8).reshape(local, shape.num_rows, shape.wire_bytes)
        for source in np.flatnonzero(num_rows):
            here, at = slice(0, num_rows[source]), source * shape.max_tokens
            side = region["side"][source, here]
            tokens, entries = side[:, 0], side[:, 1 : 1 + shape.num_topk]
            row, column = np.nonzero(entries != _NONE)
            expert = (entries[row, column] & ((1 << EXPERT_BITS) - 1)).astype(np.int64)
            place = (entries[row, column] >> EXPERT_BITS) + begin[source, expert]
            recv_x[expert, place] = region["rows"][source, row]
            results["recv_scales"].view(np.uint32)[expert, :, place] = region["scales"][source, row]
            results["src_info"][expert, place] = tokens[row]
            table = slice(at, at + int(num_rows[source]))
            tables["tokens"][table] = tokens
            tables["positions"][table] = -1
            tables["positions"][table][row, column] = expert * shape.num_rows + place
            if call.with_weights:
                tables["weights"].view(np.uint32)[table] = side[:, 1 + shape.num_topk :]

    # --- combine ------------------------------------------------------------------------------------------------------

    def _send_sums(self, call: LowLatencyCall, channel: LowLatencyChannel) -> None:
        shape, rank, tables = call.shape, self._comm.rank, call.tables
        open_to, ours = channel.await_consumed(), self._region(call, self._comm.rank)
        if call.with_weights:
            for peer in open_to:
                self._region(call, peer)["side"][rank, : call.num_tokens] = call.inputs["topk_weights"]
            channel.publish(Arrival.WEIGHTS, call.signature, np.ones(shape.num_ranks))
            channel.await_arrivals(Arrival.WEIGHTS, call.signature)
        x = call.inputs["x"].reshape(-1, shape.hidden)
        num_rows = tables["num_rows"]
        for home in open_to:
            table = slice(home * shape.max_tokens, home * shape.max_tokens + int(num_rows[home]))
            tokens, positions = tables["tokens"][table], tables["positions"][table]
            weights = ours["side"][home, tokens] if call.with_weights else tables["weights"][table]
            sums = np.zeros((len(tokens), shape.hidden), np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                for column in range(shape.num_topk):
                    here = np.flatnonzero(positions[:, column] >= 0)
                    sums[here] += weights[here, column, None] * x[positions[here, column]].astype(np.float32)
                rows = sums.astype(shape.dtype)
            self._region(call, home)["rows"][rank, tokens] = rows.view(np.uint8).reshape(len(tokens), shape.wire_bytes)
        channel.publish(Arrival.ROWS, call.signature, num_rows)

    def _receive_sums(self, call: LowLatencyCall, channel: LowLatencyChannel) -> None:
        shape = call.shape
        came = channel.await_arrivals(Arrival.ROWS, call.signature)
        rows = self._region(call, self._comm.rank)["rows"].view(shape.dtype)
        words = call.tables["token_ranks"][: call.num_tokens]
        sums = np.zeros((call.num_tokens, shape.hidden), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for rank in np.flatnonzero(came):
                tokens = np.flatnonzero(words[:, rank // 32] >> np.uint32(rank % 32) & 1)
                sums[tokens] += rows[rank, tokens].astype(np.float32)
            call.results["out"][:] = sums.astype(shape.dtype)

    # --- masks and errors ---------------------------------------------------------------------------------------------

    def set_mask(self, rank: int, masked: bool) -> None:
        self.masked[rank] = masked

    def masks(self) -> np.ndarray:
        return self.masked.copy()

    def check_ids(self) -> None:
        message, self._bad_id = self._bad_id, None
        if message:
            raise ValueError(message)

    def check(self) -> None:
        for channel in self._channels.values():
            channel.check_abort()

    def abort(self) -> None:
        for channel in self._channels.values():
            channel.abort(AbortKind.RAISED, self._comm.rank)

    def close(self, *, collective: bool) -> None:
        self._channels, self._kept = {}, []
        self.__dict__.pop("_arena", None)


def _bits(ranks: np.ndarray) -> np.ndarray:
    """`[num_tokens, num_ranks]` bool as words of 32 ranks."""
    padded = np.zeros((len(ranks), -(-ranks.shape[1] // 32) * 32), bool)
    padded[:, : ranks.shape[1]] = ranks
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
