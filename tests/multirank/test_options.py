"""Options of dispatch and combine beyond the table of cases: bias, out, fixed sizes, statistics, events."""

from __future__ import annotations

import time

import numpy as np
import pytest
import reference
from cases import DTYPES, Case, values
from multirank import checks, launch

import cupyep


def place(array, backend):
    return None if array is None else checks.place(array, "contiguous", backend)


def biases(case, rank, count):
    rng = np.random.default_rng((case.seed, rank, 2))
    return [values(rng, (case.num_tokens[rank], case.hidden), DTYPES[case.dtype]) for _ in range(count)]


def combine_with_bias(comm, case, count, backend):
    """Sums start with the addends; `out` is what comes back; rows sent nowhere are the bias alone."""
    received = checks.expect(case)[0]
    ys = [case.outputs(rank, len(received[rank].x))[0] for rank in range(comm.size)]
    addends = [biases(case, rank, count) for rank in range(comm.size)]
    expected = reference.combine(ys, received, case.num_tokens, addends)[comm.rank]
    with checks.open_buffer(comm, case, backend) as buffer:
        result = checks.check_dispatch(buffer, case, comm.rank, backend)
        given = tuple(checks.place(addend, case.memory, backend) for addend in addends[comm.rank])
        bias = given[0] if count == 1 else given
        y = place(ys[comm.rank], backend)
        checks.assert_bits("combined_x", buffer.combine(y, result.handle, bias=bias).combined_x, expected)
        out = checks.namespace(backend).full(expected.shape, np.nan, expected.dtype)
        combined = buffer.combine(y, result.handle, None, bias, out=out)
        assert combined.combined_x is out or checks.namespace(backend).shares_memory(combined.combined_x, out)
        checks.assert_bits("out", out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "hidden", "memory"), [(1, 2048, "fortran"), (2, 7, "offset"), (2, 64, "reversed")])
def test_bias(count, hidden, memory, dtype, backend):
    case = Case(num_ranks=3, tokens="uneven", hidden=hidden, dtype=dtype, routing="some -1", memory=memory, seed=hidden)
    launch.threads(3, combine_with_bias, case, count, backend)


def test_bias_with_processes(backend):
    launch.mpi(
        2, combine_with_bias, Case(num_ranks=2, tokens="uneven", hidden=24, dtype="bfloat16", seed=1), 2, backend
    )


def fixed_size(comm, case, backend):
    """num_worst_tokens: the rows that come are those of a usual dispatch, then ids of -1; combine and replays of it."""
    expected, combined, sums = checks.expect(case)
    mine, worst = expected[comm.rank], max(len(part.x) for part in expected) + 3
    with checks.open_buffer(comm, case, backend) as buffer:
        x, topk_idx, weights = (place(array, backend) for array in case.inputs(comm.rank))
        for _ in range(3):  # the first loads, the second need not wait
            options = {"num_experts": case.num_experts, "num_worst_tokens": worst}
            result = buffer.dispatch(x, topk_idx, weights, **options)
            checks.complete(result)
            count, handle = len(mine.x), result.handle
            for name, got, wanted in zip(("x", "topk_idx", "topk_weights"), result[:3],
                                         (mine.x, mine.topk_idx, mine.topk_weights), strict=True):  # fmt: skip
                assert got.shape == (worst, wanted.shape[1])
                checks.assert_bits(f"recv_{name}", got[:count], wanted)
            assert (checks.asnumpy(result.recv_topk_idx)[count:] == -1).all()
            assert (result.num_recv_tokens_per_expert_list, handle.num_recv_tokens_per_rank) == ([], [])
            assert (checks.asnumpy(handle.recv_count).tolist(), handle.num_recv_tokens) == ([count], worst)
            assert checks.asnumpy(handle.recv_count_per_expert).tolist() == mine.num_recv_tokens_per_expert
            y, w = case.outputs(comm.rank, count)
            padded = [np.concatenate([part, np.full((worst - count, part.shape[1]), np.nan, part.dtype)])
                      for part in (y, w)]  # fmt: skip
            got = buffer.combine(place(padded[0], backend), handle, place(padded[1], backend))
            checks.assert_bits("combined_x", got.combined_x, combined[comm.rank])
            checks.assert_bits("combined_topk_weights", got.combined_topk_weights, sums[comm.rank])
            again = buffer.dispatch(x, handle=handle)
            checks.assert_bits("recv_x again", again.recv_x[:count], mine.x)


