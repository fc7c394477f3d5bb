"""cp.async in the interpreter: a ring of rows per warp is right under every schedule, and faults in it are reported."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from ptxsim.scheduler import SimulationError
from ptxsim.sources import text
from ptxsim.toolkit import Gpu

SEEDS = range(int(os.environ.get("CUPYEP_PTXSIM_SEEDS", "3")))
FILE = Path(__file__).parent / "cp_async_rings.cu"
COPY, COMMIT = "    ptx::cp_async_cg_16(to, from);\n", "    ptx::cp_async_commit_group();\n"
WAIT, DRAIN = "    ptx::cp_async_wait_group<kAhead>();\n", "  ptx::cp_async_wait_group<0>();\n  sums"
READ = "    const int4 value = ring[warp][turn % kSlots][lane];\n"
WAIT_ALL = 'asm volatile("cp.async.wait_all;" ::: "memory");\n'
MBARRIER = (
    "  const unsigned lane",
    "  __shared__ ptx::u64 meet[kWarps];\n"
    "  if (threadIdx.x % 32 == 0) ptx::mbarrier_init(meet + threadIdx.x / 32, 32);\n"
    "  __syncwarp();\n"
    "  const unsigned lane",
)
ARRIVE = "ptx::mbarrier_arrive(meet + warp); while (!ptx::mbarrier_test_wait_parity(meet + warp, {})) continue;"
Replacements = tuple[tuple[str, str], ...]


def pieces(num_bytes: int) -> Replacements:
    """A lane's 16 bytes as several copies of one group."""
    return ((COPY, f"for (int i = 0; i < 16; i += {num_bytes}) ptx::cp_async_ca<{num_bytes}>(to + i, from + i);\n"),)


def of_neighbour(before: str, after: str = "") -> Replacements:
    """Every lane adds what its neighbour has copied, between two barriers."""
    read = READ.replace("[lane]", "[lane ^ 1]")
    return ((READ, f"{before}\n{read}{after}\n"), ("sums[first * 32 + lane]", "sums[first * 32 + (lane ^ 1)]"))


def sum_rows(seed: int, replacements: Replacements = (), arch: str = "sm_90", num_rows: int = 19) -> bool:
    """Whether the sums are NumPy's. Of 19 rows, the last one of 4 warps has one less."""
    gpu, rows = Gpu(), np.random.default_rng(seed).integers(-99, 99, (num_rows, 128)).astype(np.int32)
    sums = np.array([rows[warp::4].sum(0) for warp in range(4)], np.int32)
    to = gpu.empty(sums.nbytes + 64)
    program = text(FILE, "sum_rows", replacements, arch)
    gpu.run_text(program, (np.uint64(to), np.uint64(gpu.array(rows)), np.uint32(len(rows))), 2, 64, 0, seed)
    assert gpu.is_poison(to + sums.nbytes, 64)
    return np.array_equal(gpu.read(to, sums), sums)


def pass_row(seed: int, replacements: Replacements = ()) -> bool:
    gpu, row = Gpu(), np.random.default_rng(seed).integers(0, 256, 512, np.uint8)
    to = gpu.empty(row.nbytes)
    gpu.run_text(text(FILE, "pass_row", replacements), (np.uint64(to), np.uint64(gpu.array(row))), 1, 32, 0, seed)
    return np.array_equal(gpu.read(to, row), row)


def lend_row(seed: int, replacements: Replacements = ()) -> bool:
    gpu, row = Gpu(), np.array([(lane, 1, 2, 3) for lane in range(32)], np.int32)
    to, words = gpu.empty(row.nbytes), gpu.array(np.zeros(2, np.uint32))
    arguments = (np.uint64(to), np.uint64(gpu.empty(row.nbytes)), np.uint64(words))
    gpu.run_text(text(FILE, "lend_row", replacements), arguments, 2, 32, 0, seed)
    return np.array_equal(gpu.read(to, row), row)


