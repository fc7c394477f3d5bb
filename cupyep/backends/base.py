"""What a Buffer asks of a backend: the verbs on arrays that have been checked already."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from cupyep.backends.low_latency import LowLatency
from cupyep.backends.shapes import Outputs, Shape, Tokens
from cupyep.comm import Communicator
from cupyep.config import BufferConfig
from cupyep.errors import CupyepError
from cupyep.handle import EventOverlap
from cupyep.layout import align

HEAP_STEP = 1 << 21  # bytes: a heap that nobody has sized is a multiple
BLOCKS_PER_ARENA = 3  # worst-case blocks: a dispatch output, a combine input, and one more result kept by the caller


class Form(NamedTuple):
    """What the results of a dispatch are to be like, and what is to be counted on the way; see Buffer.dispatch."""

    copy: bool = False
    scales_order: str = "C"
    num_worst_tokens: int = 0  # 0: as many rows as come
    by_expert: bool = False
    expert_alignment: int = 1  # rows
    zero_gaps: bool = False
    expert_stats: Any = None
    wait_stats: Any = None

    def num_worst_rows(self, topk_shape: tuple[int, ...], num_local_experts: int) -> int:
        """The most rows by expert: every listing has one, and each group a gap."""
        num_tokens, num_topk = topk_shape
        return align(num_tokens * num_topk + num_local_experts * (self.expert_alignment - 1), self.expert_alignment)


class Run(NamedTuple):
    """When an operation runs, and on how much of the GPU; see Buffer.dispatch. previous_event is the backend's."""

    num_sms: int | None = None
    previous_event: Any = None
    async_finish: bool = False


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
        self.capacity = Capacity(config.max_tokens_per_rank or 0, config.num_nvl_bytes or HEAP_STEP)
        self._prepared: dict[Shape, int] = {}  # with the most rows of a rank that the arena was sized for
        self.broken: CupyepError | None = None  # what has ended this group for good, as far as it was raised
        self._low_latency: LowLatency | None = None

    @property
    def agreed_max_tokens(self) -> int | None:
        """The maximum that the caller has fixed, or None where a larger call may grow it."""
        return self._config.max_tokens_per_rank

    def prepare(self, shape: Shape, most_tokens: int = 0, num_worst_tokens: int = 0) -> None:
        """Collective where it acts: makes the shape's first use a normal use (arena space, kernels).

        Every rank comes here with equal arguments: all resize and load, or none does.
        """
        max_tokens, heap = self.capacity.max_tokens_per_rank, self.capacity.heap_bytes
        if most_tokens > max_tokens:
            max_tokens = most_tokens if self.agreed_max_tokens else align(most_tokens)
        num_rows = max(self._comm.size * max_tokens, num_worst_tokens)
        if num_rows <= self._prepared.get(shape, -1):
            return
        if not self._config.num_nvl_bytes:
            block = shape.rows.offsets(num_rows)["num_bytes"]
            heap = max(heap, align(BLOCKS_PER_ARENA * block, HEAP_STEP))
        grown = Capacity(max_tokens, heap)
        if heap > self.capacity.heap_bytes:
            self._resize(grown)
        self.capacity = grown
        if shape not in self._prepared:
            self._load(shape)
        self._prepared[shape] = num_rows

    def _is_prepared(self, shape: Shape, num_worst_tokens: int) -> bool:
        """Whether a dispatch with this number need not be prepared; equal on all ranks."""
        rows = self._prepared.get(shape, -1)
        return rows >= num_worst_tokens or (rows >= 0 and self._config.num_nvl_bytes > 0)

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
    def aswritable(self, name: str, value: Any) -> Any:
        """`value`, which the operation will write, as a contiguous array over the same memory."""

    @abstractmethod
    def bounds(self, array: Any) -> tuple[int, int]:
        """The addresses of an array's first byte and of the one behind its last."""

    def event(self, value: Any) -> Any:
        """`value` as an event that an operation can wait for."""
        if not isinstance(value, EventOverlap):
            raise TypeError(f"previous_event: expected an EventOverlap, got {type(value).__name__}")
        return value

    @abstractmethod
    def asnumpy(self, value: Any) -> Any:
        """`value` as a NumPy array (a copy from the GPU where it lies there)."""

    @abstractmethod
    def dispatch(self, tokens: Tokens, num_experts: int, form: Form, run: Run) -> tuple:
        """(received Tokens, handle, event, an id out of range or None). Collective."""

    @abstractmethod
    def cached_dispatch(self, tokens: Tokens, handle: Any, form: Form, run: Run) -> tuple:
        """(received Tokens, event): rows and scales only, along a routing that is known. Collective."""

    @abstractmethod
    def combine(self, outputs: Outputs, handle: Any, out: Any, run: Run) -> tuple:
        """(combined_x, which is `out` unless that is None, combined_topk_weights, event). Collective."""

    @abstractmethod
    def layout(self, topk_idx: Any, num_experts: int, *, strict: bool) -> tuple:
        """(num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank, event). Local. `strict`: bad ids raise."""

    def capture(self) -> Any:
        """An event behind what the current stream was given so far."""
        return EventOverlap()

    @abstractmethod
    def barrier(self) -> Any:
        """Collective: until every rank has come. Returns the event."""

    def dropped(self) -> None:  # noqa: B027
        """Local: nobody can use this Buffer any more, and nobody has closed it."""

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

    def locate(self, array: Any) -> tuple[int, tuple[int, ...], Any]:
        """(offset, shape, dtype) of an array in our arena. ValueError if it lies elsewhere; one without bytes may."""
        if (offset := self._offset_of(array) if array.size else 0) is None:
            got = "memory from elsewhere" if array.flags.c_contiguous else "one that is not contiguous"
            raise ValueError(f"array: expected a C-contiguous one of this Buffer's arena, got {got}")
        return offset, array.shape, array.dtype

    def peer_arrays(self, array: Any, where: tuple) -> list[Any]:
        """Every rank's located array, by rank, as this rank reaches it. Collective."""
        everyone = self._comm.allgather(where, operation="peer_arrays", timeout_s=self._config.timeout_s)
        return [array if rank == self._comm.rank else self._peer_view(rank, *it) for rank, it in enumerate(everyone)]

    @abstractmethod
    def _offset_of(self, array: Any) -> int | None:
        """Where a contiguous array lies in our arena, or None."""

    @abstractmethod
    def _peer_view(self, rank: int, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array over another rank's arena."""

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

    def check_ids(self) -> None:
        """Raises ValueError for an id out of range in a complete call that nobody has been told of. Local."""
        if self._low_latency:
            self._low_latency.check_ids()

    @abstractmethod
    def abort(self) -> None:
        """Tells the peers that this rank leaves for good because its program raised. Local."""

    @abstractmethod
    def close(self, *, collective: bool) -> None:
        """Frees what this rank holds; collective unless an error has broken the group."""
