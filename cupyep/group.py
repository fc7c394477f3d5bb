"""class Group: a Buffer's life, from its creation to close(), and its arena memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from cupyep import abi, backends, checks
from cupyep.backends.base import Run
from cupyep.backends.shapes import Outputs, Tokens
from cupyep.comm import connect
from cupyep.config import BufferConfig
from cupyep.errors import CupyepError, PeerError, PeerTimeoutError, StateError
from cupyep.handle import EventOverlap, Handle
from cupyep.watch import Watch

Self = TypeVar("Self", bound="Group")


class Group:
    """What Buffer is apart from its verbs. See Buffer for arguments and attributes."""

    num_sms: int | None = None  # of all Buffers; None: chosen by the model
    _backend: Any = None  # for __del__, should creation fail

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
        config = BufferConfig(num_nvl_bytes, num_rdma_bytes, low_latency_mode, max_tokens_per_rank, backend, timeout_s)
        group = connect(comm, timeout_s)
        self.rank, self.size = group.rank, group.size
        self._comm, self._timeout_s, self._pid = group, timeout_s, os.getpid()
        checks.integer("comm.size", group.size, 1, abi.MAX_RANKS)
        agreed = {name: value for name, value in vars(config).items() if name != "timeout_s"}
        try:
            group.agree("Buffer", agreed, timeout_s=timeout_s)
            self._backend = backends.create(group, config, device, Group.num_sms)
        except PeerTimeoutError:
            raise
        except (CupyepError, OSError):  # told to all ranks by all, so the group can be given back
            group.free()
            raise
        self._watch: Any = Watch(self._backend)  # until close(): it keeps the backend
        self.backend: str = self._backend.name

    @staticmethod
    def set_num_sms(num_sms: int | None) -> None:
        """Sets how many SMs the kernels of every Buffer may use by default; None: chosen by the model. Local."""
        Group.num_sms = None if num_sms is None else checks.integer("num_sms", num_sms, 1)

    @property
    def max_tokens_per_rank(self) -> int | None:
        """The agreed maximum, or None before the first call."""
        return self._ready("max_tokens_per_rank").capacity.max_tokens_per_rank or None

    def prepare(
        self,
        hidden: int,
        dtype: Any,
        *,
        num_topk: int = 8,
        idx_dtype: Any = np.int64,
        with_weights: bool = True,
        num_scales: int = 0,
        scale_dtype: Any = np.float32,
        layout: str = "rank",
        wire_dtype: Any = None,
        max_tokens_per_rank: int | None = None,
    ) -> None:
        """Does ahead of time what a shape's first dispatch and combine would do: sizes the arena, loads kernels.

        Args: as the arrays to come will have them; every rank must give the same. Units: elements, rows. With
            num_scales, for a dispatch of (data, scales); the combine, of another type, is then a prepare of its own.
            layout and wire_dtype as in dispatch and combine.
        Sync: collective; blocks.
        """
        backend = self._ready("prepare")
        x = np.empty((0, checks.integer("hidden", hidden, 1)), checks.dtype("dtype", dtype))
        scale_dtype, idx_dtype = checks.dtype("scale_dtype", scale_dtype), checks.dtype("idx_dtype", idx_dtype)
        scales = None
        if checks.integer("num_scales", num_scales, 0):
            scales = np.empty((0, num_scales), scale_dtype)
            checks.with_scales(x, scales)
        else:
            checks.payload("dtype", x)
        if idx_dtype not in (np.int32, np.int64):
            raise TypeError(f"idx_dtype: expected int32 or int64, got {idx_dtype}")
        checks.boolean("with_weights", with_weights)
        idx = np.empty((0, checks.integer("num_topk", num_topk, 1, abi.MAX_TOPK)), idx_dtype)
        most = 0
        if max_tokens_per_rank is not None:
            most = checks.integer("max_tokens_per_rank", max_tokens_per_rank, 1, checks.MAX_TOKENS)
        self._check_num_tokens(backend, most)
        arguments = {"hidden": hidden, "dtype": x.dtype.name, "num_topk": num_topk, "idx_dtype": idx.dtype.name}
        arguments |= {"with_weights": with_weights, "max_tokens_per_rank": max_tokens_per_rank}
        arguments |= {"num_scales": num_scales, "scale_dtype": scale_dtype.name, "layout": layout}
        by_expert = checks.one_of("layout", layout, ("rank", "expert")) == "expert"
        if wire_dtype is not None and not by_expert:
            raise ValueError(f"wire_dtype: expected None in the rank layout, got {wire_dtype!r}")
        wire = x.dtype if by_expert else None
        if wire_dtype is not None:
            wire = checks.addable("wire_dtype", wire_dtype)
        arguments["wire_dtype"] = None if wire is None else wire.name
        with self._watch:
            self._comm.agree("prepare", arguments, timeout_s=self._timeout_s)
            for weights in (None, np.empty(idx.shape, np.float32)) if with_weights else (None,):
                backend.prepare(Tokens(x, scales, idx, weights).shape(by_expert), most)
                if scales is None:
                    backend.prepare(Outputs(x, weights, wire_dtype=wire).shape(num_topk), most)

    def barrier(self) -> Any:
        """Until every rank has called it: on the host (numpy), or in the current stream's order (cuda). Collective.

        Returns: its event; on cuda `event.synchronize()` waits on the host and raises what went wrong.
        """
        backend = self._ready("barrier")
        with self._watch:
            return backend.barrier()

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised array in this rank's arena: as combine's input it is used in place. Local.

        Raises ArenaExhaustedError; prepare() or a first dispatch sizes the arena.
        """
        extents = shape if isinstance(shape, (tuple, list)) else (shape,)
        whole = tuple(checks.integer("shape", extent, 0) for extent in extents)
        return self._ready("empty").empty(whole, checks.dtype("dtype", dtype))

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

    def peer_arrays(self, array: Any) -> list[Any]:
        """Every rank's `array`, as memory that this rank may read and write, for example by tma.copy. Collective.

        Args: array: C-contiguous, in this rank's arena (a received array, or of `empty`); shapes may differ by rank.
            One without elements may lie anywhere.
        Returns: a list by rank; our own is `array` itself. They are valid until close() or until the arena grows, and
            as long as each owner keeps its array. Who may touch them when is the callers' business: see barrier().
        Raises: ValueError where it lies elsewhere. Sync: the host waits for all ranks.
        """
        backend = self._ready("peer_arrays")
        array = backend.asarray("array", array)
        where = backend.locate(array)
        with self._watch:
            return backend.peer_arrays(array, where)

    def get_comm_stream(self) -> Any:
        """The CUDA stream that operations run on (None on the numpy backend). Local."""
        return self._ready("get_comm_stream").comm_stream()

    def close(self) -> None:
        """Ends the Buffer: no more operations. Received arrays stay valid. Idempotent.

        Raises: PeerTimeoutError if a peer does not close too; MismatchError if it makes another call that meets on the
            host, which ends the Buffer on all ranks; ValueError for an id out of range in a low-latency dispatch that
            nothing else has told of. After an error nothing more is raised for it.
        Sync: collective, in the same order on all ranks where there are several Buffers, unless an error has broken the
            group.
        """
        backend, self._backend = self._backend, None
        if backend is None or os.getpid() != self._pid:  # a forked child ends nothing of its parent's
            return
        self._watch = None
        pending: BaseException | None = None
        if backend.broken is None:
            try:
                backend.check()
                backend.check_ids()
            except PeerError as error:
                pending = backend.broken = error
            except (CupyepError, ValueError) as error:  # of an operation that all ranks left alike, or a bad id
                pending = error
        if backend.broken is None:
            try:
                self._comm.barrier(operation="close", timeout_s=self._timeout_s)
            except CupyepError as error:  # somebody has not closed
                pending = backend.broken = error
            except BaseException as error:  # Ctrl-C
                pending, backend.broken = error, StateError(f"close: {type(error).__name__} was raised here")
        try:
            backend.close(collective=backend.broken is None)
        finally:
            if pending is not None:
                raise pending

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        backend = self._backend
        is_ours = backend is not None and os.getpid() == self._pid
        if error is not None and is_ours and error is not self._watch.left():
            # This rank's program failed: the peers must not wait for it until their deadline.
            self._watch.abandon(error, tell=True)
        try:
            self.close()
        except Exception:
            if error is None:  # else the block's own error goes on
                raise

    def __del__(self) -> None:
        if self._backend is not None:  # a collective close is out of the question here
            self._backend.dropped()
            warnings.warn(f"Buffer of rank {self.rank} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = "closed" if self._backend is None else "broken" if self._backend.broken else "open"
        return f"<cupyep.Buffer rank {self.rank} of {self.size}, {getattr(self, 'backend', '?')}, {state}>"

    def capture(self) -> EventOverlap:
        """An event behind what the current stream was given so far, for previous_event=. Local."""
        return self._ready("capture").capture()

    # helpers

    def _ready(self, verb: str) -> Any:
        if self._backend is None:
            raise StateError(f"{verb}: this Buffer is closed")
        if os.getpid() != self._pid:
            raise StateError(f"{verb}: this Buffer is that of process {self._pid}, which forked process {os.getpid()}")
        if error := self._backend.broken:
            raise StateError(f"{verb}: this Buffer is broken by an earlier error: {error}") from error
        return self._backend

    @staticmethod
    def _run(
        backend: Any, num_sms: int | None, previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool
    ) -> Run:
        checks.boolean("async_finish", async_finish)
        checks.boolean("allocate_on_comm_stream", allocate_on_comm_stream)
        most = backend.max_num_sms
        if num_sms is not None:
            num_sms = checks.integer("num_sms", num_sms, 1, most)
        elif Group.num_sms:
            num_sms = min(Group.num_sms, most) if most else Group.num_sms
        return Run(num_sms, None if previous_event is None else backend.event(previous_event), async_finish)

    @staticmethod
    def _check_handle(backend: Any, handle: Any) -> None:
        if not isinstance(handle, Handle):
            raise TypeError(f"handle: expected a Handle from dispatch, got {type(handle).__name__}")
        if handle.owner is not backend:
            raise StateError("handle: expected one from this Buffer's dispatch, got another Buffer's")

    def _check_num_tokens(self, backend: Any, num_tokens: int) -> None:
        most = backend.agreed_max_tokens
        if most is not None and num_tokens > most:
            raise ValueError(f"num_tokens: expected at most max_tokens_per_rank = {most}, got {num_tokens}")
