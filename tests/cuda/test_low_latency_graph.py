"""The low-latency mode in CUDA graphs: ten thousand replays with changing routing give what eager calls give."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from gpu_helpers import cupy, mpi

import cupyep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_REPLAYS, NUM_ROUTINGS = 10_000, 37  # no divisor of each other, so that every slot meets every routing
TOKENS, HIDDEN, TOPK, LOCAL = 16, 512, 4, 8


class Step:
    """Inputs at fixed addresses, two dispatches and one combine, and one number that depends on every bit of them."""

    def __init__(self, buffer: cupyep.Buffer, split: bool) -> None:
        self.buffer, self.split, self.num_experts = buffer, split, buffer.size * LOCAL
        rng = np.random.default_rng((buffer.rank, 5))
        bfloat16 = cases.DTYPES["bfloat16"]
        self.bank_x = cupy.asarray(rng.standard_normal((NUM_ROUTINGS, TOKENS, HIDDEN), np.float32)).astype(bfloat16)
        ids = rng.random((NUM_ROUTINGS, TOKENS, self.num_experts)).argsort(axis=2)[:, :, :TOPK]
        self.bank_idx = cupy.asarray(np.where(rng.random(ids.shape) < 0.2, -1, ids))
        self.bank_weights = cupy.asarray(rng.random(ids.shape, np.float32))
        self.x, self.idx, self.weights = (bank[0].copy() for bank in (self.bank_x, self.bank_idx, self.bank_weights))
        self.out = cupy.empty((TOKENS, HIDDEN), bfloat16)
        self.total = cupy.zeros((), np.uint64)
        self.factors = cupy.asarray(rng.integers(1, 2**62, 1 << 16, np.uint64) | 1)

    def choose(self, routing: int) -> None:
        for to, bank in ((self.x, self.bank_x), (self.idx, self.bank_idx), (self.weights, self.bank_weights)):
            cupy.copyto(to, bank[routing])

    def run(self) -> None:
        """Both slots of the dispatch; the second one's rows, in bf16, are the experts' outputs."""
        shared = {"num_max_dispatch_tokens_per_rank": TOKENS, "num_experts": self.num_experts}
        shared |= {"return_recv_hook": self.split}
        cast = self.buffer.low_latency_dispatch(self.x, self.idx, **shared)
        plain = self.buffer.low_latency_dispatch(self.x, self.idx, use_fp8=False, topk_weights=self.weights, **shared)
        for result in (cast, plain):
            if result.hook:
                result.hook()
        combined = self.buffer.low_latency_combine(
            plain.recv_x, self.idx, None, plain.handle, return_recv_hook=self.split, out=self.out
        )
        if combined.hook:
            combined.hook()
        codes, scales = cast.recv_x
        is_row = cupy.arange(codes.shape[1]) < cast.recv_count[:, None]
        self.total[...] = (
            self.hash(cupy.where(is_row[:, :, None], codes, 0), 1)
            + self.hash(cupy.where(is_row[:, :, None], scales.view(np.uint32), 0), 3)
            + self.hash(self.out.view(np.uint16), 5)
            + self.hash(cast.recv_count, 7)
        )

    def hash(self, array: object, salt: int) -> object:
        flat = cupy.ascontiguousarray(array).ravel().astype(np.uint64)
        return (flat * self.factors[cupy.arange(flat.size) % self.factors.size] * np.uint64(salt)).sum()


def replays(comm, split: bool) -> tuple[int, int]:
    """(replays whose number is not the eager one, different numbers)."""
    with cupyep.Buffer(comm, low_latency_mode=True, backend="cuda", timeout_s=60) as buffer:
        step = Step(buffer, split)
        step.split = False  # both shapes are new: the second one's first call needs the first one's hook called
        step.run()
        step.split = split
        eager = cupy.zeros(NUM_ROUTINGS, np.uint64)
        results = cupy.zeros(NUM_REPLAYS, np.uint64)  # behind the capture it might lie in memory that the graph uses
        with cupy.cuda.Stream(non_blocking=True) as stream:
            cupy.cuda.Device().synchronize()  # the first step ran on another stream
            for routing in range(NUM_ROUTINGS):
                step.choose(routing)
                step.run()
                eager[routing] = step.total
            stream.synchronize()
            comm.Barrier()
            stream.begin_capture()
            step.run()
            graph = stream.end_capture()
            for replay in range(NUM_REPLAYS):
                step.choose(replay % NUM_ROUTINGS)
                graph.launch(stream)
                results[replay] = step.total
            stream.synchronize()
            expected = eager[cupy.arange(NUM_REPLAYS) % NUM_ROUTINGS]
            wrong, distinct = int((results != expected).sum()), len(set(eager.tolist()))
            step.choose(3)  # and eager calls go on where the replays ended
            step.run()
            assert int(step.total) == int(eager[3])
            buffer.barrier().synchronize()
        return wrong, distinct


@pytest.mark.parametrize("split", [False, True], ids=["one launch", "halves"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ten_thousand_replays_of_processes(num_ranks, split):
    assert mpi(num_ranks, replays, split, timeout_s=280) == [(0, NUM_ROUTINGS)] * num_ranks


def unprepared(comm) -> None:
    with cupyep.Buffer(comm, low_latency_mode=True, backend="cuda", timeout_s=30) as buffer:
        x, idx = cupy.ones((4, 128), np.float32), cupy.zeros((4, 2), np.int64)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            with pytest.raises(cupyep.StateError, match="cannot be captured"):
                buffer.low_latency_dispatch(x, idx, 4, comm.size, use_fp8=False)
            stream.end_capture()
            result = buffer.low_latency_dispatch(x, idx, 4, comm.size, use_fp8=False)  # the Buffer is as it was
            result.event.synchronize()


def test_an_unprepared_shape_cannot_be_captured():
    mpi(2, unprepared)
