"""The structs and enumerators that Python and CUDA share: written once here, emitted as C by structs.py."""

from __future__ import annotations

from enum import IntEnum

from cupyep.structs import Struct, camel


class Operation(IntEnum):
    """One operation is one kernel, one epoch of its channel and one post to every rank."""

    COUNT = 1
    PUSH = 2
    PULL = 3
    BARRIER = 4
    LOW_LATENCY_DISPATCH = 5
    LOW_LATENCY_COMBINE = 6

    @property
    def verb(self) -> str:
        """The public call that runs this operation, for messages."""
        return {"COUNT": "dispatch", "PUSH": "dispatch", "PULL": "combine"}.get(self.name, self.name.lower())


class Status(IntEnum):
    """What a post says of its sender."""

    READY = 0
    FAILED = 1  # no arena block: needed and free bytes stand in the offsets; nobody moves a row
    REVOKED = 2  # the sender left: its block must not be touched


class Arrival(IntEnum):
    """What a low-latency word tells of; an index of the region "arrivals"."""

    ROWS = 0
    WEIGHTS = 1


class AbortKind(IntEnum):
    """Why the first rank to leave an operation left it."""

    TIMEOUT = 1
    CLOSED = 2
    RAISED = 3
    OVERFLOW = 4  # a sender met a row at or past the block's capacity
    OVERLAP = 5  # two operations of one channel ran at once
    MISMATCH = 6  # of the low-latency mode, which has no posts: a peer's word has another signature

    @property
    def reason(self) -> str:
        return (
            "did not arrive in time",
            "closed its buffer",
            "raised an exception",
            "was sent more rows than its block holds",
            "ran two operations of one channel at once",
            "gave other arguments (shape, types, num_topk, num_experts, topk_weights or none, options or handle)",
        )[self - 1]


