"""What dispatch leaves behind for combine (and for a cached dispatch), and the results of the public calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """How received rows lie when they are grouped by expert (layout="expert"). Arrays are the backend's.

    Attributes:
        num_rows: rows of the expanded arrays, gaps included.
        alignment: each expert's first row is a multiple of it.
        offsets: `[num_local_experts + 1]` int32: the first row of each expert; the last is the end of the last group.
        row_map: `[num_recv_tokens, num_topk]` int32: the expanded row of a received token's listing, or -1.
    """

    num_rows: int
    alignment: int
    offsets: Any
    row_map: Any


@dataclass(frozen=True, eq=False)
class Handle:
    """The routing of one dispatch, as this rank sees it. Valid with the Buffer that made it, as often as wanted.

    Attributes:
        num_tokens, num_topk, num_experts: of the dispatch.
        send_row: `[num_tokens, num_ranks]` int32: the row that a token has in each rank's output, or -1.
        num_recv_tokens: rows that this rank received; with num_worst_tokens, that number.
        num_recv_tokens_per_rank: the same by source rank; received rows are ordered by (source rank, source token).
        num_recv_tokens_per_expert: listings of each local expert among the received rows. Both lists are empty with
            num_worst_tokens, where the host does not know.
        recv_count: `[1]` int32 where the backend computes: rows that came. A graph's replay writes it anew.
        recv_count_per_expert: `[num_local_experts]` int32 there: listings of each local expert.
        expert_rows: where rows lie in the expert layout; None in the rank layout.
        handle_id: equal on all ranks; they must combine with the handle of the same dispatch.
    """

    num_tokens: int
    num_topk: int
    num_experts: int
    num_recv_tokens: int
    num_recv_tokens_per_rank: list[int]
    num_recv_tokens_per_expert: list[int]
    handle_id: int
    owner: object = field(repr=False)
    expert_rows: ExpertRows | None = field(default=None, repr=False, kw_only=True)

    @property
    def send_row(self) -> Any:
        raise NotImplementedError  # each backend keeps it in its own way


class EventOverlap:
    """The end of an operation. Of this class itself: one that was complete when its call returned (NumPy).

    As a context manager it says what may run meanwhile: `with result.event: ...` ends with current_stream_wait().
    """

    def current_stream_wait(self) -> None:
        """Orders the current stream after the operation. The host does not wait."""

    def synchronize(self) -> None:
        """Waits on the host; raises what went wrong in the operation, if anything did."""

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


class DispatchResult(NamedTuple):
    """What `Buffer.dispatch` returns; see there."""

    recv_x: Any
    recv_topk_idx: Any
    recv_topk_weights: Any
    num_recv_tokens_per_expert_list: list[int]
    handle: Handle
    event: Any


class CombineResult(NamedTuple):
    """What `Buffer.combine` returns; see there."""

    combined_x: Any
    combined_topk_weights: Any
    event: Any


class DispatchLayout(NamedTuple):
    """What `Buffer.get_dispatch_layout` returns; see there."""

    num_tokens_per_rank: Any
    num_tokens_per_rdma_rank: None
    num_tokens_per_expert: Any
    is_token_in_rank: Any
    event: Any


@dataclass(frozen=True, eq=False)
class LowLatencyHandle:
    """The routing of one low-latency dispatch. Valid, like its arrays, until the second-next such dispatch.

    Attributes:
        src_info: `[num_local_experts, num_ranks * max]` int32: the source token of each row of recv_x.
        layout_range: `[num_local_experts, num_ranks]` int64: the rows of one source rank, first << 32 | count.
        num_max_dispatch_tokens_per_rank, hidden, num_experts, num_tokens, num_topk: of the dispatch.
        with_weights: whether topk_weights travelled with it.
        number: of the dispatch, from 1.
    """

    src_info: Any
    layout_range: Any
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int
    num_tokens: int
    num_topk: int
    with_weights: bool
    number: int
    owner: object = field(repr=False)
    tables: dict[str, Any] = field(repr=False)


class LowLatencyDispatchResult(NamedTuple):
    """What `Buffer.low_latency_dispatch` returns; see there."""

    recv_x: Any
    recv_count: Any
    handle: LowLatencyHandle
    event: Any
    hook: Callable[[], None] | None


class LowLatencyCombineResult(NamedTuple):
    """What `Buffer.low_latency_combine` returns; see there."""

    combined_x: Any
    event: Any
    hook: Callable[[], None] | None
