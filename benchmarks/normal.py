"""What the options of dispatch and combine cost, on one GPU or several: each beside what it is to be compared with.

    python benchmarks/normal.py --ranks 4 --sms 8           ranks as threads of one process
    mpirun -n 4 python -m mpi4py benchmarks/normal.py       ranks as processes (MPS where they share a GPU)

Times are means over back-to-back calls between two events of the stream that they run on, after calls that are not
timed: the median of five such means, of the slowest rank. GB/s = rows pushed x row bytes / time, rows counted once per
(token, destination rank), the local rank included; scales, ids and weights are not counted. Results are verified first.
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
from cupyep.backends.base import Outputs, Tokens

REPETITIONS, WARM, LAUNCHES = 5, 2, 12
BF16 = np.dtype(ml_dtypes.bfloat16)


class Bench:
    """One rank, with everything dispatched once."""

    def __init__(self, comm: Any, buffer: cupyep.Buffer, args: argparse.Namespace) -> None:
        self.comm, self.buffer, self.args, self.backend = comm, buffer, args, buffer._backend
        rng = np.random.default_rng(buffer.rank)
        idx = np.argpartition(rng.random((args.tokens, args.experts)), args.topk, axis=1)[:, : args.topk]
        self.idx = cupy.asarray(idx.astype(np.int64))
        self.weights = cupy.asarray(rng.random(idx.shape, dtype=np.float32))
        noise = cupy.random.RandomState(buffer.rank + 1).rand(args.tokens, args.hidden, dtype=np.float32)
        self.x = (noise - 0.5).astype(BF16)
        self.fp8 = cupyep.quantize_fp8(self.x)
        self.sent = self.dispatch(self.x)
        self.sent_fp8 = self.dispatch(self.fp8)
        self.experts = self.dispatch(self.x, layout="expert", expert_alignment=128)
        self.worst = max(comm.allgather(self.sent.handle.num_recv_tokens))
        self.rows = int((self.sent.handle.send_row >= 0).sum())
        self.out = cupy.empty_like(self.x)
        self.arena_y = buffer.empty(self.sent.recv_x.shape, BF16)
        self.arena_y[...] = self.sent.recv_x
        self.pool_y = self.sent.recv_x.copy()
        self.square = cupy.eye(args.hidden, dtype=np.float16)
        self.verify()

    def dispatch(self, x: Any, **options: Any) -> Any:
        return self.buffer.dispatch(x, self.idx, self.weights, num_experts=self.args.experts, **options)

    def combine(self, y: Any, **options: Any) -> Any:
        return self.buffer.combine(y, self.sent.handle, self.sent.recv_topk_weights, **options)

    def verify(self) -> None:
        """Combining what came gives each token times the ranks it went to, by every way that is timed."""
        num_ranks = (self.sent.handle.send_row >= 0).sum(axis=1, keepdims=True).astype(np.float32)
        expected = self.x.astype(np.float32) * num_ranks
        wide = cupyep.dequantize_fp8(*self.sent_fp8.recv_x)
        for y in (self.arena_y, self.pool_y, self.sent.recv_x, wide):
            error = float(cupy.abs(self.combine(y).combined_x.astype(np.float32) - expected).max())
            limit = 2**-4 if y is wide else 2**-8
            if not error <= limit * float(cupy.abs(expected).max()):
                raise AssertionError(f"rank {self.buffer.rank}: combine is off by {error}")
        rows = self.experts.handle.expert_rows
        listed = self.experts.recv_topk_idx >= 0
        grouped, ranked = (array.view(np.uint16) for array in (self.experts.recv_x, self.sent.recv_x))
        if not bool((grouped[rows.row_map[listed]] == ranked[cupy.nonzero(listed)[0]]).all()):
            raise AssertionError(f"rank {self.buffer.rank}: the expert layout holds other rows")

    # what is timed

    def push_kernel(self, x: Any, sent: Any) -> Any:
        data, scales = x if isinstance(x, tuple) else (x, None)
        recv = sent.recv_x if isinstance(x, tuple) else (sent.recv_x, None)
        parts = {"rows": recv[0], "scales": recv[1], "idx": sent.recv_topk_idx, "weights": sent.recv_topk_weights}
        where = {name: self.backend._arena.offset_of(part) for name, part in parts.items() if part is not None}
        tokens = Tokens(data, scales, self.idx, self.weights)
        shape, routing = tokens.shape(), sent.handle.routing
        return lambda: self.backend._launcher.push(shape, routing, tokens, where, self.args.sms)

    def pull_kernel(self) -> Any:
        weights = self.sent.recv_topk_weights
        where = {"rows": self.backend._arena.offset_of(self.arena_y), "weights": self.backend._arena.offset_of(weights)}
        shape = Outputs(self.arena_y, weights).shape(self.args.topk)
        out_weights = cupy.empty_like(self.weights)
        routing = self.sent.handle.routing
        return lambda: self.backend._launcher.pull(shape, routing, self.out, out_weights, (), where, self.args.sms)

    def graph(self) -> Any:
        def both() -> None:
            came = self.dispatch(self.x, num_worst_tokens=self.worst)
            self.buffer.combine(came.recv_x, came.handle, came.recv_topk_weights, out=self.out)

        both()
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        both()
        graph = stream.end_capture()
        return lambda: graph.launch(stream)

    def product(self, where: Any) -> Any:
        half = self.sent.recv_x.astype(np.float16)
        handle = self.sent.handle
        self.buffer.combine(half, handle)

        def call() -> None:
            with where():
                y = cupy.matmul(half, self.square)
            self.buffer.combine(y, handle)

        return call

    def seconds(self, action: Any, stream: Any) -> float:
        """The slowest rank's median over repetitions of the mean time of one `action`."""
        times = []
        for _ in range(REPETITIONS):
            self.buffer.barrier().synchronize()
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            for number in range(WARM + LAUNCHES):
                if number == WARM:
                    start.record(stream)
                action()
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) * 1e-3 / LAUNCHES)
        return max(self.comm.allgather(float(np.median(times))))

    def report(self) -> None:
        from contextlib import nullcontext

        args, current, comm_stream = self.args, cupy.cuda.get_current_stream(), self.buffer.get_comm_stream()
        handle, wide, narrow = self.sent.handle, args.hidden * 2, args.hidden
        expanded = self.experts.handle
        lines = [  # name, action, stream, bytes of a row or None
            ("dispatch kernel", self.push_kernel(self.x, self.sent), comm_stream, wide),
            ("dispatch kernel, fp8 + scales", self.push_kernel(self.fp8, self.sent_fp8), comm_stream, narrow),
            ("combine kernel", self.pull_kernel(), comm_stream, wide),
            ("dispatch, cached", lambda: self.buffer.dispatch(self.x, handle=handle), current, wide),
            ("dispatch", lambda: self.dispatch(self.x), current, wide),
            ("dispatch, num_worst_tokens", lambda: self.dispatch(self.x, num_worst_tokens=self.worst), current, wide),
            ("dispatch, fp8 + scales", lambda: self.dispatch(self.fp8), current, narrow),
            ("dispatch, expert layout", lambda: self.dispatch(self.x, layout="expert"), current, wide),
            ("combine, arena input", lambda: self.combine(self.arena_y), current, wide),
            ("combine, staged input", lambda: self.combine(self.pool_y), current, wide),
            ("combine, arena input, out=", lambda: self.combine(self.arena_y, out=self.out), current, wide),
            ("combine, expert layout", lambda: self.buffer.combine(self.experts.recv_x, expanded), current, wide),
            ("matmul + combine", self.product(nullcontext), current, None),
            ("matmul + combine, allocator", self.product(self.buffer.allocator), current, None),
            ("graph of dispatch + combine", self.graph(), current, None),
            ("quantize_fp8", lambda: cupyep.quantize_fp8(self.x), current, None),
        ]
        for name, action, stream, row_bytes in lines:
            time = self.seconds(action, stream)
            rate = f"{self.rows * row_bytes / time / 1e9:8.0f} GB/s logical" if row_bytes else ""
            self.print(f"{name:30s} {time * 1e6:9.1f} us {rate}")
        self.report_expansion()

    def report_expansion(self) -> None:
        """The local kernels of the expert layout alone: bytes are rows read once and written once per listing."""
        source, current = self.sent.recv_x, cupy.cuda.get_current_stream()
        num_bytes = (source.shape[0] + int((self.experts.recv_topk_idx >= 0).sum())) * self.args.hidden * 2
        experts, handle = self.backend._experts, self.experts.handle
        stream = self.buffer.get_comm_stream()
        with stream:
            time = self.seconds(lambda: experts.expand(source, handle, False, current), stream)
        self.print(
            f"{'expand alone':30s} {time * 1e6:9.1f} us {num_bytes / time / 1e9:8.0f} GB/s of memory traffic per rank"
        )

    def print(self, text: str) -> None:
        if self.buffer.rank == 0:
            print(f"R={self.buffer.size} SMs={self.args.sms}  {text}", flush=True)


def program(comm: Any, args: argparse.Namespace) -> None:
    """One rank's program; `comm` is an mpi4py communicator or a cupyep.LocalComm."""
    row_bytes = args.hidden * 2 + args.topk * 12
    size = comm.Get_size() if hasattr(comm, "Get_size") else comm.size
    heap = 6 * size * args.tokens * row_bytes
    with cupyep.Buffer(comm, heap, backend="cuda", max_tokens_per_rank=args.tokens, timeout_s=60) as buffer:
        Bench(comm, buffer, args).report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="ranks in one process; without mpirun")
    parser.add_argument("--sms", type=int, default=8, help="SMs per rank")
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    parser.add_argument("--hidden", type=int, default=7168, help="elements of a row")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    args = parser.parse_args()
    cupyep.Buffer.set_num_sms(args.sms)
    if env.launched_by_mpi():
        from mpi4py import MPI

        program(MPI.COMM_WORLD, args)
    else:
        cupyep.run_local(program, args.ranks, args, timeout_s=500)


if __name__ == "__main__":
    main()
