"""Properties of dispatch and combine over random jobs, in one process: against the oracle, and without it."""

from __future__ import annotations

import os

import numpy as np
from cases import AXES, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from multirank import checks, launch

import cupyep

check = settings(
    deadline=None,
    max_examples=int(os.environ.get("CUPYEP_EXAMPLES", "60")),
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def cases(draw, num_ranks: int) -> Case:
    num_local_experts = draw(st.integers(1, 9))
    return Case(
        num_ranks=num_ranks,
        hidden=draw(st.integers(1, 300)),
        num_topk=draw(st.integers(1, min(32, num_ranks * num_local_experts))),
        tokens=tuple(draw(st.lists(st.integers(0, 40), min_size=num_ranks, max_size=num_ranks))),
        num_local_experts=num_local_experts,
        seed=draw(st.integers(0, 2**16)),
        **{
            name: draw(st.sampled_from(AXES[name]))
            for name in ("routing", "dtype", "idx_dtype", "weights", "memory", "expert_output", "copy", "capacity")
        },
    )


histories = st.integers(1, 4).flatmap(lambda num_ranks: st.lists(cases(num_ranks), min_size=1, max_size=4))


def run_history(comm, history, backend):
    """All dispatches, then all combines, in one buffer that grows; every result stays what it was."""
    with cupyep.Buffer(comm, 1 << 24, backend=backend, timeout_s=checks.TIMEOUT_S) as buffer:
        results = [checks.check_dispatch(buffer, case, comm.rank, backend) for case in history]
        for case, result in zip(history, results, strict=True):
            checks.check_combine(buffer, case, comm.rank, backend, result)
        for case, result in zip(history, results, strict=True):
            checks.check_received(result, case, comm.rank)


@check
@given(history=histories)
def test_any_history_matches_the_oracle(history, backend):
    launch.threads(history[0].num_ranks, run_history, history, backend)


def run_conservation(comm, case, backend):
    """What the definition says, computed from this rank's own arrays. Returns (rows sent to, rows received from)."""
    _, topk_idx, _ = case.inputs(comm.rank)
    num_tokens, width = len(topk_idx), case.hidden
    x = (np.arange(num_tokens * width, dtype=np.float32).reshape(num_tokens, width) + 1) * (-1) ** comm.rank
    weights = np.arange(1, topk_idx.size + 1, dtype=np.float32).reshape(topk_idx.shape)
    owners = [{expert // case.num_local_experts for expert in ids if expert >= 0} for ids in topk_idx.tolist()]
    num_copies = np.array([len(ranks) for ranks in owners], np.float32).reshape(-1, 1)
    with checks.open_buffer(comm, case, backend) as buffer:
        on_device = [checks.place(array, case.memory, backend) for array in (x, topk_idx, weights)]
        result = buffer.dispatch(*on_device, num_experts=case.num_experts)
        combined = buffer.combine(result.recv_x, result.handle, result.recv_topk_weights)
        # Experts that do nothing: a token comes back once from every rank that it was sent to, its weights once in all.
        checks.assert_bits("combined_x", combined.combined_x, x * num_copies + np.float32(0))
        checks.assert_bits("combined_topk_weights", combined.combined_topk_weights, np.where(topk_idx >= 0, weights, 0))
        idx = checks.asnumpy(result.recv_topk_idx)
        assert ((idx >= 0).any(axis=1)).all() and ((idx >= 0) == (checks.asnumpy(result.recv_topk_weights) > 0)).all()
        counts = [int((idx == expert).sum()) for expert in range(case.num_local_experts)]
        checks.assert_equal("num_recv_tokens_per_expert_list", result.num_recv_tokens_per_expert_list, counts)
        sent = [sum(rank in ranks for ranks in owners) for rank in range(case.num_ranks)]
        return sent, result.handle.num_recv_tokens_per_rank


@check
@given(case=st.integers(1, 5).flatmap(cases))
def test_tokens_are_conserved(case, backend):
    results = launch.threads(case.num_ranks, run_conservation, case, backend)
    sent_to_each = [list(column) for column in zip(*(sent for sent, _ in results), strict=True)]
    assert sent_to_each == [received for _, received in results]


@check
@given(case=st.integers(1, 4).flatmap(cases))
def test_same_bits_every_time(case, backend):
    """Two runs give the same bits: nothing depends on which rank comes first."""

    def run(comm):
        with checks.open_buffer(comm, case, backend) as buffer:
            result = checks.check_dispatch(buffer, case, comm.rank, backend)
            combined = checks.check_combine(buffer, case, comm.rank, backend, result)
            return checks.asnumpy(result.recv_x).tobytes(), checks.asnumpy(combined.combined_x).tobytes()

    assert launch.threads(case.num_ranks, run) == launch.threads(case.num_ranks, run)
