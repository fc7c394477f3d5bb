"""Structs and constants that Python and CUDA share: written once here, emitted as C.

A Struct gives both a NumPy dtype, from which the host fills memory and kernel arguments, and a C declaration whose
static_asserts fix its size and every offset. Constants go into `namespace cfg` of the generated prelude.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

_TYPES = {  # our name -> (NumPy, C)
    "u8": ("u1", "unsigned char"),
    "u32": ("u4", "unsigned int"),
    "i32": ("i4", "int"),
    "u64": ("u8", "unsigned long long"),
    "i64": ("i8", "long long"),
    "f32": ("f4", "float"),
    "ptr": ("u8", "unsigned long long"),  # device addresses travel as integers
}


class Struct:
    """A C struct: `Struct("Post", epoch="u32", rows_offset="u64", words=("u32", 4))`, laid out by C's rules.

    Attributes: name; dtype (NumPy, aligned, with trailing padding); fields (name -> type, (type, length) or Struct).
    """

    def __init__(self, name: str, **fields: str | tuple[str, int] | Struct) -> None:
        self.name = name
        self.fields = fields
        self.dtype = np.dtype([(key, *self._numpy(kind)) for key, kind in fields.items()], align=True)

    @staticmethod
    def _numpy(kind: str | tuple[str, int] | Struct) -> tuple:
        if isinstance(kind, Struct):
            return (kind.dtype,)
        return (_TYPES[kind][0],) if isinstance(kind, str) else (_TYPES[kind[0]][0], (kind[1],))

    @staticmethod
    def _c(key: str, kind: str | tuple[str, int] | Struct) -> str:
        if isinstance(kind, Struct):
            return f"{kind.name} {key}"
        return f"{_TYPES[kind][1]} {key}" if isinstance(kind, str) else f"{_TYPES[kind[0]][1]} {key}[{kind[1]}]"

    def declaration(self) -> str:
        """The struct in C, with static_asserts on its size and on the offset of every field."""
        lines = [f"struct {self.name} {{", *(f"  {self._c(key, kind)};" for key, kind in self.fields.items()), "};"]
        lines.append(f"static_assert(sizeof({self.name}) == {self.dtype.itemsize});")
        assert self.dtype.fields is not None
        for key, (_, offset, *_) in self.dtype.fields.items():  # NVRTC has no offsetof; __INTADDR__ is its constant
            lines.append(f"static_assert(__INTADDR__(&(static_cast<{self.name}*>(nullptr)->{key})) == {offset});")
        return "\n".join(lines)

    def __call__(self, **values: object) -> np.ndarray:
        """One record of this struct (a 0-d structured array), zero where no value is given."""
        record = np.zeros((), self.dtype)
        for key, value in values.items():
            record[key] = value
        return record


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
            "gave other arguments (shape, types, num_topk, num_experts or options)",
        )[self - 1]


class DType(IntEnum):
    """Element types that combine can add."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3


class Flag(IntEnum):
    """Bits of a signature."""

    WEIGHTS = 1
    IDX64 = 2


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
SIGNATURE_FIELDS = ("operation", "dtype", "row_bytes", "num_topk", "num_experts", "handle_id", "flags")

# One rank's word to one peer about one operation. `epoch` is stored last, with release, and makes the rest valid.
POST = Struct(
    "Post",
    **dict.fromkeys(SIGNATURE_FIELDS, "u32"),
    status="u32",
    num_tokens="u32",
    capacity="u32",  # capacity: rows that the block at rows_offset holds
    epoch="u32",
    pad="u32",
    rows_offset="u64",
    idx_offset="u64",
    weights_offset="u64",
    scales_offset="u64",  # bytes from the arena's start
    pad2=("u64", 2),
)

# What every kernel is told of its group. peers: device array of the ranks' arena addresses; host: pinned HostRecords.
SYNC = Struct("Sync", peers="ptr", host="ptr", timeout_ns="u64", rank="u32", channel="u32")

# Device words that COUNT leaves for PUSH and PULL, followed by base[num_ranks]: our first row at each destination.
ROUTING = Struct("Routing", skip="u32", pad="u32")

