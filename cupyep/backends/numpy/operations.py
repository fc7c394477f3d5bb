"""The operations of one arena in NumPy: COUNT, PUSH, PULL and BARRIER, each the twin of a kernel of that name."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyep import abi
from cupyep.abi import Operation, Status
from cupyep.backends.base import Form
from cupyep.backends.numpy import routing
from cupyep.backends.numpy.memory import Arena
from cupyep.backends.numpy.routing import NumpyHandle
from cupyep.backends.numpy.sync import Channel
from cupyep.backends.shapes import Outputs, Shape, Tokens
from cupyep.comm import Communicator
from cupyep.errors import ArenaExhaustedError
from cupyep.layout import Channel as ChannelId
from cupyep.layout import ControlLayout

_CHUNK_BYTES = 1 << 20  # of fp32 partial sums in PULL: small enough to stay in a cache


class Operations:
    """Collective: every method is called by all ranks in the same order."""

    def __init__(self, arena: Arena, control: ControlLayout, comm: Communicator, timeout_s: float | None) -> None:
        self._arena, self._comm = arena, comm
        self._normal, self._barrier = (
            Channel(arena, control, comm, channel, timeout_s) for channel in (ChannelId.NORMAL, ChannelId.BARRIER)
        )

    def count(
        self, shape: Shape, route: routing.Route, num_experts: int, form: Form
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Exchanges counts: (rows [source, destination], listings of our experts, most tokens of any rank)."""
        size, rank, num_local = self._comm.size, self._comm.rank, num_experts // self._comm.size
        parity = self._normal.begin(Operation.COUNT)
        for peer in range(size):
            words = self._normal.counts[peer][parity, rank]
            words[:size] = route.num_tokens_per_rank
            words[size : size + num_local] = route.num_tokens_per_expert[peer * num_local : (peer + 1) * num_local]
        record = abi.POST(
            operation=Operation.COUNT,
            num_experts=num_experts,
            handle_id=form.num_worst_tokens,
            num_tokens=len(route.is_token_in_rank),
            **shape.signature,
        )
        self._normal.post(record)
        posts = self._normal.wait_posts(form.wait_stats)
        counts = self._normal.counts[rank][parity].astype(np.int64)
        self._normal.end()
        experts = counts[:, size : size + num_local].sum(0)
        if form.expert_stats is not None:
            np.add(form.expert_stats, experts, out=form.expert_stats, casting="unsafe")
        return counts[:, :size], experts, int(posts["num_tokens"].max())

    def agree(self, shape: Shape, handle: NumpyHandle) -> None:
        """Raises MismatchError on all ranks unless all mean the same operation; moves nothing."""
        self._normal.begin(shape.operation)
        self._normal.post(self._record(shape, handle, 0))
        self._normal.wait_posts()
        self._normal.end()

    def push(self, shape: Shape, sent: Tokens, handle: NumpyHandle) -> Tokens:
        """Our rows into every rank's block, theirs into ours."""
        capacity, rank, num_local = handle.num_recv_tokens, self._comm.rank, handle.num_experts // self._comm.size
        record, parts = self._record(shape, handle, capacity), shape.rows.offsets(capacity)
        try:
            block = self._arena.block(parts["num_bytes"])
            start = block.ctypes.data - self._arena.address
            for name in ("rows", "idx", "weights", "scales"):
                record[f"{name}_offset"] = start + parts[name]
        except ArenaExhaustedError as error:
            self._fail(record, error)
        posts = self._open(record)
        for step in range(self._comm.size):  # each rank starts with another destination
            peer = (rank + step) % self._comm.size
            tokens = np.flatnonzero(handle.send_row[:, peer] >= 0)
            if not len(tokens):
                continue
            self._normal.check_writable(peer)  # H7
            first = int(handle.send_row[tokens[0], peer])  # a rank's tokens are contiguous there
            if first + len(tokens) > posts[peer]["capacity"]:
                self._normal.abort(abi.AbortKind.OVERFLOW, peer)
                self._normal.check_abort()
            ours = slice(first, first + len(tokens))
            there = self._parts(peer, posts[peer], shape)
            np.take(sent.x, tokens, axis=0, out=there.x[ours])
            if sent.scales is not None:
                np.take(sent.scales, tokens, axis=0, out=there.scales[ours])
            if sent.topk_idx is not None:
                idx = there.topk_idx[ours] = routing.local_idx(sent.topk_idx[tokens], peer, num_local)
                if sent.topk_weights is not None:
                    there.topk_weights[ours] = np.where(idx >= 0, sent.topk_weights[tokens], np.float32(0))
        self._normal.finish()
        return self._parts(rank, record, shape, block)

    def pull(self, shape: Shape, outputs: Outputs, handle: NumpyHandle, out: np.ndarray | None) -> tuple:
        """Sums, for each of our tokens, the rows at the ranks that it was sent to: (combined_x, combined weights)."""
        x, topk_weights = outputs.x, outputs.topk_weights
        record = self._record(shape, handle, len(x))
        try:
            record["rows_offset"], x = self._visible(x)
            if topk_weights is not None:
                record["weights_offset"], topk_weights = self._visible(topk_weights)
        except ArenaExhaustedError as error:
            self._fail(record, error)
        posts = self._open(record)
        for peer in np.flatnonzero((handle.send_row >= 0).any(0)):
            self._normal.check_writable(int(peer))  # H5
        parts = [self._parts(peer, posts[peer], shape) for peer in range(self._comm.size)]
        if out is None:
            out = np.empty((handle.num_tokens, shape.hidden), shape.dtype)
        _sum([part.x for part in parts], handle.send_row, outputs.bias, out)
        weights = None
        if topk_weights is not None:
            weights = np.empty((handle.num_tokens, handle.num_topk), np.float32)
            _sum([part.topk_weights for part in parts], handle.send_row, (), weights)
        self._normal.finish()
        return out, weights

    def barrier(self) -> None:
        """Returns when every rank has come."""
        self._barrier.begin(Operation.BARRIER)
        self._barrier.post(abi.POST(operation=Operation.BARRIER))
        self._barrier.wait_posts()
        self._barrier.end()

    def check(self) -> None:
        """Raises if a peer has left for good."""
        self._normal.check_abort()

    def abort(self) -> None:
        """Leaves for good because this rank's program raised."""
        self._normal.abort(abi.AbortKind.RAISED, self._comm.rank)

    def _open(self, record: np.ndarray) -> np.ndarray:
        """Posts and returns all posts. ArenaExhaustedError of any rank is raised on all, before a row has moved."""
        self._normal.begin(Operation(int(record["operation"])))
        self._normal.post(record)
        posts = self._normal.wait_posts()
        for rank in np.flatnonzero(posts["status"] == Status.FAILED):
            self._normal.end()
            raise ArenaExhaustedError(int(posts[rank]["rows_offset"]), int(posts[rank]["idx_offset"]), int(rank))
        return posts

    def _record(self, shape: Shape, handle: NumpyHandle, capacity: int) -> np.ndarray:
        return abi.POST(
            operation=shape.operation,
            num_experts=handle.num_experts,
            handle_id=handle.handle_id,
            capacity=capacity,
            **shape.signature,
        )

    @staticmethod
    def _fail(record: np.ndarray, error: ArenaExhaustedError) -> None:
        record["status"], record["rows_offset"], record["idx_offset"] = Status.FAILED, error.needed, error.free

    def _visible(self, array: np.ndarray) -> tuple[int, np.ndarray]:
        """(offset in our arena, the array there): itself where it can be used in place, else a copy."""
        if not array.size:
            return 0, array
        offset = self._arena.offset_of(array)
        if offset is None or offset % 16:  # as kernels read it
            staged = self._arena.block(array.nbytes).view(array.dtype).reshape(array.shape)
            staged[...] = array
            return self._visible(staged)
        return offset, array

    def _parts(self, peer: int, post: Any, shape: Shape, block: np.ndarray | None = None) -> Tokens:
        """The arrays that `peer` has posted; over `block` if it is our own."""
        memory, start = (self._arena.memories[peer], 0) if block is None else (block, self._arena.offset_of(block) or 0)
        capacity = int(post["capacity"])

        def part(name: str, columns: int, dtype: Any) -> np.ndarray:
            begin, num_bytes = int(post[f"{name}_offset"]) - start, capacity * columns * np.dtype(dtype).itemsize
            return memory[begin : begin + num_bytes].view(dtype).reshape(capacity, columns)

        rows, scale = shape.rows, shape.scale_dtype
        return Tokens(
            part("rows", shape.hidden, shape.dtype),
            part("scales", rows.scale_bytes // scale.itemsize, scale) if rows.scale_bytes else None,
            part("idx", rows.num_topk, f"i{rows.idx_bytes}") if rows.idx_bytes else None,
            part("weights", rows.num_topk, np.float32) if rows.with_weights else None,
        )


def _sum(sources: list[np.ndarray], send_row: np.ndarray, bias: tuple[np.ndarray, ...], out: np.ndarray) -> None:
    """out[t] = bias and the rows of token t added in fp32 by ascending rank, starting at +0, rounded once."""
    chunk = max(1, _CHUNK_BYTES // (4 * out.shape[1]))
    for start in range(0, len(out), chunk):
        total = np.zeros((min(chunk, len(out) - start), out.shape[1]), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # inf - inf and rounding to inf are the caller's business
            for addend in bias:
                total += addend[start : start + chunk].astype(np.float32)
            for peer, rows in enumerate(sources):
                where = send_row[start : start + chunk, peer]
                tokens = np.flatnonzero(where >= 0)
                if len(tokens):
                    total[tokens] += rows[where[tokens]].astype(np.float32)
            out[start : start + chunk] = total
