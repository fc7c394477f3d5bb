"""The whole CUDA backend without a GPU: a Buffer whose memory, streams and kernels are simulated.

CuPy's arrays are real, over addresses of the simulated space; what would reach the driver is replaced: allocation,
copies, streams, events, launches. Ranks are threads. Work is queued; where a rank waits on the host, all ranks meet,
and one of them runs everybody's queue in the interpreter. Streams are one queue per rank, so this shows what the host
side does with arrays, blocks and parameters, and nothing about the order of streams.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cupy
import numpy as np
from cupy.cuda import runtime

from cupyep import backends, layout, model
from cupyep.backends.cuda import arena, backend, devices, kernels, plan, session
from ptxsim.harness import ARCH, Pinned, small
from ptxsim.memory import Space
from ptxsim.scheduler import Scheduler
from ptxsim.sources import program

HEAP_BYTES = 1 << 16
_numbers = itertools.count(100)


class Machine:
    """One GPU shared by `num_ranks` threads."""

    def __init__(self, num_ranks: int, mover: str, seed: int) -> None:
        self.mover, self.num_ranks = mover, num_ranks
        self.space = Space(num_ranks, num_ranks << 20)
        self.scheduler = Scheduler(self.space, seed, int(1e9))
        self.queues: dict[int, list[Callable[[], None]]] = {rank: [] for rank in range(num_ranks)}
        self.meeting = threading.Barrier(num_ranks, self._run)
        self.here = threading.local()  # rank, stream, pinned memory
        self.lock = threading.Lock()

    def _run(self) -> None:
        queues, self.queues = self.queues, {rank: [] for rank in range(self.num_ranks)}
        self.scheduler.run(queues)

    def wait(self, *_: object) -> None:
        """On the host of this thread's rank: until everything that any rank was given is done."""
        self.meeting.wait(120)

    def queue(self, step: Callable[[], None]) -> None:
        self.queues[self.here.rank].append(step)

    def allocate(self, num_bytes: int) -> int:
        with self.lock:
            return self.space.allocate(max(16, int(num_bytes)))

    def array(self, content: Any, dtype: Any = None) -> cupy.ndarray:
        """A device array of this content, at once."""
        content = np.ascontiguousarray(content, dtype)
        address = self.allocate(content.nbytes)
        self.space.write(self.here.rank, address, content)
        return _over(address, content.shape, content.dtype)

    def read(self, array: cupy.ndarray) -> np.ndarray:
        """A host copy, once all is done."""
        raw = self.space.read(self.here.rank, array.data.ptr, (array.size,), array.dtype)
        return raw.reshape(array.shape[::-1]).T if array.flags.f_contiguous else raw.reshape(array.shape)

    def copy(self, to: cupy.ndarray, of: cupy.ndarray) -> None:
        rank = self.here.rank

        def step() -> None:
            value = self.space.read(rank, of.data.ptr, of.shape, of.dtype)
            self.space.write(rank, to.data.ptr, value if to.flags.c_contiguous else value.T)

        self.queue(step)

    def memset(self, address: int, value: int, num_bytes: int, _: int) -> None:
        rank = self.here.rank
        self.queue(lambda: self.space.write(rank, address, np.full(num_bytes, value, np.uint8)))

    def memcpy(self, to: int, of: int, num_bytes: int, kind: int) -> None:
        if kind == runtime.memcpyHostToDevice:
            self.space.write(self.here.rank, to, np.frombuffer(ctypes.string_at(of, num_bytes), np.uint8))
        else:
            ctypes.memmove(to, self.space.read(self.here.rank, of, (num_bytes,), np.uint8).tobytes(), num_bytes)

    def pinned(self, num_bytes: int) -> Pinned:
        self.here.pinned = Pinned(num_bytes)
        self.here.pinned.ptr = self.allocate(num_bytes)
        return self.here.pinned

    def kernel(self, name: str, file: str, chosen: plan.Plan, num_ranks: int) -> Any:
        def launch(num_ctas: int, call: Any, stream: Any, smem_bytes: int | None = None) -> None:
            rank, pinned = self.here.rank, self.here.pinned
            code = program(name, file, ARCH[self.mover], num_ranks, chosen.constants, ())
            params = ctypes.string_at(ctypes.c_uint64.from_address(call.arguments).value, code.param_bytes)
            smem = chosen.smem_bytes if smem_bytes is None else smem_bytes

            def fetch() -> None:
                pinned[:] = self.space.read(rank, pinned.ptr, (len(pinned),), np.uint8).tobytes()

            def step() -> None:
                self.space.write(rank, pinned.ptr, np.frombuffer(pinned, np.uint8))
                self.scheduler.launch(rank, code, min(num_ctas, 2), chosen.num_threads, smem, params, fetch)

            self.queue(step)

        return SimpleNamespace(launch=launch)