class DType(IntEnum):
    """Element types. Combine can add the first three; the others travel as they are."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    UINT8 = 4
    INT8 = 5
    INT32 = 6
    FLOAT8_E4M3FN = 7
    FLOAT8_E5M2 = 8
    FLOAT8_E8M0FNU = 9


class Add(IntEnum):
    """What a store of COPY does to its destination: replace it, or add elements of one type to it."""

    NONE = 0
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    INT32 = 4


class Hint(IntEnum):
    """What L2 is told of the lines that a bulk copy touches."""

    NONE = 0
    EVICT_FIRST = 1
    EVICT_LAST = 2


class Flag(IntEnum):
    """Bits of a signature."""

    WEIGHTS = 1
    IDX64 = 2
    EXPERT_LAYOUT = 4


class Phase(IntEnum):
    """The halves of a low-latency operation, as bits."""

    SEND = 1
    RECEIVE = 2


MAX_RANKS = 256
MAX_TOPK = 32
MAX_LOCAL_EXPERTS = 1024
MAX_EXPERTS = 16384  # the count kernel keeps a histogram of all experts in shared memory


class Verdict(IntEnum):
    """How an operation ended on the device, for the host."""

    DONE = 0
    MISMATCH = 1  # signatures differ: no row moved
    FAILED = 2  # a rank had no arena block: no row moved
    GROW = 3  # COUNT only: a rank has more tokens than agreed; grow, then push
    ABORTED = 4  # see the abort word


# The words that every rank must post alike. They lead the Post struct, in this order.
# handle_id: of the dispatch that is meant; in COUNT, which has none yet, num_worst_tokens.
# scales: bytes of a token's scales * 16 + their DType, or 0.
SIGNATURE_FIELDS = ("operation", "dtype", "row_bytes", "num_topk", "num_experts", "handle_id", "flags", "scales")

# One rank's word to one peer about one operation. `epoch` is stored last, with release, and makes the rest valid.
POST = Struct(
    "Post",
    **dict.fromkeys(SIGNATURE_FIELDS, "u32"),
    status="u32",
    num_tokens="u32",
    capacity="u32",  # capacity: rows that the block at rows_offset holds
    epoch="u32",
    rows_offset="u64",
    idx_offset="u64",
    weights_offset="u64",
    scales_offset="u64",  # bytes from the arena's start
    pad2=("u64", 2),
)

# What every kernel is told of its group. peers: device array of the ranks' arena addresses; host: pinned HostRecords.
SYNC = Struct("Sync", peers="ptr", own="ptr", host="ptr", timeout_ns="u64", rank="u32", channel="u32")

# Device words that COUNT leaves for PUSH and PULL, followed by base[num_ranks]: our first row at each destination.
ROUTING = Struct("Routing", skip="u32", pad="u32")

# The kernels' parameters. A ptr of 0 means: does not travel. order: [num_tokens][num_ranks] i32, a token's place among
# this rank's tokens for that destination, or -1.
# received: [1 + num_local_experts] i32: rows that come to us, listings of each of our experts. expert_stats [experts]
# i32 and wait_stats [num_ranks] i64 grow by these listings, and by the microseconds until each rank's post was here.
COUNT_PARAMS = Struct(
    "CountParams",
    sync=SYNC,
    post=POST,
    topk_idx="ptr",
    order="ptr",
    routing="ptr",
    received="ptr",
    expert_stats="ptr",
    wait_stats="ptr",
    max_tokens="u32",
    pad="u32",
)
PUSH_PARAMS = Struct(
    "PushParams",
    sync=SYNC,
    post=POST,
    x="ptr",
    topk_idx="ptr",
    topk_weights="ptr",
    scales="ptr",
    order="ptr",
    routing="ptr",
    num_tokens="u32",
    num_local_experts="u32",
)
PULL_PARAMS = Struct(
    "PullParams",
    sync=SYNC,
    post=POST,
    out="ptr",
    out_weights="ptr",
    bias=("u64", 2),
    order="ptr",
    routing="ptr",
    num_tokens="u32",
    pad="u32",
)
QUANTIZE_PARAMS = Struct("QuantizeParams", wide="ptr", codes="ptr", scales="ptr", num_tokens="u32", hidden="u32")
# The expert layout. received: as COUNT left it; capacity: received rows that the arrays have room for.
_ROW_MAP = {"row_map": "ptr", "offsets": "ptr", "received": "ptr", "num_topk": "u32", "num_local_experts": "u32"}
ARRANGE_PARAMS = Struct(
    "ArrangeParams", topk_idx="ptr", histograms="ptr", **_ROW_MAP, capacity="u32", idx_bytes="u32", alignment="u32"
)
EXPAND_PARAMS = Struct("ExpandParams", rows="ptr", expanded="ptr", **_ROW_MAP, capacity="u32", zero_gaps="u32")
REDUCE_PARAMS = Struct("ReduceParams", expanded="ptr", rows="ptr", weights="ptr", **_ROW_MAP, capacity="u32")
BARRIER_PARAMS = Struct("BarrierParams", sync=SYNC, post=POST)
ABORT_PARAMS = Struct("AbortParams", sync=SYNC, word="u64")
# The benchmarks' kernels (ceilings.cu): arrays to load from and to store to, units, and loads and stores for each unit.
CEILING_ARRAYS = 8
CEILING_PARAMS = Struct(
    "CeilingParams",
    src=("u64", CEILING_ARRAYS),
    dst=("u64", CEILING_ARRAYS),
    num_units="u32",
    num_src="u32",
    num_dst="u32",
    reads="u32",
    writes="u32",
    pad="u32",
)
# COPY of the TMA toolkit. Rows of row_bytes, each cut into num_chunks; src_rows and dst_rows: [num_rows] indices, or 0
# for 0, 1, 2...; pitches in bytes. Of a run of bytes that is one row, head and tail are its ends that no vector covers.
COPY_PARAMS = Struct(
    "CopyParams",
    src="ptr",
    dst="ptr",
    src_rows="ptr",
    dst_rows="ptr",
    src_pitch="u64",
    dst_pitch="u64",
    row_bytes="u64",
    chunk_bytes="u32",
    num_chunks="u32",
    num_rows="u32",
    num_src_rows="u32",
    num_dst_rows="u32",
    head_bytes="u32",
    tail_bytes="u32",
    pad="u32",
)
# Tiles of tensor maps, innermost axis first. COPY_TENSOR: tiles per axis, and elements from one to the next. LOAD_TILE
# and STORE_TILE: the first element, the tile's own memory, and which pieces of a line change places (0, 1, 3 or 7).
TILES_PARAMS = Struct("TilesParams", num_tiles_along=("u32", 5), box=("i32", 5), num_tiles="u32", tile_bytes="u32")
TILE_PARAMS = Struct(
    "TileParams", tile="ptr", coordinates=("i32", 5), tile_bytes="u32", swizzle_pieces="u32", pad="u32"
)
KERNEL_STRUCTS = (
    POST,
    SYNC,
    ROUTING,
    COUNT_PARAMS,
    PUSH_PARAMS,
    PULL_PARAMS,
    BARRIER_PARAMS,
    ABORT_PARAMS,
    QUANTIZE_PARAMS,
    ARRANGE_PARAMS,
    EXPAND_PARAMS,
    REDUCE_PARAMS,
    CEILING_PARAMS,
)


# The abort word is one u64, so that it is claimed by one compare-and-swap and broadcast by one store; 0 means none.
#   bits 60..63 kind | 56..59 operation | 44..55 rank | 32..43 peer | 0..31 epoch
def pack_abort(kind: AbortKind, operation: Operation, rank: int, peer: int, epoch: int) -> int:
    """The abort word that names `peer` as the culprit that `rank` noticed."""
    return kind << 60 | operation << 56 | rank << 44 | peer << 32 | epoch


def unpack_abort(word: int) -> tuple[AbortKind, Operation, int, int, int]:
    """(kind, operation, rank, peer, epoch) of an abort word other than 0."""
    return (
        AbortKind(word >> 60),
        Operation(word >> 56 & 0xF),
        word >> 44 & 0xFFF,
        word >> 32 & 0xFFF,
        word & 0xFFFFFFFF,
    )


def enum_constants() -> dict[str, int]:
    """Every enumerator above by its C name: kOperationPush, kStatusReady, kAbortTimeout, kDTypeFloat32."""
    families: dict[str, type[IntEnum]] = {
        "Operation": Operation,
        "Status": Status,
        "Abort": AbortKind,
        "DType": DType,
        "Add": Add,
        "Hint": Hint,
        "Flag": Flag,
        "Verdict": Verdict,
        "Phase": Phase,
        "Arrival": Arrival,
    }
    return {f"k{family}{camel(member.name)}": int(member) for family, enum in families.items() for member in enum}
