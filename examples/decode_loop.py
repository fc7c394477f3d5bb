"""A decode loop of MoE layers with two micro-batches: while one's tokens travel, the other's experts run.

Four ranks as processes:  mpiexec -n 4 python -m mpi4py examples/decode_loop.py
Four ranks as threads:    python examples/decode_loop.py

Runs on the CPU (NumPy) or on GPUs (CuPy). The last step is computed once more with the normal mode and compared.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy comes: ranks share the cores

import argparse
import sys
import time

import ml_dtypes
import numpy as np
from tqdm import tqdm

import cupyep


def positive(text):
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def parse(argv=None):
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=show_defaults)
    parser.add_argument("--tokens", type=positive, default=16, help="sequences of one micro-batch, per rank")
    parser.add_argument("--hidden", type=positive, default=512, help="elements of a token (--fp8: a multiple of 128)")
    parser.add_argument("--experts", type=positive, default=16, help="experts of all ranks together")
    parser.add_argument("--topk", type=positive, default=4, help="experts per token")
    parser.add_argument("--layers", type=positive, default=4, help="layers, all with the same weights")
    parser.add_argument("--steps", type=positive, default=10, help="timed steps, after one that is not timed")
    parser.add_argument("--fp8", action="store_true", help="tokens travel as e4m3")
    parser.add_argument("--backend", choices=["auto", "numpy", "cuda"], default="auto")
    parser.add_argument(
        "--tolerance", type=float, help="largest relative error that passes; None: 0.02, with --fp8 0.06"
    )
    return parser.parse_args(argv)


class Layer:
    """Router, this rank's experts (one matrix each), and what stands in for attention."""

    def __init__(self, xp, buffer, args):
        self.xp, self.buffer, self.args = xp, buffer, args
        self.num_local = args.experts // buffer.size
        self.w_router = normal(xp, 0, (args.hidden, args.experts))
        self.w_attention = normal(xp, 1, (args.hidden, args.hidden))
        self.w_experts = normal(xp, 2 + buffer.rank, (self.num_local, args.hidden, args.hidden))

    def attention(self, x):
        return x + (x.astype(np.float32) @ self.w_attention * np.float32(0.1)).astype(x.dtype)

    def router(self, x):
        """(topk_idx, topk_weights) of `x`; the weights of a token sum to 1."""
        xp = self.xp
        logits = x.astype(np.float32) @ self.w_router
        topk_idx = xp.argsort(-logits, axis=1)[:, : self.args.topk].astype(np.int64)
        weights = xp.exp(xp.take_along_axis(logits, topk_idx, axis=1) - logits.max(axis=1, keepdims=True))
        return topk_idx, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)

    def experts(self, rows, dtype):
        """Each local expert on its rows `[num_local, rows, hidden]`. Rows that nobody sent are computed as well: their
        number is on the GPU, where it stays."""
        with np.errstate(all="ignore"):
            if self.args.fp8:
                codes, scales = rows
                table = self.xp.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
                rows = table[codes] * self.xp.repeat(scales, 128, axis=2)
            return (rows.astype(np.float32) @ self.w_experts).astype(dtype)

    def dispatch(self, x, topk_idx, topk_weights):
        """Sends; the result may be used once its hook has been called."""
        args = self.args
        return self.buffer.low_latency_dispatch(
            x,
            topk_idx,
            args.tokens,
            args.experts,
            use_fp8=args.fp8,
            return_recv_hook=True,
            topk_weights=topk_weights,
        )

    def combine(self, y, topk_idx, handle):
        return self.buffer.low_latency_combine(y, topk_idx, None, handle, return_recv_hook=True)

    def normal_mode(self, x, topk_idx, topk_weights):
        """The same layer's output by dispatch and combine."""
        received = self.buffer.dispatch(x, topk_idx, topk_weights, num_experts=self.args.experts)
        total = self.xp.zeros(received.recv_x.shape, np.float32)
        for expert in range(self.num_local):
            rows, columns = self.xp.nonzero(received.recv_topk_idx == expert)
            y = received.recv_x[rows].astype(np.float32) @ self.w_experts[expert]
            total[rows] += received.recv_topk_weights[rows, columns][:, None] * y
        return self.buffer.combine(total.astype(x.dtype), received.handle).combined_x


