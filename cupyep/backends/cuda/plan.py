"""The shape of a kernel: how it moves rows of one size, as compile-time constants, threads and shared memory.

`smem_limit` is what one CTA may have, in bytes: 227 KB on compute capability 9.0 and 10.0, 99 KB on 12.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cupyep import abi, checks, layout, low_latency_abi
from cupyep.backends.low_latency_shape import EXPERT_BITS, LowLatencyShape
from cupyep.backends.shapes import Shape
from cupyep.structs import emit

_STATIC_BYTES = 1024  # what the kernels declare themselves, beside the tables by rank
MOVERS = {"vector": 0, "tma": 1}


@dataclass(frozen=True)
class Plan:
    """A kernel's `cfg::` constants, threads per CTA and dynamic shared memory in bytes."""

    constants: dict[str, int]
    num_threads: int
    smem_bytes: int


def prelude(num_ranks: int, constants: dict[str, int] | None = None) -> str:
    """What every kernel source starts with: layout, enumerators, structs, and `constants` of this kernel."""
    control, host = layout.ControlLayout(num_ranks), layout.HostLayout(num_ranks)
    everything = {**control.constants(), **host.constants(), **abi.enum_constants(), **(constants or {})}
    structs = (*abi.KERNEL_STRUCTS, *low_latency_abi.KERNEL_STRUCTS)
    return emit(everything, (layout.CHANNEL_STATE, layout.HOST_RECORD, *structs))


def mover_of(row_bytes: int, requested: str, compute_capability: int) -> str:
    """ "tma" where the GPU has it and rows allow it (a multiple of 16 bytes), else "vector"."""
    able = compute_capability >= 90 and row_bytes % 16 == 0
    if requested == "tma" and compute_capability < 90:
        raise ValueError(f"CUPYEP_MOVER: tma needs compute capability 9.0, found {compute_capability / 10}")
    return "tma" if able and requested != "vector" else "vector"


