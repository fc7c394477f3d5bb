"""The low-latency mode in microseconds, beside its bytes and the bare barrier. Verifies before it times.

    mpirun -n 8 python -m mpi4py benchmarks/low_latency.py       ranks as processes (MPS where they share a GPU)

kernel      one call, of a graph of 20 calls replayed: no launch costs in between
pair        a dispatch and a combine, of a graph of 20 pairs
host        what an eager call costs the host: calls back to back, not waiting for the GPU
bytes       what dispatch and combine move through memory: rows read, sent, taken out of the region, written
ceiling     the same bytes at the rate at which all ranks copy memory at once, measured in the same run
Times are the slowest rank's, medians of five repetitions.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")

import cupy
import ml_dtypes
import numpy as np

import cupyep

REPETITIONS, CALLS = 5, 20
DTYPE = np.dtype(ml_dtypes.bfloat16)


class Rank:
    """Inputs, and the calls to be timed."""

    def __init__(self, comm: Any, args: argparse.Namespace) -> None:
        self.comm, self.args = comm, args
        self.buffer = cupyep.Buffer(comm, low_latency_mode=True, backend="cuda", timeout_s=30)
        rng = np.random.default_rng(comm.rank)
        idx = rng.random((args.tokens, args.experts)).argsort(axis=1)[:, : args.topk]
        self.num_ranks_of_a_token = np.mean([len(set(ids // (args.experts // comm.size))) for ids in idx])
        self.idx, self.weights = cupy.asarray(idx), cupy.asarray(rng.random(idx.shape, np.float32))
        self.x = cupy.asarray(rng.standard_normal((args.tokens, args.hidden), np.float32)).astype(DTYPE)
        self.verify()
        self.handle = self.dispatch().handle
        self.y = self.buffer.get_next_low_latency_combine_buffer(self.handle)
        self.y[...] = 1

    def dispatch(self, fp8: bool | None = None) -> cupyep.LowLatencyDispatchResult:
        args = self.args
        fp8 = not args.bf16 if fp8 is None else fp8
        return self.buffer.low_latency_dispatch(
            self.x, self.idx, args.tokens, args.experts, use_fp8=fp8, topk_weights=self.weights, num_sms=args.sms
        )

    def combine(self) -> None:
        self.buffer.low_latency_combine(self.y, self.idx, None, self.handle, num_sms=self.args.sms)

    def pair(self) -> None:
        handle = self.dispatch().handle
        self.buffer.low_latency_combine(self.y, self.idx, None, handle, num_sms=self.args.sms)

    def verify(self) -> None:
        """Experts that answer with what they got give each token times the sum of its weights."""
        sent = self.dispatch(fp8=False)
        got = self.buffer.low_latency_combine(sent.recv_x, self.idx, None, sent.handle).combined_x.astype(np.float32)
        expected = self.x.astype(np.float32) * self.weights.sum(axis=1, keepdims=True)
        error = float(cupy.abs(got - expected).max())
        if not error <= 2**-7 * float(cupy.abs(expected).max()):
            raise AssertionError(f"rank {self.comm.rank}: combine(dispatch(x)) is off by {error}")

    def bytes(self) -> tuple[float, float]:
        """(of a dispatch, of a combine) through memory: every row that is read or written once more."""
        args, rows = self.args, self.num_ranks_of_a_token
        row = args.hidden * DTYPE.itemsize
        wire = row if args.bf16 else args.hidden + args.hidden // 32
        dispatch = row + rows * wire * 2 + args.topk * wire
        combine = args.topk * row + rows * row * 2 + row
        return args.tokens * dispatch, args.tokens * combine


def replayed(rank: Rank, call: Callable[[], Any], stream: Any) -> float:
    """Seconds of one call, of a graph of CALLS."""
    call()
    stream.synchronize()
    stream.begin_capture()
    for _ in range(CALLS):
        call()
    graph = stream.end_capture()
    return timed(rank, lambda: graph.launch(stream), stream) / CALLS


def timed(rank: Rank, action: Callable[[], Any], stream: Any) -> float:
    """Median seconds of `action` between two events; one before them absorbs the ranks' different starts."""
    times = []
    for _ in range(REPETITIONS):
        stream.synchronize()
        rank.comm.Barrier()
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        action()
        start.record(stream)
        action()
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) * 1e-3)
    return float(np.median(times))


def host_seconds(rank: Rank, call: Callable[[], Any], stream: Any) -> float:
    times = []
    for _ in range(REPETITIONS):
        stream.synchronize()
        rank.comm.Barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS)
    return float(np.median(times))


def copy_rate(rank: Rank, stream: Any) -> float:
    """Bytes read and written per second while every rank copies."""
    source = cupy.zeros(1 << 28, np.uint8)
    target = cupy.empty_like(source)
    seconds = timed(rank, lambda: [cupy.copyto(target, source) for _ in range(CALLS)], stream)
    return 2 * source.nbytes * CALLS / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sms", type=int, help="CTAs per rank; default: as many SMs as a rank has to itself")
    parser.add_argument("--tokens", type=int, default=128, help="per rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--bf16", action="store_true", help="dispatch rows as they are")
    args = parser.parse_args()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    with cupy.cuda.Stream(non_blocking=True) as stream:
        rank = Rank(comm, args)

        def show(name: str, seconds: float, more: str = "") -> float:
            slowest = max(comm.allgather(seconds))
            if comm.rank == 0:
                print(f"R={comm.size}  {name:18s} {slowest * 1e6:8.1f} us{more}", flush=True)
            return slowest

        rate = min(comm.allgather(copy_rate(rank, stream)))
        barriers = timed(rank, lambda: [rank.buffer.barrier() for _ in range(CALLS)], stream) / CALLS
        show("barrier call", barriers)
        for name, call, moved in zip(("dispatch", "combine"), (rank.dispatch, rank.combine), rank.bytes(), strict=True):
            rank.handle = rank.dispatch().handle  # the last one's tables
            term = f"   {moved / 1e6:.1f} MB, at {rate / 1e9:,.0f} GB/s {moved / rate * 1e6:.1f} us"
            show(f"{name} kernel", replayed(rank, call, stream), term)
            show(f"{name} host", host_seconds(rank, call, stream))
        show("pair in a graph", replayed(rank, rank.pair, stream))
        rank.buffer.close()


if __name__ == "__main__":
    main()
