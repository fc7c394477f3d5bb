"""Buffer.dispatch: checks arguments, hands them to the backend, wraps the results."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyep import checks
from cupyep.backends.base import Form, Run
from cupyep.backends.shapes import Tokens
from cupyep.group import Group
from cupyep.handle import DispatchResult, Handle


class Dispatch(Group):
    """The verb dispatch of a Buffer."""

    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        num_experts: int | None = None,
        handle: Handle | None = None,
        copy: bool = False,
        scales_order: str = "C",
        num_worst_tokens: int = 0,
        layout: str = "rank",
        expert_alignment: int = 1,
        zero_gaps: bool = False,
        num_sms: int | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        cumulative_local_expert_recv_stats: Any = None,
        dispatch_wait_us: Any = None,
        validate: bool = False,
        num_tokens_per_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        config: Any = None,
    ) -> DispatchResult:
        """Sends each token to every rank that owns one of its top-k experts, once per rank.

        Args:
            x: `[num_tokens, hidden]` float32, float16 or bfloat16; any array, it is only read. num_tokens may differ
                between ranks and may be 0. Or a pair (data, scales) of matrices with a row per token, which travel as
                they are: fp8 codes with float32 scales or packed UE8M0 int32 (see quantize_fp8), MXFP8 or NVFP4 as
                uint8; also float32, float16, bfloat16, int8, int32, and on NumPy the fp8 types of ml_dtypes.
            topk_idx: `[num_tokens, num_topk]` int32 or int64 global expert ids, -1 for none; num_topk 1..32.
            topk_weights: `[num_tokens, num_topk]` float32, or None.
            num_experts: of all ranks together, a multiple of their number; expert e lives on rank
                e // (num_experts / num_ranks). None: the length of num_tokens_per_expert.
            handle: of an earlier dispatch: repeats its routing and layout for another x, without topk_idx and without
                counting.
            copy: results in memory of their own instead of the arena; for results that are kept, as in training.
            scales_order: "C" or "F": received scales row-major, or column-major, which takes a local copy.
            num_worst_tokens: rows of all results, whatever comes, equal on all ranks: the host waits for no count. The
                first handle.recv_count[0] rows are those that came; ids of the others are -1, all else there is
                undefined. More rows than that are an ArenaExhaustedError on all ranks, no row has moved then. An arena
                that nobody has sized gets room for this dispatch; wider rows along its handle want num_nvl_bytes.
            layout: "rank": a row per received token. "expert": a row per listing, grouped by local expert, each group
                in the order of received tokens, for a grouped matrix product; handle.expert_rows says where. Rows
                still cross once per (token, rank) and are multiplied where they arrive.
            expert_alignment: in the expert layout, rows of which each group's start is a multiple; else 1.
            zero_gaps: rows between two groups are 0; else they are undefined.
            num_sms: SMs for this call; None: the default.
            previous_event: EventOverlap or cupy.cuda.Event that the operation waits for, in place of all that the
                current stream was given so far. Inputs must be ready then.
            async_finish: the current stream does not wait: the caller waits for result.event before it uses results.
                What the operation reads is kept alive until it has been.
            allocate_on_comm_stream: accepted from DeepEP's callers; results always wait for both streams.
            cumulative_local_expert_recv_stats: `[num_experts / num_ranks]` int32 of the backend, to which the listings
                of each local expert are added.
            dispatch_wait_us: `[num_ranks]` int64 of the backend, to which the microseconds are added that this rank
                waited for each rank's counts: who is slow. Both grow with the counting, also if no row moves after it.
            validate: check the three arrays below against our own counts; otherwise they are ignored.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: as from get_dispatch_layout.
            config: ignored; DeepEP's tuning object.

        Returns: DispatchResult of
            recv_x `[num_recv_tokens, hidden]`, ordered by (source rank, source token), a pair if x is one; in the
                expert layout `[handle.expert_rows.num_rows, hidden]`;
            recv_topk_idx `[num_recv_tokens, num_topk]`: ids of local experts, -1 for experts of other ranks;
            recv_topk_weights, the same shape, 0 where the id is -1; both None if not sent;
            num_recv_tokens_per_expert_list: listings of each local expert; [] with num_worst_tokens;
            handle for combine; event.
        Raises: ValueError, TypeError before anything is sent, but for ids outside -1..num_experts-1, which count as
            -1 and raise once the operation is complete; MismatchError; ArenaExhaustedError; PeerError; StateError
            under graph capture, where num_worst_tokens and a shape that has been used are needed. Without a wait for
            counts, errors come up at event.synchronize(), at a later call, or at close().
        Sync: collective. The results are ready in stream order (cuda) or complete (numpy); the host waits for counts.
        """
        backend = self._ready("dispatch")
        x, scales = self._payload(backend, x)
        run = self._run(backend, num_sms, previous_event, async_finish, allocate_on_comm_stream)
        checks.boolean("copy", copy)
        checks.boolean("validate", validate)
        checks.one_of("scales_order", scales_order, ("C", "F"))
        by_expert = checks.one_of("layout", layout, ("rank", "expert")) == "expert"
        expert_alignment = checks.integer("expert_alignment", expert_alignment, 1, checks.MAX_ALIGNMENT)
        if handle is not None:
            given = {
                "topk_idx": topk_idx,
                "topk_weights": topk_weights,
                "num_worst_tokens": num_worst_tokens or None,
                "cumulative_local_expert_recv_stats": cumulative_local_expert_recv_stats,
                "dispatch_wait_us": dispatch_wait_us,
            }
            for name, value in given.items():
                if value is not None:
                    raise ValueError(f"{name}: expected None with handle=, got one")
            self._check_handle(backend, handle)
            if by_expert and handle.expert_rows is None:
                raise ValueError("layout: expected 'rank', that of the handle's dispatch, got 'expert'")
            alignment = handle.expert_rows.alignment if handle.expert_rows else 1
            if expert_alignment not in (1, alignment):
                raise ValueError(f"expert_alignment: expected the handle's {alignment}, got {expert_alignment}")
            if num_experts not in (None, handle.num_experts):
                raise ValueError(f"num_experts: expected the handle's {handle.num_experts}, got {num_experts!r}")
            form = Form(copy, scales_order, zero_gaps=checks.boolean("zero_gaps", zero_gaps))
            return self._cached_dispatch(backend, Tokens(x, scales), handle, form, run)
        if topk_idx is None:
            raise ValueError("topk_idx: expected an array, or handle= of an earlier dispatch, got None")
        topk_idx = backend.asarray("topk_idx", topk_idx)
        checks.topk_idx(topk_idx, x.shape[0])
        if topk_weights is not None:
            topk_weights = backend.asarray("topk_weights", topk_weights)
            checks.topk_weights(topk_weights, tuple(topk_idx.shape))
        if num_experts is None:
            if num_tokens_per_expert is None:
                raise ValueError("num_experts: expected an int (or num_tokens_per_expert=), got None")
            try:
                num_experts = len(num_tokens_per_expert)
            except TypeError as error:
                raise TypeError(f"num_tokens_per_expert: expected an array, got {num_tokens_per_expert!r}") from error
        num_experts = checks.num_experts(num_experts, self.size)
        self._check_num_tokens(backend, x.shape[0])
        if expert_alignment > 1 and not by_expert:
            raise ValueError(f"expert_alignment: expected 1 in the rank layout, got {expert_alignment}")
        form = Form(
            copy,
            scales_order,
            checks.integer("num_worst_tokens", num_worst_tokens, 0, checks.MAX_TOKENS),
            by_expert,
            expert_alignment,
            checks.boolean("zero_gaps", zero_gaps),
            self._statistics("cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats,
                             num_experts // self.size, np.int32),
            self._statistics("dispatch_wait_us", dispatch_wait_us, self.size, np.int64),
        )  # fmt: skip
        if validate:
            theirs_all = (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
            names = ("num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank")
            ours = backend.layout(topk_idx, num_experts, strict=False)  # bad ids are the count's business
            for name, theirs, expected in zip(names, theirs_all, ours, strict=False):
                if theirs is not None:
                    checks.same(name, backend.asnumpy(theirs), backend.asnumpy(expected))
        with self._watch:
            tokens = Tokens(x, scales, topk_idx, topk_weights)
            came, handle, event, bad_id = backend.dispatch(tokens, num_experts, form, run)
        if bad_id is not None:  # the operation was carried through with -1 in its place, so no peer suffers
            raise ValueError(f"topk_idx: expected ids in -1..{num_experts - 1}, got {bad_id}")
        return self._result(came, handle, event)

    def _cached_dispatch(self, backend: Any, tokens: Tokens, handle: Handle, form: Form, run: Run) -> DispatchResult:
        checks.rows("x", tokens.x, handle.num_tokens, "num_tokens of the handle's dispatch")
        with self._watch:
            came, event = backend.cached_dispatch(tokens, handle, form, run)
        return self._result(came, handle, event)

    def _statistics(self, name: str, value: Any, length: int, dtype: Any) -> Any:
        if value is None:
            return None
        array = self._backend.aswritable(name, value)
        if array.dtype != dtype or tuple(array.shape) != (length,):
            wanted = f"{np.dtype(dtype)} of shape {(length,)}"
            raise ValueError(f"{name}: expected {wanted}, got {array.dtype} of shape {tuple(array.shape)}")
        return array

    @staticmethod
    def _payload(backend: Any, x: Any) -> tuple[Any, Any]:
        """x as (data, scales or None), checked."""
        if not isinstance(x, tuple):
            x = backend.asarray("x", x)
            checks.payload("x", x)
            return x, None
        if len(x) != 2:
            raise ValueError(f"x: expected an array or a pair (data, scales), got {len(x)} items")
        data, scales = (backend.asarray(f"x[{i}]", part) for i, part in enumerate(x))
        checks.with_scales(data, scales)
        return data, scales

    @staticmethod
    def _result(came: Tokens, handle: Handle, event: Any) -> DispatchResult:
        recv_x = came.x if came.scales is None else (came.x, came.scales)
        counts = handle.num_recv_tokens_per_expert
        return DispatchResult(recv_x, came.topk_idx, came.topk_weights, counts, handle, event)
