"""What Python and CUDA share: struct offsets, constants, the abort word, and where things lie in an arena."""

from __future__ import annotations

import ctypes
import re
from itertools import pairwise

import numpy as np
import pytest
from compile_helpers import needs_nvrtc
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyep import abi, layout, structs
from cupyep.backends.cuda import jit
from cupyep.errors import CompileError
from cupyep.structs import Struct, emit

STRUCTS = [value for module in (abi, layout) for value in vars(module).values() if isinstance(value, Struct)]
ADVERSARIAL = [
    Struct("Single", a="u8"),
    Struct("TailPadding", a="u64", b="u8"),
    Struct("HolesEverywhere", a="u8", b="u64", c="u8", d="u32", e="u8", f="f32", g="u8", h="i64", i="u8"),
    Struct("OddArrays", a=("u8", 3), b=("u32", 3), c=("u8", 1), d=("u64", 1), e=("u8", 5), f="ptr"),
    Struct("ArrayOfOne", a=("i32", 1), b="ptr"),
    Struct("Nested", a="u8", inner=Struct("Inner", x="u8", y="u64", z="u8"), b="u8", c="u32"),
]
types = st.sampled_from(sorted(structs._TYPES))
fields = st.lists(st.one_of(types, st.tuples(types, st.integers(1, 9))), min_size=1, max_size=12)


def with_inner(struct: Struct) -> tuple[Struct, ...]:
    """`struct` after the structs that its fields are made of."""
    inner = [with_inner(kind) for kind in struct.fields.values() if isinstance(kind, Struct)]
    return (*dict.fromkeys(part for parts in inner for part in parts), struct)


def compile_prelude(prelude: str, more: str = "") -> None:
    jit.compile_source("abi.cu", f"{prelude}\n{more}\n", "sm_90")


def asserted_values(constants: dict[str, int]) -> str:
    """C text that compiles only when every constant has its value, in 64 bits and without a sign change."""
    return "\n".join(
        f"static_assert(cfg::{name} == {value}{'ULL' if value >= 2**31 else 'LL'});"
        for name, value in constants.items()
    )


@needs_nvrtc
@pytest.mark.parametrize("struct", [*STRUCTS, *ADVERSARIAL], ids=lambda struct: struct.name)
def test_c_and_numpy_agree_on_a_struct(struct: Struct) -> None:
    compile_prelude(emit({}, with_inner(struct)))


@pytest.mark.parametrize("struct", [*STRUCTS, *ADVERSARIAL], ids=lambda struct: struct.name)
def test_ctypes_and_numpy_agree_on_a_struct(struct: Struct) -> None:
    assert ctypes.sizeof(struct.record) == struct.dtype.itemsize
    assert struct.dtype.fields is not None
    for name, (dtype, offset, *_) in struct.dtype.fields.items():
        field = getattr(struct.record, name)
        assert (field.offset, field.size) == (offset, dtype.itemsize), name
    with pytest.raises(AttributeError):
        struct.record().no_such_field = 1


@needs_nvrtc
@settings(max_examples=15, deadline=None)
@given(st.lists(fields, min_size=1, max_size=20))
def test_c_and_numpy_agree_on_any_struct(structs: list) -> None:
    made = [Struct(f"S{i}", **{f"f{j}": kind for j, kind in enumerate(kinds)}) for i, kinds in enumerate(structs)]
    compile_prelude(emit({}, tuple(made)))


@needs_nvrtc
@pytest.mark.parametrize("number", range(5))
def test_a_wrong_size_or_offset_does_not_compile(number: int) -> None:
    text = Struct("Shared", a="u8", b="u64", c="u8", d="i64").declaration()
    compile_prelude(text)
    claims = list(re.finditer(r"== (\d+)\);", text))
    assert [int(claim[1]) for claim in claims] == [32, 0, 8, 16, 24]  # sizeof, then a, b, c, d
    wrong = text[: claims[number].start(1)] + str(int(claims[number][1]) + 1) + text[claims[number].end(1) :]
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_prelude(wrong)


@needs_nvrtc
@pytest.mark.parametrize(
    "change",
    [
        ("unsigned char a;", "unsigned char a[9];"),
        ("unsigned char c;", ""),
        ("char c;\n  long long d;", "char c, e[8];\n  long long d;"),
    ],
)
def test_a_struct_that_drifts_on_the_c_side_does_not_compile(change: tuple[str, str]) -> None:
    text = Struct("Shared", a="u8", b="u64", c="u8", d="i64").declaration()
    assert change[0] in text
    with pytest.raises(CompileError, match=r"static assertion failed|has no member"):
        compile_prelude(text.replace(*change))


@needs_nvrtc
def test_constants_keep_their_values() -> None:
    edges = {f"kEdge{i}": value for i, value in enumerate((0, -1, -(2**31), 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1))}
    compile_prelude(
        emit(edges, ()),
        asserted_values({k: v for k, v in edges.items() if v >= 0})
        + "\nstatic_assert(cfg::kEdge1 == -1 && cfg::kEdge2 == -2147483647 - 1);",
    )
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_prelude(emit({"kSeven": 7}, ()), "static_assert(cfg::kSeven == 8);")


