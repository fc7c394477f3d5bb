"""How long results live: over later calls, in several buffers, after growth, after exhaustion, after close()."""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest
import reference
from cases import Case
from multirank import checks

import cupyep

SMALL = (
    Case(num_ranks=2, hidden=64, tokens="uneven", dtype="float32", seed=200),
    Case(num_ranks=2, hidden=64, tokens="uneven", dtype="bfloat16", weights=False, num_topk=8, seed=201),
    Case(num_ranks=2, hidden=64, tokens="uneven", dtype="float16", num_topk=1, seed=202),
)


def LargeBuffer(comm, backend):
    """A Buffer with room for every result that the tests below keep."""
    return cupyep.Buffer(comm, 64 << 20, backend=backend, max_tokens_per_rank=200, timeout_s=checks.TIMEOUT_S)


def keep_results(comm, backend):
    """Every result of 24 calls stays intact while the later ones run, and handles may be combined in any order."""
    kept = []
    with LargeBuffer(comm, backend) as buffer:
        for round_ in range(8):
            for case in SMALL:
                result = checks.check_dispatch(buffer, case, comm.rank, backend)
                combined = checks.check_combine(buffer, case, comm.rank, backend, result)
                kept.append((case, result, combined, checks.asnumpy(combined.combined_x)))
                if round_ % 2:
                    del kept[0]  # leaves holes in the arena
        for case, result, combined, combined_x in reversed(kept):
            checks.check_received(result, case, comm.rank)
            checks.assert_bits("combined_x, kept", combined.combined_x, combined_x)
            checks.check_combine(buffer, case, comm.rank, backend, result)


def interleave_two_buffers(comm, backend):
    """Two buffers of the same ranks share nothing."""
    first, second, _ = SMALL
    with cupyep.Buffer(comm, backend=backend) as one, cupyep.Buffer(comm, backend=backend) as other:
        for _ in range(5):
            result_one = checks.check_dispatch(one, first, comm.rank, backend)
            result_other = checks.check_dispatch(other, second, comm.rank, backend)
            checks.check_combine(one, first, comm.rank, backend, result_one)
            one.barrier()
            checks.check_combine(other, second, comm.rank, backend, result_other)
            checks.check_received(result_one, first, comm.rank)
            checks.check_received(result_other, second, comm.rank)


ROW_CASE = Case(num_ranks=2, hidden=256, tokens=64, num_topk=4, num_local_experts=2, seed=300)
THREE_BLOCKS = 3 * 2 * 64 * (256 * 4 + 4 * 8 + 4 * 4) + (1 << 12)  # bytes of three of its worst cases, and a little


def copies_need_no_arena(comm, backend):
    """With copy=True an arena of three blocks serves any number of results."""
    case = dataclasses.replace(ROW_CASE, copy=True)
    with cupyep.Buffer(comm, THREE_BLOCKS, backend=backend, max_tokens_per_rank=64) as buffer:
        kept = [checks.check_dispatch(buffer, case, comm.rank, backend) for _ in range(20)]
        for result in kept:
            checks.check_received(result, case, comm.rank)


def thousand_calls(comm, backend):
    """Calls in a row, in an arena of three blocks: nothing leaks, and each result is right."""
    cases = [
        Case(num_ranks=2, tokens=tokens, hidden=16, seed=400 + seed)
        for seed, tokens in enumerate(((3, 5), (8, 0), (0, 8), (1, 1), (7, 8)))
    ]
    with cupyep.Buffer(comm, 1 << 14, backend=backend, max_tokens_per_rank=8) as buffer:
        for call in range(500):
            case = cases[call % len(cases)]
            result = checks.check_dispatch(buffer, case, comm.rank, backend)
            checks.check_combine(buffer, case, comm.rank, backend, result)


def wrap_the_epoch(comm, backend):
    """Epochs pass 2^32 in the middle of a run, on every channel that a barrier and the two verbs use."""
    usual = cupyep.layout.INITIAL_EPOCH
    cupyep.layout.INITIAL_EPOCH = 2**32 - 10
    with pytest.raises((KeyError, cupyep.PeerError)) as caught, LargeBuffer(comm, backend) as buffer:
        for call in range(24):
            case = SMALL[call % 3]
            result = checks.check_dispatch(buffer, case, comm.rank, backend)
            checks.check_combine(buffer, case, comm.rank, backend, result)
            buffer.barrier()
        if comm.rank == 1:
            raise KeyError("the peer's error tells the epoch")
        checks.check_dispatch(buffer, case, comm.rank, backend)
    if comm.rank == 0:
        assert 14 <= caught.value.epoch < 100, caught.value
    cupyep.layout.INITIAL_EPOCH = usual  # a process may have more to do; threads share it, and the test puts it back


def grow(comm, backend):
    """Without max_tokens_per_rank, later calls may be larger; results of earlier, smaller ones stay intact."""
    sizes = (
        ((1, 0), 8),
        ((40, 30), 8),
        ((40, 30), 2048),
        ((2, 300), 16),
        ((700, 1), 2880),
        ((0, 0), 8),
        ((50, 50), 7168),
    )
    kept = []
    with cupyep.Buffer(comm, backend=backend) as buffer:
        for seed, (tokens, hidden) in enumerate(sizes, start=500):
            case = Case(num_ranks=2, tokens=tokens, hidden=hidden, dtype="bfloat16", seed=seed)
            kept.append((case, checks.check_dispatch(buffer, case, comm.rank, backend)))
            for earlier, result in kept:
                checks.check_received(result, earlier, comm.rank)
                checks.check_combine(buffer, earlier, comm.rank, backend, result)


