"""Bulk copies and reductions of whole arrays and of rows, with a chosen number of SMs.

A kernel of `num_sms` CTAs moves rows through shared memory by TMA: cuda_src/kernels/tma_copy.cu. Here are the checks,
and the plan: how rows are cut, and which way they go.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupyep import abi, env, layout
from cupyep.backends.cuda import jit, plan
from cupyep.tma import arrays
from cupyep.tma import launch as launches
from cupyep.tma.launch import Launch, Target

DEFAULT_NUM_SMS = 8
SLOT_STATE_BYTES = 32  # of an mbarrier and what is in a slot
MAX_UNITS = 2**31 - 1
ADD = {
    np.dtype(np.float32): abi.Add.FLOAT32,
    np.dtype(np.float16): abi.Add.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): abi.Add.BFLOAT16,
    np.dtype(np.int32): abi.Add.INT32,
}
_ADDING = threading.Lock()  # NumPy loads, adds and stores in three steps, so threads that add take turns
HINTS = {"none": abi.Hint.NONE, "evict_first": abi.Hint.EVICT_FIRST, "evict_last": abi.Hint.EVICT_LAST}


@dataclass(frozen=True)
class Ring:
    """Of one CTA: independent warps, slots of each, bytes of a slot."""

    num_warps: int
    num_stages: int
    slot_bytes: int

    @property
    def smem_bytes(self) -> int:
        return self.num_warps * self.num_stages * (self.slot_bytes + SLOT_STATE_BYTES)

    def constants(self) -> dict[str, int]:
        """What copy_ring.cuh wants to know."""
        return {
            "kWarps": self.num_warps,
            "kStages": self.num_stages,
            "kSlotBytes": self.slot_bytes,
            "kSlotStateBytes": SLOT_STATE_BYTES,
        }

    def longest_unit(self, num_sms: int) -> int:
        """Bytes of the longest unit to put into a slot: all of it, or less where too many bytes would be under way."""
        share = MOST_UNDER_WAY // (num_sms * self.num_warps * self.num_stages)
        return min(self.slot_bytes, max(SHORTEST_UNIT, share // layout.ALIGNMENT * layout.ALIGNMENT))

    def within(self, smem_limit: int) -> Ring:
        """With half as many warps, again and again, until it fits."""
        if self.smem_bytes <= smem_limit or self.num_warps == 1:
            return self
        return Ring(self.num_warps // 2, self.num_stages, self.slot_bytes).within(smem_limit)


# Four warps of three slots of 14 KB fill an SM's store port; short rows need more of them in flight.
RINGS = (Ring(16, 12, 1024), Ring(8, 12, 2048), Ring(8, 6, 4096), Ring(8, 3, 8192), Ring(4, 3, 14336))
# With many SMs memory is the limit, not the store ports. It needs its rate times its latency of bytes under way, a few
# MB; many more only queue up, and come to it from farther apart. Units get no shorter for it than SHORTEST_UNIT.
MOST_UNDER_WAY, SHORTEST_UNIT = 8 << 20, 4096
VECTORS = Ring(32, 1, 8192)  # the vector path: warps of a CTA, and the bytes of a unit


@dataclass(frozen=True)
class Rows:
    """What is moved: rows of row_bytes; addresses, and pitches in bytes. src_rows, dst_rows: of indices, or 0."""

    dst: int
    src: int
    row_bytes: int
    num_rows: int = 1
    dst_pitch: int = 0
    src_pitch: int = 0
    dst_rows: int = 0
    src_rows: int = 0
    num_dst_rows: int = 1
    num_src_rows: int = 1
    idx_bytes: int = 8
    head_bytes: int = 0
    tail_bytes: int = 0

    @property
    def alignment(self) -> int:
        """The largest power of two, up to 16, that divides all addresses and sizes."""
        return math.gcd(self.dst, self.src, self.dst_pitch, self.src_pitch, self.row_bytes, 16)


def run_of_bytes(dst: int, src: int, num_bytes: int) -> Rows:
    """One run as a row that starts and ends where both sides allow the widest vectors, and the two ends beside it."""
    apart = dst - src
    start = 128 if apart % 128 == 0 else math.gcd(apart, 16)  # whole lines where possible
    width = min(start, 16)
    head = min(-src % start, num_bytes)
    body = (num_bytes - head) // width * width
    tail = num_bytes - head - body
    return Rows(dst + head, src + head, body, int(body > 0), head_bytes=head, tail_bytes=tail)


def plan_copy(
    target: Target,
    rows: Rows,
    num_sms: int,
    *,
    add: abi.Add = abi.Add.NONE,
    load_hint: abi.Hint = abi.Hint.NONE,
    store_hint: abi.Hint = abi.Hint.NONE,
    mover: str = "auto",
    ring: Ring | None = None,
) -> Launch:
    """The launch that moves `rows`. mover, ring: instead of the usual ones, to try others."""
    mover = plan.mover_of(rows.alignment, env.mover() if mover == "auto" else mover, target.compute_capability)
    longest = ring.slot_bytes if ring else VECTORS.slot_bytes
    if ring is None and mover == "vector":
        ring = VECTORS
    elif ring is None:
        ring = next((ring for ring in RINGS if ring.slot_bytes >= rows.row_bytes), RINGS[-1])
        ring = ring.within(target.smem_limit)
        longest = ring.longest_unit(num_sms)
    # A unit is as long as may be, but shorter where there are too few of them for all warps.
    share = math.ceil(rows.row_bytes * rows.num_rows / (num_sms * ring.num_warps))
    most = min(longest, max(1024, layout.align(share)))
    chunk_bytes, num_chunks, num_rows = most, 1, 0  # of rows of no bytes: a bulk copy of none does not exist
    if rows.row_bytes:
        chunk_bytes = layout.align(math.ceil(rows.row_bytes / math.ceil(rows.row_bytes / most)))  # all about as long
        num_chunks, num_rows = math.ceil(rows.row_bytes / chunk_bytes), rows.num_rows
    if num_rows * num_chunks > MAX_UNITS:
        raise ValueError(f"src_rows: expected at most {MAX_UNITS:,} pieces of rows, got {num_rows * num_chunks:,}")
    constants = {
        "kMoverTma": plan.MOVERS["tma"],
        "kMover": plan.MOVERS[mover],
        "kVecBytes": rows.alignment,
        "kIdxBytes": rows.idx_bytes,
        "kAdd": add,
        "kLoadHint": load_hint,
        "kStoreHint": store_hint,
        **ring.constants(),
    }
    params = abi.COPY_PARAMS(
        src=rows.src,
        dst=rows.dst,
        src_rows=rows.src_rows,
        dst_rows=rows.dst_rows,
        src_pitch=rows.src_pitch,
        dst_pitch=rows.dst_pitch,
        row_bytes=rows.row_bytes,
        chunk_bytes=chunk_bytes,
        num_chunks=num_chunks,
        num_rows=num_rows,
        num_src_rows=rows.num_src_rows,
        num_dst_rows=rows.num_dst_rows,
        head_bytes=rows.head_bytes,
        tail_bytes=rows.tail_bytes,
    )
    request = jit.Request("tma_copy", target.arch, launches.prelude(constants, abi.COPY_PARAMS))
    smem_bytes = ring.smem_bytes if mover == "tma" else 0
    return Launch(request, "tma_copy", num_sms, ring.num_warps * 32, smem_bytes, (params,))


def copy(
    dst: Any,
    src: Any,
    *,
    num_sms: int = DEFAULT_NUM_SMS,
    stream: Any = None,
    load_hint: str = "none",
    store_hint: str = "none",
) -> Any:
    """Copies `src` to `dst`, within a GPU or to or from a peer's memory, by TMA and with few SMs.

    Args:
        dst, src: C-contiguous arrays of one shape and dtype, any size and alignment, that do not overlap: NumPy, CuPy
            or with __cuda_array_interface__. Either may lie on another GPU or in another rank's arena: see
            Buffer.peer_arrays.
        num_sms: SMs that the copy may take; 8 fill one direction of an NVLink.
        stream: CuPy stream; None: the current one. A peer's data must be ready in its order.
        load_hint, store_hint: "none", "evict_first" (not needed again soon) or "evict_last", for L2; by TMA only.

    Returns: an event with current_stream_wait() and synchronize().
    Raises: TypeError, ValueError naming the argument.
    Sync: on `stream`; the host does not wait. NumPy arrays are copied when it returns.
    Source: PTX ISA, cp.async.bulk. Addresses that differ modulo 16, and GPUs before 9.0, take a vector path.
    """
    launches.check(stream, num_sms)
    dst, src = arrays.pair(dst, src)
    arrays.same_shape(dst, src)
    hints = {name: _hint(name, value) for name, value in (("load_hint", load_hint), ("store_hint", store_hint))}
    for name, array in (("dst", dst), ("src", src)):
        arrays.contiguous(name, array)
    if arrays.is_numpy(dst):
        np.copyto(dst, src)
        return launches.done()
    with launches.on(stream):
        return run(run_of_bytes(arrays.address(dst), arrays.address(src), dst.nbytes), (dst, src), num_sms, **hints)


def reduce_add(dst: Any, src: Any, *, num_sms: int = DEFAULT_NUM_SMS, stream: Any = None) -> Any:
    """Adds `src` to `dst` element by element, by bulk reduction stores: `dst` is never loaded by an SM.

    Each addition is atomic among the adders of one GPU, so several calls, also of several streams, may add to one
    array; the order of float additions is then not defined. float32 subnormals, also of the sum, may become 0. On NumPy
    arrays it is atomic among the threads of one process, call by call, and not among processes.

    Args:
        dst, src: as of copy; float32, float16, bfloat16 or int32. 16-bit sums are rounded to nearest even.
        num_sms, stream: as of copy.

    Returns, Raises, Sync: as copy.
    Source: PTX ISA, cp.reduce.async.bulk; atomics where copy would take its vector path.
    """
    launches.check(stream, num_sms)
    dst, src = arrays.pair(dst, src)
    arrays.same_shape(dst, src)
    if dst.dtype not in ADD:
        raise TypeError(f"dst: expected float32, float16, bfloat16 or int32, got {dst.dtype}")
    for name, array in (("dst", dst), ("src", src)):
        arrays.contiguous(name, array)
    if arrays.is_numpy(dst):
        with _ADDING, np.errstate(over="ignore", invalid="ignore"):  # a sum may be inf or NaN, as on a GPU
            # 24 bits are twice 11 and 2 more: a 16-bit sum that is rounded to them first is the same as rounded once.
            wide = np.int32 if dst.dtype == np.int32 else np.float32
            dst[...] = (dst.astype(wide) + src.astype(wide)).astype(dst.dtype)
        return launches.done()
    rows = run_of_bytes(arrays.address(dst), arrays.address(src), dst.nbytes)
    with launches.on(stream):
        return run(rows, (dst, src), num_sms, add=ADD[dst.dtype])


def _hint(name: str, value: str) -> abi.Hint:
    if value not in tuple(HINTS):
        raise ValueError(f"{name}: expected {', '.join(HINTS)}, got {value!r}")
    return HINTS[value]


def run(rows: Rows, touched: tuple[Any, ...], num_sms: int, **options: Any) -> Any:
    """Moves `rows` on the current GPU, which is let reach the arrays `touched`. Returns the event."""
    target = launches.target()
    num_sms = launches.num_sms(target, num_sms)
    arrays.reach(*touched)
    if rows.num_rows == 0 and rows.head_bytes + rows.tail_bytes == 0:
        num_sms = 1  # nothing to move, but the event is due
    return launches.run(plan_copy(target, rows, num_sms, **options))
