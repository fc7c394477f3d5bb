"""The oracle against examples small enough to work out by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import reference

BF16 = np.dtype(ml_dtypes.bfloat16)


def two_ranks():
    """Two ranks, four experts (two each), top-2. Rank 0 has three tokens, rank 1 has one."""
    xs = [np.array([[1, 2], [3, 4], [5, 6]], np.float32), np.array([[7, 8]], np.float32)]
    idx = [np.array([[0, 3], [2, 3], [-1, -1]], np.int64), np.array([[1, 1]], np.int64)]
    weights = [np.array([[0.5, 0.25], [1, 2], [3, 4]], np.float32), np.array([[6, 8]], np.float32)]
    return xs, idx, weights


def test_dispatch_by_hand():
    xs, idx, weights = two_ranks()
    first, second = reference.dispatch(xs, idx, weights, num_experts=4)
    # Rank 0 owns experts 0 and 1: its own token 0 (expert 0) and rank 1's token 0 (expert 1, listed twice, sent once).
    assert first.sources == [(0, 0), (1, 0)]
    assert first.x.tolist() == [[1, 2], [7, 8]]
    assert first.topk_idx.tolist() == [[0, -1], [1, 1]] and first.topk_idx.dtype == np.int64
    assert first.topk_weights.tolist() == [[0.5, 0], [6, 8]] and first.topk_weights.dtype == np.float32
    assert first.num_recv_tokens_per_expert == [1, 2] and first.num_recv_tokens_per_rank == [1, 1]
    assert first.send_row.tolist() == [[0, 0], [-1, 1], [-1, -1]]
    # Rank 1 owns experts 2 and 3: rank 0's token 0 (expert 3) and token 1 (both).
    assert second.sources == [(0, 0), (0, 1)]
    assert second.x.tolist() == [[1, 2], [3, 4]]
    assert second.topk_idx.tolist() == [[-1, 1], [0, 1]]
    assert second.topk_weights.tolist() == [[0, 0.25], [1, 2]]
    assert second.num_recv_tokens_per_expert == [1, 2] and second.num_recv_tokens_per_rank == [2, 0]
    assert second.send_row.tolist() == [[1, -1]]


def test_layout_by_hand():
    _, idx, _ = two_ranks()
    sent = reference.layout(idx[0], num_experts=4, num_ranks=2)
    assert sent.num_tokens_per_rank == [1, 2] and sent.num_tokens_per_expert == [1, 0, 1, 2]
    assert sent.is_token_in_rank.tolist() == [[True, True], [False, True], [False, False]]
    sent = reference.layout(idx[1], num_experts=4, num_ranks=2)
    assert sent.num_tokens_per_rank == [1, 0] and sent.num_tokens_per_expert == [0, 2, 0, 0]


def test_dispatch_without_weights_and_with_ids_of_no_expert():
    xs = [np.ones((2, 1), np.float16), np.zeros((0, 1), np.float16)]
    idx = [np.array([[4, 1], [-7, 99]], np.int32), np.zeros((0, 2), np.int32)]
    first, second = reference.dispatch(xs, idx, None, num_experts=4)
    assert first.topk_weights is None and first.topk_idx.tolist() == [[-1, 1]] and first.topk_idx.dtype == np.int32
    assert second.x.shape == (0, 1) and second.topk_idx.shape == (0, 2) and second.num_recv_tokens_per_expert == [0, 0]
    assert first.send_row.tolist() == [[0, -1], [-1, -1]]


def test_combine_by_hand():
    xs, idx, weights = two_ranks()
    received = reference.dispatch(xs, idx, weights, num_experts=4)
    ys = [np.array([[1, 10], [-0.0, 40]], np.float32), np.array([[2, 20], [3, 30]], np.float32)]
    first, second = reference.combine(ys, received, [3, 1])
    assert first.tolist() == [[3, 30], [3, 30], [0, 0]]  # both ranks; rank 1 alone; nobody
    assert second.tolist() == [[0, 40]] and not np.signbit(second[0, 0])  # +0 + -0 is +0
    sums = reference.combine([part.topk_weights for part in received], received, [3, 1])
    assert sums[0].tolist() == [[0.5, 0.25], [1, 2], [0, 0]] and sums[1].tolist() == [[6, 8]]


def sum_of_three(values: list[float], dtype: np.dtype) -> np.ndarray:
    """A token that rank 0 sends to three ranks, which answer with `values` in order of their rank."""
    received = reference.dispatch(
        [np.zeros((1, 1), dtype)] + [np.zeros((0, 1), dtype)] * 2,
        [np.array([[2, 0, 1]])] + [np.zeros((0, 3), int)] * 2,
        None,
        num_experts=3,
    )
    return reference.combine([np.array([[value]], dtype) for value in values], received, [1, 0, 0])[0][0, 0]


def test_combine_adds_in_rank_order():
    assert sum_of_three([2.0**24, 1, 1], np.dtype("f4")) == 2.0**24  # each 1 is lost on its own
    assert sum_of_three([1, 1, 2.0**24], np.dtype("f4")) == 2.0**24 + 2
    assert sum_of_three([3e38, 3e38, -3e38], np.dtype("f4")) == np.inf


@pytest.mark.parametrize(("dtype", "ulp"), [(np.dtype("f2"), 2.0**-10), (BF16, 2.0**-7)], ids=["float16", "bfloat16"])
def test_combine_rounds_once(dtype, ulp):
    assert sum_of_three([1, ulp / 2, 0], dtype) == 1  # a tie goes to the even neighbour
    assert sum_of_three([1, ulp / 2, ulp / 2], dtype) == 1 + ulp  # rounding after each sum would give 1
    assert sum_of_three([1 + ulp, ulp / 2, 0], dtype) == 1 + 2 * ulp


BF16_TABLE = [  # float32 bits -> bfloat16 bits
    (0x00000000, 0x0000),
    (0x80000000, 0x8000),
    (0x3F800000, 0x3F80),
    (0x3F808000, 0x3F80),
    (0x3F818000, 0x3F82),
    (0x3F808001, 0x3F81),
    (0x3F807FFF, 0x3F80),  # ties and their neighbours
    (0x00000001, 0x0000),
    (0x00010000, 0x0001),
    (0x00018000, 0x0002),
    (0x00008001, 0x0001),  # denormals
    (0x007FFFFF, 0x0080),
    (0x7F7FFFFF, 0x7F80),
    (0xFF7FFFFF, 0xFF80),  # up to the least normal number; up to inf
    (0x7F800000, 0x7F80),
    (0xFF800000, 0xFF80),
    (0x7FC00000, 0x7FC0),
    (0x7F800001, 0x7FC0),
    (0xFFFFFFFF, 0xFFFF),
]


@pytest.mark.parametrize(("bits", "expected"), BF16_TABLE, ids=[f"{bits:08x}" for bits, _ in BF16_TABLE])
def test_bfloat16_rounding(bits, expected):
    assert reference.bfloat16_bits(np.array([bits], np.uint32).view(np.float32))[0] == expected


def test_widen_is_exact_for_every_value():
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    wide = reference.widen(every.view(BF16))
    assert (wide.view(np.uint32) == every.astype(np.uint32) << 16).all()
    finite = every[np.isfinite(every.view(np.float16))].view(np.float16)
    assert (reference.narrow(reference.widen(finite), finite.dtype).view(np.uint16) == finite.view(np.uint16)).all()
    assert reference.widen(np.array([1], np.uint16).view(np.float16))[0] == 2.0**-24  # the least denormal
    with pytest.raises(TypeError, match="row: expected float32, float16 or bfloat16, got int32"):
        reference.widen(np.zeros(1, np.int32))


def test_imports_nothing_of_the_library():
    names = set()
    for node in ast.walk(ast.parse(Path(reference.__file__).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    assert names == {"__future__", "dataclasses", "numpy"}
