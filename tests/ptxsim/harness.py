"""Ranks in one simulated address space, driven by the CUDA backend's own Launcher: dispatch and combine of a Case.

The Launcher fills the parameter structs and reads the host records as it does on a GPU; only memory and the launch
itself are replaced. Every result is compared with the oracle, bit by bit, and memory that nobody may write must keep
its poison.
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
import reference
from cases import Case, values
from multirank.checks import assert_bits

from cupyep import layout
from cupyep.abi import Operation
from cupyep.backends.base import Form
from cupyep.backends.cuda import launcher, plan
from cupyep.backends.shapes import Shape, Tokens
from cupyep.errors import CupyepError
from ptxsim.memory import GLOBAL, POISON, Space
from ptxsim.scheduler import Scheduler
from ptxsim.sources import Patch, program

ARCH = {"tma": "sm_90", "vector": "sm_80"}
TIMEOUT_S = 1.0


def small(chosen: plan.Plan, mover: str, chunks: int, consumers: int = 1) -> plan.Plan:
    """A backend's plan with as few warps, stages and slots as its kernel allows, and rows cut into `chunks`."""
    c = dict(chosen.constants)
    tma = mover == "tma"
    if tma:
        c["kNumChunks"], c["kChunkBytes"] = chunks, layout.align(-(-c["kRowBytes"] // chunks), 16)
        c["kSlotBytes"] = layout.align(c["kChunkBytes"])
    if "kStages" in c:
        c |= {"kWarps": 2, "kStages": 2, "kSideWarps": 1, "kPushThreads": 96}
        return plan.Plan(c, 96, 4 * (c["kSlotBytes"] + 8) if tma else 0)
    c |= {"kRowsPerSlot": 1} if chunks > 1 else {}
    threads = 32 * (consumers + 2)  # with the loader and the warp of the weights
    c |= {"kGroups": 1, "kConsumerWarps": consumers, "kSlots": 2, "kPullThreads": threads}
    c["kVecsPerThread"] = -(-c["kChunkBytes"] // (512 * consumers))
    return plan.Plan(c, threads, 2 * (c["kRowsPerSlot"] * c["kSlotBytes"] + 20) if tma else 0)


@dataclass(frozen=True)
class Job:
    """What to run: dispatch, then combine, `rounds` times over. Of COUNT alone every round has other ids."""

    case: Case
    mover: str = "tma"
    num_ctas: int = 2
    rounds: int = 1
    chunks: int = 1
    consumers: int = 1  # warps of PULL that add
    rows_only: bool = False  # ids and weights do not travel, as in a cached dispatch
    scale_bytes: int = 0  # of a token
    num_bias: int = 0  # addends of combine
    own_plan: bool = False  # the backend's plan instead of a small one
    kernels: tuple[str, ...] = ("count", "push", "pull")
    absent: tuple[int, str] | None = None  # a rank, and the operation at which it is missing
    stalled: tuple[int, str] | None = None  # a rank, and the operation in which it stops until the others have left
    patch: Patch = ()


class Pinned(bytearray):
    """Host memory of the Launcher, with its address in the simulated space."""

    ptr = 0


class Rank:
    """One rank's arena, arrays and launcher."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.space = group, rank, group.space
        self.case = group.job.case
        self.x, self.topk_idx, self.topk_weights = self.case.inputs(rank)
        num_tokens, size = len(self.x), self.case.num_ranks
        self.capacity = max(1, sum(self.case.num_tokens))
        row_bytes, topk = self.x.shape[1] * self.x.itemsize, self.case.num_topk
        self.scales = group.scales[rank]
        rows = layout.RowLayout(row_bytes, topk, self.topk_idx.itemsize, self.topk_weights is not None,
                                group.job.scale_bytes)
        self.push_shape = Shape(Operation.PUSH, self.x.shape[1], self.x.dtype, rows, self.scales.dtype)
        self.pull_shape = replace(self.push_shape, operation=Operation.PULL,
                                  rows=replace(rows, idx_bytes=0, scale_bytes=0))
        control = layout.ControlLayout(size)
        block = rows.offsets(self.capacity)
        self.block_bytes, self.parts = block["num_bytes"], block
        self.arena = self.space.allocate(control.num_bytes + 2 * self.block_bytes)
        self.space.write(rank, self.arena, control.initial())
        self.dispatch_at, self.combine_at = control.num_bytes, control.num_bytes + self.block_bytes
        self.peers = self.array(np.zeros(size, np.uint64))
        self.device_x, self.device_idx = self.array(self.x), self.array(self.topk_idx)
        self.device_weights = None if self.topk_weights is None else self.array(self.topk_weights)
        self.device_scales = self.array(self.scales) if group.job.scale_bytes else None
        self.order = self.array(num_tokens * size * 4)
        self.words = self.array(4 * (3 + size + self.case.num_local_experts))
        self.bias = tuple(self.array(addend) for addend in group.biases[rank])
        self.out = self.array(self.x.nbytes, num_tokens)
        self.out_weights = None if self.topk_weights is None else self.array(self.topk_weights.nbytes)
        self.pinned = Pinned(layout.HostLayout(size).num_bytes)
        self.pinned.ptr = self.space.allocate(len(self.pinned))
        kernels = SimpleNamespace(count=self.kernel("count", "count", plan.Plan({}, 1024, 0)),
                                  barrier=self.kernel("barrier", "barrier", plan.Plan({}, 32, 0)),
                                  abort_peers=self.kernel("abort_peers", "barrier", plan.Plan({}, 1, 0)),
                                  of=self.kernel_of)
        with mock.patch.object(cupy.cuda, "alloc_pinned_memory", lambda num_bytes: self.pinned):
            self.launcher = launcher.Launcher(
                SimpleNamespace(peers=self.peers, address=self.arena), kernels,  # type: ignore[arg-type]
                SimpleNamespace(rank=rank, size=size), TIMEOUT_S, None)  # type: ignore[arg-type]
        self.error: CupyepError | None = None
        self.turn = -1  # of the counts that differ
        self.routing = launcher.Routing(1, self.case.num_experts, self.order, self.words, self.capacity)

    def array(self, content: Any, length: int | None = None) -> Any:
        """A device array with this content, or of so many poisoned bytes, as far as the Launcher cares."""
        if not isinstance(content, np.ndarray):
            return _DeviceArray(self.space.allocate(max(16, content)), length or 0)
        address = self.space.allocate(max(16, content.nbytes))
        self.space.write(self.rank, address, content)
        return _DeviceArray(address, len(content))

    def kernel(self, name: str, file: str, chosen: plan.Plan) -> Any:
        job = self.group.job

        def launch(num_ctas: int, call: Any, stream: Any, smem_bytes: int | None = None) -> None:
            code = program(name, file, ARCH[job.mover], self.case.num_ranks, chosen.constants, job.patch)
            struct = ctypes.c_uint64.from_address(call.arguments).value  # as the driver reads it
            self.space.write(self.rank, self.pinned.ptr, np.frombuffer(self.pinned, np.uint8))
            smem = chosen.smem_bytes if smem_bytes is None else smem_bytes
            self.group.scheduler.launch(self.rank, code, num_ctas, chosen.num_threads, smem,
                                        ctypes.string_at(struct, code.param_bytes), self.fetch_pinned)

        return SimpleNamespace(launch=launch)

    def kernel_of(self, shape: Shape) -> Any:
        make, name = (plan.push_plan, "push") if shape.operation == Operation.PUSH else (plan.pull_plan, "pull")
        job = self.group.job
        chosen = make(shape, self.case.num_ranks, job.mover, 227 * 1024)
        return self.kernel(name, name, chosen if job.own_plan else small(chosen, job.mover, job.chunks, job.consumers))

    def fetch_pinned(self) -> None:
        self.pinned[:] = self.space.read(self.rank, self.pinned.ptr, (len(self.pinned),), np.uint8).tobytes()

    # --- the stream ---------------------------------------------------------------------------------------------------

    def steps(self) -> list[Callable[[], None]]:
        absent = self.group.job.absent
        counts_only = self.group.job.kernels == ("count",)
        stages = {"count": [self.count, self.check_counts] if counts_only else [self.count],
                  "push": [self.push, self.check_dispatch], "pull": [self.pull, self.check_combine]}
        names = list(self.group.job.kernels) * self.group.job.rounds
        if absent and absent[0] == self.rank:
            names = names[: names.index(absent[1])]
        steps = [step for name in names for step in stages[name]]
        return [functools.partial(self.attempt, step) for step in steps] if absent or self.group.job.stalled else steps

    def attempt(self, step: Callable[[], None]) -> None:
        """Where ranks may fail: keeps the first error, and does no more after it."""
        if self.error is None:
            try:
                step()
            except CupyepError as error:
                self.error = error

    def count(self) -> None:
        self.turn = min(self.turn + 1, len(self.group.ids) - 1)
        if self.turn:
            self.space.write(self.rank, self.device_idx.data.ptr, self.group.ids[self.turn][self.rank])
        self.launcher.count(self.push_shape, self.routing, self.device_idx, 1 << 20, 0, Form())

    def push(self) -> None:
        where = {name: self.dispatch_at + self.parts[name] for name in ("rows", "idx", "weights", "scales")}
        shape, tokens = self.push_shape, Tokens(self.device_x, self.device_scales, self.device_idx, self.device_weights)
        if self.group.job.rows_only:
            shape = replace(shape, rows=replace(shape.rows, num_topk=0, idx_bytes=0, with_weights=False))
            tokens = Tokens(self.device_x, self.device_scales)
        self.launcher.push(shape, self.routing, tokens, where, self.group.job.num_ctas)

    def pull(self) -> None:
        where = {name: self.combine_at + self.parts[name] for name in ("rows", "weights")}
        self.launcher.pull(self.pull_shape, self.routing, self.out, self.out_weights, self.bias, where,
                           self.group.job.num_ctas)

    def read_part(self, at: int, name: str, width: int, dtype: Any) -> np.ndarray:
        return self.space.read(self.rank, self.arena + at + self.parts[name], (self.capacity, width), dtype)

    def check_counts(self) -> None:
        """What COUNT told the host, and the kernels behind it."""
        expected = self.group.counted[self.turn][self.rank]
        counted = self.launcher.counted(self.push_shape, self.case.num_local_experts)
        self.launcher.check()
        assert counted.rows == expected.num_recv_tokens_per_rank, f"rows: {counted.rows}"
        assert counted.experts == expected.num_recv_tokens_per_expert, f"experts: {counted.experts}"
        assert counted.most_tokens == max(self.case.num_tokens) and counted.bad_id is None
        base = self.space.read(self.rank, self.words.data.ptr + 8, (self.case.num_ranks,), np.int32)
        order = self.space.read(self.rank, self.order.data.ptr, (len(self.x), self.case.num_ranks), np.int32)
        assert_bits("send_row", np.where(order < 0, np.int32(-1), order + base).astype(np.int32), expected.send_row)

    def check_dispatch(self) -> None:
        """The host after dispatch; then it lets the experts' outputs appear and gives the received block away."""
        self.check_counts()
        expected = self.group.received[self.rank]
        scales = self.group.received_scales[self.rank] if self.group.job.scale_bytes else None
        parts = [("rows", expected.x), ("scales", scales), ("idx", expected.topk_idx),
                 ("weights", expected.topk_weights)]
        for name, value in parts[:2] if self.group.job.rows_only else parts:
            if value is not None:
                got = self.read_part(self.dispatch_at, name, value.shape[1], value.dtype)
                assert_bits(f"rank {self.rank} received {name}", got[: len(value)], value)
                assert (got[len(value):].view(np.uint8) == POISON).all(), f"{name} written behind the last row"
        self.space.write(self.rank, self.arena + self.dispatch_at, np.full(self.block_bytes, POISON, np.uint8))
        for name, value in zip(("rows", "weights"), self.group.answers[self.rank], strict=True):
            if value is not None:
                self.space.write(self.rank, self.arena + self.combine_at + self.parts[name], value)

    def check_combine(self) -> None:
        """The host after combine; the block is reused at once."""
        self.launcher.check()
        for name, where, expected in (("combined", self.out, self.group.combined),
                                      ("combined weights", self.out_weights, self.group.combined_weights)):
            if expected is not None:
                value = expected[self.rank]
                got = self.space.read(self.rank, where.data.ptr, value.shape, value.dtype)
                assert_bits(f"rank {self.rank} {name}", got, value)
        self.space.write(self.rank, self.arena + self.combine_at, np.full(self.block_bytes, POISON, np.uint8))
        self.space.write(self.rank, self.out.data.ptr, np.full(max(1, self.x.nbytes), POISON, np.uint8))

    def abort_word(self) -> int:
        """As the system sees it."""
        return int(self.group.space.system.bytes[self.arena - GLOBAL :][:8].view(np.uint64)[0])


class _DeviceArray:
    def __init__(self, address: int, length: int) -> None:
        self.data, self.length = SimpleNamespace(ptr=address), length

    def __len__(self) -> int:
        return self.length


class Group:
    """All ranks of a job, what they should get, and the scheduler."""

    def __init__(self, job: Job, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.job, case = job, job.case
        size = case.num_ranks
        row_bytes = case.hidden * case.inputs(0)[0].itemsize + 16 * case.num_topk + job.scale_bytes
        arrays = max(1 << 16, 5 * sum(case.num_tokens) * row_bytes)
        self.space = Space(size, size * (layout.ControlLayout(size).num_bytes + arrays))
        self.scheduler = Scheduler(self.space, seed, int(TIMEOUT_S * 1e9) // 4, trace, job.stalled)
        inputs = [case.inputs(rank) for rank in range(size)]
        weights = [topk_weights for *_, topk_weights in inputs] if case.weights else None
        turns = range(job.rounds if job.kernels == ("count",) else 1)
        self.ids = [[np.where(idx < 0, idx, (idx + turn) % case.num_experts) for _, idx, _ in inputs] for turn in turns]
        self.counted = [reference.dispatch([x for x, *_ in inputs], ids, weights, case.num_experts)  # type: ignore[arg-type]
                        for ids in self.ids]
        self.received = self.counted[0]
        rng = np.random.default_rng(case.seed)
        self.scales = [rng.integers(0, 256, (len(x), job.scale_bytes), np.uint8) for x, *_ in inputs]
        self.received_scales = [part.x for part in reference.dispatch(self.scales, [idx for _, idx, _ in inputs], None,
                                                                      case.num_experts)]
        self.answers = [case.outputs(rank, len(self.received[rank].x)) for rank in range(size)]
        self.biases = [[values(rng, x.shape, x.dtype) for _ in range(job.num_bias)] for x, *_ in inputs]
        self.combined = reference.combine([y for y, _ in self.answers], self.received, case.num_tokens, self.biases)
        self.combined_weights = reference.combine([w for _, w in self.answers], self.received, case.num_tokens) if (  # type: ignore[misc]
            case.weights) else None
        self.ranks = [Rank(self, rank) for rank in range(size)]
        addresses = np.array([rank.arena for rank in self.ranks], np.uint64)
        for rank in self.ranks:
            self.space.write(rank.rank, rank.peers.data.ptr, addresses)

    def run(self) -> None:
        """Raises AssertionError, SimulationError or what the Launcher raises."""
        self.scheduler.run({rank.rank: rank.steps() for rank in self.ranks})


def run(job: Job, seed: int, trace: Callable[[str], None] | None = None) -> Group:
    """One job under the schedule of `seed`."""
    group = Group(job, seed, trace)
    group.run()
    return group