class SimulatedKernels(kernels.Kernels):
    """Kernels that are interpreted, with plans as small as they can be."""

    def __init__(self, machine: Machine, num_ranks: int) -> None:
        self._machine, self._num_ranks, self._by_shape = machine, num_ranks, {}
        self._cc, self._smem_limit, self._mover = int(ARCH[machine.mover][3:]), 227 * 1024, "auto"
        make = functools.partial(machine.kernel, num_ranks=num_ranks)
        self.count = make("count", "count", plan.Plan({}, 1024, 0))
        self.barrier = make("barrier", "barrier", plan.Plan({}, 32, 0))
        self.abort_peers = make("abort_peers", "barrier", plan.Plan({}, 1, 0))

    def _built(self, name: str, file: str, chosen: plan.Plan) -> Any:
        if name in ("push", "pull"):
            tma = chosen.constants["kMover"] == plan.MOVERS["tma"]
            chosen = small(chosen, "tma" if tma else "vector", 1)
        return self._machine.kernel(name, file, chosen, self._num_ranks)


class Stream:
    """A name for a stream: all work of a rank is one queue."""

    machine: Machine
    captures = False

    def is_capturing(self) -> bool:
        return self.captures

    def __init__(self, *_: object, **__: object) -> None:
        self.ptr = next(_numbers)

    def __enter__(self) -> Stream:
        self._outer, self.machine.here.stream = self.machine.here.stream, self
        return self

    def __exit__(self, *_: object) -> None:
        self.machine.here.stream = self._outer

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        if any(self.machine.queues.values()):
            self.machine.wait()


class Event:
    """Complete for whoever asks; `synchronize` makes it so."""

    machine: Machine
    done = True

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        self.machine.wait()


def _over(address: int, shape: tuple[int, ...], dtype: Any) -> cupy.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = cupy.cuda.UnownedMemory(address, max(1, size), None, 0)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def _malloc(machine: Machine, num_bytes: int) -> Any:
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(machine.allocate(num_bytes), num_bytes, None, 0), 0)


@contextmanager
def simulated(num_ranks: int, mover: str = "tma", seed: int = 0) -> Iterator[Machine]:
    """Within it, Buffers with backend="cuda" of threads that call `enter_rank` first run on the returned machine."""
    machine = Machine(num_ranks, mover, seed)
    bound: dict[str, Any] = {"machine": machine}
    stream, event = type("Stream", (Stream,), bound), type("Event", (Event,), bound)
    device = mock.MagicMock()
    device.return_value.attributes = {"MultiProcessorCount": 2}
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (cupy, {
            "array": machine.array, "copyto": machine.copy,
            "get_default_memory_pool": lambda: SimpleNamespace(malloc=functools.partial(_malloc, machine)),
        }),
        (cupy.cuda, {
            "Device": device, "Stream": stream, "Event": event, "alloc_pinned_memory": machine.pinned,
            "get_current_stream": lambda: machine.here.stream,
        }),
        (runtime, {
            "malloc": machine.allocate, "free": lambda address: None, "memcpy": machine.memcpy,
            "memsetAsync": machine.memset, "deviceSynchronize": lambda: None,
        }),
        (arena, {"align": lambda num_bytes, alignment=128: layout.align(num_bytes)}),
        (devices, {
            "choose": lambda *_: devices.Claim(0, 2, 1, frozenset()), "release": lambda *_: None,
            "machine": lambda device: model.Machine(),
            "load": lambda device, num_ranks: SimulatedKernels(machine, num_ranks),
        }),
        (backends, {"cuda_usable": lambda: True, "rank_context": None}),
        (backend, dict.fromkeys(("asarray", "aswritable"), lambda name, value: value)),
        (session.Session, {"_host_wait": machine.wait}),
    ]  # fmt: skip
    with ExitStack() as stack:
        for target, values in replaced:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(target, name, value))
        yield machine


def enter_rank(machine: Machine, rank: int) -> None:
    """Makes the calling thread a rank of `machine`."""
    machine.here.rank, machine.here.stream = rank, cupy.cuda.Stream()
