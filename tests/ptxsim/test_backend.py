"""Buffers of the CUDA backend on the simulated machine: every option of dispatch and combine against the oracle."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import expert_reference
import numpy as np
import pytest
import reference
from cases import DTYPES, Case, values
from multirank.checks import assert_bits, expect

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

import cupy

import cupyep
from cupyep.backends import base
from cupyep.comm import run_threads
from ptxsim.backend import HEAP_BYTES, Machine, enter_rank, simulated

CASE = Case(num_ranks=2, tokens=(7, 4), hidden=24, num_topk=3, num_local_experts=2, dtype="bfloat16", routing="some -1")


class Rank:
    """One rank's part of a job."""

    def __init__(self, machine: Machine, comm: Any) -> None:
        enter_rank(machine, comm.rank)
        self.machine, self.comm, self.rank = machine, comm, comm.rank
        self.buffer = cupyep.Buffer(comm, HEAP_BYTES, backend="cuda", timeout_s=30)
        self.inputs = [machine.array(part) for part in CASE.inputs(comm.rank)]
        self.received, self.combined, self.sums = expect(CASE)
        self.mine = self.received[comm.rank]
        self.outputs = [CASE.outputs(rank, len(part.x)) for rank, part in enumerate(self.received)]

    def dispatch(self, x: Any = None, **options: Any) -> Any:
        given = self.inputs[0] if x is None else x
        result = self.buffer.dispatch(given, *self.inputs[1:], num_experts=CASE.num_experts, **options)
        self.machine.wait()
        return result

    def check(self, name: str, got: Any, expected: np.ndarray, count: int | None = None) -> None:
        self.machine.wait()
        assert_bits(name, self.machine.read(got)[:count], expected)

    def check_rows(self, result: Any, count: int | None = None) -> None:
        self.check("recv_x", result.recv_x, self.mine.x, count)
        self.check("recv_topk_idx", result.recv_topk_idx, self.mine.topk_idx, count)
        assert self.mine.topk_weights is not None
        self.check("recv_topk_weights", result.recv_topk_weights, self.mine.topk_weights, count)

    def check_combine(self, result: Any, num_rows: int | None = None, **options: Any) -> None:
        y, weights = self.outputs[self.rank]
        assert weights is not None and self.sums is not None
        if num_rows:
            y, weights = (np.pad(part.view(np.uint8), ((0, num_rows - len(part)), (0, 0))).view(part.dtype)
                          for part in (y, weights))
        home = self.buffer.combine(self.machine.array(y), result.handle, self.machine.array(weights), **options)
        self.check("combined_x", home.combined_x, self.combined[self.rank])
        self.check("combined_topk_weights", home.combined_topk_weights, self.sums[self.rank])


def usual(rank: Rank) -> None:
    for options in ({}, {"copy": True}, {"async_finish": True, "previous_event": rank.buffer.capture()}):
        result = rank.dispatch(**options)
        assert result.handle.num_recv_tokens == len(rank.mine.x)
        assert result.num_recv_tokens_per_expert_list == rank.mine.num_recv_tokens_per_expert
        rank.check_rows(result)
        rank.check_combine(result, **{key: value for key, value in options.items() if key != "copy"})
        again = rank.buffer.dispatch(rank.inputs[0], handle=result.handle, **options)
        rank.check("recv_x again", again.recv_x, rank.mine.x)


def arena_input(rank: Rank) -> None:
    """What combine can use in place it does; out= and two addends."""
    result, machine = rank.dispatch(), rank.machine
    y = rank.buffer.empty(result.recv_x.shape, result.recv_x.dtype)
    machine.copy(y, machine.array(rank.outputs[rank.rank][0]))
    rngs = [np.random.default_rng(number) for number in range(2)]
    width, dtype = CASE.hidden, rank.combined[0].dtype
    addends = [[values(rng, (n, width), dtype) for _ in range(2)] for rng, n in zip(rngs, CASE.num_tokens, strict=True)]
    expected = reference.combine([y for y, _ in rank.outputs], rank.received, CASE.num_tokens, addends)[rank.rank]
    out = machine.array(np.zeros_like(expected))
    before = rank.buffer._backend._arena.largest
    bias = tuple(machine.array(addend) for addend in addends[rank.rank])
    home = rank.buffer.combine(y, result.handle, bias=bias, out=out)
    assert home.combined_x is out and home.combined_topk_weights is None
    assert rank.buffer._backend._arena.largest == before
    rank.check("out", out, expected)


