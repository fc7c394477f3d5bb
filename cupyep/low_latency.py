"""class LowLatencyVerbs: the calls for decoding, where latency counts and nobody may wait for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cupyep import abi, checks
from cupyep.backends import low_latency_checks
from cupyep.backends.low_latency_shape import LowLatencyShape, shape_of, size_hint
from cupyep.group import Group
from cupyep.handle import LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle


class LowLatencyVerbs(Group):
    """Buffer's low-latency calls; docs/low-latency.md tells how they work.

    What they return lies in memory of the Buffer's own and is valid until the second-next call of the same verb. A call
    runs on the current stream (cuda), or with async_finish on the Buffer's own. With return_recv_hook only the send
    half runs; the returned hook runs the receive half, and in between nothing of ours is busy. Calls of a verb and
    their hooks come in the same order on all ranks.
    """

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of num_rdma_bytes that hold the receive regions of this shape: 16-bit tokens, any num_topk. Local."""
        num_experts = checks.num_experts(num_experts, checks.integer("num_ranks", num_ranks, 1, abi.MAX_RANKS))
        tokens = low_latency_checks.max_tokens(num_max_dispatch_tokens_per_rank, 0, 1, num_experts)
        hidden = checks.integer("hidden", hidden, 1, checks.MAX_ROW_BYTES // 2)
        return size_hint(LowLatencyShape(num_ranks, tokens, hidden, np.dtype(np.float16), abi.MAX_TOPK, num_experts))

    def low_latency_dispatch(
        self,
        x: Any,
        topk_idx: Any,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Any = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        topk_weights: Any = None,
        *,
        num_sms: int | None = None,
    ) -> LowLatencyDispatchResult:
        """Sends each token to its experts; every expert's rows lie together.

        Args:
            x: `[num_tokens, hidden]` bfloat16, float16 or float32; 0..num_max_dispatch_tokens_per_rank tokens.
            topk_idx: `[num_tokens, num_topk]` int32 or int64 global expert ids, -1 for none; num_topk 1..32. An expert
                that a token lists twice gets it once.
            num_max_dispatch_tokens_per_rank: the most tokens of any rank, equal on all, 1..4096;
                times num_topk at most 32768; rounded up to a multiple of 32, times num_experts at most 262144.
            num_experts: of all ranks together.
            cumulative_local_expert_recv_stats: contiguous `[num_local_experts]` int32 of this backend, to which
                recv_count is added, or None.
            use_fp8: rows travel and arrive as e4m3, with a scale per 128 values (see quantize_fp8).
            round_scale: with it, scales are powers of two. use_ue8m0: and arrive as exponent bytes, four to an int32.
            async_finish: on the Buffer's own stream; the event orders others behind it.
            return_recv_hook: only the send half; call the hook before the results are used. Not with async_finish.
            topk_weights: `[num_tokens, num_topk]` float32 to travel along; then the combine's send half waits for
                nobody.
            num_sms: CTAs; None: as many SMs as this rank has to itself.

        Returns: LowLatencyDispatchResult of
            recv_x `[num_local_experts, num_ranks * max, hidden]`: recv_count[e] rows of each expert, ordered by (source
            rank, source token), undefined behind them; with use_fp8 a pair (uint8 codes, scales `[num_local_experts,
            num_ranks * max, hidden / 128]` float32, or int32 `[.., hidden / 512]`; rows are their fastest axis);
            recv_count `[num_local_experts]` int32; handle; event; hook or None.
        Raises: ValueError, TypeError, StateError before anything is sent, at this rank alone; MismatchError,
            ArenaExhaustedError at a shape's first call, on all ranks; PeerError. Ids out of range count as -1 and
            raise ValueError at event.synchronize(), at the next low-latency call or at close().
        Sync: collective; the host does not wait. A shape's first call is a step of all hosts as well: not in a graph,
            and not where a rank is masked.
        """
        backend = self._ready("low_latency_dispatch")
        engine = backend.low_latency
        x, topk_idx = backend.asarray("x", x), backend.asarray("topk_idx", topk_idx)
        if topk_weights is not None:
            topk_weights = backend.asarray("topk_weights", topk_weights)
        shape = low_latency_checks.dispatch_shape(
            self.size,
            low_latency_checks.meta(x),
            low_latency_checks.meta(topk_idx),
            None if topk_weights is None else low_latency_checks.meta(topk_weights),
            num_max_dispatch_tokens_per_rank,
            num_experts,
            use_fp8,
            round_scale,
            use_ue8m0,
        )
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            name, extents = "cumulative_local_expert_recv_stats", (shape.num_local_experts,)
            low_latency_checks.own(name, backend, stats, extents, np.int32, alignment=4)
        inputs = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights, "stats": stats}
        num_sms = None if num_sms is None else checks.integer("num_sms", num_sms, 1, engine.max_num_sms)
        low_latency_checks.finish(async_finish, return_recv_hook)
        engine.check_ids()
        with self._watch:
            results, handle, event, hook = engine.dispatch(
                shape, inputs, num_sms=num_sms, async_finish=async_finish, split=return_recv_hook
            )
        recv_x = (results["recv_x"], results["scales"]) if use_fp8 else results["recv_x"]
        return LowLatencyDispatchResult(recv_x, results["recv_count"], handle, event, self._watched(hook))

    def low_latency_combine(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Any = None,
        *,
        num_sms: int | None = None,
    ) -> LowLatencyCombineResult:
        """Brings the experts' outputs home: the sum of topk_weights times rows.

        A rank adds the rows of its own experts first, by ascending column of topk_idx, and sends one row per token, in
        x's type. The token's home adds those by ascending rank. Both sums run in fp32 from +0 and are rounded once.

        Args:
            x: `[num_local_experts, num_ranks * max, hidden]` float32, float16 or bfloat16, read in place; rows behind
                recv_count are not read.
            topk_idx: as given to the dispatch, or None. Only its shape is looked at: the handle knows the routing.
            topk_weights: `[num_tokens, num_topk]` float32. None if they went with the dispatch. Otherwise they travel
                now, and the send half waits for those of all ranks.
            handle: of one of the last two dispatches, the same one on all ranks.
            use_logfmt: not supported; see docs/low-latency.md.
            zero_copy: x is get_next_low_latency_combine_buffer(handle). There is no copy to save, x is only checked.
            async_finish, return_recv_hook, num_sms: as for the dispatch.
            out: contiguous `[num_tokens, hidden]` of x's type and of this backend, at a multiple of 16 bytes, or None:
                memory of the Buffer's own.

        Returns: LowLatencyCombineResult of combined_x `[num_tokens, hidden]`, event, hook or None.
        Raises, Sync: as the dispatch.
        """
        backend = self._ready("low_latency_combine")
        engine = backend.low_latency
        if checks.boolean("use_logfmt", use_logfmt):
            raise ValueError("use_logfmt: expected False, got True: rows travel in x's type; see docs/low-latency.md")
        if not isinstance(handle, LowLatencyHandle):
            raise TypeError(f"handle: expected one from low_latency_dispatch, got {type(handle).__name__}")
        engine.check_handle(handle)
        x = backend.asarray("x", x)
        shape = self._combine_shape(handle, x.dtype)
        expected = (shape.num_local_experts, shape.num_rows, shape.hidden)
        if tuple(x.shape) != expected:
            raise ValueError(f"x: expected shape {expected}, got {tuple(x.shape)}")
        checks.addable_rows("x", x)
        checks.boolean("zero_copy", zero_copy)
        if zero_copy and engine.address(x) != engine.address(engine.next_combine_buffer(shape)):
            raise ValueError("x: expected the array of get_next_low_latency_combine_buffer with zero_copy, got another")
        ids = (handle.num_tokens, handle.num_topk)
        if topk_idx is not None:
            given = tuple((topk_idx if hasattr(topk_idx, "shape") else checks.host_array("topk_idx", topk_idx)).shape)
            if given != ids:
                raise ValueError(f"topk_idx: expected shape {ids}, got {given}")
        if (topk_weights is None) != handle.with_weights:
            wanted = (
                "None, as they went with the dispatch"
                if handle.with_weights
                else "an array, as none went with the dispatch"
            )
            raise ValueError(f"topk_weights: expected {wanted}, got {'None' if topk_weights is None else 'an array'}")
        if topk_weights is not None:
            topk_weights = backend.asarray("topk_weights", topk_weights)
            checks.topk_weights(topk_weights, ids)
        if out is not None:
            low_latency_checks.own("out", backend, out, (handle.num_tokens, shape.hidden), x.dtype, alignment=16)
        num_sms = None if num_sms is None else checks.integer("num_sms", num_sms, 1, engine.max_num_sms)
        inputs = {"x": x, "topk_weights": topk_weights, "out": out}
        low_latency_checks.finish(async_finish, return_recv_hook)
        engine.check_ids()
        with self._watch:
            combined_x, event, hook = engine.combine(
                shape, inputs, handle, num_sms=num_sms, async_finish=async_finish, split=return_recv_hook
            )
        return LowLatencyCombineResult(combined_x, event, self._watched(hook))

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle, dtype: Any = ml_dtypes.bfloat16) -> Any:
        """`[num_local_experts, num_ranks * max, hidden]` for the experts' outputs of the next combine. Local.

        Of bfloat16 unless `dtype` says otherwise. It is the same memory for every second combine. It saves no copy:
        combine reads any array in place.
        """
        engine = self._ready("get_next_low_latency_combine_buffer").low_latency
        if not isinstance(handle, LowLatencyHandle):
            raise TypeError(f"handle: expected one from low_latency_dispatch, got {type(handle).__name__}")
        engine.check_valid(handle)
        return engine.next_combine_buffer(self._combine_shape(handle, checks.addable("dtype", dtype)))

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing: a word that carries its epoch is never taken for another call's, so nothing needs cleaning."""

    def mask_rank(self, rank: int) -> None:
        """Leaves `rank` out of low-latency calls from the next half on: it gives and gets no rows, nobody waits for it.

        Local: every rank masks for itself. The masked rank is told 0 rows, so it does not hang either. What it has not
        yet received of earlier calls is undefined then too.
        """
        self._set_mask("mask_rank", rank, masked=True)

    def unmask_rank(self, rank: int) -> None:
        """Takes `rank` in again. It must have made as many low-latency calls as this rank. Local."""
        self._set_mask("unmask_rank", rank, masked=False)

    def query_masks(self) -> Any:
        """`[num_ranks]` int32, 1 for masked ranks, also for those that calls have masked. Local; the host waits."""
        return self._ready("query_masks").low_latency.masks()

    def set_mask_on_timeout(self, enabled: bool, timeout_s: float | None = None) -> None:
        """Whether low-latency calls mask a rank that is late, instead of breaking the Buffer. Local.

        Args: timeout_s: deadline of their waits in seconds; None: the Buffer's.
        """
        engine = self._ready("set_mask_on_timeout").low_latency
        checks.boolean("enabled", enabled)
        checks.timeout(timeout_s)
        engine.masks_on_timeout, engine.timeout_s = enabled, self._timeout_s if timeout_s is None else timeout_s

    # helpers

    def _set_mask(self, verb: str, rank: int, *, masked: bool) -> None:
        engine = self._ready(verb).low_latency
        if checks.integer("rank", rank, 0, self.size - 1) == self.rank:
            raise ValueError(f"rank: expected another rank than this one, got {rank}")
        engine.set_mask(rank, masked)

    def _combine_shape(self, handle: LowLatencyHandle, dtype: Any) -> LowLatencyShape:
        most = handle.num_max_dispatch_tokens_per_rank
        return shape_of(self.size, most, handle.hidden, dtype, handle.num_topk, handle.num_experts)

    def _watched(self, hook: Callable[[], None] | None) -> Callable[[], None] | None:
        """`hook`, whose errors are a collective call's."""
        if hook is None:
            return None

        def watched() -> None:
            self._ready("hook")
            with self._watch:
                hook()

        return watched
