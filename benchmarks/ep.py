"""Dispatch and combine in GB/s, on one GPU or several. Verifies before it times.

    python benchmarks/ep.py --ranks 4 --sms 4 8          ranks as streams of one process: kernel times
    mpirun -n 4 python -m mpi4py benchmarks/ep.py        ranks as processes (MPS where they share a GPU): kernel and API

GB/s = rows pushed x row bytes / time. "logical" counts every (token, destination rank), "wire" leaves the local rank
out. A kernel's time is the mean over back-to-back launches between two events, ids and weights included, positions
ready; the API's is that of whole calls. The figure is the slowest rank's. Random data; the median of five repetitions.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8" if "OMPI_COMM_WORLD_SIZE" in os.environ else "32")

import cupy
import ml_dtypes
import numpy as np

import cupyep
from cupyep import env
from cupyep.abi import Operation
from cupyep.backends.base import Shape, Tokens
from cupyep.layout import RowLayout

REPETITIONS, LAUNCHES = 5, 12
DTYPE = np.dtype(ml_dtypes.bfloat16)


class Rank:
    """One rank with a dispatch and a combine behind it, whose kernels can be launched again and again."""

    def __init__(self, comm: Any, args: argparse.Namespace) -> None:
        self.buffer = cupyep.Buffer(comm, backend="cuda", max_tokens_per_rank=args.tokens, timeout_s=30)
        rng = np.random.default_rng(self.buffer.rank)
        scores = rng.random((args.tokens, args.experts))
        idx = np.argpartition(scores, args.topk, axis=1)[:, : args.topk]
        self.topk_idx = cupy.asarray(idx.astype(np.int64))
        self.weights = cupy.asarray(rng.random(idx.shape, dtype=np.float32))
        noise = cupy.random.RandomState(self.buffer.rank + 1).rand(args.tokens, args.hidden, dtype=np.float32)
        self.x, self.num_experts = (noise - 0.5).astype(DTYPE), args.experts
        self.sent = self.buffer.dispatch(self.x, self.topk_idx, self.weights, num_experts=args.experts)
        self.combined = self.buffer.combine(self.sent.recv_x, self.sent.handle, self.sent.recv_topk_weights)
        self.verify()
        row_bytes = args.hidden * DTYPE.itemsize
        goes = self.sent.handle.send_row >= 0
        self.logical_bytes = int(goes.sum()) * row_bytes
        self.wire_bytes = self.logical_bytes - int(goes[:, self.buffer.rank].sum()) * row_bytes
        self.push_shape = Shape(Operation.PUSH, args.hidden, DTYPE, RowLayout(row_bytes, args.topk, 8, True))
        self.pull_shape = Shape(Operation.PULL, args.hidden, DTYPE, RowLayout(row_bytes, args.topk, 0, True))
        backend: Any = self.buffer._backend
        self.launcher, self.arena = backend._launcher, backend._arena
        self.stream = self.buffer.get_comm_stream()
        cupy.cuda.get_current_stream().synchronize()

    def verify(self) -> None:
        """Combining what was received gives each token times the number of ranks that it went to."""
        num_ranks = (self.sent.handle.send_row >= 0).sum(axis=1, keepdims=True).astype(np.float32)
        expected = self.x.astype(np.float32) * num_ranks
        error = float(cupy.abs(self.combined.combined_x.astype(np.float32) - expected).max())
        if not error <= 2**-8 * float(cupy.abs(expected).max()):
            raise AssertionError(f"rank {self.buffer.rank}: combine(dispatch(x)) is off by {error}")

    def push(self, sms: int) -> None:
        where = dict(zip(("rows", "idx", "weights"), map(self.arena.offset_of, self.sent[:3]), strict=True))
        routing = self.sent.handle.routing
        self.launcher.push(self.push_shape, routing, Tokens(self.x, None, self.topk_idx, self.weights), where, sms)

    def pull(self, sms: int) -> None:
        rows, weights = self.sent.recv_x, self.sent.recv_topk_weights
        where = {"rows": self.arena.offset_of(rows), "weights": self.arena.offset_of(weights)}
        out, out_weights, _ = self.combined
        self.launcher.pull(self.pull_shape, self.sent.handle.routing, out, out_weights, (), where, sms)

    def barrier(self, sms: int) -> None:
        self.launcher.barrier()

    def api_dispatch(self, sms: int) -> None:
        self.buffer.dispatch(self.x, self.topk_idx, self.weights, num_experts=self.num_experts, num_sms=sms)

    def api_cached_dispatch(self, sms: int) -> None:
        self.buffer.dispatch(self.x, handle=self.sent.handle, num_sms=sms)

    def api_combine(self, sms: int) -> None:
        self.buffer.combine(self.sent.recv_x, self.sent.handle, self.sent.recv_topk_weights, num_sms=sms)


KERNELS = {"dispatch kernel": Rank.push, "combine kernel": Rank.pull, "barrier kernel": Rank.barrier}
CALLS = {
    "dispatch API": Rank.api_dispatch,
    "dispatch API, cached": Rank.api_cached_dispatch,
    "combine API": Rank.api_combine,
}


def seconds(ranks: list[Rank], action: Any, sms: int, align: Any, stream: Any) -> float:
    """Mean time of one `action` of every rank in `ranks`, between two events on `stream`."""
    times = []
    for _ in range(REPETITIONS):
        align()
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        for launch in range(LAUNCHES + 1):  # the first absorbs the ranks' different starts
            for rank in ranks:
                action(rank, sms)
            if launch == 0:
                start.record(stream)
        end.record(stream)
        end.synchronize()
        cupy.cuda.Device().synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) * 1e-3 / LAUNCHES)
    return float(np.median(times))


def report(ranks: list[Rank], sms: int, name: str, time: float, num_ranks: int) -> None:
    logical, wire = (np.mean([getattr(rank, kind) for rank in ranks]) for kind in ("logical_bytes", "wire_bytes"))
    rates = "" if "barrier" in name else f"{logical / time / 1e9:8.0f} logical {wire / time / 1e9:8.0f} wire GB/s"
    print(f"R={num_ranks} SMs={sms:3d}  {name:22s} {time * 1e6:9.1f} us {rates}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="ranks in one process; without mpirun")
    parser.add_argument("--sms", type=int, nargs="+", default=[4, 8], help="SMs per rank")
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    parser.add_argument("--hidden", type=int, default=7168, help="bf16 elements of a row")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    args = parser.parse_args()
    cupyep.Buffer.set_num_sms(max(args.sms))
    if env.launched_by_mpi():
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        rank = Rank(comm, args)
        for sms in args.sms:
            for name, action in (KERNELS | CALLS).items():
                stream = rank.stream if name in KERNELS else cupy.cuda.get_current_stream()
                time = max(comm.allgather(seconds([rank], action, sms, comm.Barrier, stream)))
                if comm.rank == 0:
                    report([rank], sms, name, time, comm.size)
        rank.buffer.close()
        return
    ranks = cupyep.run_local(Rank, args.ranks, args, timeout_s=300)
    for sms in args.sms:
        for name, action in KERNELS.items():
            time = seconds(ranks, action, sms, cupy.cuda.Device().synchronize, ranks[0].stream)
            report(ranks, sms, name, time, args.ranks)
    for rank in ranks:
        rank.launcher.check()
    cupyep.run_local(lambda comm: ranks[comm.rank].buffer.close(), args.ranks, timeout_s=60)


if __name__ == "__main__":
    main()
