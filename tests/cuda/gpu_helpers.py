"""What the GPU tests share: tokens that say who they are, a kernel that takes its time, ranks in other processes.

The oracle of tests/reference.py is right but slow. Here every row is made by arithmetic from its token's number; what
must come back is made the same way, on the GPU, and compared there without stopping the stream.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from multirank import launch

import cupyep

try:
    import cupy
except ImportError as error:
    pytest.skip(f"no CuPy: {error}", allow_module_level=True)

TIMEOUT_S = 20.0  # of Buffers whose ranks all come
CULPRIT = 1  # the rank that misbehaves

BUSY = r"""
extern "C" __global__ void busy(unsigned long long ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < ns);
}
"""


@functools.cache
def _busy_kernel() -> Any:
    return cupy.RawKernel(BUSY, "busy")


def busy(seconds: float) -> None:
    """Holds the current stream up, with one thread of one SM. The first call loads the kernel: make it early."""
    _busy_kernel()((1,), (1,), (np.uint64(int(seconds * 1e9)),))


@dataclass(frozen=True)
class Traffic:
    """One dispatch of every rank and what must come of it. x and weights of a token are made from its number."""

    num_ranks: int
    num_tokens: int = 50
    hidden: int = 64
    dtype: str = "float32"
    num_topk: int = 2
    num_local_experts: int = 4
    missing: float = 0.1  # the share of ids that are -1
    seed: int = 0

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.num_local_experts

    def numbers(self, rank: int) -> np.ndarray:
        """The tokens' numbers: no two alike in a job, and other ones for another seed."""
        return np.arange(self.num_tokens) + (self.seed * self.num_ranks + rank) * self.num_tokens + 1

    def topk_idx(self, rank: int) -> np.ndarray:
        return _topk_idx(self, rank)

    def weights(self, rank: int) -> np.ndarray:
        """float32, exact, never 0."""
        return (self.numbers(rank)[:, None] * self.num_topk + np.arange(self.num_topk)).astype(np.float32)

    def goes(self, rank: int) -> np.ndarray:
        """[num_tokens, num_ranks] bool: which ranks get which token of `rank`."""
        owners = self.topk_idx(rank) // self.num_local_experts  # of -1: -1
        return (owners[:, :, None] == np.arange(self.num_ranks)).any(axis=1)

    def inputs(self, rank: int) -> tuple[Any, Any, Any]:
        """x, topk_idx and topk_weights of `rank`, on the GPU."""
        x = rows(self.numbers(rank), np.ones(self.num_tokens), self.hidden, self.dtype)
        return x, cupy.asarray(self.topk_idx(rank)), cupy.asarray(self.weights(rank))

    def received(self, rank: int) -> tuple[Any, Any, Any]:
        """What dispatch must give to `rank`: recv_x, recv_topk_idx, recv_topk_weights."""
        numbers, idxs, weightss = [], [], []
        for source in range(self.num_ranks):
            comes = self.goes(source)[:, rank]
            local = self.topk_idx(source)[comes] - rank * self.num_local_experts
            is_here = (local >= 0) & (local < self.num_local_experts)
            numbers.append(self.numbers(source)[comes])
            idxs.append(np.where(is_here, local, -1))
            weightss.append(np.where(is_here, self.weights(source)[comes], np.float32(0)))
        everyone = np.concatenate(numbers)
        x = rows(everyone, np.ones(len(everyone)), self.hidden, self.dtype)
        return x, cupy.asarray(np.concatenate(idxs)), cupy.asarray(np.concatenate(weightss))

    def combined(self, rank: int, factor: int = 1) -> tuple[Any, Any]:
        """What combine must give if the experts multiply rows by `factor`, and leave the weights: x and weights."""
        x = rows(self.numbers(rank), self.goes(rank).sum(axis=1) * factor, self.hidden, self.dtype)
        return x, cupy.asarray(np.where(self.topk_idx(rank) >= 0, self.weights(rank), np.float32(0)))


@functools.lru_cache(maxsize=32)
def _topk_idx(traffic: Traffic, rank: int) -> np.ndarray:
    rng = np.random.default_rng((traffic.seed, rank))
    ids = rng.random((traffic.num_tokens, traffic.num_experts)).argsort(axis=1)[:, : traffic.num_topk]
    ids[rng.random(ids.shape) < traffic.missing] = -1
    ids.flags.writeable = False
    return ids


def rows(numbers: np.ndarray, factors: np.ndarray, hidden: int, dtype: str) -> Any:
    """[len(numbers), hidden]: six bits of the number, plus the column, mod 64, times the factor.

    Exact in every type while factors are at most 4: then all values are integers below 256.
    """
    target = np.dtype(getattr(ml_dtypes, dtype, dtype))
    result = cupy.empty((len(numbers), hidden), target)
    column = cupy.arange(hidden, dtype=np.int32)
    for start in range(0, len(numbers), 8192):  # few at a time: what is in between takes several times the result
        part = slice(start, start + 8192)
        number, factor = (cupy.asarray(of[part].astype(np.int32))[:, None] for of in (numbers, factors))
        values = ((((number >> column % 4 * 6) + column) & 63) * factor).astype(np.float32)
        if dtype == "bfloat16":  # its bits are the upper half
            result[part].view(np.uint16)[...] = values.view(np.uint32) >> 16
        else:
            result[part] = values
    return result


