"""The benchmarks' own kernels: what they move is right under every schedule, and nothing else is touched."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cases import Case

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from cupyep import abi
from cupyep.backends.cuda.kernels import Call
from cupyep.bench.ceilings import FILL, smem_bytes
from ptxsim.harness import Group, Job
from ptxsim.memory import POISON, Space
from ptxsim.scheduler import Scheduler
from ptxsim.sources import program
from ptxsim.test_kernels import SEEDS

CHUNK = 64
CONSTANTS = {"kWarps": 2, "kStages": 2, "kChunkBytes": CHUNK, "kSlotBytes": 128, "kFill": FILL}


def run(kernel: str, seed: int, num_units: int, num_src: int, num_dst: int, reads: int, writes: int) -> tuple[Any, Any]:
    """(sources, destinations) after the kernel: `[array, unit, CHUNK]` bytes; destinations have a unit to spare."""
    space, rng = Space(1), np.random.default_rng(seed)
    src = rng.integers(0, 256, (max(1, num_src), num_units, CHUNK), dtype=np.uint8)
    addresses = {"src": [space.allocate(array.nbytes) for array in src]}
    for address, array in zip(addresses["src"], src, strict=True):
        space.write(0, address, array)
    addresses["dst"] = [space.allocate((num_units + 1) * CHUNK) for _ in range(num_dst)]
    call = Call(abi.CEILING_PARAMS, {})
    call.set(num_units=num_units, num_src=max(1, num_src), num_dst=max(1, num_dst), reads=reads, writes=writes)
    for name, values in addresses.items():
        call.set(**{name: tuple(values[: abi.CEILING_ARRAYS])})
    code = program(kernel, "ceilings", "sm_80" if kernel == "copy" else "sm_90", 1, CONSTANTS, ())
    struct = ctypes.c_uint64.from_address(call.arguments).value
    scheduler = Scheduler(space, seed)
    params = ctypes.string_at(struct, code.param_bytes)
    scheduler.run({0: [lambda: scheduler.launch(0, code, 2, 64, smem_bytes(CONSTANTS), params)]})
    stored = [space.read(0, address, (num_units + 1, CHUNK), np.uint8) for address in addresses["dst"]]
    return src, np.array(stored)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_units", [1, 4, 13])
@pytest.mark.parametrize(("num_dst", "writes"), [(1, 1), (3, 3), (3, 2), (8, 5)])
def test_fan_stores_each_unit_in_turn(num_dst: int, writes: int, num_units: int, seed: int) -> None:
    src, dst = run("fan", seed, num_units, 1, num_dst, 1, writes)
    expected = np.full_like(dst, POISON)
    for unit in range(num_units):
        for write in range(writes):
            expected[(unit + write) % num_dst, unit] = src[0, unit]
    assert (dst == expected).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("reads", "writes"), [(0, 1), (1, 0), (1, 3), (5, 1), (1, 1)])
def test_mix_stores_its_own_bytes(reads: int, writes: int, seed: int) -> None:
    _, dst = run("mix", seed, 9, reads, max(1, writes), reads, writes)
    assert (dst[:, :9] == (FILL if writes else POISON)).all() and (dst[:, 9] == POISON).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_copy(seed: int) -> None:
    src, dst = run("copy", seed, 7, 1, 1, 1, 1)
    assert (dst[0, :7] == src[0]).all() and (dst[0, 7] == POISON).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_let_nobody_through_early(seed: int) -> None:
    """Two launches of three barriers: six epochs, and after each launch all ranks have come."""
    group, arrived = Group(Job(Case(num_ranks=3, tokens=1)), seed), []
    code = program("barriers", "barriers", "sm_90", 3, {"kNumBarriers": 3}, ())

    def start(rank: Any) -> None:
        arrived.append(rank.rank)
        call = rank.launcher._barrier
        params = ctypes.string_at(ctypes.c_uint64.from_address(call.arguments).value, code.param_bytes)
        rank.space.write(rank.rank, rank.pinned.ptr, np.frombuffer(rank.pinned, np.uint8))
        group.scheduler.launch(rank.rank, code, 1, 32, 0, params, rank.fetch_pinned)

    def through(rank: Any, number: int) -> None:
        rank.launcher.check()
        assert len(arrived) >= 3 * number

    group.scheduler.run(
        {
            rank.rank: [
                step
                for number in (1, 2)
                for step in (lambda rank=rank: start(rank), lambda rank=rank, number=number: through(rank, number))
            ]
            for rank in group.ranks
        }
    )
    assert {rank.abort_word() for rank in group.ranks} == {0}
    assert [epoch_of(rank) for rank in group.ranks] == [6] * 3


def epoch_of(rank: Any) -> int:
    from cupyep import layout

    control = layout.ControlLayout(3)
    region = control.region(layout.Channel.BARRIER, "state")
    state = rank.space.read(rank.rank, rank.arena + region.offset, (), layout.CHANNEL_STATE.dtype)
    return int(state["epoch"])
