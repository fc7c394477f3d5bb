"""class Buffer: checks arguments, hands them to a backend, wraps the results."""

from __future__ import annotations

from typing import Any

from cupyep import checks
from cupyep.errors import StateError
from cupyep.handle import CombineResult, DispatchLayout, DispatchResult, Handle
from cupyep.low_latency import LowLatencyVerbs


class Buffer(LowLatencyVerbs):
    """One rank's end of an expert-parallel group: dispatch sends tokens to experts, combine brings the outputs back.

    Args:
        comm: an mpi4py communicator (also one from Split), a LocalComm from run_local, or None: MPI.COMM_WORLD under
            an MPI launcher, else one rank alone.
        num_nvl_bytes: bytes of the arena's heap on this rank; 0: sized from max_tokens_per_rank and the first call.
        num_rdma_bytes: bytes of the low-latency calls' receive regions, see get_low_latency_rdma_size_hint; 0: they
            grow with the shapes. No RDMA is involved.
        low_latency_mode: allows the low-latency calls.
        max_tokens_per_rank: the most tokens a rank will dispatch in one call. None: agreed at the first call and
            grown, collectively, by a later larger one.
        backend: "cuda", "numpy", or "auto": cuda where a GPU and CuPy are present.
        device: CUDA device ordinal; None: the rank's number on this host modulo the GPUs.
        timeout_s: deadline in seconds of every wait; None waits for ever (for debuggers).

    Attributes: rank, size, backend (the name of the one chosen).
    Raises: TypeError, ValueError; MismatchError if ranks differ in these arguments; TopologyError if they cannot reach
        each other's memory; PeerTimeoutError if one does not come.
    Sync: creation, every verb and close() are collective: all ranks of comm call them in the same order. A Buffer
        belongs to one thread at a time.
    """

    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        num_experts: int | None = None,
        handle: Handle | None = None,
        copy: bool = False,
        validate: bool = False,
        num_sms: int | None = None,
        num_tokens_per_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        config: Any = None,
    ) -> DispatchResult:
        """Sends each token to every rank that owns one of its top-k experts, once per rank.

        Args:
            x: `[num_tokens, hidden]` float32, float16 or bfloat16; any array, it is only read. num_tokens may differ
                between ranks and may be 0.
            topk_idx: `[num_tokens, num_topk]` int32 or int64 global expert ids, -1 for none; num_topk 1..32.
            topk_weights: `[num_tokens, num_topk]` float32, or None.
            num_experts: of all ranks together, a multiple of their number; expert e lives on rank
                e // (num_experts / num_ranks). None: the length of num_tokens_per_expert.
            handle: of an earlier dispatch: repeats its routing for another x, without topk_idx and without counting.
            copy: results in memory of their own instead of the arena; for results that are kept, as in training.
            validate: check the three arrays below against our own counts; otherwise they are ignored.
            num_sms: SMs for this call; None: the default.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: as from get_dispatch_layout.
            config: ignored; DeepEP's tuning object.

        Returns: DispatchResult of
            recv_x `[num_recv_tokens, hidden]`, ordered by (source rank, source token);
            recv_topk_idx `[num_recv_tokens, num_topk]`: ids of local experts, -1 for experts of other ranks;
            recv_topk_weights, the same shape, 0 where the id is -1; both None if not sent;
            num_recv_tokens_per_expert_list: listings of each local expert;
            handle for combine; event.
        Raises: ValueError, TypeError before anything is sent, but for ids outside -1..num_experts-1, which count as
            -1 and raise once the operation is complete; MismatchError; ArenaExhaustedError; PeerError.
        Sync: collective. The results are ready in stream order (cuda) or complete (numpy); the host waits for counts.
        """
        backend = self._ready("dispatch")
        x = backend.asarray("x", x)
        checks.payload("x", x)
        sms = self._sms(backend, num_sms)
        if handle is not None:
            return self._cached_dispatch(backend, x, topk_idx, topk_weights, handle, copy, sms)
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
            num_experts = len(num_tokens_per_expert)
        num_experts = checks.num_experts(num_experts, self.size)
        self._check_num_tokens(backend, x.shape[0])
        if validate:
            given = (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
            names = ("num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank")
            ours = backend.layout(topk_idx, num_experts, strict=False)  # bad ids are the count's business
            for name, theirs, expected in zip(names, given, ours, strict=False):
                if theirs is not None:
                    checks.same(name, backend.asnumpy(theirs), backend.asnumpy(expected))
        with self._watch():
            recv_x, recv_idx, recv_weights, handle, event, bad_id = backend.dispatch(
                x, topk_idx, topk_weights, num_experts, copy=copy, num_sms=sms
            )
        if bad_id is not None:  # the operation was carried through with -1 in its place, so no peer suffers
            raise ValueError(f"topk_idx: expected ids in -1..{num_experts - 1}, got {bad_id}")
        return DispatchResult(recv_x, recv_idx, recv_weights, handle.num_recv_tokens_per_expert, handle, event)

    def _cached_dispatch(
        self, backend: Any, x: Any, topk_idx: Any, topk_weights: Any, handle: Handle, copy: bool, sms: int | None
    ) -> DispatchResult:
        self._check_handle(backend, handle)
        for name, value in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if value is not None:
                raise ValueError(f"{name}: expected None with handle=, got an array")
        checks.rows("x", x, handle.num_tokens, "num_tokens of the handle's dispatch")
        with self._watch():
            recv_x, event = backend.cached_dispatch(x, handle, copy=copy, num_sms=sms)
        return DispatchResult(recv_x, None, None, handle.num_recv_tokens_per_expert, handle, event)

    def combine(
        self, x: Any, handle: Handle, topk_weights: Any = None, *, num_sms: int | None = None, config: Any = None
    ) -> CombineResult:
        """Brings the experts' outputs home: each token gets the sum of its rows at all ranks that it was sent to.

        Args:
            x: `[num_recv_tokens, hidden]` float32, float16 or bfloat16, rows in the order of dispatch's recv_x, already
                weighted. An array of this Buffer's arena is used in place; any other is staged there by a local copy.
            handle: from that dispatch.
            topk_weights: `[num_recv_tokens, num_topk]` float32 to be summed the same way, or None.
            num_sms: SMs for this call; None: the default.
            config: ignored; DeepEP's tuning object.

        Returns: CombineResult of combined_x `[num_tokens, hidden]`, combined_topk_weights `[num_tokens, num_topk]` or
            None, event. Sums run in fp32 from +0 by ascending rank and are rounded once; tokens sent nowhere are 0.
        Raises: ValueError, TypeError, StateError (another Buffer's handle) before anything is sent; MismatchError;
            ArenaExhaustedError; PeerError.
        Sync: collective. Ready in stream order (cuda) or complete (numpy).
        """
        backend = self._ready("combine")
        self._check_handle(backend, handle)
        x = backend.asarray("x", x)
        checks.payload("x", x)
        checks.rows("x", x, handle.num_recv_tokens, "num_recv_tokens of the handle")
        if topk_weights is not None:
            topk_weights = backend.asarray("topk_weights", topk_weights)
            checks.topk_weights(topk_weights, (handle.num_recv_tokens, handle.num_topk))
        sms = self._sms(backend, num_sms)
        with self._watch():
            return CombineResult(*backend.combine(x, handle, topk_weights, num_sms=sms))

    def get_dispatch_layout(self, topk_idx: Any, num_experts: int) -> DispatchLayout:
        """How a dispatch of `topk_idx` would spread; DeepEP's callers want it, dispatch itself does not.

        Args: topk_idx `[num_tokens, num_topk]` int32 or int64; num_experts of all ranks.
        Returns: DispatchLayout of num_tokens_per_rank `[num_ranks]` int32, None, num_tokens_per_expert `[num_experts]`
            int32, is_token_in_rank `[num_tokens, num_ranks]` bool, event.
        Sync: local.
        """
        backend = self._ready("get_dispatch_layout")
        topk_idx = backend.asarray("topk_idx", topk_idx)
        checks.matrix("topk_idx", topk_idx)
        checks.topk_idx(topk_idx, topk_idx.shape[0])
        num_experts = checks.num_experts(num_experts, self.size)
        per_rank, per_expert, in_rank, event = backend.layout(topk_idx, num_experts, strict=True)
        return DispatchLayout(per_rank, None, per_expert, in_rank, event)

    def _sms(self, backend: Any, num_sms: int | None) -> int | None:
        most = backend.max_num_sms
        if num_sms is not None:
            return checks.integer("num_sms", num_sms, 1, most)
        return min(Buffer.num_sms, most) if Buffer.num_sms and most else Buffer.num_sms

    @staticmethod
    def _check_handle(backend: Any, handle: Any) -> None:
        if not isinstance(handle, Handle):
            raise TypeError(f"handle: expected a Handle from dispatch, got {type(handle).__name__}")
        if handle.owner is not backend:
            raise StateError("handle: expected one from this Buffer's dispatch, got another Buffer's")