def test_fixed_size(run_ranks, backend):
    run_ranks(3, fixed_size, Case(num_ranks=3, tokens="uneven", hidden=40, routing="some -1", seed=21), backend)


def too_small(comm, backend):
    """One rank gets more rows than num_worst_tokens: the same error on all ranks, and the next call works."""
    case, errors = Case(num_ranks=2, tokens=40, routing="one rank", seed=5), []
    target = max(range(2), key=lambda rank: len(checks.expect(case)[0][rank].x))
    with checks.open_buffer(comm, case, backend) as buffer:
        x, topk_idx, weights = (place(array, backend) for array in case.inputs(comm.rank))
        for worst in (79, 80, 10):
            try:
                options = {"num_experts": case.num_experts, "num_worst_tokens": worst}
                checks.complete(buffer.dispatch(x, topk_idx, weights, **options))
                errors.append(None)
            except cupyep.ArenaExhaustedError as error:
                assert error.rank == target
                errors.append(str(error))
        checks.run_case(comm, case, backend, buffer)
    return errors


def test_more_rows_than_num_worst_tokens(backend):
    first, second = launch.threads(2, too_small, backend)
    assert first == second and [error is None for error in first] == [False, True, False]
    assert all(f"num_worst_tokens: expected at least 80, got {worst}" in first[at] for at, worst in ((0, 79), (2, 10)))


def sized_by_worst_tokens(comm, backend):
    """An arena that nobody has sized has room for num_worst_tokens, whatever the first calls bring."""
    xp = checks.namespace(backend)
    x, topk_idx = xp.full((1, 4096), comm.rank, np.float32), xp.zeros((1, 1), np.int64)
    with cupyep.Buffer(comm, backend=backend, timeout_s=checks.TIMEOUT_S) as buffer:
        for worst in (0, 1024, 1024, 4096):
            result = buffer.dispatch(x, topk_idx, num_experts=2, num_worst_tokens=worst)
            checks.complete(result)
            if comm.rank == 0:
                assert result.recv_x[:2, 0].tolist() == [0, 1]
        checks.complete(buffer.combine(result.recv_x, result.handle))


def test_worst_tokens_size_the_arena(run_ranks, backend):
    run_ranks(2, sized_by_worst_tokens, backend)


def be_late(backend, seconds):
    """Holds up this rank's work: on a GPU its stream, because threads as ranks meet before each launch."""
    if backend == "numpy":
        time.sleep(seconds)
    else:
        checks.namespace(backend).cuda.get_current_stream().launch_host_func(lambda _: time.sleep(seconds), None)


def statistics(comm, backend):
    """Listings add up over dispatches; the time waited is that of the rank that comes late."""
    case = Case(num_ranks=3, tokens=30, routing="duplicates", num_topk=4, seed=9)
    listed = checks.expect(case)[0][comm.rank].num_recv_tokens_per_expert
    xp = checks.namespace(backend)
    with checks.open_buffer(comm, case, backend) as buffer:
        x, topk_idx, weights = (place(array, backend) for array in case.inputs(comm.rank))
        experts, waits = xp.full(case.num_local_experts, 7, np.int32), xp.zeros(comm.size, np.int64)
        buffer.dispatch(x, topk_idx, weights, num_experts=case.num_experts)
        for number in range(4):
            if comm.rank == 1 and number > 1:
                be_late(backend, 0.15)
            options = {"cumulative_local_expert_recv_stats": experts, "dispatch_wait_us": waits}
            buffer.dispatch(x, topk_idx, weights, num_experts=case.num_experts, **options)
            buffer.barrier().synchronize()
        assert checks.asnumpy(experts).tolist() == [7 + 4 * count for count in listed]
        return checks.asnumpy(waits).tolist()


def test_statistics(run_ranks, backend):
    waits = run_ranks(3, statistics, backend)
    for rank in (0, 2):
        assert 2 * 100_000 < waits[rank][1] < 10_000_000 and waits[rank][1] > 2 * waits[rank][rank], waits
    assert max(waits[1]) < 100_000, waits


