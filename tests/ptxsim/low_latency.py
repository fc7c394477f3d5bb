"""Ranks of a low-latency job in one simulated address space: dispatch and combine as the CUDA backend launches them.

The backend's own LowLatencyLauncher fills the parameters and reads the host records; memory and the launch are
replaced. A job is one of tests/multirank/low_latency.py, whose checks are used as well.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cupy
import numpy as np
from multirank import low_latency
from multirank.checks import assert_bits
from multirank.low_latency import Job

from cupyep import abi, layout, low_latency_abi
from cupyep.abi import Phase
from cupyep.backends.cuda import plan
from cupyep.backends.cuda.low_latency import LowLatencyLauncher
from cupyep.backends.low_latency import LowLatencyCall
from cupyep.backends.low_latency_shape import (
    CHANNELS,
    COMBINE,
    DISPATCH,
    NUM_REGIONS,
    LowLatencyShape,
    offsets,
    size_hint,
)
from cupyep.errors import CupyepError, PeerTimeoutError
from ptxsim.harness import ARCH, TIMEOUT_S, Pinned
from ptxsim.memory import POISON, Space
from ptxsim.scheduler import Scheduler
from ptxsim.sources import Patch, program

NUM_WARPS = 2


@dataclass(frozen=True)
class Run:
    """A job, again and again in one slot or in both; tma: sm_90, vector: sm_80."""

    job: Job
    mover: str = "tma"
    num_ctas: int = 2
    rounds: int = 1
    slots: int = 1
    smem_bytes: int = 8 << 10  # of an SM so small that rings have two slots
    num_vecs: int = 1  # of a lane in a share
    overlap: bool = False  # the dispatches of two slots are open at once
    dispatches_only: bool = False  # nothing but done words keeps a rank from running ahead
    absent: tuple[int, str] | None = None  # a rank, and the verb at which it is missing
    masks_on_timeout: bool = False
    late: tuple[int, int] | None = None  # a masked rank, and the round of the others in which it begins its first one
    tardy: int | None = None  # a rank that comes about when its peers' deadline passes: they mask it or they do not
    patch: Patch = ()


class Array:
    """A device array as far as the launcher cares. An empty one is at 0, as CuPy's."""

    def __init__(self, rank: Rank, shape: tuple[int, ...], dtype: Any, content: np.ndarray | None = None) -> None:
        self.shape, self.dtype, self.rank = shape, np.dtype(dtype), rank
        self.itemsize, self.nbytes = self.dtype.itemsize, int(np.prod(shape)) * self.dtype.itemsize
        self.data = SimpleNamespace(ptr=rank.space.allocate(self.nbytes) if self.nbytes else 0)
        if content is not None and self.nbytes:
            rank.space.write(rank.rank, self.data.ptr, content)

    def get(self) -> np.ndarray:
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        return self.rank.space.read(self.rank.rank, self.data.ptr, self.shape, self.dtype)

    def poison(self) -> None:
        if self.nbytes:
            self.rank.space.write(self.rank.rank, self.data.ptr, np.full(self.nbytes, POISON, np.uint8))