def pairs(rank: Rank) -> None:
    for num_scales, dtype, order in ((3, "float32", "F"), (5, "uint8", "C")):
        rngs = [np.random.default_rng((number, num_scales)) for number in range(2)]
        counts = zip(rngs, CASE.num_tokens, strict=True)
        scales = [rng.integers(0, 99, (count, num_scales)).astype(dtype) for rng, count in counts]
        wanted = reference.dispatch(scales, [CASE.inputs(number)[1] for number in range(2)], None, CASE.num_experts)
        x = rank.inputs[0], rank.machine.array(scales[rank.rank])
        for result in (rank.dispatch(x, scales_order=order), rank.dispatch(x, copy=True, scales_order=order)):
            rank.check("rows", result.recv_x[0], rank.mine.x)
            rank.check("scales", result.recv_x[1], wanted[rank.rank].x)
            assert result.recv_x[1].flags[f"{order}_CONTIGUOUS"]


def fixed_size(rank: Rank) -> None:
    count, worst, machine = len(rank.mine.x), 2 + max(len(part.x) for part in rank.received), rank.machine
    stats = machine.array(np.full(2, 5, np.int32)), machine.array(np.zeros(2, np.int64))
    for number in range(3):
        result = rank.dispatch(
            num_worst_tokens=worst, cumulative_local_expert_recv_stats=stats[0], dispatch_wait_us=stats[1])
        assert result.recv_x.shape[0] == worst and result.num_recv_tokens_per_expert_list == []
        rank.check_rows(result, count)
        assert (machine.read(result.recv_topk_idx)[count:] == -1).all()
        assert machine.read(result.handle.recv_count).tolist() == [count]
        assert machine.read(result.handle.recv_count_per_expert).tolist() == rank.mine.num_recv_tokens_per_expert
        assert machine.read(stats[0]).tolist() == [5 + (number + 1) * n for n in rank.mine.num_recv_tokens_per_expert]
        rank.check_combine(result, worst)


def too_few_rows(rank: Rank) -> None:
    rank.dispatch(num_worst_tokens=20)
    result = rank.dispatch(num_worst_tokens=2)
    with pytest.raises(cupyep.ArenaExhaustedError, match="num_worst_tokens"):
        result.event.synchronize()
    with pytest.raises(cupyep.ArenaExhaustedError, match="num_nvl_bytes") as caught:
        rank.dispatch(num_worst_tokens=2000)
    assert caught.value.needed > 2000 * CASE.hidden * 2 > caught.value.free
    usual(rank)


def sized(rank: Rank) -> None:
    """An arena that nobody has sized grows with num_worst_tokens; then no call waits for counts."""
    with cupyep.Buffer(rank.comm, backend="cuda", timeout_s=30) as buffer:
        given, rank.buffer = rank.buffer, buffer
        for worst in (20, 900, 900, 20):
            result = rank.dispatch(num_worst_tokens=worst)
            rank.check_rows(result, len(rank.mine.x))
            result.event.synchronize()
            del result
        rank.buffer = given


def numpy_integers(rank: Rank) -> None:
    """Sizes and numbers may be NumPy's; what is computed of them becomes addresses."""
    given, size = rank.buffer, np.int64
    for options in ({"max_tokens_per_rank": size(8)}, {"num_nvl_bytes": size(1 << 13)}):
        with cupyep.Buffer(rank.comm, backend="cuda", timeout_s=30, **options) as rank.buffer:
            for _ in range(2):  # the second into blocks that are there before the counts
                rank.check_rows(rank.dispatch(num_sms=size(1)))
            result = rank.dispatch(layout="expert", expert_alignment=size(4), num_worst_tokens=size(13))
            assert type(result.handle.expert_rows.num_rows) is int
            del result
    rank.buffer = given


def different_sizes(rank: Rank) -> None:
    """A rank that waits for the counts learns it in the call, one that does not learns it later; both go on."""
    for theirs in (0, 30):
        rank.dispatch(num_worst_tokens=20)
        if rank.rank == 0:
            result = rank.dispatch(num_worst_tokens=20)
        elif theirs:
            result = rank.dispatch(num_worst_tokens=theirs)
        with pytest.raises(cupyep.MismatchError, match="num_worst_tokens: rank 0 has 20"):
            if rank.rank == 1 and not theirs:
                try:
                    rank.buffer.dispatch(*rank.inputs, num_experts=CASE.num_experts)
                finally:
                    rank.machine.wait()
            result.event.synchronize()
        usual(rank)