@needs_nvrtc
@pytest.mark.parametrize("num_ranks", [1, 8, abi.MAX_RANKS])
def test_the_prelude_of_a_job_compiles(num_ranks: int) -> None:
    enums, places = abi.enum_constants(), layout.ControlLayout(num_ranks).constants()
    assert not enums.keys() & places.keys()
    compile_prelude(emit(enums | places, tuple(STRUCTS)), asserted_values(enums | places))


def test_a_record_holds_what_it_was_given() -> None:
    record = Struct("Record", a="u8", b="u64", c=("u32", 3))(b=2**64 - 1, c=[1, 2, 3])
    assert (record["a"], record["b"], record["c"].tolist()) == (0, 2**64 - 1, [1, 2, 3])
    with pytest.raises(ValueError):
        abi.POST(no_such_field=1)


def test_a_post_starts_with_its_signature() -> None:
    assert (
        abi.POST.dtype.names is not None and abi.POST.dtype.names[: len(abi.SIGNATURE_FIELDS)] == abi.SIGNATURE_FIELDS
    )
    assert abi.POST.dtype.itemsize % 16 == 0  # 128-bit stores


@given(
    st.sampled_from(abi.AbortKind),
    st.sampled_from(abi.Operation),
    st.integers(0, abi.MAX_RANKS - 1),
    st.integers(0, abi.MAX_RANKS - 1),
    st.integers(0, 2**32 - 1),
)
def test_the_abort_word_gives_back_its_parts(
    kind: abi.AbortKind, operation: abi.Operation, rank: int, peer: int, epoch: int
) -> None:
    word = abi.pack_abort(kind, operation, rank, peer, epoch)
    assert 0 < word < 2**64
    assert abi.unpack_abort(word) == (kind, operation, rank, peer, epoch)
    assert int(np.uint64(word)) == word


def regions_of(control: layout.ControlLayout) -> list[layout.Region]:
    names = ("state", "posts", "done", "arrivals", "counts")
    return [control.abort, *(control.region(channel, name) for channel in layout.Channel for name in names)]


@pytest.mark.parametrize("num_ranks", [*range(1, 65), abi.MAX_RANKS])
def test_regions_are_aligned_and_do_not_overlap(num_ranks: int) -> None:
    control = layout.ControlLayout(num_ranks)
    regions = sorted(regions_of(control), key=lambda region: region.offset)
    for region, following in pairwise(regions):
        assert region.offset + region.num_bytes <= following.offset, (region, following)
    assert regions[-1].offset + regions[-1].num_bytes <= control.num_bytes
    assert all(region.offset % layout.ALIGNMENT == 0 for region in regions)
    assert control.num_bytes % layout.ALIGNMENT == 0
    counts = control.region(layout.Channel.NORMAL, "counts")
    assert counts.shape[:2] == (2, num_ranks) and counts.shape[2] >= num_ranks + abi.MAX_LOCAL_EXPERTS


@pytest.mark.parametrize("num_ranks", [1, 3, 64])
def test_views_alias_nothing(num_ranks: int) -> None:
    control = layout.ControlLayout(num_ranks)
    memory, regions = np.zeros(control.num_bytes, np.uint8), regions_of(control)
    for i, region in enumerate(regions, 1):
        view = control.view(memory, region)
        assert view.shape == region.shape and view.dtype == region.dtype
        view[...] = np.frombuffer(bytes([i]) * region.dtype.itemsize, region.dtype)[0]
    for i, region in enumerate(regions, 1):
        assert set(control.view(memory, region).tobytes()) == {i}, region.name
    assert np.count_nonzero(memory) == sum(region.num_bytes for region in regions)


def test_epoch_and_busy_are_one_word() -> None:
    """To the kernels: the epoch below, busy above, at an address of 8 bytes."""
    offsets = {name: offset for name, (_, offset, *_) in layout.CHANNEL_STATE.dtype.fields.items()}  # type: ignore[union-attr]
    assert offsets["busy"] == offsets["epoch"] + 4 and offsets["epoch"] % 8 == 0 and layout.ALIGNMENT % 8 == 0


@given(
    st.integers(1, 2**18),
    st.integers(0, abi.MAX_TOPK),
    st.sampled_from([0, 4, 8]),
    st.booleans(),
    st.integers(0, 2**24),
)
def test_row_blocks_hold_their_parts(
    row_bytes: int, num_topk: int, idx_bytes: int, with_weights: bool, capacity: int
) -> None:
    offsets = layout.RowLayout(row_bytes, num_topk, idx_bytes, with_weights).offsets(capacity)
    assert offsets["rows"] == 0
    assert offsets["idx"] >= capacity * row_bytes
    assert offsets["weights"] - offsets["idx"] >= capacity * num_topk * idx_bytes
    assert offsets["num_bytes"] - offsets["weights"] >= (capacity * num_topk * 4 if with_weights else 0)
    assert all(value % layout.ALIGNMENT == 0 for value in offsets.values()) and offsets["num_bytes"] > 0
