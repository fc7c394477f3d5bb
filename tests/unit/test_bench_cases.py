"""What the benchmarks move and count, and that a rank sees a wrong result."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import reference_low_latency
from multirank.checks import assert_bits

from cupyep.bench.cases import MODES, Case, count_bytes
from cupyep.bench.low_latency_ranks import memory_bytes
from cupyep.bench.ranks import Rank, check_encoding, weighted_sums


@pytest.mark.parametrize("rank", [0, 2])
def test_bytes_against_a_dense_count(rank):
    num_ranks, experts_per_rank = 3, 4
    case = Case(num_tokens=50, hidden=20, num_topk=3, num_experts=num_ranks * experts_per_rank, mode="fp32")
    topk_idx, weights = case.routing(rank)
    assert topk_idx.shape == weights.shape == (50, 3) and all(len(set(ids)) == 3 for ids in topk_idx.tolist())
    send_row, logical, wire = np.full((50, num_ranks), -1, np.int32), 0, 0
    for token, ids in enumerate(topk_idx):
        for destination in range(num_ranks):
            if any(expert // experts_per_rank == destination for expert in ids):
                send_row[token, destination] = 7
                logical += 20 * 4
                wire += 20 * 4 * (destination != rank)
    assert 0 < wire < logical
    assert count_bytes(send_row, rank, case.row_bytes("dispatch")) == (logical, wire)


@pytest.mark.parametrize("mode", MODES)
def test_rows_add_up_exactly_in_every_mode(mode):
    """A sum of up to 8 equal rows has no rounding, so that verification can be bit by bit."""
    case = Case(num_tokens=40, hidden=64, mode=mode)
    rows = case.rows(3)
    assert rows.dtype == MODES[mode].dtype and rows.nbytes == 40 * case.row_bytes("combine")
    assert len(np.unique(rows)) > 200
    for times in (2, 3, 5, 7, 8):
        total = np.zeros(rows.shape, np.float32)
        for _ in range(times):
            total += rows.astype(np.float32)
        assert (total == rows.astype(np.float64) * times).all()
    assert (rows != case.rows(4)).any()


def test_fp8_sends_half_the_bytes_and_combines_what_came():
    case, mode = Case(num_tokens=9, hidden=200, mode="fp8"), MODES["fp8"]
    assert (case.row_bytes("dispatch"), case.row_bytes("combine")) == (200, 400)
    data, scales = mode.encode(case.rows(0))
    assert data.nbytes == 9 * case.row_bytes("dispatch") and scales.shape == (9, 2) and scales.dtype == np.float32
    check_encoding(mode.decode((data, scales)), case.rows(0))
    with pytest.raises(AssertionError, match="encode: expected rows that decode to within a fifteenth"):
        check_encoding(mode.decode((data ^ np.uint8(8), scales)), case.rows(0))


def test_weighted_sums_are_the_oracles():
    """What the expert layout and the low-latency mode bring home: each rank's own sum first."""
    case, size = Case(num_tokens=6, hidden=16, num_topk=4, num_experts=6), 3
    routings, rows = [case.routing(rank) for rank in range(size)], [case.rows(rank) for rank in range(size)]
    idxs, weights = [idx for idx, _ in routings], [weights for _, weights in routings]
    experts = reference_low_latency.dispatch(idxs, 6)
    ys = np.zeros((size, 2, size * 6, 16), rows[0].dtype)
    for rank, mine in enumerate(experts):
        for expert, received in enumerate(mine):
            for row, (source, token) in enumerate(received.sources):
                ys[rank, expert, row] = rows[source][token]
    for rank, wanted in enumerate(reference_low_latency.combine(list(ys), experts, idxs, weights, 6)):
        assert_bits("sums", weighted_sums(rows[rank], idxs[rank], weights[rank], 2), wanted)


def test_bytes_through_memory():
    """128 tokens to 5 of 8 ranks each: in fp8 a row is 7,168 bytes and 56 scales, in bf16 14,336 bytes."""
    fp8, bf16 = (memory_bytes(Case(128, mode=mode), 5.0) for mode in ("fp8", "bf16"))
    assert fp8["dispatch"] == 128 * (14336 + (2 * 5 + 8) * (7168 + 4 * 56))
    assert bf16["dispatch"] == bf16["combine"] == fp8["combine"] == 128 * 14336 * (1 + 2 * 5 + 8)


def test_many_tokens_repeat_rows():
    rows = Case(num_tokens=5000, hidden=8).rows(0)
    assert (rows[4093:] == rows[: 5000 - 4093]).all() and len(rows) == 5000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_topk": 33}, r"num_topk: expected 1\.\.32 \(experts: 256\), got 33"),
        ({"num_topk": 5, "num_experts": 4}, r"num_topk: expected 1\.\.4 \(experts: 4\), got 5"),
        ({"hidden": 0}, "hidden: expected at least 1, got 0"),
        ({"mode": "int4"}, "mode: expected one of bf16, .*, got 'int4'"),
    ],
)
def test_bad_cases(values, message):
    with pytest.raises(ValueError, match=message):
        Case(**values)


def test_a_rank_sees_a_wrong_result():
    """Verification can fail: one element changed by one bit."""
    case = Case(num_tokens=3, hidden=4, num_topk=2, num_experts=2)
    rows, send_row = case.rows(0), np.array([[0, -1], [1, 0], [-1, 1]], np.int32)
    x = (rows.astype(np.float32) * [[1], [2], [1]]).astype(rows.dtype)
    weights = np.ones((3, 2), np.float32)
    rank = Rank.__new__(Rank)
    rank.buffer, rank.case, rank.rows, rank.topk_weights = SimpleNamespace(rank=1), case, rows, weights
    rank.sent, rank.y = SimpleNamespace(handle=SimpleNamespace(send_row=send_row), recv_x=rows), rows
    rank.combined = SimpleNamespace(combined_x=x, combined_topk_weights=weights.copy())
    rank.verify()
    x.view(np.uint16)[1, 2] ^= 1
    with pytest.raises(AssertionError, match=r"rank 1: combine\(dispatch\(x\)\): 1 of 12 elements are wrong"):
        rank.verify()
