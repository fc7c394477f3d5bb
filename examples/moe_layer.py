"""A mixture-of-experts layer spread over ranks: router, dispatch, experts, combine; checked against a dense loop.

Four ranks as processes:  mpiexec -n 4 python -m mpi4py examples/moe_layer.py
Four ranks as threads:    python examples/moe_layer.py

Runs on the CPU (NumPy) or on GPUs (CuPy): the code of the layer is the same, `xp` is the array module.
"""

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before NumPy comes: ranks share the cores, each gets one for its matmuls

import argparse
import sys
import time

import ml_dtypes
import numpy as np
from tqdm import tqdm

import cupyep

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
TOLERANCES = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}  # of the relative error of a rank's checked tokens
PHASES = ("router", "dispatch", "experts", "combine")


def positive(text):
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def parse(argv=None):
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=show_defaults)
    parser.add_argument("--tokens", type=positive, default=512, help="tokens per rank")
    parser.add_argument("--hidden", type=positive, default=1024, help="elements of a token")
    parser.add_argument("--ffn", type=positive, default=512, help="inner width of an expert")
    parser.add_argument("--experts", type=positive, default=32, help="experts of all ranks together")
    parser.add_argument("--topk", type=positive, default=4, help="experts per token")
    parser.add_argument("--backend", choices=["auto", "numpy", "cuda"], default="auto")
    parser.add_argument("--steps", type=positive, default=10, help="timed steps, after one that is not timed")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of tokens and of experts' outputs")
    parser.add_argument(
        "--checked", type=positive, default=64, help="tokens per rank that the dense loop computes as well"
    )
    parser.add_argument("--tolerance", type=float, help="largest relative error that passes; None: by dtype")
    return parser.parse_args(argv)


class MoELayer:
    """The router, and this rank's experts: silu(x @ w_in) @ w_out, in float32."""

    def __init__(self, xp, buffer, args):
        self.xp, self.buffer, self.num_experts, self.num_topk = xp, buffer, args.experts, args.topk
        num_local_experts = args.experts // buffer.size
        self.first_expert = buffer.rank * num_local_experts
        self.w_router = normal(xp, 0, (args.hidden, args.experts))  # the same on every rank
        self.w_in = normal(xp, 1 + buffer.rank, (num_local_experts, args.hidden, args.ffn))
        self.w_out = normal(xp, 1001 + buffer.rank, (num_local_experts, args.ffn, args.hidden))

    def router(self, x):
        """(topk_idx, topk_weights), both [num_tokens, num_topk]: softmax over all experts, the top-k renormalised."""
        xp = self.xp
        logits = x.astype(np.float32) @ self.w_router
        probabilities = xp.exp(logits - logits.max(axis=1, keepdims=True))
        topk_idx = xp.argsort(-probabilities, axis=1)[:, : self.num_topk].astype(np.int64)
        weights = xp.take_along_axis(probabilities, topk_idx, axis=1)
        return topk_idx, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)

    def expert(self, local_expert, rows):
        hidden = rows.astype(np.float32) @ self.w_in[local_expert]
        return (hidden / (1 + self.xp.exp(-hidden))) @ self.w_out[local_expert]

    def experts(self, received):
        """Each local expert on its rows, weighted and summed per row; in the arena, where combine reads it in place."""
        x = received.recv_x
        total = self.xp.zeros(x.shape, np.float32)
        for local_expert, count in enumerate(received.num_recv_tokens_per_expert_list):
            if count:
                rows, columns = self.xp.nonzero(received.recv_topk_idx == local_expert)
                weights = received.recv_topk_weights[rows, columns]
                total[rows] += weights[:, None] * self.expert(local_expert, x[rows])
        output = self.buffer.empty(x.shape, x.dtype)
        output[...] = total
        return output

    def step(self, x, clock):
        """The layer's output for `x`, the times at its five borders, and what was dispatched."""
        times = [clock()]
        topk_idx, topk_weights = self.router(x)
        self.buffer.barrier()  # so that dispatch and combine are timed, not the wait for the slowest rank
        times.append(clock())
        received = self.buffer.dispatch(x, topk_idx, topk_weights, num_experts=self.num_experts)
        times.append(clock())
        output = self.experts(received)
        self.buffer.barrier()
        times.append(clock())
        combined_x = self.buffer.combine(output, received.handle).combined_x
        times.append(clock())
        return combined_x, times, received.handle

    def dense(self, comm, x, topk_idx, topk_weights):
        """The same output without dispatch and combine: every rank runs its own experts on all ranks' tokens."""
        everyone = comm.allgather(tuple(asnumpy(array) for array in (x, topk_idx, topk_weights)))
        contributions = []
        for tokens, idx, weights in everyone:
            total = np.zeros(tokens.shape, np.float32)
            for token, choice in np.ndindex(idx.shape):
                local_expert = int(idx[token, choice]) - self.first_expert
                if 0 <= local_expert < len(self.w_in):
                    row = self.expert(local_expert, self.xp.asarray(tokens[token : token + 1]))
                    total[token] += weights[token, choice] * asnumpy(row)[0]
            contributions.append(total)
        return sum(everyones[comm.rank] for everyones in comm.allgather(contributions))