def differ(got: Any, expected: Any) -> Any:
    """Whether any bit differs, as a boolean on the GPU. Type and shape must agree."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (got.dtype, got.shape, expected.shape)
    bits = np.dtype(f"u{got.itemsize}")
    return (got.view(bits) != expected.view(bits)).any()


def assert_same(names: str, got: tuple, expected: tuple) -> None:
    """Pairs of arrays agree in every bit; `names` are theirs."""
    for name, one, other in zip(names.split(), got, expected, strict=True):
        assert not differ(one, other), name


def open_buffer(comm: Any, *traffics: Traffic, **options: Any) -> cupyep.Buffer:
    """A Buffer of the CUDA backend with room for every one of `traffics`."""
    most = max(traffic.num_tokens for traffic in traffics)
    return cupyep.Buffer(comm, backend="cuda", **{"max_tokens_per_rank": most, "timeout_s": TIMEOUT_S, **options})


def check(buffer: cupyep.Buffer, traffic: Traffic, **options: Any) -> cupyep.DispatchResult:
    """One dispatch and one combine of its rows, and everything that comes back. Returns the dispatch's result."""
    rank = buffer.rank
    result = buffer.dispatch(*traffic.inputs(rank), num_experts=traffic.num_experts, **options)
    assert_same("recv_x recv_topk_idx recv_topk_weights", result[:3], traffic.received(rank))
    combined = buffer.combine(result.recv_x, result.handle, result.recv_topk_weights)
    assert_same("combined_x combined_topk_weights", combined[:2], traffic.combined(rank))
    return result


def check_alone(comm: Any, *traffics: Traffic) -> None:
    """All `traffics` in a Buffer of their own. Once at a job's start, it also loads every kernel that the tests use."""
    busy(0)
    with open_buffer(comm, *traffics) as buffer:
        for traffic in traffics:
            result = check(buffer, traffic)
            buffer.dispatch(traffic.inputs(buffer.rank)[0], handle=result.handle).event.synchronize()
            buffer.barrier().synchronize()


def verbs(buffer: cupyep.Buffer, traffic: Traffic) -> dict[str, Callable[[], Any]]:
    """The collective calls by name, each of which returns its event; all have been used once."""
    inputs, handle = traffic.inputs(buffer.rank), check(buffer, traffic).handle
    y = traffic.received(buffer.rank)[0]
    calls = {
        "dispatch": lambda: buffer.dispatch(*inputs, num_experts=traffic.num_experts).event,
        "combine": lambda: buffer.combine(y, handle).event,
        "barrier": buffer.barrier,
    }
    for call in calls.values():
        call().synchronize()
    return calls


def settled(call: Callable[[], Any]) -> tuple[Exception | None, float]:
    """As outcome, of one of `verbs` and of all that comes of it: the host waits for its end."""
    return outcome(lambda: call().synchronize())


def outcome(call: Callable[..., Any], *args: Any) -> tuple[Exception | None, float]:
    """(what `call(*args)` raised or None, seconds until then)."""
    start = time.monotonic()
    try:
        call(*args)
    except Exception as error:
        return error.with_traceback(None), time.monotonic() - start  # its frames would keep arrays alive
    return None, time.monotonic() - start


def make_room(num_bytes: int = 64 << 20) -> None:
    """Has CuPy's pools keep so much for the current stream, and pinned memory for small arrays that come from the host.

    What comes later is then cut from it: where ranks are threads, an allocation of the driver may wait for a kernel
    that waits for this thread, and meanwhile holds up all threads' launches.
    """
    cupy.empty(num_bytes, np.uint8)
    pinned = [cupy.cuda.alloc_pinned_memory(512 * units) for units in range(1, 9) for _ in range(32)]
    del pinned
    cupy.cuda.get_current_stream().synchronize()


def free_bytes() -> int:
    """Bytes free on the GPU, once all garbage has been given back."""
    gc.collect()
    cupy.cuda.Device().synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
    return cupy.cuda.runtime.memGetInfo()[0]


def is_in_arena(buffer: cupyep.Buffer, array: Any) -> bool:
    """Whether combine could find `array` in the Buffer's arena."""
    try:
        buffer.record_stream(array, cupy.cuda.get_current_stream())
    except ValueError:
        return False
    return True


def fill(buffer: cupyep.Buffer) -> list[Any]:
    """Arrays that leave nothing free in the arena."""
    kept, size = [], 1 << 30
    while size >= 128:
        try:
            kept.append(buffer.empty((size,), np.uint8))
        except cupyep.ArenaExhaustedError:
            size //= 2
    return kept


def child(function: Callable[..., Any], *args: Any, timeout_s: float = 60, is_fresh: bool = False) -> Any:
    """`function(*args)` in another process, which is ended when the time is over, or is_fresh, a new one."""
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # streams that share one wait for each other
    if is_fresh:
        launch.close_all()  # each process that waits holds as many of the GPU's channels
    return launch.mpi(1, _without_comm, function, args, timeout_s=timeout_s, is_fresh=is_fresh, env=env)[0]


def _without_comm(_: Any, function: Callable[..., Any], args: tuple) -> Any:
    return function(*args)


def threads(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
    """`function(comm, *args)` in threads of one other process."""
    return child(launch.threads, num_ranks, function, *args, timeout_s=timeout_s)


def mpi(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60, **options: Any) -> list[Any]:
    """`function(comm, *args)` in processes of an MPI job."""
    connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}  # CUDA's default; four ranks with 32 are too many for MPS
    env = connections | options.pop("env", {})
    return launch.mpi(num_ranks, function, *args, timeout_s=timeout_s, env=env, **options)
