"""What CTAs of the low-latency kernels take of an SM, for all shapes; nothing is compiled."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyep import abi
from cupyep.backends import low_latency_checks
from cupyep.backends.cuda import plan
from cupyep.backends.low_latency_shape import COMBINE, DISPATCH, LowLatencyShape
from cupyep.layout import align

KB = 1024
NUM_WARPS = 16


@st.composite
def shapes(draw):
    """Within the bounds of low_latency_checks; every second one with as many ids as these allow."""
    tokens = draw(st.integers(1, low_latency_checks.MAX_TOKENS))
    most_topk = min(32, low_latency_checks.MAX_IDS // tokens)
    topk = draw(st.one_of(st.just(most_topk), st.integers(1, most_topk)))
    most_experts = low_latency_checks.MAX_LISTINGS // align(tokens, 32)
    ranks = draw(st.integers(1, min(72, most_experts)))
    local = draw(st.integers(1, min(abi.MAX_LOCAL_EXPERTS, most_experts // ranks)))
    dtype = np.dtype(draw(st.sampled_from(["f4", "f2", ml_dtypes.bfloat16])))
    return LowLatencyShape(ranks, tokens, draw(st.integers(1, 20_000)), dtype, topk, local * ranks)


@settings(deadline=None, max_examples=400)
@given(shape=shapes(), smem_limit=st.sampled_from([99 * KB, 163 * KB, 227 * KB]))
def test_two_ctas_fit_on_an_sm(shape, smem_limit):
    """Two combines, and a combine with a dispatch of its shape, unless that leaves no room for a ring of one slot."""
    low_latency_checks.max_tokens(shape.max_tokens, 0, shape.num_topk, shape.num_experts)
    dispatch, combine = (plan.low_latency_plan(verb, shape, smem_limit) for verb in (DISPATCH, COMBINE))
    c = combine.constants
    assert combine.smem_bytes == NUM_WARPS * c["kSlots"] * c["kSlotBytes"]
    assert c["kSlotBytes"] % c["kVecBytes"] == 0 and 1 <= c["kSlots"] <= 4
    assert 32 * c["kVecsPerLane"] * c["kVecBytes"] * c["kParts"] >= c["kRowBytes"]
    room = smem_limit + KB  # of an SM
    each = KB + plan.low_latency_static_bytes(shape.num_ranks)  # of a CTA, whatever it asks for
    assert 2 * (combine.smem_bytes + each) <= room
    both = dispatch.smem_bytes + combine.smem_bytes + 2 * each
    assert both <= room or c["kSlots"] == 1
    if c["kSlots"] < 4:  # as many as fit
        more = NUM_WARPS * c["kSlotBytes"]
        assert both + more > room or 2 * (combine.smem_bytes + more + each) > room