class Rank:
    """One rank's arena, results, and launcher."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.space = group, rank, group.space
        job, size = group.run.job, group.run.job.case.num_ranks
        self.shape = group.shape
        self.combine_shape = replace(self.shape, fp8=False, round_scale=False, ue8m0=False)
        control = layout.ControlLayout(size)
        region_bytes = size_hint(self.combine_shape) // NUM_REGIONS
        self.arena = self.space.allocate(control.num_bytes + NUM_REGIONS * region_bytes)
        self.space.write(rank, self.arena, control.initial())
        self.peers = Array(self, (size,), np.uint64)
        self.masks = Array(self, (size,), np.int32, np.zeros(size, np.int32))
        masked = [peer for one, peer in job.masked if one == rank]
        if masked:
            flags = np.zeros(size, np.int32)
            flags[masked] = 1
            self.space.write(rank, self.masks.data.ptr, flags)
        fates = Array(
            self, (NUM_REGIONS, size), np.uint64, np.full((NUM_REGIONS, size), layout.INITIAL_EPOCH << 32, np.uint64)
        )
        self.pinned = Pinned(layout.HostLayout(size).num_bytes)
        self.pinned.ptr = self.space.allocate(len(self.pinned))
        kernels = SimpleNamespace(low_latency=self.kernel)
        arena = SimpleNamespace(peers=self.peers, address=self.arena)
        with mock.patch.object(cupy.cuda, "alloc_pinned_memory", lambda num_bytes: self.pinned):
            self.launcher = LowLatencyLauncher(
                arena, kernels, SimpleNamespace(rank=rank, size=size), region_bytes, self.masks, fates
            )
        self.launcher.timeout_s = TIMEOUT_S
        self.error, self.turn = None, 0
        self.results = {
            (operation, slot): {
                name: Array(self, extents, dtype)
                for name, (extents, dtype) in self.shape_of(operation).results(operation).items()
            }
            for operation in CHANNELS
            for slot in range(group.run.slots)
        }
        fields = low_latency_abi.TABLES.fields
        self.tables = [{name: self.results[DISPATCH, i][name] for name in fields} for i in range(group.run.slots)]
        self.num_tokens = len(job.inputs(rank)[0])
        names = ("x", "topk_idx", "topk_weights", "y")
        self.inputs = [
            {
                name: Array(self, a.shape, a.dtype, a)
                for name, a in zip(names, (*each.inputs(rank), each.outputs(rank)), strict=True)
            }
            for each in group.jobs
        ]
        self.total = np.zeros(self.shape.num_local_experts, np.int32)  # of recv_count so far
        self.stats = Array(self, self.total.shape, np.int32, self.total)

    def shape_of(self, operation: abi.Operation) -> LowLatencyShape:
        return self.shape if operation == DISPATCH else self.combine_shape

    def kernel(self, operation: abi.Operation, shape: LowLatencyShape) -> Any:
        run = self.group.run
        chosen = plan.low_latency_plan(operation, shape, run.smem_bytes, num_warps=NUM_WARPS, num_vecs=run.num_vecs)

        def launch(num_ctas: int, call: Any, stream: Any) -> None:
            name, constants = operation.verb, chosen.constants
            code = program(name, name, ARCH[run.mover], shape.num_ranks, constants, run.patch)
            struct = ctypes.c_uint64.from_address(call.arguments).value
            self.space.write(self.rank, self.pinned.ptr, np.frombuffer(self.pinned, np.uint8))
            parameters = ctypes.string_at(struct, code.param_bytes)
            self.group.scheduler.launch(
                self.rank, code, num_ctas, chosen.num_threads, chosen.smem_bytes, parameters, self.fetch_pinned
            )

        return SimpleNamespace(launch=launch)

    def fetch_pinned(self) -> None:
        self.pinned[:] = self.space.read(self.rank, self.pinned.ptr, (len(self.pinned),), np.uint8).tobytes()

    # --- the stream ---------------------------------------------------------------------------------------------------

    def steps(self) -> list[Callable[[], None]]:
        run, steps, part = self.group.run, [], functools.partial
        halves = [Phase.SEND, Phase.RECEIVE] if run.job.split else [Phase.SEND | Phase.RECEIVE]
        for turn in range(run.rounds):
            slots = range(run.slots)
            if run.overlap:  # all send, then all receive
                steps += [
                    ("dispatch", part(self.launch, DISPATCH, slot, half, turn)) for half in halves for slot in slots
                ]
            for slot in slots:
                if not run.overlap:
                    steps += [("dispatch", part(self.launch, DISPATCH, slot, half, turn)) for half in halves]
                steps += [("dispatch", part(self.check_dispatch, slot, turn))]
                if run.dispatches_only:
                    continue
                steps += [("combine", part(self.launch, COMBINE, slot, half, turn)) for half in halves]
                steps += [("combine", part(self.check_combine, slot, turn))]
        if (run.late and run.late[0] == self.rank) or run.tardy == self.rank:  # what it gets is undefined
            waits = [("", self.wait)] if run.late else []
            steps = [*waits, *(step for step in steps if step[1].func == self.launch), ("", self.launcher.check)]
        if run.absent and run.absent[0] == self.rank:
            names = [name for name, _ in steps]
            steps = steps[: names.index(run.absent[1])]
        return [part(self.attempt, step) for _, step in steps] if run.absent else [step for _, step in steps]

    def wait(self) -> None:
        """Until all others are in the round that a late rank begins in."""
        assert self.group.run.late
        if any(rank.turn < self.group.run.late[1] for rank in self.group.ranks if rank is not self):
            self.group.scheduler.streams[self.rank].insert(0, self.wait)

    def attempt(self, step: Callable[[], None]) -> None:
        """Where ranks may fail: keeps the first error, and does no more after it."""
        if self.error is None:
            try:
                step()
            except CupyepError as error:
                self.error = error

    def launch(self, operation: abi.Operation, slot: int, phases: int, turn: int) -> None:
        job, given, self.turn = self.group.run.job, self.inputs[turn], turn
        if operation == DISPATCH:
            inputs = {
                "x": given["x"],
                "topk_idx": given["topk_idx"],
                "topk_weights": given["topk_weights"] if job.travel else None,
                "stats": self.stats,
            }
        else:
            inputs = {"x": given["y"], "topk_weights": None if job.travel else given["topk_weights"]}
        call = LowLatencyCall(
            operation,
            slot,
            self.shape_of(operation),
            self.num_tokens,
            inputs["topk_weights"] is not None,
            inputs,
            self.results[operation, slot],
            self.tables[slot],
            turn,  # in place of a slot, so that each turn has another signature
            None,
        )
        self.launcher.launch(call, int(phases), self.group.run.masks_on_timeout, self.group.run.num_ctas, None)

    def job(self, turn: int) -> Job:
        """What was to be done, with whom this rank has masked meanwhile."""
        job = self.group.jobs[turn]
        masked = tuple((self.rank, int(peer)) for peer in np.flatnonzero(self.masks.get()))
        return job if self.group.run.tardy is None else replace(job, masked=masked)

    def check_dispatch(self, slot: int, turn: int) -> None:
        """Against the oracle; rows behind the last one keep their poison."""
        self.launcher.check()
        job, results = self.job(turn), self.results[DISPATCH, slot]
        recv_x = results["recv_x"].get()
        given = (recv_x, results["recv_scales"].get().swapaxes(1, 2)) if job.fp8 else recv_x
        handle = SimpleNamespace(src_info=results["src_info"].get(), layout_range=results["layout_range"].get())
        counts = results["recv_count"].get()
        low_latency.check_dispatch(SimpleNamespace(recv_x=given, recv_count=counts, handle=handle), job, self.rank)  # type: ignore[arg-type]
        for expert, count in enumerate(counts.tolist()):
            assert (recv_x[expert, count:].view(np.uint8) == POISON).all(), "rows written behind the last one"
        self.total += counts
        if not self.group.run.overlap:  # else more than this one may have been added
            assert_bits("stats", self.stats.get(), self.total)
        for name in ("recv_x", "recv_scales", "recv_count", "src_info", "layout_range"):
            results[name].poison()

    def check_combine(self, slot: int, turn: int) -> None:
        """Against the oracle; the slot is used again at once."""
        self.launcher.check()
        out = self.results[COMBINE, slot]["out"].get()
        expected = low_latency.combined(self.job(turn))[self.rank]
        assert_bits(f"rank {self.rank} combined", out[: self.num_tokens], expected)
        assert (out[self.num_tokens :].view(np.uint8) == POISON).all(), "tokens written behind the last one"
        for array in (*self.results[COMBINE, slot].values(), *self.results[DISPATCH, slot].values()):
            array.poison()


class Group:
    """All ranks of a run, and the scheduler."""

    def __init__(self, run: Run, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.run, case, job = run, run.job.case, run.job
        size, dtype = case.num_ranks, job.inputs(0)[0].dtype
        self.jobs = [
            replace(job, case=replace(case, seed=case.seed + turn)) for turn in range(run.rounds)
        ]  # fresh data
        options = {"fp8": bool(job.fp8), "round_scale": job.options["round_scale"], "ue8m0": job.options["use_ue8m0"]}
        self.shape = LowLatencyShape(
            size, job.max_tokens, case.hidden, dtype, case.num_topk, case.num_experts, **options
        )
        results = sum(offsets(self.shape.results(operation))["num_bytes"] for operation in CHANNELS)
        results += run.rounds * sum(a.nbytes + 512 for a in (*job.inputs(0), job.outputs(0)))
        arena = layout.ControlLayout(size).num_bytes + 4 * size_hint(self.shape)
        self.space = Space(size, size * (arena + (1 + run.slots) * results + (1 << 16)))
        stalled = None if run.tardy is None else (run.tardy, "low_latency_dispatch")
        self.scheduler = Scheduler(self.space, seed, int(TIMEOUT_S * 1e9) // 4, trace, stalled)
        self.ranks = [Rank(self, rank) for rank in range(size)]
        for rank in self.ranks:
            self.space.write(rank.rank, rank.peers.data.ptr, np.array([rank.arena for rank in self.ranks], np.uint64))

    def go(self) -> None:
        """Raises AssertionError, SimulationError or what the launcher raises."""
        self.scheduler.run({rank.rank: rank.steps() for rank in self.ranks})


def run(what: Run, seed: int, trace: Callable[[str], None] | None = None) -> Group:
    """One run under the schedule of `seed`; after one with a rank that did not come, all others must name it."""
    group = Group(what, seed, trace)
    group.go()
    if what.absent and not what.masks_on_timeout:
        missing, verb = what.absent
        for rank in group.ranks:
            if rank.rank != missing:
                assert isinstance(rank.error, PeerTimeoutError), f"rank {rank.rank}: {rank.error}"
                assert (rank.error.peer, rank.error.operation) == (missing, f"low_latency_{verb}"), str(rank.error)
    return group