def normal(xp, seed, shape):
    """Normal float32 numbers, scaled so that a product with them keeps its input's size."""
    return xp.random.default_rng(seed).standard_normal(shape, dtype=np.float32) / np.float32(shape[-2] ** 0.5)


def asnumpy(array):
    return array.get() if hasattr(array, "get") else array


def main(comm, args):
    """One rank's program; `comm` is an mpi4py communicator or a cupyep.LocalComm. Returns the exit status."""
    with cupyep.Buffer(comm, max_tokens_per_rank=args.tokens, backend=args.backend) as buffer:
        if buffer.backend == "cuda":
            import cupy as xp
        else:
            xp = np

        def clock():
            if xp is not np:
                xp.cuda.get_current_stream().synchronize()
            return time.perf_counter()

        buffer.prepare(args.hidden, DTYPES[args.dtype], num_topk=args.topk)
        layer = MoELayer(xp, buffer, args)
        x = xp.random.default_rng(2001 + comm.rank).standard_normal((args.tokens, args.hidden), dtype=np.float32)
        x = x.astype(DTYPES[args.dtype])

        layer.step(x, clock)
        all_times = []
        for _ in tqdm(range(args.steps), "steps", disable=comm.rank != 0):
            combined_x, times, handle = layer.step(x, clock)
            all_times.append([*np.diff(times), times[-1] - times[0]])

        some = slice(0, args.checked)
        expected = layer.dense(comm, x[some], *(array[some] for array in layer.router(x)))
        error = np.linalg.norm(asnumpy(combined_x)[some].astype(np.float32) - expected) / np.linalg.norm(expected)
        num_rows = asnumpy((handle.send_row >= 0).sum(axis=0))  # sent to each rank, our own included
        facts = (float(error), num_rows, np.median(all_times, axis=0))
        return report(comm.rank, args, buffer.backend, comm.allgather(facts))


def report(rank, args, backend, everyone):
    """Prints what all ranks did, on rank 0; returns 1 if an error is too large (NaN included), else 0."""
    errors, num_rows, medians = zip(*everyone, strict=True)
    num_ranks, row_bytes = len(everyone), args.hidden * np.dtype(DTYPES[args.dtype]).itemsize
    *phase_s, step_s = np.max(medians, axis=0)  # seconds: median over steps, maximum over ranks
    phases = dict(zip(PHASES, phase_s, strict=True))
    rows = np.sum(num_rows) / num_ranks  # per rank
    local_rows = np.trace(np.array(num_rows)) / num_ranks
    tolerance = TOLERANCES[args.dtype] if args.tolerance is None else args.tolerance
    passed = max(errors) <= tolerance and not np.isnan(errors).any()
    if rank == 0:
        print(
            f"{num_ranks} ranks, {backend} backend, {args.dtype}; {args.tokens} tokens per rank, hidden {args.hidden}"
        )
        print(f"{args.experts} experts, {args.experts // num_ranks} per rank, ffn {args.ffn}; top-{args.topk}")
        print(f"rows sent per rank: {rows:,.0f} of {row_bytes:,} bytes, of which {local_rows:,.0f} to itself")
        print(f"step {step_s * 1e3:.2f} ms: {', '.join(f'{name} {t * 1e3:.2f}' for name, t in phases.items())}")
        print(f"{args.tokens * num_ranks / step_s:,.0f} tokens/s (median of {args.steps} steps, slowest rank)")
        for name in ("dispatch", "combine"):
            logical, wire = (count * row_bytes / phases[name] / 1e9 for count in (rows, rows - local_rows))
            print(f"{name}: {logical:.2f} GB/s per rank logical (all rows), {wire:.2f} wire (without the local rank)")
        verdict = f"{'ok' if passed else 'TOO LARGE'} (limit {tolerance:.0e})"
        checked = min(args.checked, args.tokens) * num_ranks
        print(f"relative error of {checked} tokens: {max(errors):.1e} against a dense loop, {verdict}")
    return 0 if passed else 1


if __name__ == "__main__":
    args = parse()
    if cupyep.env.launched_by_mpi():
        from mpi4py import MPI

        sys.exit(main(MPI.COMM_WORLD, args))
    sys.exit(max(cupyep.run_local(main, 4, args)))