def expert_layout(rank: Rank) -> None:
    machine, wire = rank.machine, DTYPES["float32"]
    expanded = [expert_reference.expand(part, 4) for part in rank.received]
    mine = expanded[rank.rank]
    rows = np.stack([np.zeros(CASE.hidden, DTYPES["bfloat16"]) if row is None else row for row in mine.rows])
    ys = [values(np.random.default_rng(number), (len(part.rows), CASE.hidden), DTYPES["bfloat16"])
          for number, part in enumerate(expanded)]
    factors = [weights for _, weights in rank.outputs]
    for options in ({}, {"num_worst_tokens": 13}, {"copy": True}):
        result = rank.dispatch(layout="expert", expert_alignment=4, zero_gaps=True, **options)
        again = rank.buffer.dispatch(rank.inputs[0], handle=result.handle, zero_gaps=True)
        for got in (result, again):
            rank.check("recv_x", got.recv_x, rows, len(rows))
        placed, count = result.handle.expert_rows, len(rank.mine.x)
        assert machine.read(placed.offsets).tolist() == mine.offsets
        rank.check("row_map", placed.row_map, mine.row_map, count)
        rank.check("recv_topk_idx", result.recv_topk_idx, rank.mine.topk_idx, count)
        partial = [expert_reference.reduce(y, part.row_map, weights, wire)
                   for y, part, weights in zip(ys, expanded, factors, strict=True)]
        wanted = reference.combine(partial, rank.received, CASE.num_tokens)[rank.rank]
        given = np.zeros((placed.num_rows, CASE.hidden), DTYPES["bfloat16"])
        given[: len(rows)] = ys[rank.rank]
        weights = np.zeros((result.handle.num_recv_tokens, CASE.num_topk), np.float32)
        weights[:count] = factors[rank.rank]
        home = rank.buffer.combine(machine.array(given), result.handle, machine.array(weights), wire_dtype=wire)
        rank.check("combined_x", home.combined_x, wanted)


def grown(rank: Rank) -> None:
    """The second dispatch has more tokens than were agreed."""
    few = [part[:2] for part in rank.inputs]
    rank.buffer.dispatch(*few, num_experts=CASE.num_experts)
    rank.machine.wait()
    usual(rank)


USER_OBJECTS: list[tuple[int, int]] = []  # that graphs own: their numbers and destructors


def fake_driver() -> Any:
    """What graphs.py wants of cuda.bindings.driver."""
    flag = SimpleNamespace(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC=1, CU_GRAPH_USER_OBJECT_MOVE=1)

    def create(number: int, destructor: int, count: int, flags: int) -> tuple:
        USER_OBJECTS.append((number, destructor))
        return 0, number

    return SimpleNamespace(
        CUuserObject_flags=flag, CUuserObjectRetain_flags=flag, CUhostFn=int, cuUserObjectCreate=create,
        cuStreamGetCaptureInfo=lambda stream: (0, 1, 7, "graph", None, 0), cuGraphRetainUserObject=lambda *_: (0,))


def captured(rank: Rank) -> None:
    """Under capture: what needs the host is refused, all blocks are pinned, and they come back with the destructors."""
    machine, streams = rank.machine, cupy.cuda.Stream
    first = rank.dispatch(num_worst_tokens=20)
    rank.check_combine(first, 20)
    free = rank.buffer._backend._arena.largest
    machine.wait()
    streams.captures = True
    machine.wait()
    half = machine.array(CASE.inputs(rank.rank)[0].astype(np.float16))
    for call in (
        rank.dispatch,
        lambda: rank.dispatch(half, num_worst_tokens=20),
        lambda: rank.buffer.dispatch(half, handle=first.handle),
        lambda: rank.buffer.combine(machine.array(np.zeros((20, 24), np.float16)), first.handle),
    ):
        with pytest.raises(cupyep.StateError, match="under graph capture"):
            call()
    result = rank.dispatch(num_worst_tokens=20)
    rank.check_rows(result, len(rank.mine.x))
    rank.check_combine(result, 20)
    machine.wait()
    streams.captures = False
    machine.wait()
    del result
    assert rank.buffer._backend._arena.largest < free, "a graph's blocks were given back"
    usual(rank)
    assert rank.buffer._backend._arena.largest < free, "a graph's blocks were given back"
    machine.wait()
    while USER_OBJECTS:  # the ranks' together; each is destroyed once
        number, destructor = USER_OBJECTS.pop()
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destructor)(number)
    machine.wait()
    rank.buffer.empty(1, np.uint8)
    machine.wait()
    assert rank.buffer._backend._arena.largest == free


JOBS = [
    captured, usual, arena_input, pairs, fixed_size, too_few_rows, sized, numpy_integers, different_sizes,
    expert_layout, grown,
]  # fmt: skip


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_backend(job: Any) -> None:
    mover = "vector" if job in (pairs, expert_layout) else "tma"
    with simulated(2, mover) as machine, mock.patch.object(base, "HEAP_STEP", 1 << 12):

        def program(comm: Any) -> None:
            rank = Rank(machine, comm)
            with rank.buffer:
                job(rank)

        with mock.patch.dict(sys.modules, {"cuda.bindings": SimpleNamespace(driver=fake_driver())}):
            run_threads(program, 2, (), 200, lambda rank: nullcontext())
