"""What a Buffer asks of a backend: the verbs on arrays that have been checked already."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cupyep import abi, checks
from cupyep.backends.low_latency import LowLatency
from cupyep.comm import Communicator
from cupyep.config import BufferConfig
from cupyep.errors import CupyepError
from cupyep.layout import RowLayout, align

BLOCKS_PER_ARENA = 3  # worst-case blocks: a dispatch output, a combine input, and one more result kept by the caller


@dataclass(frozen=True)
class Shape:
    """What a collective first use prepares: the rows of one kind of dispatch or combine, equal on all ranks."""

    operation: abi.Operation  # PUSH or PULL
    hidden: int
    dtype: Any  # NumPy dtype
    rows: RowLayout

    @property
    def signature(self) -> dict[str, int]:
        """The words that every rank must post alike, apart from operation, num_experts and handle_id."""
        flags = abi.Flag.WEIGHTS * self.rows.with_weights | abi.Flag.IDX64 * (self.rows.idx_bytes == 8)
        return {
            "dtype": checks.DTYPES[self.dtype],
            "row_bytes": self.rows.row_bytes,
            "num_topk": self.rows.num_topk,
            "flags": flags,
        }


@dataclass(frozen=True)
class Capacity:
    """What the arena is sized for, equal on all ranks; 0 tokens: not known yet."""

    max_tokens_per_rank: int
    heap_bytes: int


class Backend(ABC):
    """One rank's data movement. A call raises the errors of `Buffer`'s verbs; a Backend is not thread-safe."""

    name: str

    def __init__(self, comm: Communicator, config: BufferConfig) -> None:
        self._comm, self._config = comm, config
        self.capacity = Capacity(config.max_tokens_per_rank or 0, config.num_nvl_bytes)
        self._prepared: set[Shape] = set()
        self.broken: CupyepError | None = None  # what has ended this group for good, as far as it was raised
        self._low_latency: LowLatency | None = None

    @property
    def agreed_max_tokens(self) -> int | None:
        """The maximum that the caller has fixed, or None where a larger call may grow it."""
        return self._config.max_tokens_per_rank

    def prepare(self, shape: Shape, most_tokens: int = 0) -> None:
        """Collective where it acts: makes the shape's first use a normal use (arena space, kernels).

        Every rank comes here with equal arguments: all resize and load, or none does.
        """
        if shape in self._prepared and most_tokens <= self.capacity.max_tokens_per_rank:
            return
        max_tokens, heap = max(self.capacity.max_tokens_per_rank, align(most_tokens)), self.capacity.heap_bytes
        if not self._config.num_nvl_bytes:
            heap = max(heap, BLOCKS_PER_ARENA * shape.rows.offsets(self._comm.size * max_tokens)["num_bytes"])
        grown = Capacity(max_tokens, heap)
        if heap > self.capacity.heap_bytes:
            self._resize(grown)
        self.capacity = grown
        if shape not in self._prepared:
            self._load(shape)
            self._prepared.add(shape)

    @abstractmethod
    def _resize(self, capacity: Capacity) -> None:
        """Collective: a new arena; the old one lives on until the last array over it dies."""

    @abstractmethod
    def _load(self, shape: Shape) -> None:
        """Collective: compiles and loads what the shape needs."""

    @property
    def low_latency(self) -> LowLatency:
        """The low-latency side. StateError where the Buffer was not created for it."""
        if self._low_latency is None:
            self._low_latency = self._create_low_latency()
        return self._low_latency

    @abstractmethod
    def _create_low_latency(self) -> LowLatency:
        """Collective where its arena has a given size."""

    @abstractmethod
    def asarray(self, name: str, value: Any) -> Any:
        """`value` as an array of this backend, without a copy where possible. TypeError names the argument."""

    @abstractmethod
    def asnumpy(self, value: Any) -> Any:
        """`value` as a NumPy array (a copy from the GPU where it lies there)."""

    @abstractmethod
    def dispatch(
        self, x: Any, topk_idx: Any, topk_weights: Any, num_experts: int, *, copy: bool, num_sms: int | None
    ) -> tuple:
        """(recv_x, recv_topk_idx, recv_topk_weights, handle, event, an id out of range or None). Collective."""

    @abstractmethod
    def cached_dispatch(self, x: Any, handle: Any, *, copy: bool, num_sms: int | None) -> tuple:
        """(recv_x, event): rows only, along a routing that is known. Collective."""

    @abstractmethod
    def combine(self, x: Any, handle: Any, topk_weights: Any, *, num_sms: int | None) -> tuple:
        """(combined_x, combined_topk_weights, event). Collective."""

    @abstractmethod
    def layout(self, topk_idx: Any, num_experts: int, *, strict: bool) -> tuple:
        """(num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank, event). Local. `strict`: bad ids raise."""

    @abstractmethod
    def barrier(self) -> Any:
        """Collective: until every rank has come. Returns the event."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised array in the arena."""

    @contextmanager
    def allocator(self) -> Iterator[None]:
        """New arrays of the array library come from the arena, where it has such a hook."""
        yield

    @abstractmethod
    def record_stream(self, array: Any, stream: Any) -> None:
        """The array's block is not reused before the stream's present work is done."""

    @property
    def max_num_sms(self) -> int | None:
        """The SMs that one call may take, or None where there are none."""
        return None

    def comm_stream(self) -> Any:
        """The stream that operations run on, or None."""
        return None

    @abstractmethod
    def check(self) -> None:
        """Raises what a peer or an operation behind us has met, once all our operations are complete. Local."""

    @abstractmethod
    def abort(self) -> None:
        """Tells the peers that this rank leaves for good because its program raised. Local."""

    @abstractmethod
    def close(self, *, collective: bool) -> None:
        """Frees what this rank holds; collective unless an error has broken the group."""


class CompletedEvent:
    """The event of an operation that is complete when the call returns (the NumPy backend)."""

    def current_stream_wait(self) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""