# The kernels' parameters. A ptr of 0 means: does not travel. order: [num_tokens][num_ranks] i32, a token's place among
# this rank's tokens for that destination, or -1.
COUNT_PARAMS = Struct(
    "CountParams", sync=SYNC, post=POST, topk_idx="ptr", order="ptr", routing="ptr", max_tokens="u32", pad="u32"
)
PUSH_PARAMS = Struct(
    "PushParams",
    sync=SYNC,
    post=POST,
    x="ptr",
    topk_idx="ptr",
    topk_weights="ptr",
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
    order="ptr",
    routing="ptr",
    num_tokens="u32",
    pad="u32",
)
BARRIER_PARAMS = Struct("BarrierParams", sync=SYNC, post=POST)
ABORT_PARAMS = Struct("AbortParams", sync=SYNC, word="u64")

# What both low-latency kernels are told (docs/low-latency.md). Offsets are bytes: of `region` from the arena's start,
# of scales and side rows (a dispatch's meta words, a combine's weights) from there. masks: [num_ranks] u32, ranks left
# out; fates: [num_ranks] u64 of this channel.
LOW_LATENCY = Struct(
    "LowLatency",
    **dict.fromkeys(("region", "scales_offset", "side_offset"), "u64"),
    **dict.fromkeys(("masks", "fates"), "ptr"),
    **dict.fromkeys(("phases", "signature", "max_tokens", "num_tokens", "num_topk", "num_local_experts"), "u32"),
    **dict.fromkeys(("idx64", "masks_on_timeout"), "u32"),
)
# What a dispatch leaves at its own rank for the combine of its handle; [num_ranks * max_tokens] rows in all but the
# first two, which are [num_tokens][words of 32 ranks] and [num_ranks].
LOW_LATENCY_TABLES = Struct(
    "LowLatencyTables", **dict.fromkeys(("token_ranks", "num_rows", "tokens", "positions", "weights"), "ptr")
)
LOW_LATENCY_DISPATCH_PARAMS = Struct(
    "LowLatencyDispatchParams",
    sync=SYNC,
    ll=LOW_LATENCY,
    tables=LOW_LATENCY_TABLES,
    **dict.fromkeys(("x", "topk_idx", "topk_weights"), "ptr"),
    **dict.fromkeys(("recv_x", "recv_scales", "recv_count", "src_info", "layout_range", "stats"), "ptr"),
)
LOW_LATENCY_COMBINE_PARAMS = Struct(
    "LowLatencyCombineParams",
    sync=SYNC,
    ll=LOW_LATENCY,
    tables=LOW_LATENCY_TABLES,
    **dict.fromkeys(("x", "topk_weights", "out"), "ptr"),
)
KERNEL_STRUCTS = (
    *(POST, SYNC, ROUTING, COUNT_PARAMS, PUSH_PARAMS, PULL_PARAMS, BARRIER_PARAMS, ABORT_PARAMS),
    *(LOW_LATENCY, LOW_LATENCY_TABLES, LOW_LATENCY_DISPATCH_PARAMS, LOW_LATENCY_COMBINE_PARAMS),
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
        "Flag": Flag,
        "Verdict": Verdict,
        "Phase": Phase,
        "Arrival": Arrival,
    }
    return {f"k{family}{camel(member.name)}": int(member) for family, enum in families.items() for member in enum}


def camel(name: str) -> str:
    """snake_case or SCREAMING_CASE as CamelCase."""
    return "".join(part.capitalize() for part in name.split("_"))


def emit(constants: dict[str, int], structs: tuple[Struct, ...]) -> str:
    """The prelude of a kernel: `namespace cfg { constexpr int kNumRanks = 8; ... }` and the structs.

    Values from 2^31 on become `unsigned long long`; all others are `int`.
    """
    kinds = {name: "int" if -(2**31) <= value < 2**31 else "unsigned long long" for name, value in constants.items()}
    lines = ["namespace cfg {"]
    lines += [
        f"constexpr {kinds[name]} {name} = {value}{'' if kinds[name] == 'int' else 'ULL'};"
        for name, value in constants.items()
    ]
    lines.append("}  // namespace cfg")
    return "\n".join([*lines, *(struct.declaration() for struct in structs), ""])
