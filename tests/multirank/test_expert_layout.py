"""layout="expert" against the oracle: where rows lie, what the gaps hold, what combine makes of weights and types."""

from __future__ import annotations

import expert_reference
import numpy as np
import pytest
import reference
from cases import DTYPES, Case, values
from multirank import checks, launch
from multirank.test_options import biases

import cupyep

CASES = {
    "plain": (Case(num_ranks=3, tokens="uneven", hidden=24, num_topk=4, seed=1), 1, None),
    "aligned": (Case(num_ranks=3, tokens="uneven", hidden=64, num_topk=4, dtype="bfloat16", seed=2), 128, "bfloat16"),
    "duplicates": (Case(num_ranks=3, tokens=17, num_topk=8, routing="duplicates", idx_dtype="int32", seed=3), 4, None),
    "odd rows": (
        Case(num_ranks=3, tokens=33, hidden=7, num_topk=3, routing="some -1", dtype="float16", seed=4),
        3,
        "f4",
    ),
    "many experts": (
        Case(num_ranks=3, tokens=40, hidden=16, num_topk=32, num_local_experts=300, seed=5),
        16,
        "bfloat16",
    ),
    "nowhere": (Case(num_ranks=3, tokens=4, routing="nowhere", seed=6), 8, None),
    "one rank": (Case(num_ranks=3, tokens=90, num_topk=2, routing="one rank", num_local_experts=2, seed=7), 64, "f4"),
}


def place(array, backend):
    return None if array is None else checks.place(array, "contiguous", backend)


def dtype_of(name, case):
    return DTYPES[case.dtype] if name is None else np.dtype(DTYPES.get(name, name))


def check_expanded(result, expected, received, alignment, zero_gaps, exact=True):
    """Rows, offsets, row map and counts; gaps are zero if asked for."""
    experts, count = result.handle.expert_rows, len(received.x)
    assert experts.alignment == alignment and (experts.num_rows == len(expected.rows) or not exact)
    assert checks.asnumpy(experts.offsets).tolist() == expected.offsets
    checks.assert_bits("row_map", experts.row_map[:count], expected.row_map)
    got = checks.asnumpy(result.recv_x)
    assert got.shape == (experts.num_rows, received.x.shape[1])
    for place, row in enumerate(expected.rows):
        if row is not None or zero_gaps:
            wanted = np.zeros(got.shape[1], got.dtype) if row is None else row
            checks.assert_bits(f"recv_x[{place}]", got[place], wanted)


def expert_layout(comm, name, backend):
    """Dispatch, cached dispatch and combine, with and without weights, bias and another wire dtype."""
    case, alignment, wire_name = CASES[name]
    wire, rank = dtype_of(wire_name, case), comm.rank
    received = checks.expect(case)[0]
    expanded = [expert_reference.expand(part, alignment) for part in received]
    rngs = [np.random.default_rng((case.seed, rank, 5)) for rank in range(comm.size)]
    ys = [
        values(rng, (len(part.rows), case.hidden), DTYPES[case.dtype]) for rng, part in zip(rngs, expanded, strict=True)
    ]
    factors = [values(rng, part.row_map.shape, np.dtype("f4")) for rng, part in zip(rngs, expanded, strict=True)]
    addends = [[addend.astype(wire) for addend in biases(case, rank, 1)] for rank in range(comm.size)]
    with checks.open_buffer(comm, case, backend) as buffer:
        x, topk_idx, weights = (place(array, backend) for array in case.inputs(rank))
        options = {"layout": "expert", "expert_alignment": alignment, "num_experts": case.num_experts}
        for number in range(2):
            result = buffer.dispatch(x, topk_idx, weights, copy=number == 1, zero_gaps=number == 1, **options)
            check_expanded(result, expanded[rank], received[rank], alignment, number == 1)
            checks.assert_bits("recv_topk_idx", result.recv_topk_idx, received[rank].topk_idx)
            checks.assert_bits("recv_topk_weights", result.recv_topk_weights, received[rank].topk_weights)
            assert result.num_recv_tokens_per_expert_list == received[rank].num_recv_tokens_per_expert
        again = buffer.dispatch(x, handle=result.handle, zero_gaps=True)
        check_expanded(again, expanded[rank], received[rank], alignment, True)
        for with_weights, with_bias in ((True, False), (False, True)):
            partial = [
                expert_reference.reduce(y, part.row_map, factor if with_weights else None, wire)
                for y, part, factor in zip(ys, expanded, factors, strict=True)
            ]
            wanted = reference.combine(partial, received, case.num_tokens, addends if with_bias else None)[rank]
            combined = buffer.combine(
                place(ys[rank], backend), result.handle, place(factors[rank], backend) if with_weights else None,
                place(addends[rank][0], backend) if with_bias else None, wire_dtype=None if wire_name is None else wire,
            )  # fmt: skip
            checks.assert_bits("combined_x", combined.combined_x, wanted)
            assert combined.combined_topk_weights is None
        checks.run_case(comm, case, backend, buffer)


@pytest.mark.parametrize("name", CASES)
def test_expert_layout(name, backend):
    launch.threads(3, expert_layout, name, backend)


def test_expert_layout_with_processes(backend):
    launch.mpi(3, expert_layout, "aligned", backend)