def events(comm, backend):
    """Asynchronous dispatch and combine, each behind the other's event; inputs that the caller drops at once."""
    case = Case(num_ranks=comm.size, tokens="uneven", hidden=512, seed=31)
    received, combined, _ = checks.expect(case)
    y = case.outputs(comm.rank, len(received[comm.rank].x))[0]
    later = {"async_finish": True, "allocate_on_comm_stream": True}
    with checks.open_buffer(comm, case, backend) as buffer:
        for number in range(5):
            x, topk_idx, weights = (place(array, backend) for array in case.inputs(comm.rank))
            options = {"copy": number % 2 == 1, "num_experts": case.num_experts}
            result = buffer.dispatch(x, topk_idx, weights, previous_event=buffer.capture(), **options, **later)
            del x, topk_idx, weights
            output = place(y, backend)
            home = buffer.combine(output, result.handle, previous_event=buffer.capture(), **later)
            del output
            checks.namespace(backend).ones(1 << 16)  # whoever reuses memory too early writes here
            with home.event, result.event as event:
                assert isinstance(event, cupyep.EventOverlap)
            checks.assert_bits("combined_x", home.combined_x, combined[comm.rank])
            checks.assert_bits("recv_x", result.recv_x, received[comm.rank].x)
            home.event.synchronize()


def test_events(run_ranks, backend):
    run_ranks(2, events, backend)


@pytest.mark.parametrize(
    ("verb", "arguments", "error", "text"),
    [
        ("dispatch", {"previous_event": 3}, TypeError, r"^previous_event: expected an EventOverlap.*, got int"),
        ("dispatch", {"async_finish": 1}, TypeError, "^async_finish: expected a bool, got 1"),
        ("dispatch", {"allocate_on_comm_stream": 0}, TypeError, "^allocate_on_comm_stream: expected a bool, got 0"),
        ("dispatch", {"num_worst_tokens": -1}, ValueError, "^num_worst_tokens: expected .*, got -1"),
        ("dispatch", {"num_worst_tokens": 2.0}, TypeError, r"^num_worst_tokens: expected an int, got 2\.0"),
        ("dispatch", {"copy": 1}, TypeError, "^copy: expected a bool, got 1"),
        ("dispatch", {"dispatch_wait_us": [0]}, TypeError, "^dispatch_wait_us: expected an array .*, got list"),
        ("dispatch", {"dispatch_wait_us": ("i8", 2)}, ValueError, r"^dispatch_wait_us: expected int64 of shape \(1,\)"),
        (
            "dispatch",
            {"cumulative_local_expert_recv_stats": ("i8", 4)},
            ValueError,
            r"^cumulative_local_expert_recv_stats: expected int32 of shape \(4,\), got int64 of shape \(4,\)",
        ),
        (
            "combine",
            {"bias": ("f2", (5, 8))},
            TypeError,
            "^bias: expected float32, the type of combined_x, got float16",
        ),
        ("combine", {"bias": ("f4", (5, 7))}, ValueError, r"^bias: expected shape \(5, 8\), got \(5, 7\)"),
        ("combine", {"bias": [("f4", (5, 8))] * 3}, ValueError, "^bias: expected one array or a pair, got 3"),
        ("combine", {"out": ("f4", (4, 8))}, ValueError, r"^out: expected shape \(5, 8\), got \(4, 8\)"),
        ("combine", {"out": ("f8", (5, 8))}, TypeError, "^out: expected float32, the type of combined_x, got float64"),
        ("combine", {"out": [1]}, TypeError, "^out: expected an array .*, got list"),
        ("combine", {"out": "x"}, ValueError, "^out: expected memory apart from x"),
        ("combine", {"async_finish": None}, TypeError, "^async_finish: expected a bool, got None"),
    ],
)
def test_wrong_options(verb, arguments, error, text, backend):
    xp = checks.namespace(backend)

    def made(value):
        if isinstance(value, list) and isinstance(value[0], tuple):
            return [made(part) for part in value]
        return xp.zeros(value[1], value[0]) if isinstance(value, tuple) else value

    case = Case(num_ranks=1, tokens=5, hidden=8, routing="random")
    with checks.open_buffer(None, case, backend) as buffer:
        x, topk_idx, weights = (place(array, backend) for array in case.inputs(0))
        result = buffer.dispatch(x, topk_idx, weights, num_experts=case.num_experts)
        given = {name: result.recv_x if value == "x" else made(value) for name, value in arguments.items()}
        with pytest.raises(error, match=text):
            if verb == "dispatch":
                buffer.dispatch(x, topk_idx, weights, num_experts=case.num_experts, **given)
            else:
                buffer.combine(result.recv_x, result.handle, **given)
        checks.check_combine(buffer, case, 0, backend, result)