VARIANTS = {
    "16 bytes": (),
    **{f"pieces of {num_bytes}": pieces(num_bytes) for num_bytes in (4, 8, 16)},
    "wait_all, also for what is in no group": ((COMMIT, ""), (WAIT, WAIT_ALL), (DRAIN, WAIT_ALL + "  sums")),
}
UNFINISHED = "whose copy thread .* has not waited for"  # also where lanes that meet at no barrier have parted
FAULTS = {
    "one group too many pending": (((WAIT, WAIT.replace("kAhead", "kAhead + 1")),), UNFINISHED),
    "no wait": (((WAIT, ""),), UNFINISHED),
    "no commit": (((COMMIT, ""),), UNFINISHED),
    "a slot is refilled before it was read": ((("kAhead = kSlots - 1", "kAhead = kSlots"),), UNFINISHED),
    "not drained": (((DRAIN, "  sums"),), "exit with copies to shared memory that were not waited for"),
    "a neighbour reads without a barrier": (of_neighbour(""), f"{UNFINISHED}|has copied, with no barrier after it"),
    "a slot is refilled that a neighbour may still read": (
        of_neighbour("__syncwarp();"),
        f"{UNFINISHED}|has read, with no barrier after it",
    ),
    "two lanes copy to one place": (
        (("[turn % kSlots][lane]);", "[turn % kSlots][lane / 2]);"),),
        "lanes copy to the same shared memory",
    ),
    "a copy across its alignment": (
        ((COPY, COPY.replace("to, from", "to + 8, from")),),
        "misaligned shared access of 16 bytes",
    ),
    "a source across its alignment": (
        ((COPY, COPY.replace("from)", "from + 8)")),),
        "misaligned global access of 16 bytes",
    ),
}
WAIT_0, FENCE = "  ptx::cp_async_wait_group<0>();\n", "  ptx::fence_proxy_async_shared_cta();\n"
PASS_FAULTS = {
    "before the wait": (((WAIT_0 + FENCE, FENCE), ("  }\n}\n\n#endif", f"  }}\n{WAIT_0}}}\n\n#endif")), UNFINISHED),
    "without a proxy fence": (((FENCE, ""),), r"without a proxy fence \(H2\)"),
    "with a proxy fence before the wait": (((WAIT_0 + FENCE, FENCE + WAIT_0),), r"without a proxy fence \(H2\)"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_sums_of_rows(variant: str, seed: int) -> None:
    assert sum_rows(seed, VARIANTS[variant])


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_of_rows_before_hopper(seed: int) -> None:
    assert sum_rows(seed, arch="sm_80")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("barrier", ["__syncwarp();", "__syncthreads();", "mbarrier"])
def test_sums_of_what_neighbours_copied(barrier: str, seed: int) -> None:
    pair = (ARRIVE.format(0), ARRIVE.format(1)) if barrier == "mbarrier" else (barrier, barrier)
    assert sum_rows(seed, (*of_neighbour(*pair), MBARRIER), num_rows=20)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported(fault: str, seed: int) -> None:
    replacements, message = FAULTS[fault]
    with pytest.raises(SimulationError, match=message):
        sum_rows(seed, replacements)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_source_that_changes_before_the_wait_is_seen(seed: int) -> None:
    assert not sum_rows(seed, ((COMMIT, f"    row[lane].x += 1;\n{COMMIT}"),))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bulk_store_takes_a_row_that_was_copied(seed: int) -> None:
    assert pass_row(seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", PASS_FAULTS)
def test_a_bulk_store_too_early_is_reported(fault: str, seed: int) -> None:
    replacements, message = PASS_FAULTS[fault]
    with pytest.raises(SimulationError, match=message):
        pass_row(seed, replacements)


LEND_AWAIT = "  while (ptx::ld_acquire_sys(words) == 0) continue;\n"
LEND_COPY = "  ptx::cp_async_cg_16(slot + lane, row + lane);\n  ptx::cp_async_commit_group();\n"
LEND_TELL = "  __syncwarp();\n  if (lane == 0) ptx::st_release_sys(words + 1, 1);\n"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_of_another_cta(seed: int) -> None:
    assert lend_row(seed)


@pytest.mark.parametrize(
    "replacement",
    [
        pytest.param((LEND_AWAIT + LEND_COPY, LEND_COPY + LEND_AWAIT), id="copied before the row is there"),
        pytest.param((WAIT_0 + LEND_TELL, LEND_TELL + WAIT_0), id="given back before it has been read"),
    ],
)
def test_a_row_of_another_cta_at_the_wrong_time_is_seen(replacement: tuple[str, str]) -> None:
    assert not all(lend_row(seed, (replacement,)) for seed in range(12))