def fixed_size(comm, backend):
    """num_worst_tokens in the expert layout: room for the worst; rows that did not come are not read."""
    case = Case(num_ranks=comm.size, tokens="uneven", hidden=40, num_topk=3, routing="some -1", seed=11)
    received = checks.expect(case)[0]
    expanded = [expert_reference.expand(part, 8) for part in received]
    mine, worst = received[comm.rank], max(len(part.x) for part in received) + 9
    scales = [
        np.random.default_rng(rank).integers(0, 99, (len(case.inputs(rank)[0]), 5), np.int32)
        for rank in range(comm.size)
    ]
    with checks.open_buffer(comm, case, backend) as buffer:
        x, topk_idx, weights = (place(array, backend) for array in case.inputs(comm.rank))
        for _ in range(3):
            result = buffer.dispatch(
                (x, place(scales[comm.rank], backend)), topk_idx, weights, num_experts=case.num_experts,
                layout="expert", expert_alignment=8, num_worst_tokens=worst, zero_gaps=True,
            )  # fmt: skip
            checks.complete(result)
            rows = result.handle.expert_rows
            assert rows.num_rows == result.recv_x[1].shape[0] >= worst * 3 and rows.num_rows % 8 == 0
            sent_scales = reference.dispatch(
                scales, [case.inputs(rank)[1] for rank in range(comm.size)], None, case.num_experts
            )
            for got, part in zip(result.recv_x, (mine, sent_scales[comm.rank]), strict=True):
                wanted = expert_reference.expand(part, 8)
                check_expanded(result._replace(recv_x=got), wanted, part, 8, True, exact=False)
            assert (checks.asnumpy(rows.row_map)[len(mine.x) :] == -1).all()
            y = np.random.default_rng(comm.rank).standard_normal((rows.num_rows, 40), np.float32)
            ys = comm.allgather(y)
            padded = [np.ones((worst, 3), np.float32)] * comm.size
            partial = [
                expert_reference.reduce(one, part.row_map, weight, np.dtype("f4"))
                for one, part, weight in zip(ys, expanded, padded, strict=True)
            ]
            home = buffer.combine(place(y, backend), result.handle, place(padded[0], backend))
            wanted = reference.combine(partial, received, case.num_tokens)[comm.rank]
            checks.assert_bits("combined_x", home.combined_x, wanted)


def test_fixed_size(run_ranks, backend):
    run_ranks(2, fixed_size, backend)


def mixed_layouts(comm, backend):
    """Ranks that want different layouts, or reduce to different types: an error on all, then business as usual."""
    case, errors = Case(num_ranks=2, seed=3), []
    x, topk_idx, weights = (place(array, backend) for array in case.inputs(comm.rank))
    with checks.open_buffer(comm, case, backend) as buffer:
        with pytest.raises(cupyep.MismatchError) as error:
            layout = ("rank", "expert")[comm.rank]
            buffer.dispatch(x, topk_idx, weights, num_experts=case.num_experts, layout=layout)
        errors.append(str(error.value))
        result = buffer.dispatch(x, topk_idx, weights, num_experts=case.num_experts, layout="expert")
        with pytest.raises(cupyep.MismatchError) as error:
            buffer.combine(result.recv_x, result.handle, wire_dtype=("f4", "f2")[comm.rank])
        errors.append(str(error.value))
        checks.run_case(comm, case, backend, buffer)
    return errors


def test_mixed_layouts(backend):
    for first, second in launch.threads(2, mixed_layouts, backend):
        assert "layout: rank 0 has 'rank', rank 1 has 'expert'" in first
        assert "'float32 reduced to float32', rank 1 has 'float32 reduced to float16'" in second


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"layout": "token"}, ValueError, "^layout: expected 'rank' or 'expert', got 'token'"),
        ({"expert_alignment": 0}, ValueError, r"^expert_alignment: expected 1\.\.65536, got 0"),
        ({"zero_gaps": 1}, TypeError, "^zero_gaps: expected a bool, got 1"),
    ],
)
def test_wrong_layouts(options, error, text, backend):
    case = Case(num_ranks=1, tokens=5)
    with checks.open_buffer(None, case, backend) as buffer:
        x, topk_idx, weights = (place(array, backend) for array in case.inputs(0))
        with pytest.raises(error, match=text):
            buffer.dispatch(x, topk_idx, weights, num_experts=case.num_experts, **options)
        ranked = buffer.dispatch(x, topk_idx, weights, num_experts=case.num_experts)
        with pytest.raises(ValueError, match=r"^layout: expected 'rank', .* got 'expert'"):
            buffer.dispatch(x, handle=ranked.handle, layout="expert")
        with pytest.raises(ValueError, match=r"^dispatch_wait_us: expected None with handle="):
            buffer.dispatch(x, handle=ranked.handle, dispatch_wait_us=np.zeros(1, np.int64))
        with pytest.raises(ValueError, match=r"^wire_dtype: expected None in the rank layout"):
            buffer.combine(ranked.recv_x, ranked.handle, wire_dtype="f4")
        grouped = buffer.dispatch(x, topk_idx, weights, num_experts=case.num_experts, layout="expert")
        with pytest.raises(TypeError, match=r"^wire_dtype: expected float32, .*, got int32"):
            buffer.combine(grouped.recv_x, grouped.handle, wire_dtype="i4")
        with pytest.raises(ValueError, match=r"^x: expected \d+ rows \(expert_rows.num_rows of the handle\), got 5"):
            buffer.combine(x, grouped.handle)