def step(layer, batches, num_layers):
    """All layers for both micro-batches: (their outputs, the last layer's inputs). Four kernels are in flight in turn:

    batch 0   attention send  receive experts send            receive
    batch 1                   attention send  receive experts send ...
    """
    x, inputs, sent, combined = list(batches), [None, None], [None, None], [None, None]
    for _ in range(num_layers):
        for one in (0, 1):
            other = 1 - one
            if combined[one]:
                combined[one].hook()
                x[one] = normalised(layer.xp, combined[one].combined_x)
            x[one] = layer.attention(x[one])
            inputs[one] = (x[one], *layer.router(x[one]))
            sent[one] = layer.dispatch(*inputs[one])  # travels while the other's experts run
            if sent[other]:
                finish(layer, inputs, sent, combined, other)
    finish(layer, inputs, sent, combined, 1)
    for result in combined:
        result.hook()
    return [result.combined_x for result in combined], inputs


def finish(layer, inputs, sent, combined, batch):
    """Receives a micro-batch, runs its experts, and sends the answers home."""
    sent[batch].hook()
    y = layer.experts(sent[batch].recv_x, inputs[batch][0].dtype)
    combined[batch] = layer.combine(y, inputs[batch][1], sent[batch].handle)
    sent[batch] = None


def normalised(xp, x):
    wide = x.astype(np.float32)
    return (wide / xp.sqrt((wide * wide).mean(axis=1, keepdims=True) + np.float32(1e-6))).astype(x.dtype)


def normal(xp, seed, shape):
    """Normal float32 numbers, scaled so that a product with them keeps its input's size."""
    return xp.random.default_rng(seed).standard_normal(shape, dtype=np.float32) / np.float32(shape[-2] ** 0.5)


def main(comm, args):
    """One rank's program; `comm` is an mpi4py communicator or a cupyep.LocalComm. Returns the exit status."""
    with cupyep.Buffer(comm, low_latency_mode=True, max_tokens_per_rank=args.tokens, backend=args.backend) as buffer:
        if buffer.backend == "cuda":
            import cupy as xp
        else:
            xp = np
        layer = Layer(xp, buffer, args)
        rng = xp.random.default_rng(1000 + comm.rank)
        batches = [rng.standard_normal((args.tokens, args.hidden), dtype=np.float32) for _ in range(2)]
        batches = [batch.astype(ml_dtypes.bfloat16) for batch in batches]
        step(layer, batches, args.layers)
        buffer.barrier().synchronize()
        start = time.perf_counter()
        for _ in tqdm(range(args.steps), "steps", disable=comm.rank != 0):
            outputs, inputs = step(layer, batches, args.layers)
        if xp is not np:
            xp.cuda.get_current_stream().synchronize()
        seconds = time.perf_counter() - start
        errors = []
        for output, given in zip(outputs, inputs, strict=True):
            expected, got = (array.astype(np.float32) for array in (layer.normal_mode(*given), output))
            errors.append(float(xp.linalg.norm(got - expected) / xp.linalg.norm(expected)))
        return report(comm, args, buffer.backend, comm.allgather((max(errors), seconds)))


def report(comm, args, backend, everyone):
    """Prints on rank 0; returns 1 if an error is too large (NaN included), else 0."""
    error, seconds = np.max(everyone, axis=0)
    tolerance = args.tolerance or (0.06 if args.fp8 else 0.02)
    passed = error <= tolerance
    if comm.rank == 0:
        num_ranks = len(everyone)
        print(f"{num_ranks} ranks, {backend} backend, {'fp8' if args.fp8 else 'bfloat16'}; 2 x {args.tokens} tokens")
        print(f"{args.layers} layers, hidden {args.hidden}, {args.experts} experts, top-{args.topk}")
        tokens = 2 * args.tokens * num_ranks * args.steps
        print(f"{tokens / seconds:,.0f} tokens/s, {seconds / args.steps * 1e3:.2f} ms a step (slowest rank)")
        verdict = f"{'ok' if passed else 'TOO LARGE'} (limit {tolerance:g})"
        print(f"relative error {error:.1e} against the normal mode, {verdict}")
    return 0 if passed else 1


if __name__ == "__main__":
    args = parse()
    if cupyep.env.launched_by_mpi():
        from mpi4py import MPI

        sys.exit(main(MPI.COMM_WORLD, args))
    sys.exit(max(cupyep.run_local(main, 4, args)))