def exhaust(comm, backend, keepers):
    """Ranks in `keepers` keep all results: in one and the same call all ranks get the error, and can go on."""
    case, rank, kept = ROW_CASE, comm.rank, []
    with cupyep.Buffer(comm, THREE_BLOCKS, backend=backend, max_tokens_per_rank=64) as buffer:
        for _ in range(3):  # the same again after all was dropped: nothing is lost by an error
            for call in range(50):
                try:
                    result = checks.check_dispatch(buffer, case, rank, backend)
                except cupyep.ArenaExhaustedError as error:
                    caught = (call, error.rank in keepers, error.needed > error.free >= 0)
                    break
                if rank in keepers:
                    kept.append(result)
            else:
                raise AssertionError(f"rank {rank}: 50 results fitted into an arena of three")
            for result in kept:
                checks.check_received(result, case, rank)
            result = None
            kept.clear()
            gc.collect()
            checks.run_case(comm, case, backend, buffer)
    return caught


def repeat_a_dispatch(comm, backend):
    """dispatch(handle=...) sends other rows the same way, of another width and type too; its handle combines them."""
    first, rank = SMALL[1], comm.rank
    received = checks.expect(first)[0]
    with LargeBuffer(comm, backend) as buffer:
        kept = checks.check_dispatch(buffer, first, rank, backend)
        for hidden, dtype, copy in ((64, "bfloat16", False), (7, "float32", True), (2880, "float16", False)):
            other = dataclasses.replace(first, hidden=hidden, dtype=dtype, tokens=tuple(first.num_tokens), seed=203)
            xs = [other.inputs(source)[0] for source in range(2)]
            ys = [np.empty((len(part.sources), hidden), xs[0].dtype) for part in received]
            for y, part in zip(ys, received, strict=True):
                for row, (source, token) in enumerate(part.sources):
                    y[row] = xs[source][token]
            again = buffer.dispatch(checks.place(xs[rank], "strided", backend), handle=kept.handle, copy=copy)
            checks.assert_bits("recv_x", again.recv_x, ys[rank])
            assert again.recv_topk_idx is None and again.recv_topk_weights is None
            combined = buffer.combine(again.recv_x, again.handle)
            expected = reference.combine(ys, received, first.num_tokens)[rank]
            checks.assert_bits("combined_x", combined.combined_x, expected)
        checks.check_received(kept, first, rank)


def outlive_close(comm, backend):
    """Arrays of a closed buffer can be read and written, also when the Buffer object is gone."""
    case = SMALL[0]
    buffer = LargeBuffer(comm, backend)
    result = checks.check_dispatch(buffer, case, comm.rank, backend)
    combined = checks.check_combine(buffer, case, comm.rank, backend, result)
    expected = checks.asnumpy(combined.combined_x)
    own = buffer.empty((100, 7), np.float32)
    buffer.close()
    buffer.close()  # a second time does nothing
    del buffer
    gc.collect()
    own[...] = 1
    again = LargeBuffer(comm, backend)  # may take the freed memory
    for other in SMALL[1:]:
        checks.run_case(comm, other, backend, again)
    again.close()
    checks.check_received(result, case, comm.rank)
    checks.assert_bits("combined_x after close", combined.combined_x, expected)
    assert float(own.sum()) == 700
    result.recv_x[...] = 0


def arena_arrays(comm, backend):
    """empty() and allocator() give arrays that later calls leave alone."""
    with LargeBuffer(comm, backend) as buffer:
        arrays = [buffer.empty((20, width), np.float16) for width in (1, 8, 33)]
        with buffer.allocator():
            arrays.append(checks.namespace(backend).zeros((20, 5), np.float16))
        for number, array in enumerate(arrays):
            assert array.shape[0] == 20 and array.dtype == np.float16
            array[...] = number
        for case in SMALL:
            checks.run_case(comm, case, backend, buffer)
        buffer.prepare(hidden=64, dtype=np.float32)
        for number, array in enumerate(arrays):
            assert (checks.asnumpy(array) == number).all()


SCENARIOS = (
    keep_results,
    interleave_two_buffers,
    copies_need_no_arena,
    thousand_calls,
    wrap_the_epoch,
    grow,
    repeat_a_dispatch,
    outlive_close,
    arena_arrays,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_lifetimes(scenario, run_ranks, backend, monkeypatch):
    monkeypatch.setattr(cupyep.layout, "INITIAL_EPOCH", cupyep.layout.INITIAL_EPOCH)
    run_ranks(2, scenario, backend)


@pytest.mark.parametrize("keepers", [(0, 1), (1,)], ids=["all-ranks-keep", "one-rank-keeps"])
def test_exhausted_arena(keepers, run_ranks, backend):
    results = run_ranks(2, exhaust, backend, keepers)
    assert results[0] == results[1]
    call, is_of_keeper, is_short = results[0]
    assert call >= 2 and is_of_keeper and is_short
