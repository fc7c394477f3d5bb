"""Compiles what the test suite will need, on all cores at once: `python tests/cuda/precompile.py`.

Each case has kernels of its own, and compiled one after the other they take longer than all the tests. Those of CuPy
that nearly every test uses take two seconds each, and wait for each other where ranks are threads.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cases import CASES, DTYPES
from multirank.test_low_latency import JOBS

from cupyep import abi
from cupyep.backends.cuda import jit, plan, warmup
from cupyep.backends.low_latency_shape import COMBINE, DISPATCH, LowLatencyShape
from cupyep.backends.shapes import Shape
from cupyep.layout import RowLayout

SMEM_LIMIT = 227 * 1024  # bytes that a CTA may have on sm_90


def requests(architecture: str) -> set[jit.Request]:
    """Count, barrier, push and pull of every case, with both movers."""
    found = set()
    for case in CASES:
        num_ranks, dtype = case.num_ranks, DTYPES[case.dtype]
        found |= {jit.Request(name, architecture, plan.prelude(num_ranks)) for name in ("count", "barrier")}
        for name, make, operation in (
            ("push", plan.push_plan, abi.Operation.PUSH),
            ("pull", plan.pull_plan, abi.Operation.PULL),
        ):
            shape = Shape(operation, case.hidden, dtype, RowLayout(case.hidden * dtype.itemsize))
            capability = int(architecture.removeprefix("sm_"))
            for mover in {plan.mover_of(shape.rows.row_bytes, "auto", capability), "vector"}:
                constants = make(shape, num_ranks, mover, SMEM_LIMIT).constants
                found.add(jit.Request(name, architecture, plan.prelude(num_ranks, constants)))
    return found


def low_latency_requests(architecture: str) -> set[jit.Request]:
    """The low-latency kernels of every job, for as many ranks as the tests have."""
    found = set()
    for job in JOBS.values():
        case, fp8 = job.case, bool(job.fp8)
        dtype, casts = DTYPES[case.dtype], (fp8, job.options["round_scale"], job.options["use_ue8m0"])
        for num_ranks in (1, 2, 3, 4):
            sizes = (num_ranks, job.max_tokens, case.hidden, dtype, case.num_topk, case.num_experts)
            for operation, shape in ((DISPATCH, LowLatencyShape(*sizes, *casts)), (COMBINE, LowLatencyShape(*sizes))):
                constants = plan.low_latency_plan(operation, shape, SMEM_LIMIT).constants
                found.add(jit.Request(operation.verb, architecture, plan.prelude(num_ranks, constants)))
    return found


CUPY_KERNELS = (
    lambda a: a >> a,
    lambda a: a + a,
    lambda a: a * a,
    lambda a: a % 4,
    lambda a: a * 6,
    lambda a: a & 63,
    lambda a: a.astype("f4"),
    lambda a: a.astype("f2"),
    lambda a: a.astype("f4").astype("f2"),
    lambda a: a.astype("f4") * a.astype("f4"),
    lambda a: (a.astype("u4") >> 16).astype("u2"),
    lambda a: (a.view("u4") != a.view("u4")).any(),
    lambda a: a.view("u2") != a.view("u2"),
    lambda a: a.view("u1") != a.view("u1"),
    lambda a: a.view("u8") != a.view("u8"),
    lambda a: a.view("bool").__ior__(a.view("bool")),
    lambda a: type(a)(a.shape, "f4").fill(0),
    lambda a: type(a)(a.shape, "i4").fill(0),
)


def load(number: int) -> None:
    """Has CuPy compile one of these into its own cache."""
    import cupy

    CUPY_KERNELS[number](cupy.arange(4, dtype="i4"))


if __name__ == "__main__":
    wanted = set().union(*(of(name) for name in warmup.gpu_architectures() for of in (requests, low_latency_requests)))
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:  # a forked process could not use CUDA
        loading = pool.map(load, range(len(CUPY_KERNELS)))
        print(f"{len(list(pool.map(jit.build, wanted)))} kernels in the cache, {len(list(loading))} of CuPy's")
