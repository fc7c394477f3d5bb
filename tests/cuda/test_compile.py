"""Every kernel compiles for every target, spills nothing, reads no peer's memory past coherence, and fits an SM.

Needs NVRTC and no GPU. The plans (warps, ring, chunks) are checked for all row sizes, without compiling.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from compile_helpers import needs_nvrtc, sass
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyep import abi
from cupyep.abi import Operation
from cupyep.backends.cuda import jit, kernels, plan
from cupyep.backends.low_latency_shape import LowLatencyShape
from cupyep.backends.shapes import Shape
from cupyep.errors import StateError
from cupyep.layout import RowLayout

BF16 = np.dtype(ml_dtypes.bfloat16)
pytestmark = pytest.mark.timeout(1200)  # the first test compiles everything
ROWS = ((7168, BF16), (7168, "f4"), (2880, "f2"), (2048, BF16), (8, BF16), (7, "f4"), (100, "f2"), (3, BF16))
RANKS = (1, 4, 8, 40)
KB = 1024
NUM_REGISTERS = 65536  # of an SM


@dataclass(frozen=True)
class Target:
    """A GPU: architecture, CUPYEP_MOVER, and the shared memory that one CTA may have."""

    arch: str
    mover: str
    smem_limit: int

    @property
    def compute_capability(self) -> int:
        return int(self.arch.removeprefix("sm_"))


TARGETS = (
    Target("sm_80", "vector", 163 * KB),
    Target("sm_90", "auto", 227 * KB),
    Target("sm_90", "vector", 227 * KB),
    Target("sm_100", "auto", 227 * KB),
)
SMALL_SM = Target("sm_120", "auto", 99 * KB)


@dataclass(frozen=True)
class Build:
    """One kernel file for one target: what is compiled, and how it is launched."""

    kernel: str
    target: Target
    num_ranks: int
    row: tuple[int, str | np.dtype] | None = None  # hidden, dtype
    scale_bytes: int = 0
    constants: tuple[tuple[str, int], ...] = ()  # of a kernel without a plan

    def __str__(self) -> str:
        row = f"-{self.row[0]}-{np.dtype(self.row[1])}" if self.row else ""
        more = "".join(f"-{value}" for value in (self.scale_bytes, *dict(self.constants).values()) if value)
        return f"{self.kernel}-{self.target.arch}-{self.target.mover}-R{self.num_ranks}{row}{more}"

    @functools.cached_property
    def plan(self) -> plan.Plan:
        if self.row is None:
            num_threads, smem_bytes = (1024, 4 * (abi.MAX_EXPERTS + 1)) if self.kernel == "count" else (256, 0)
            return plan.Plan(dict(self.constants), num_threads, smem_bytes)
        return make_plan(self.kernel, *self.row, self.num_ranks, self.target, self.scale_bytes)

    @property
    def request(self) -> jit.Request:
        return jit.Request(self.kernel, self.target.arch, plan.prelude(self.num_ranks, self.plan.constants))

    @property
    def is_tma(self) -> bool:
        return self.plan.constants.get("kMover") == plan.MOVERS["tma"]

    @functools.cached_property
    def sass(self) -> dict[str, str]:
        return sass(jit.build(self.request).read_bytes())


LOW_LATENCY = {
    "low_latency_dispatch": Operation.LOW_LATENCY_DISPATCH,
    "low_latency_combine": Operation.LOW_LATENCY_COMBINE,
}


def make_plan(
    kernel: str, hidden: int, dtype: str | np.dtype, num_ranks: int, target: Target, scale_bytes: int = 0
) -> plan.Plan:
    row_bytes = hidden * np.dtype(dtype).itemsize
    if kernel in LOW_LATENCY:  # every width that the cast can take is cast, with each kind of scale
        casts = kernel == "low_latency_dispatch" and hidden % 128 == 0
        options = {"fp8": casts, "round_scale": casts and num_ranks != 4, "ue8m0": casts and num_ranks == 8}
        shape = LowLatencyShape(num_ranks, 128, hidden, np.dtype(dtype), 8, 8 * num_ranks, **options)
        return plan.low_latency_plan(LOW_LATENCY[kernel], shape, target.smem_limit)
    operation, make = {"push": (Operation.PUSH, plan.push_plan), "pull": (Operation.PULL, plan.pull_plan)}[kernel]
    shape = Shape(operation, hidden, np.dtype(dtype), RowLayout(row_bytes, 8, 8, True, scale_bytes), np.dtype("u1"))
    mover = plan.mover_of(row_bytes, target.mover, target.compute_capability)
    return make(shape, num_ranks, mover, target.smem_limit)


QUANTIZE = tuple(
    tuple(zip(("kDType", "kBlock", "kVecBytes", "kRoundScale", "kUe8m0"), values, strict=True))
    for values in ((3, 128, 8, 1, 1), (2, 32, 2, 0, 0), (1, 1000, 16, 0, 0), (1, 1024, 4, 1, 0))
)

EXPERT_PLANS = {
    "expand": [plan.expand_plan(row_bytes) for row_bytes in (14336, 224, 7, 200)],
    "reduce": [
        plan.reduce_plan(hidden, np.dtype(local), np.dtype(wire))
        for hidden, local, wire in ((7168, BF16, BF16), (7168, BF16, "f4"), (2880, "f4", "f2"), (7, "f2", BF16))
    ],
}

# A Latin square: every pair of row, target and number of ranks occurs, for push and for pull.
BUILDS = (
    *(
        Build(kernel, target, RANKS[(i + j) % len(RANKS)], row)
        for kernel in ("push", "pull")
        for i, row in enumerate(ROWS)
        for j, target in enumerate(TARGETS)
    ),
    *(Build(kernel, SMALL_SM, 8, row) for kernel in ("push", "pull") for row in (ROWS[0], ROWS[2])),
    *(
        Build(kernel, target, RANKS[(i + j) % len(RANKS)], row)
        for kernel in LOW_LATENCY
        for i, row in enumerate(ROWS[:3] + ROWS[5:6])
        for j, target in enumerate((TARGETS[0], TARGETS[1], TARGETS[3]))  # these kernels have one mover
    ),
    *(Build("count", TARGETS[(i + 1) % 4], num_ranks) for i, num_ranks in enumerate(RANKS)),
    *(Build("barrier", TARGETS[(i + 2) % 4], num_ranks) for i, num_ranks in enumerate(RANKS)),
    Build("count", TARGETS[1], 40),
    *(
        Build("push", target, num_ranks, (7168, "u1"), scale_bytes)
        for target, num_ranks, scale_bytes in zip(TARGETS, RANKS, (224, 56, 37, 1024), strict=True)
    ),
    *(Build("quantize", target, 1, constants=constants) for target in TARGETS for constants in QUANTIZE),
    *(Build("arrange", target, 1) for target in TARGETS),
    *(
        Build(kernel, target, 1, constants=tuple(chosen.constants.items()))
        for target in (TARGETS[0], TARGETS[1], TARGETS[3])
        for kernel, plans in EXPERT_PLANS.items()
        for chosen in plans
    ),
)


LOCAL = ("quantize", "arrange", "expand", "reduce")  # wait for nobody

row_sizes = st.sampled_from([BF16, np.dtype("f2"), np.dtype("f4")]).flatmap(
    lambda dtype: st.tuples(st.integers(1, 60_000 // dtype.itemsize), st.just(dtype))
)
targets = st.sampled_from([*TARGETS, SMALL_SM, Target("sm_90", "auto", 163 * KB)])
check = settings(deadline=None, max_examples=400)


@check
@given(row=row_sizes, num_ranks=st.integers(1, 72), target=targets)
def test_push_plans(row, num_ranks, target):
    chosen = make_plan("push", *row, num_ranks, target)
    check_chunks(chosen, row[0] * row[1].itemsize, target)
    c = chosen.constants
    assert chosen.num_threads == 32 * (c["kWarps"] + c["kSideWarps"])
    assert c["kStages"] >= 2  # a slot fills while another is read
    if c["kMover"] == plan.MOVERS["tma"]:
        assert chosen.smem_bytes >= c["kWarps"] * c["kStages"] * (c["kSlotBytes"] + 8)
    tables = num_ranks * 40
    assert chosen.smem_bytes + tables + plan._STATIC_BYTES <= target.smem_limit


@check
@given(row=row_sizes, num_ranks=st.integers(1, 72), target=targets)
def test_pull_plans(row, num_ranks, target):
    chosen = make_plan("pull", *row, num_ranks, target)
    check_chunks(chosen, row[0] * row[1].itemsize, target)
    c = chosen.constants
    assert chosen.num_threads == c["kPullThreads"]
    if c["kMover"] == plan.MOVERS["tma"]:
        assert chosen.num_threads == 32 * (c["kGroups"] * (c["kConsumerWarps"] + 1) + 1)
        assert 16 * 32 * c["kConsumerWarps"] * c["kVecsPerThread"] >= c["kChunkBytes"]  # a thread for every vector
        assert c["kSlots"] >= 2 and chosen.smem_bytes >= c["kGroups"] * c["kSlots"] * (
            c["kRowsPerSlot"] * c["kSlotBytes"] + 20
        )
    tables = num_ranks * 16
    assert chosen.smem_bytes + tables + plan._STATIC_BYTES <= target.smem_limit


def check_chunks(chosen: plan.Plan, row_bytes: int, target: Target) -> None:
    """The chunks are the row, no more and no less; bulk copies are aligned; the CTA can be launched."""
    c = chosen.constants
    assert c["kRowBytes"] == row_bytes and row_bytes % c["kVecBytes"] == 0 and c["kVecBytes"] in (2, 4, 8, 16)
    starts = range(0, c["kNumChunks"] * c["kChunkBytes"], c["kChunkBytes"])
    lengths = [min(c["kChunkBytes"], row_bytes - start) for start in starts]
    assert len(lengths) == c["kNumChunks"] and sum(lengths) == row_bytes and min(lengths) > 0
    assert 32 <= chosen.num_threads <= 1024 and chosen.num_threads % 32 == 0
    is_tma = c["kMover"] == plan.MOVERS["tma"]
    assert is_tma == (target.mover == "auto" and row_bytes % 16 == 0)
    if is_tma:
        assert all(length % 16 == 0 for length in lengths)
        assert c["kSlotBytes"] >= c["kChunkBytes"] and c["kSlotBytes"] % 128 == 0
    else:
        assert (c["kNumChunks"], chosen.smem_bytes) == (1, 0)


@pytest.fixture(scope="module")
def built() -> None:
    """Compiles everything into the kernel cache, and disassembles it, several at a time."""
    jit.warm_up({build.request: None for build in BUILDS})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda build: build.sass, BUILDS))


def of_builds(builds: Iterable[Build]) -> Callable:
    """Makes a test of one `build` a test of each, all compiled beforehand."""

    def decorate(test: Callable) -> Callable:
        each = pytest.mark.parametrize("build", list(builds), ids=str)
        return needs_nvrtc(pytest.mark.usefixtures("built")(each(test)))

    return decorate


@of_builds(BUILDS)
def test_registers_and_spills(build):
    """No kernel spills, and each can be launched with its threads: registers come in eights per thread."""
    usages = jit.resource_usage(build.request)
    assert usages
    for name, usage in usages.items():
        assert usage.spill_bytes == 0, name
        assert -(-usage.num_registers // 8) * 8 * build.plan.num_threads <= NUM_REGISTERS, name


@of_builds(BUILDS)
def test_shared_memory(build):
    """What the kernel declares itself and what its plan asks for are, together, what one CTA may have."""
    log = jit.build(build.request).with_suffix(".log").read_text()
    declared = max((int(number) for number in re.findall(r"(\d+) bytes smem", log)), default=0)
    assert declared > 0 or build.kernel in ("barrier", *LOCAL)
    assert declared + build.plan.smem_bytes <= build.target.smem_limit
    if build.kernel in LOW_LATENCY:
        assert declared <= plan.low_latency_static_bytes(build.num_ranks)


@of_builds(BUILDS)
def test_no_local_memory_and_no_incoherent_loads(build):
    """A peer may write what a kernel reads, so no load may go through the cache that takes memory for constant."""
    assert build.sass
    for name, code in build.sass.items():
        assert not re.findall(r"\b(?:LDL|STL)\b.*", code), name
        assert not re.findall(INCOHERENT, code), name


INCOHERENT = r"\bLDG\S*\.CONSTANT\S*"


@needs_nvrtc
@pytest.mark.parametrize("arch", sorted({target.arch for target in TARGETS}))
def test_an_incoherent_load_would_be_found(arch):
    source = 'extern "C" __global__ void f(const int* __restrict__ from, int* __restrict__ to) { *to = *from; }'
    assert re.findall(INCOHERENT, sass(jit.compile_source("f.cu", source, arch)[0])["f"])


@of_builds(build for build in BUILDS if build.row and build.kernel not in LOW_LATENCY)
def test_bulk_copies(build):
    """One instruction per place in the source: a loop that were unrolled over lanes or ranks would show many more.

    push loads in two places (the ring's start, its refill) and stores once per 32 ranks; pull loads once per 32 ranks.
    """
    code = build.sass[build.kernel]
    loads, stores = (len(re.findall(rf"\bUBLKCP\.{way}\b", code)) for way in (r"S\.G", r"G\.S"))
    groups = -(-build.num_ranks // 32)
    expected = {"push": (2, groups), "pull": (groups, 0)}[build.kernel] if build.is_tma else (0, 0)
    assert (loads, stores) == expected
    assert ("SYNCS" in code) == build.is_tma
    assert build.is_tma == (build.target.mover == "auto" and build.plan.constants["kRowBytes"] % 16 == 0)


def test_a_low_latency_shape_too_large_for_the_gpu_is_refused():
    """By an error that leaves the Buffer as it was, before anything is compiled."""
    loaded = kernels.Kernels.__new__(kernels.Kernels)
    loaded._smem_limit, loaded._num_ranks = SMALL_SM.smem_limit, 8
    shape = LowLatencyShape(8, 2048, 128, BF16, 8, 1024)
    text = r"expected tokens, top-k and experts that take at most [0-9,]+ bytes of shared memory here, got 296,960"
    with pytest.raises(StateError, match=text):
        loaded.load_low_latency(Operation.LOW_LATENCY_DISPATCH, shape)
