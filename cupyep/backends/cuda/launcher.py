"""One rank's kernels as operations: fills the parameter structs, launches, and reads what the device tells the host.

Nothing here waits, but for `counted`. The order of one rank's launches is the order of its epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cupy
import numpy as np

from cupyep import abi, layout
from cupyep.abi import AbortKind, Operation, Status, Verdict
from cupyep.backends.base import Form
from cupyep.backends.cuda.arena import Arena, abort_word
from cupyep.backends.cuda.kernels import Call, Kernel, Kernels
from cupyep.backends.shapes import Shape, Tokens
from cupyep.backends.verdict import abort_error, signature_mismatch
from cupyep.comm import Communicator
from cupyep.errors import ArenaExhaustedError, CupyepError
from cupyep.handle import Handle
from cupyep.structs import Struct

COUNT, OTHERS = 0, 1  # the two host records


Where = dict[str, int] | ArenaExhaustedError


class Routing(NamedTuple):
    """Where the tokens of one dispatch go, on the GPU.

    order: `[num_tokens, num_ranks]` int32, a token's place among this rank's tokens for that rank, or -1;
    words: those of abi.ROUTING, then our first row at each rank, then what COUNT calls received;
    capacity: rows that our own block holds.
    """

    handle_id: int
    num_experts: int
    order: cupy.ndarray
    words: cupy.ndarray
    capacity: int

    @property
    def recv_count(self) -> cupy.ndarray:
        first = 2 + self.order.shape[1]
        return self.words[first : first + 1]


@dataclass(frozen=True, eq=False)
class CudaHandle(Handle):
    """A Handle whose routing lies on the GPU."""

    routing: Routing

    @property
    def send_row(self) -> cupy.ndarray:
        order = self.routing.order
        return cupy.where(order < 0, np.int32(-1), order + self.routing.words[2 : 2 + order.shape[1]])

    @property
    def recv_count(self) -> cupy.ndarray:
        return self.routing.recv_count

    @property
    def recv_count_per_expert(self) -> cupy.ndarray:
        return self.routing.words[3 + self.routing.order.shape[1] :]


def host_records(num_ranks: int) -> tuple[Any, dict[tuple[int, str], Any]]:
    """Pinned memory in which the device tells the host, all zero, and its parts: see HostLayout.views."""
    host_layout = layout.HostLayout(num_ranks)
    pinned = cupy.cuda.alloc_pinned_memory(host_layout.num_bytes)
    host = np.frombuffer(pinned, np.uint8, host_layout.num_bytes)
    host[:] = 0
    return pinned, host_layout.views(host)


class Counted(NamedTuple):
    """What COUNT found: rows from each rank, listings of each local expert, most tokens of any rank, a bad id."""

    rows: list[int]
    experts: list[int]
    most_tokens: int
    bad_id: int | None
    verdict: Verdict


class Launcher:
    """The operations of one arena on one stream."""

    def __init__(
        self, arena: Arena, kernels: Kernels, comm: Communicator, timeout_s: float | None, stream: Any
    ) -> None:
        self._arena, self._kernels, self._stream, self._timeout_s = arena, kernels, stream, timeout_s
        self._rank, self._num_ranks = comm.rank, comm.size
        self._pinned, self._host = host_records(comm.size)
        self._records = [self._host[index, "record"] for index in (COUNT, OTHERS)]
        self.operation = Operation.BARRIER  # the last one launched, or about to be
        sync = {
            "peers": arena.peers.data.ptr,
            "own": arena.address,
            "host": self._pinned.ptr,
            "timeout_ns": int((timeout_s or 0) * 1e9),
            "rank": comm.rank,
        }
        self._sync = {**sync, "channel": layout.Channel.NORMAL}
        self._counts: dict[Shape, Call] = {}
        self._moves: dict[Shape, tuple[Kernel, Call]] = {}  # PUSH and PULL
        self._barrier = Call(abi.BARRIER_PARAMS, {**sync, "channel": layout.Channel.BARRIER})
        self._barrier.within("post", operation=Operation.BARRIER)
        self._abort = Call(abi.ABORT_PARAMS, self._sync)

    def _call(self, params: Struct, shape: Shape, operation: Operation) -> Call:
        """Parameters with all that stays as it is for operations of one shape."""
        call = Call(params, self._sync)
        call.within("post", operation=operation, **shape.signature)
        return call

    def _move(self, shape: Shape, params: Struct) -> tuple[Kernel, Call]:
        """The kernel of a shape that was loaded, and its parameters."""
        if (found := self._moves.get(shape)) is None:
            found = self._moves[shape] = self._kernels.of(shape), self._call(params, shape, shape.operation)
        return found

    def count(self, shape: Shape, routing: Routing, topk_idx: Any, max_tokens: int, free: int, form: Form) -> None:
        """Launches COUNT; its result is there once the stream has passed it. `free`: bytes, for peers' messages."""
        if (call := self._counts.get(shape)) is None:
            call = self._counts[shape] = self._call(abi.COUNT_PARAMS, shape, Operation.COUNT)
        call.within(
            "post",
            num_experts=routing.num_experts,
            handle_id=form.num_worst_tokens,
            num_tokens=len(topk_idx),
            capacity=routing.capacity,
            rows_offset=free,
        )
        call.set(
            topk_idx=topk_idx.data.ptr,
            order=routing.order.data.ptr,
            routing=routing.words.data.ptr,
            received=routing.words.data.ptr + 4 * (2 + self._num_ranks),
            expert_stats=_pointer(form.expert_stats),
            wait_stats=_pointer(form.wait_stats),
            max_tokens=max_tokens,
        )
        self._kernels.count.launch(1, call, self._stream, smem_bytes=4 * (routing.num_experts + 1))

    def counted(self, shape: Shape, num_local_experts: int) -> Counted:
        """After COUNT: what it found. Raises MismatchError, PeerError, ArenaExhaustedError, on all ranks alike."""
        record = self._records[COUNT]
        verdict, bad_id = Verdict(record.verdict), self._take_bad_id()
        if verdict not in (Verdict.DONE, Verdict.GROW):
            raise self._error(COUNT)
        record.verdict = Verdict.DONE
        return Counted(
            self._host[COUNT, "host_rows"].tolist(),
            self._host[COUNT, "host_experts"][:num_local_experts].tolist(),
            record.most_tokens,
            bad_id,
            verdict,
        )

    def _take_bad_id(self) -> int | None:
        record = self._records[COUNT]
        has_bad_id, record.has_bad_id = record.has_bad_id, 0
        return record.bad_id if has_bad_id else None

    def check_ids(self) -> None:
        """Raises ValueError for an id of a dispatch whose counts the host did not wait for."""
        if (bad_id := self._take_bad_id()) is not None:
            raise ValueError(f"topk_idx: expected ids of experts, or -1, got {bad_id}")

    def push(self, shape: Shape, routing: Routing, tokens: Tokens, where: Where, num_sms: int) -> None:
        """Launches PUSH. `where`: offsets of our rows, idx, weights and scales, or why there is no block."""
        kernel, call = self._move(shape, abi.PUSH_PARAMS)
        self._post(call, routing, where)
        call.set(
            x=tokens.x.data.ptr,
            topk_idx=_pointer(tokens.topk_idx),
            topk_weights=_pointer(tokens.topk_weights),
            scales=_pointer(tokens.scales),
            order=routing.order.data.ptr,
            routing=routing.words.data.ptr,
            num_tokens=len(tokens.x),
            num_local_experts=routing.num_experts // self._num_ranks,
        )
        kernel.launch(num_sms, call, self._stream)

    def pull(
        self, shape: Shape, routing: Routing, out: Any, out_weights: Any, bias: tuple, where: Where, num_sms: int
    ) -> None:
        """Launches PULL. `where`: offsets of our input rows and weights, or why there is no block."""
        kernel, call = self._move(shape, abi.PULL_PARAMS)
        self._post(call, routing, where)
        call.set(
            out=out.data.ptr,
            out_weights=_pointer(out_weights),
            bias=tuple(map(_pointer, bias)),  # the rest is 0
            order=routing.order.data.ptr,
            routing=routing.words.data.ptr,
            num_tokens=len(out),
        )
        kernel.launch(num_sms, call, self._stream)

    def agree(self, shape: Shape, routing: Routing) -> None:
        """Launches an operation that moves nothing: it tells whether all ranks mean the same."""
        call = self._call(abi.BARRIER_PARAMS, shape, shape.operation)
        self._post(call, routing, {})
        self._kernels.barrier.launch(1, call, self._stream)

    def barrier(self) -> None:
        """Launches BARRIER."""
        self._kernels.barrier.launch(1, self._barrier, self._stream)

    def abort(self, kind: AbortKind, peer: int, stream: Any) -> None:
        """Makes every rank leave what it does. On a stream of its own: ours may be waiting for a peer."""
        self._abort.set(word=abi.pack_abort(kind, self.operation, self._rank, peer, 0))
        self._kernels.abort_peers.launch(1, self._abort, stream)

    def check(self) -> None:
        """Raises what an operation behind us has met, as far as the device has told."""
        for index, record in enumerate(self._records):
            if record.verdict:
                raise self._error(index)

    def check_abort(self) -> None:
        """Raises if a rank has left for good, also when no kernel of ours has met it yet."""
        if word := abort_word(self._arena.address):
            raise abort_error(word, self._timeout_s or 0)

    @staticmethod
    def _post(call: Call, routing: Routing, where: Where) -> None:
        failed = isinstance(where, ArenaExhaustedError)
        offsets = {"rows": where.needed, "idx": where.free} if isinstance(where, ArenaExhaustedError) else where
        call.within(
            "post",
            num_experts=routing.num_experts,
            handle_id=routing.handle_id,
            status=Status.FAILED if failed else Status.READY,
            capacity=routing.capacity,
            rows_offset=offsets.get("rows", 0),
            idx_offset=offsets.get("idx", 0),
            weights_offset=offsets.get("weights", 0),
            scales_offset=offsets.get("scales", 0),
        )

    def _error(self, index: int) -> CupyepError:
        """The error of a record with a verdict; a mismatch or a full arena is over with it, an abort stays."""
        record, posts = self._records[index], self._host[index, "host_posts"]
        verdict = Verdict(record.verdict)
        if verdict == Verdict.ABORTED:
            return abort_error(record.abort, self._timeout_s or 0)
        record.verdict = Verdict.DONE
        if verdict == Verdict.FAILED and index == COUNT:
            rank, rows = record.failed_rank, record.failed_rows
            post = posts[rank]
            fixed = int(post["handle_id"])
            if 0 < fixed < rows:
                return ArenaExhaustedError(rows, fixed, rank, "num_worst_tokens")
            needed = _row_layout(post).offsets(max(rows, fixed))["num_bytes"]
            return ArenaExhaustedError(needed, int(post["rows_offset"]), rank)
        if verdict == Verdict.FAILED:
            rank = int(np.flatnonzero(posts["status"] == Status.FAILED)[0])
            return ArenaExhaustedError(int(posts[rank]["rows_offset"]), int(posts[rank]["idx_offset"]), rank)
        mismatch = signature_mismatch(posts)
        assert mismatch is not None
        return mismatch


def _row_layout(post: Any) -> layout.RowLayout:
    """Of a row with all that travels beside it."""
    flags = int(post["flags"])
    return layout.RowLayout(
        int(post["row_bytes"]),
        num_topk=int(post["num_topk"]),
        idx_bytes=8 if flags & abi.Flag.IDX64 else 4,
        with_weights=bool(flags & abi.Flag.WEIGHTS),
        scale_bytes=int(post["scales"]) // 16,
    )


def _pointer(array: Any) -> int:
    return 0 if array is None else array.data.ptr
