"""class Buffer: checks arguments, hands them to a backend, wraps the results."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from cupyep import abi, backends, checks
from cupyep.backends.base import Shape
from cupyep.comm import connect
from cupyep.config import BufferConfig
from cupyep.errors import CupyepError, MismatchError, PeerError, StateError
from cupyep.handle import CombineResult, DispatchLayout, DispatchResult, Handle
from cupyep.layout import RowLayout


class Buffer:
    """One rank's end of an expert-parallel group: dispatch sends tokens to experts, combine brings the outputs back.

    Args:
        comm: an mpi4py communicator (also one from Split), a LocalComm from run_local, or None: MPI.COMM_WORLD under
            an MPI launcher, else one rank alone.
        num_nvl_bytes: bytes of the arena's heap on this rank; 0: sized from max_tokens_per_rank and the first call.
        num_rdma_bytes: accepted for code that comes from DeepEP; ranks of one node need none.
        low_latency_mode: reserved for the low-latency calls.
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

    num_sms: int | None = None  # of all Buffers; None: chosen by the model

    def __init__(
        self,
        comm: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        *,
        max_tokens_per_rank: int | None = None,
        backend: str = "auto",
        device: int | None = None,
        timeout_s: float | None = 120,
    ) -> None:
        self._backend: Any = None  # for __del__, should a check fail
        self._error: CupyepError | None = None
        config = BufferConfig(num_nvl_bytes, num_rdma_bytes, low_latency_mode, max_tokens_per_rank, backend, timeout_s)
        group = connect(comm, timeout_s)
        self.rank, self.size = group.rank, group.size
        for peer, theirs in enumerate(group.allgather(config, operation="Buffer", timeout_s=timeout_s)):
            for name, value in vars(config).items():
                if vars(theirs)[name] != value and name != "timeout_s":
                    raise MismatchError("Buffer", peer, name, value, vars(theirs)[name])
        self._backend = backends.create(group, config, device)
        self.backend: str = self._backend.name

    @staticmethod
    def set_num_sms(num_sms: int | None) -> None:
        """Sets how many SMs the kernels of every Buffer may use by default; None: chosen by the model. Local."""
        Buffer.num_sms = None if num_sms is None else checks.integer("num_sms", num_sms, 1)

    @property
    def max_tokens_per_rank(self) -> int | None:
        """The agreed maximum, or None before the first call."""
        return self._ready("max_tokens_per_rank").capacity.max_tokens_per_rank or None

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
        sms = self._sms(num_sms)
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
            ours = self.get_dispatch_layout(topk_idx, num_experts)
            for name, given in (
                ("num_tokens_per_rank", num_tokens_per_rank),
                ("is_token_in_rank", is_token_in_rank),
                ("num_tokens_per_expert", num_tokens_per_expert),
            ):
                if given is not None:
                    checks.same(name, backend.asnumpy(given), backend.asnumpy(getattr(ours, name)))
        with self._watch():
            recv_x, recv_idx, recv_weights, handle, event = backend.dispatch(
                x, topk_idx, topk_weights, num_experts, copy=copy, num_sms=sms
            )
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
        sms = self._sms(num_sms)
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
        per_rank, per_expert, in_rank, event = backend.layout(topk_idx, checks.num_experts(num_experts, self.size))
        return DispatchLayout(per_rank, None, per_expert, in_rank, event)

    def prepare(
        self,
        hidden: int,
        dtype: Any,
        *,
        num_topk: int = 8,
        idx_dtype: Any = np.int64,
        with_weights: bool = True,
        max_tokens_per_rank: int | None = None,
    ) -> None:
        """Does ahead of time what a shape's first dispatch and combine would do: sizes the arena, loads kernels.

        Args: as the arrays to come will have them; every rank must give the same. Units: elements, rows.
        Sync: collective; blocks.
        """
        backend = self._ready("prepare")
        dtype, idx_bytes = np.dtype(dtype), np.dtype(idx_dtype).itemsize
        checks.payload("dtype", np.empty((0, checks.integer("hidden", hidden, 1)), dtype))
        checks.integer("num_topk", num_topk, 1, abi.MAX_TOPK)
        most = checks.integer("max_tokens_per_rank", max_tokens_per_rank, 1) if max_tokens_per_rank is not None else 0
        self._check_num_tokens(backend, most)
        row_bytes = hidden * dtype.itemsize
        with self._watch():
            for weights in (False, True) if with_weights else (False,):
                backend.prepare(
                    Shape(abi.Operation.PUSH, hidden, dtype, RowLayout(row_bytes, num_topk, idx_bytes, weights)), most
                )
                backend.prepare(
                    Shape(abi.Operation.PULL, hidden, dtype, RowLayout(row_bytes, num_topk * weights, 0, weights)), most
                )

    def barrier(self) -> None:
        """Returns when every rank has called it (cuda: in stream order, on the GPU). Collective."""
        backend = self._ready("barrier")
        with self._watch():
            backend.barrier()

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised array in this rank's arena: as combine's input it is used in place. Local.

        Raises ArenaExhaustedError; prepare() or a first dispatch sizes the arena.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return self._ready("empty").empty(shape, np.dtype(dtype))

    @contextmanager
    def allocator(self) -> Iterator[None]:
        """Within it, new CuPy arrays come from the arena, so that combine uses them in place. Local.

        Falls back to CuPy's pool when the arena is full. NumPy has no such hook: use `empty` with `out=` there.
        """
        with self._ready("allocator").allocator():
            yield

    def record_stream(self, array: Any, stream: Any) -> None:
        """Keeps the arena block of `array` from reuse until `stream` has done what it was given so far. Local."""
        self._ready("record_stream").record_stream(array, stream)

    def get_comm_stream(self) -> Any:
        """The CUDA stream that operations run on (None on the numpy backend). Local."""
        return self._ready("get_comm_stream").comm_stream()

    def close(self) -> None:
        """Ends the Buffer: no more operations. Received arrays stay valid. Idempotent.

        Raises: PeerTimeoutError if a peer does not close too; after an error nothing more is raised for it.
        Sync: collective, unless an error has broken the group.
        """
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close(collective=self._error is None)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._backend is not None and self._error is None:
            # This rank's program failed: the peers must not wait for it until their deadline.
            self._error = error if isinstance(error, CupyepError) else StateError(f"the program raised {error!r}")
            self._backend.abort()
        self.close()

    def __del__(self) -> None:
        if self._backend is not None:  # a collective close is out of the question here
            warnings.warn(f"Buffer of rank {self.rank} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = "closed" if self._backend is None else "broken" if self._error else "open"
        return f"<cupyep.Buffer rank {self.rank} of {self.size}, {getattr(self, 'backend', '?')}, {state}>"

    # helpers

    def _ready(self, verb: str) -> Any:
        if self._backend is None:
            raise StateError(f"{verb}: this Buffer is closed")
        if self._error is not None:
            raise StateError(f"{verb}: this Buffer is broken by an earlier error: {self._error}") from self._error
        return self._backend

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """A peer's failure breaks the Buffer; a mismatch or a full arena leaves it usable on every rank."""
        try:
            yield
        except PeerError as error:
            self._error = error
            raise

    def _sms(self, num_sms: int | None) -> int | None:
        return Buffer.num_sms if num_sms is None else checks.integer("num_sms", num_sms, 1)

    def _check_num_tokens(self, backend: Any, num_tokens: int) -> None:
        most = backend.agreed_max_tokens
        if most is not None and num_tokens > most:
            raise ValueError(f"num_tokens: expected at most max_tokens_per_rank = {most}, got {num_tokens}")

    @staticmethod
    def _check_handle(backend: Any, handle: Any) -> None:
        if not isinstance(handle, Handle):
            raise TypeError(f"handle: expected a Handle from dispatch, got {type(handle).__name__}")
        if handle.owner is not backend:
            raise StateError("handle: expected one from this Buffer's dispatch, got another Buffer's")
