"""One low-latency job, made of a Case, on every rank of a communicator, compared with the oracle bit by bit."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import fp8_reference
import ml_dtypes
import numpy as np
import reference_low_latency as reference
from cases import Case, values
from multirank.checks import TIMEOUT_S, _expecting, asnumpy, assert_bits, namespace, place

import cupyep
from cupyep import env


def small_case(**fields: Any) -> Case:
    """A Case with few tokens, unless fields say otherwise."""
    return Case(**{"num_local_experts": 3, "hidden": 128, "dtype": "bfloat16", "num_topk": 4, "tokens": 9, **fields})


@dataclass(frozen=True)
class Job:
    """A Case and the mode's own options. extra: how many more tokens than the most are allowed for."""

    case: Case
    fp8: str = ""  # "", "plain", "round", "ue8m0"
    travel: bool = True  # the weights go with the dispatch
    split: bool = False
    async_finish: bool = False
    zero_copy: bool = False
    give_out: bool = False
    extra: int = 0
    num_sms: int | None = None
    masked: tuple[tuple[int, int], ...] = ()  # (rank, masked by it)

    @property
    def max_tokens(self) -> int:
        return max(1, *self.case.num_tokens) + self.extra

    @property
    def options(self) -> dict[str, bool]:
        return {
            "use_fp8": bool(self.fp8),
            "round_scale": self.fp8 in ("round", "ue8m0"),
            "use_ue8m0": self.fp8 == "ue8m0",
        }

    def inputs(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, topk_idx, topk_weights: a Case's in every fourth row; else groups of 128 values, and rows of weights, of
        one magnitude each, because next to an infinity or a large number all others become 0."""
        return _inputs(self, rank)

    def outputs(self, rank: int) -> np.ndarray:
        """What the experts of `rank` answer, also in rows that nobody sent: those must not be read."""
        case = self.case
        shape = (case.num_local_experts, case.num_ranks * self.max_tokens, case.hidden)
        rng = np.random.default_rng((case.seed, rank, 2))
        y = values(rng, (shape[0] * shape[1], shape[2]), np.dtype(getattr(ml_dtypes, case.dtype, case.dtype)))
        mild = rng.random(len(y)) < 0.75
        y[mild] = rng.standard_normal(y.shape, np.float32)[mild]
        y = y.reshape(shape)
        for expert, received in enumerate(expect(self)[0][rank]):
            y[expert, len(received.sources) :] = np.nan
        return y


@functools.lru_cache(maxsize=16)
def _inputs(job: Job, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, idx, weights = job.case.inputs(rank)
    rng = np.random.default_rng((job.case.seed, rank, 3))
    assert weights is not None
    mild = rng.random(len(x)) < 0.75
    magnitudes = np.repeat(np.ldexp(1, rng.integers(-12, 12, (len(x), -(-x.shape[1] // 128)))), 128, axis=1)
    x, weights = x.copy(), weights.copy()
    x[mild] = (rng.standard_normal(x.shape) * magnitudes[:, : x.shape[1]])[mild].astype(x.dtype)
    weights[mild] = rng.random(weights.shape, np.float32)[mild]
    return x, idx, weights


def expect(job: Job) -> tuple[list[list[reference.Expert]], Any]:
    """([rank][local expert], (codes, scales) of every rank's x or None)."""
    with _expecting:
        return _expect(job)


@functools.lru_cache(maxsize=32)
def _expect(job: Job) -> tuple[list[list[reference.Expert]], Any]:
    inputs = [job.inputs(rank) for rank in range(job.case.num_ranks)]
    experts = reference.dispatch([idx for _, idx, _ in inputs], job.case.num_experts, set(job.masked))
    quantized = [fp8_reference.quantize(x, 128, job.options["round_scale"]) for x, *_ in inputs] if job.fp8 else None
    return experts, quantized


@functools.lru_cache(maxsize=32)
def combined(job: Job) -> list[np.ndarray]:
    inputs = [job.inputs(rank) for rank in range(job.case.num_ranks)]
    idxs, weights = [idx for _, idx, _ in inputs], [weights for *_, weights in inputs]
    ys = [job.outputs(rank) for rank in range(job.case.num_ranks)]
    return reference.combine(ys, expect(job)[0], idxs, weights, job.case.num_experts, set(job.masked))  # type: ignore[arg-type]


def dispatch(buffer: cupyep.Buffer, job: Job, backend: str, stats: Any = None) -> cupyep.LowLatencyDispatchResult:
    """The job's dispatch; a split one is left open."""
    x, idx, weights = (place(array, job.case.memory, backend) for array in job.inputs(buffer.rank))
    return buffer.low_latency_dispatch(
        x,
        idx,
        job.max_tokens,
        job.case.num_experts,
        stats,
        async_finish=job.async_finish,
        return_recv_hook=job.split,
        topk_weights=weights if job.travel else None,
        num_sms=job.num_sms,
        **job.options,
    )


def combine(buffer: cupyep.Buffer, job: Job, backend: str, handle: Any) -> cupyep.LowLatencyCombineResult:
    """The job's combine; a split one is left open."""
    xp, case = namespace(backend), job.case
    _, idx, weights = job.inputs(buffer.rank)
    y = job.outputs(buffer.rank)
    if job.zero_copy:
        given = buffer.get_next_low_latency_combine_buffer(handle, y.dtype)
        given[...] = xp.asarray(y)
    else:
        given = xp.asarray(y)
    out = xp.empty((len(idx), case.hidden), y.dtype) if job.give_out else None
    result = buffer.low_latency_combine(
        given,
        place(idx, case.memory, backend),
        None if job.travel else place(weights, case.memory, backend),
        handle,
        zero_copy=job.zero_copy,
        async_finish=job.async_finish,
        return_recv_hook=job.split,
        out=out,
        num_sms=job.num_sms,
    )
    assert out is None or result.combined_x is out
    return result


def finish(result: Any) -> None:
    """Runs the hook, if there is one, and waits; errors come up here."""
    if result.hook:
        result.hook()
    result.event.synchronize()


def check_dispatch(result: cupyep.LowLatencyDispatchResult, job: Job, rank: int) -> None:
    """Everything that the dispatch returns, now or later."""
    case, (experts, quantized) = job.case, expect(job)
    mine, handle = experts[rank], result.handle
    counts = np.array([len(expert.sources) for expert in mine], np.int32)
    assert_bits("recv_count", result.recv_count, counts)
    ranges = asnumpy(handle.layout_range)
    assert_bits("counts", ranges & 0xFFFFFFFF, np.array([expert.num_from_rank for expert in mine], np.int64))
    firsts = [np.cumsum([0, *expert.num_from_rank])[:-1] for expert in mine]
    assert_bits("firsts", ranges >> 32, np.array(firsts, np.int64))
    data, scales = (asnumpy(part) for part in result.recv_x) if job.fp8 else (asnumpy(result.recv_x), None)
    assert data.shape == (len(mine), case.num_ranks * job.max_tokens, case.hidden)
    src_info = asnumpy(handle.src_info)
    for expert, received in enumerate(mine):
        count = len(received.sources)
        tokens = np.array([token for _, token in received.sources], np.int32)
        assert_bits("src_info", src_info[expert, :count], tokens)
        if not count:
            continue
        if quantized is None:
            rows = np.stack([job.inputs(source)[0][token] for source, token in received.sources])
        else:
            rows = np.stack([quantized[source][0][token] for source, token in received.sources])
            wanted = np.stack([quantized[source][1][token] for source, token in received.sources])
            if job.fp8 == "ue8m0":
                exponents = (wanted.view(np.uint32) >> 23).astype(np.uint8)
                wanted = exponents.reshape(count, -1, 4).astype(np.int64) @ (1 << 8 * np.arange(4))
                wanted = wanted.astype(np.uint32).view(np.int32)
            assert_bits("scales", np.ascontiguousarray(scales[expert, :count]), wanted)
        assert_bits(f"rows of expert {expert}", data[expert, :count], rows)
    if env.poison():
        for expert, received in enumerate(mine):
            behind = np.ascontiguousarray(data[expert, len(received.sources) :])
            assert (behind.view(np.uint8) == 0xFF).all(), "a row was written behind the last one"
            assert (src_info[expert, len(received.sources) :] == -1).all()


def check_combine(result: cupyep.LowLatencyCombineResult, job: Job, rank: int) -> None:
    assert_bits("combined_x", result.combined_x, combined(job)[rank])


def run_job(buffer: cupyep.Buffer, job: Job, backend: str) -> None:
    """One dispatch and one combine."""
    stats = namespace(backend).full(job.case.num_local_experts, 7, np.int32)
    result = dispatch(buffer, job, backend, stats)
    finish(result)
    check_dispatch(result, job, buffer.rank)
    assert_bits("stats", stats, asnumpy(result.recv_count) + np.int32(7))
    answer = combine(buffer, job, backend, result.handle)
    finish(answer)
    check_combine(answer, job, buffer.rank)
    check_dispatch(result, job, buffer.rank)


def open_buffer(comm: Any, backend: str, **options: Any) -> cupyep.Buffer:
    return cupyep.Buffer(comm, low_latency_mode=True, backend=backend, **{"timeout_s": TIMEOUT_S, **options})


def run_jobs(comm: Any, jobs: tuple[Job, ...], backend: str, num_rdma_bytes: int = 0) -> None:
    """All jobs in one Buffer: shapes change from call to call."""
    with open_buffer(comm, backend, num_rdma_bytes=num_rdma_bytes) as buffer:
        for job in jobs:
            try:
                for rank, peer in job.masked:
                    if rank == buffer.rank:
                        buffer.mask_rank(peer)
                run_job(buffer, job, backend)
                for rank, peer in job.masked:
                    if rank == buffer.rank:
                        buffer.unmask_rank(peer)
            except Exception as error:
                raise AssertionError(f"rank {buffer.rank}: {job!r}: {type(error).__name__}: {error}") from error