def push_plan(shape: Shape, num_ranks: int, mover: str, smem_limit: int) -> Plan:
    """PUSH: warps x stages x slot bytes of ring; a slot holds a row, or a chunk of a long one.

    Four warps of three stages fill an SM's store port with rows of 14 KB; short rows need more of them in flight, and
    the shortest come faster than one warp stores their side rows.
    """
    row_bytes = shape.rows.row_bytes
    available = smem_limit - _STATIC_BYTES - 40 * num_ranks
    short = row_bytes <= 8192 and 8 * 3 * (layout.align(row_bytes) + 8) <= available
    num_warps, num_stages = (8, 3) if short else (4, 3)
    num_chunks = math.ceil(row_bytes / (available // 12 // 128 * 128 - 128))
    chunk_bytes = row_bytes if num_chunks == 1 else layout.align(math.ceil(row_bytes / num_chunks))
    if mover == "vector":
        num_warps, num_chunks, chunk_bytes = 16, 1, row_bytes
    num_side_warps = 2 if row_bytes <= 4096 else 1
    num_threads = (num_warps + num_side_warps) * 32
    slot_bytes = layout.align(chunk_bytes)
    constants = {
        "kMoverTma": MOVERS["tma"],
        "kMover": MOVERS[mover],
        "kRowBytes": row_bytes,
        "kVecBytes": math.gcd(row_bytes, 16),
        "kNumChunks": num_chunks,
        "kChunkBytes": chunk_bytes,
        "kSlotBytes": slot_bytes,
        "kWarps": num_warps,
        "kStages": num_stages,
        "kSideWarps": num_side_warps,
        "kPushThreads": num_threads,
        "kScaleBytes": shape.rows.scale_bytes,
        "kScaleVecBytes": math.gcd(shape.rows.scale_bytes, 16),
    }
    smem = num_warps * num_stages * (slot_bytes + 8) if mover == "tma" else 0
    return Plan(constants, num_threads, smem)


def pull_plan(shape: Shape, num_ranks: int, mover: str, smem_limit: int) -> Plan:
    """PULL: groups of consumer warps, each with a loader and a ring of slots.

    Adding is bound by the SM's issue slots, so threads take many vectors (seven: four warps take rows of 14,336 bytes),
    all of them as many if that can be, and there are as many groups as registers allow. Longer rows are split by
    columns. A slot takes all rows of a token, or four, where rings of three such slots leave room for enough groups;
    else each row has a slot of its own.
    """
    row_bytes = shape.rows.row_bytes
    num_chunks = _exact(math.ceil(row_bytes / 14336), row_bytes, 512)
    chunk_bytes = row_bytes if num_chunks == 1 else layout.align(math.ceil(row_bytes / num_chunks))
    slot_bytes = layout.align(chunk_bytes)
    num_vecs = math.ceil(chunk_bytes / 16)
    consumer_warps = _exact(math.ceil(num_vecs / (32 * 7)), num_vecs, 32)
    vecs_per_thread = math.ceil(num_vecs / (32 * consumer_warps))
    available = smem_limit - _STATIC_BYTES - 16 * num_ranks
    rows_per_slot, most_groups = min(num_ranks, 4), max(1, min(8, 15 // (consumer_warps + 1)))
    groups = min(most_groups, available // (3 * (rows_per_slot * slot_bytes + 20)))
    if groups * consumer_warps < 7:
        rows_per_slot, groups = 1, most_groups
    stage_bytes = rows_per_slot * slot_bytes + 20
    slots = min(16, available // groups // stage_bytes)
    num_threads = (groups * (consumer_warps + 1) + 1) * 32
    smem = groups * slots * stage_bytes
    if mover == "vector":
        num_chunks, chunk_bytes, num_threads, smem = 1, row_bytes, 17 * 32, 0
    constants = {
        "kMoverTma": MOVERS["tma"],
        "kMover": MOVERS[mover],
        "kRowBytes": row_bytes,
        "kVecBytes": math.gcd(row_bytes, 16),
        "kDType": int(checks.DTYPES[shape.dtype]),
        "kNumChunks": num_chunks,
        "kChunkBytes": chunk_bytes,
        "kSlotBytes": slot_bytes,
        "kGroups": groups,
        "kConsumerWarps": consumer_warps,
        "kVecsPerThread": vecs_per_thread,
        "kSlots": slots,
        "kRowsPerSlot": rows_per_slot,
        "kPullThreads": num_threads,
    }
    return Plan(constants, num_threads, smem)


def _exact(fewest: int, size: int, unit: int) -> int:
    """The first number from `fewest` to its double that divides `size` into whole units, else `fewest`."""
    return next((number for number in range(fewest, 2 * fewest + 1) if size % (number * unit) == 0), fewest)


def arrange_plans() -> dict[str, Plan]:
    """The two kernels of ARRANGE: a histogram of the local experts for each CTA, then one for each warp."""
    warps, histogram_bytes = 8, 4 * abi.MAX_LOCAL_EXPERTS
    return {
        "arrange_count": Plan({}, warps * 32, histogram_bytes),
        "arrange_place": Plan({}, warps * 32, warps * histogram_bytes),
    }


def expand_plan(row_bytes: int) -> Plan:
    """EXPAND: the vector mover's walk over rows of `row_bytes`. Some constants only please the header's other mover."""
    constants = {
        "kMoverTma": MOVERS["tma"],
        "kMover": MOVERS["vector"],
        "kRowBytes": row_bytes,
        "kVecBytes": math.gcd(row_bytes, 16),
        "kNumChunks": 1,
        "kChunkBytes": row_bytes,
        "kSlotBytes": layout.align(row_bytes),
        "kWarps": 8,
        "kStages": 2,
    }
    return Plan(constants, 8 * 32, 0)


def reduce_plan(hidden: int, local_dtype: Any, wire_dtype: Any) -> Plan:
    """REDUCE: vectors of as many elements as fit into 16 bytes of either type."""
    num_elements = math.gcd(hidden, 16 // max(local_dtype.itemsize, wire_dtype.itemsize))
    constants = {
        "kDType": int(checks.DTYPES[local_dtype]),
        "kWireDType": int(checks.DTYPES[wire_dtype]),
        "kVecBytes": num_elements * local_dtype.itemsize,
        "kHidden": hidden,
    }
    return Plan(constants, 256, 0)


def low_latency_static_bytes(num_ranks: int) -> int:
    """The most shared memory that LOW_LATENCY_* declare themselves."""
    return _STATIC_BYTES + 16 * num_ranks


def low_latency_plan(
    operation: abi.Operation, shape: LowLatencyShape, smem_limit: int, *, num_warps: int = 16, num_vecs: int = 2
) -> Plan:
    """LOW_LATENCY_*: warps that each take shares of rows; many small shares, as a batch has few rows.

    A share is `num_vecs` vectors for each lane, and as many groups of 16 values where rows are cast. Two CTAs must fit
    on an SM: a dispatch and a combine may be under way together on all of them, each waiting for its peers. So neither
    takes more than half of the registers, and a combine, whose warps have rings of up to four shares in shared memory,
    not more than half of that, nor more than the dispatch of its shape leaves (a ring has one share at least).
    """
    num_topk, num_tokens = shape.num_topk, shape.max_tokens
    row_bytes = shape.hidden * shape.dtype.itemsize
    vec_bytes, wire_vec_bytes = math.gcd(row_bytes, 16), math.gcd(shape.wire_bytes, 16)
    vecs = math.ceil(shape.wire_bytes / (32 * wire_vec_bytes))  # for each lane to move a row
    slot_bytes = layout.align(num_vecs * 32 * vec_bytes + 20, max(vec_bytes, 8))
    ids_bytes = 4 * (shape.num_experts + shape.num_ranks) * math.ceil(num_tokens / 32) + 2 * num_tokens * num_topk
    both = smem_limit - 1024 - 2 * low_latency_static_bytes(shape.num_ranks)  # an SM has 1 KB more; a CTA costs 1
    available = min(both // 2, both - ids_bytes)
    num_slots = max(1, min(4, available // (num_warps * slot_bytes)))
    constants = {
        "kDType": int(checks.DTYPES[shape.dtype]),
        "kHidden": shape.hidden,
        "kRowBytes": row_bytes,
        "kVecBytes": vec_bytes,
        "kWireBytes": shape.wire_bytes,
        "kWireVecBytes": wire_vec_bytes,
        "kFp8": int(shape.fp8),
        "kRoundScale": int(shape.round_scale),
        "kUe8m0": int(shape.ue8m0),
        "kScaleWords": shape.num_scale_words,
        "kExpertBits": EXPERT_BITS,
        "kVecsPerLane": num_vecs,
        "kParts": math.ceil(vecs / num_vecs),
        "kSlots": num_slots,
        "kSlotBytes": slot_bytes,
        "kThreads": num_warps * 32,
    }
    if operation == abi.Operation.LOW_LATENCY_DISPATCH:  # Ids; the receive half takes fewer
        return Plan(constants, num_warps * 32, ids_bytes)
    return Plan(constants, num_warps * 32, num_warps * num_slots * slot_bytes)
