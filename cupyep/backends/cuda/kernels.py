"""The loaded kernels of one Buffer, and how they are launched."""

from __future__ import annotations

import ctypes
from typing import Any

import cupy
from cupy.cuda import driver

from cupyep import abi
from cupyep.backends.cuda import jit, plan
from cupyep.backends.low_latency_shape import LowLatencyShape
from cupyep.backends.shapes import Shape
from cupyep.errors import StateError
from cupyep.structs import Struct


class Call:
    """The parameter struct of a kernel, filled anew for each launch: the driver copies it then."""

    def __init__(self, params: Struct, sync: dict[str, int]) -> None:
        self._record = params.record()
        if sync:
            self.within("sync", **sync)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self._record))
        self.arguments = ctypes.addressof(self._pointer)  # what the driver wants: an array of pointers to arguments

    def set(self, **fields: int | tuple[int, ...]) -> None:
        """Sets fields of the struct itself."""
        record = self._record
        for name, value in fields.items():
            setattr(record, name, value)

    def within(self, part: str, **fields: int) -> None:
        """Sets fields of an inner struct."""
        inner = getattr(self._record, part)
        for name, value in fields.items():
            setattr(inner, name, value)


class Kernel:
    """A kernel with its threads and shared memory; one by-value struct is its only argument."""

    def __init__(self, function: cupy.RawKernel, num_threads: int, smem_bytes: int) -> None:
        self._function = function  # keeps the module
        self._pointer, self._num_threads, self._smem_bytes = function.kernel.ptr, num_threads, smem_bytes

    def launch(self, num_ctas: int, call: Call, stream: Any, smem_bytes: int | None = None) -> None:
        """Straight to the driver: RawKernel.__call__ costs several times as much for a struct."""
        smem = self._smem_bytes if smem_bytes is None else smem_bytes
        driver.launchKernel(self._pointer, num_ctas, 1, 1, self._num_threads, 1, 1, smem, stream.ptr, call.arguments, 0)


class Kernels:
    """Compiles (once per node, in the disk cache) and loads. Loading beside a spinning kernel hangs, so it happens
    in collective steps only: `general` at creation, `of(shape)` at a shape's first use."""

    def __init__(self, num_ranks: int, compute_capability: int, smem_limit: int, mover: str) -> None:
        self._num_ranks, self._cc, self._smem_limit, self._mover = num_ranks, compute_capability, smem_limit, mover
        self._by_shape: dict[Any, Kernel] = {}
        general = jit.load(jit.build(self._request("barrier")))
        self.barrier = Kernel(jit.function(general, "barrier"), 32, 0)
        self.abort_peers = Kernel(jit.function(general, "abort_peers"), 1, 0)
        count = jit.load(jit.build(self._request("count")))
        self.count = Kernel(jit.function(count, "count", 4 * (abi.MAX_EXPERTS + 1)), 1024, 0)

    def _request(self, name: str, constants: dict[str, int] | None = None) -> jit.Request:
        return jit.Request(name, f"sm_{self._cc}", plan.prelude(self._num_ranks, constants))

    @staticmethod
    def _key(shape: Shape) -> tuple[Any, ...]:
        dtype = shape.dtype if shape.operation == abi.Operation.PULL else None
        return shape.operation, shape.rows.row_bytes, shape.rows.scale_bytes, dtype

    def load(self, shape: Shape) -> None:
        """Makes `of(shape)` ready. Push does not care for the element type, and neither for ids and weights."""
        if shape.by_expert:
            self._load_local(shape)
        if self._key(shape) in self._by_shape:
            return
        mover = plan.mover_of(shape.rows.row_bytes, self._mover, self._cc)
        name, make = ("push", plan.push_plan) if shape.operation == abi.Operation.PUSH else ("pull", plan.pull_plan)
        chosen = make(shape, self._num_ranks, mover, self._smem_limit)
        self._by_shape[self._key(shape)] = self._built(name, name, chosen)

    def _built(self, name: str, file: str, chosen: plan.Plan) -> Kernel:
        module = jit.load(jit.build(self._request(file, chosen.constants)))
        return Kernel(jit.function(module, name, chosen.smem_bytes), chosen.num_threads, chosen.smem_bytes)

    def _load_local(self, shape: Shape) -> None:
        """The kernels of the expert layout: `local(name, ...)` of what a shape needs."""
        if shape.operation == abi.Operation.PULL:
            key = "reduce", shape.hidden, shape.local_dtype, shape.dtype
            self._add_local(key, plan.reduce_plan(*key[1:]))
            return
        for name, chosen in plan.arrange_plans().items():
            self._add_local((name,), chosen, "arrange")
        for row_bytes in filter(None, (shape.rows.row_bytes, shape.rows.scale_bytes)):
            self._add_local(("expand", row_bytes), plan.expand_plan(row_bytes))

    def _add_local(self, key: Any, chosen: plan.Plan, file: str | None = None) -> None:
        if key not in self._by_shape:
            self._by_shape[key] = self._built(key[0], file or key[0], chosen)

    def local(self, *key: Any) -> Kernel:
        """A kernel of the expert layout that was loaded."""
        return self._by_shape[key]

    def of(self, shape: Shape) -> Kernel:
        """The kernel of a shape that was loaded."""
        return self._by_shape[self._key(shape)]

    def load_low_latency(self, operation: abi.Operation, shape: LowLatencyShape) -> None:
        """Makes `low_latency(operation, shape)` ready. StateError if it takes too much: the Buffer is as it was."""
        chosen, name = plan.low_latency_plan(operation, shape, self._smem_limit), operation.verb
        most = self._smem_limit - plan.low_latency_static_bytes(self._num_ranks)
        if chosen.smem_bytes > most:
            expected = f"tokens, top-k and experts that take at most {most:,} bytes of shared memory"
            raise StateError(f"num_max_dispatch_tokens_per_rank: expected {expected} here, got {chosen.smem_bytes:,}")
        module = jit.load(jit.build(self._request(name, chosen.constants)))
        function = jit.function(module, name, chosen.smem_bytes)
        self._by_shape[operation, shape] = Kernel(function, chosen.num_threads, chosen.smem_bytes)

    def low_latency(self, operation: abi.Operation, shape: LowLatencyShape) -> Kernel:
        """The kernel of a shape that was loaded."""
        return self._by_shape[operation, shape]
