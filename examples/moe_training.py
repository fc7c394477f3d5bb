"""Trains a small mixture-of-experts model by hand-written gradients, its experts spread over ranks.

Four ranks as threads:    python examples/moe_training.py
Four ranks as processes:  mpiexec -n 4 python -m mpi4py examples/moe_training.py

The backward pass moves the same rows the other way round: the backward of combine is a cached dispatch of the output's
gradient, the backward of dispatch is a combine, which brings the gradients of tokens and of top-k weights home. Every
rank also trains the whole model alone, without cupyep, on all ranks' tokens: both loss curves must agree.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy comes: ranks share the cores

import argparse
import sys

import numpy as np
from tqdm import tqdm

import cupyep

LEARNT = 0.7  # the last loss is below this part of the first one


def positive(text):
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def parse(argv=None):
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=show_defaults)
    parser.add_argument("--ranks", type=positive, default=4, help="threads, where no MPI launcher started this")
    parser.add_argument("--tokens", type=positive, default=64, help="per rank and step")
    parser.add_argument("--features", type=positive, default=16, help="elements of an input")
    parser.add_argument("--hidden", type=positive, default=32, help="elements of a token")
    parser.add_argument("--ffn", type=positive, default=32, help="inner width of an expert")
    parser.add_argument("--experts", type=positive, default=8, help="experts of all ranks together")
    parser.add_argument("--topk", type=positive, default=2, help="experts per token")
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--rate", type=float, default=0.3, help="learning rate")
    parser.add_argument("--backend", choices=["auto", "numpy", "cuda"], default="auto")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest relative difference of two losses")
    return parser.parse_args(argv)


def normal(xp, seed, shape):
    return xp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32) / np.float32(shape[-2] ** 0.5))


class Experts:
    """relu(x @ w_in) @ w_out for each of some experts; rows name them by idx, -1 for none."""

    def __init__(self, xp, w_in, w_out):
        self.xp, self.w_in, self.w_out = xp, w_in, w_out

    def chosen(self, idx):
        """(expert, rows, choices) of every expert that has a row. A row names an expert once at most."""
        for expert in range(len(self.w_in)):
            rows, choices = self.xp.nonzero(idx == expert)
            if len(rows):
                yield expert, rows, choices

    def forward(self, x, idx, weights):
        """The weighted sum of each row's experts."""
        y = self.xp.zeros_like(x)
        for expert, rows, choices in self.chosen(idx):
            inner = self.xp.maximum(x[rows] @ self.w_in[expert], 0)
            y[rows] += weights[rows, choices][:, None] * (inner @ self.w_out[expert])
        return y

    def backward(self, x, idx, weights, dy):
        """(dx, dweights, dw_in, dw_out) for the gradient dy of forward's result."""
        dx, dweights = self.xp.zeros_like(x), self.xp.zeros_like(weights)
        dw_in, dw_out = self.xp.zeros_like(self.w_in), self.xp.zeros_like(self.w_out)
        for expert, rows, choices in self.chosen(idx):
            inner = self.xp.maximum(x[rows] @ self.w_in[expert], 0)
            dweights[rows, choices] = (inner @ self.w_out[expert] * dy[rows]).sum(axis=1)
            doutput = weights[rows, choices][:, None] * dy[rows]
            dinner = doutput @ self.w_out[expert].T * (inner > 0)
            dw_out[expert], dw_in[expert] = inner.T @ doutput, x[rows].T @ dinner
            dx[rows] += dinner @ self.w_in[expert].T
        return dx, dweights, dw_in, dw_out


class Model:
    """inputs @ w_embed, then the MoE layer. `moe` has forward(x, idx, weights) and backward(dy), see below."""

    def __init__(self, xp, args, moe):
        self.xp, self.args, self.moe = xp, args, moe
        self.w_embed = normal(xp, 1, (args.features, args.hidden))
        self.w_router = normal(xp, 2, (args.hidden, args.experts))

    def step(self, inputs, targets, num_all_tokens, reduce):
        """One step of gradient descent; `reduce` sums over ranks. Returns the loss of all ranks' tokens."""
        xp = self.xp
        x = inputs @ self.w_embed
        logits = x @ self.w_router
        idx = xp.argsort(-logits, axis=1)[:, : self.args.topk].astype(np.int64)
        scores = xp.exp(xp.take_along_axis(logits, idx, axis=1) - logits.max(axis=1, keepdims=True))
        weights = (scores / scores.sum(axis=1, keepdims=True)).astype(np.float32)
        error = self.moe.forward(x, idx, weights) - targets
        dy = error * np.float32(2 / (num_all_tokens * self.args.hidden))

        dx, dweights, dw_in, dw_out = self.moe.backward(dy)
        dscores = weights * (dweights - (weights * dweights).sum(axis=1, keepdims=True))
        dlogits = xp.zeros_like(logits)
        dlogits[xp.arange(len(idx))[:, None], idx] = dscores
        dx = dx + dlogits @ self.w_router.T
        dw_router, dw_embed, loss = reduce(x.T @ dlogits, inputs.T @ dx, (error**2).sum())

        experts, rate = self.moe.experts, np.float32(self.args.rate)
        for weight, gradient in (
            (self.w_embed, dw_embed),
            (self.w_router, dw_router),
            (experts.w_in, dw_in),
            (experts.w_out, dw_out),
        ):
            weight -= rate * gradient
        return float(loss) / (num_all_tokens * self.args.hidden)


class SpreadMoE:
    """Experts of this rank, for the tokens of all ranks."""

    def __init__(self, buffer, experts, num_experts):
        self.buffer, self.experts, self.num_experts = buffer, experts, num_experts

    def forward(self, x, idx, weights):
        # copy: the rows are needed again in the backward pass, and other layers need the arena meanwhile
        self.received = self.buffer.dispatch(x, idx, weights, num_experts=self.num_experts, copy=True)
        y = self.experts.forward(*self.received[:3])
        return self.buffer.combine(y, self.received.handle).combined_x

    def backward(self, dy):
        handle = self.received.handle
        dy_rows = self.buffer.dispatch(dy, handle=handle).recv_x
        dx_rows, dweights, dw_in, dw_out = self.experts.backward(*self.received[:3], dy_rows)
        dx, dweights, _ = self.buffer.combine(dx_rows, handle, dweights)
        return dx, dweights, dw_in, dw_out


class LocalMoE:
    """All experts in one place."""

    def __init__(self, experts):
        self.experts = experts

    def forward(self, *inputs):
        self.inputs = inputs
        return self.experts.forward(*inputs)

    def backward(self, dy):
        return self.experts.backward(*self.inputs, dy)


def batch(xp, args, step, rank):
    """Inputs, and targets that the model has to learn: two matrices, taking turns by the first input's sign."""
    inputs = np.random.default_rng((step, rank)).standard_normal((args.tokens, args.features), np.float32)
    first, second = (np.random.default_rng(seed).standard_normal((args.features, args.hidden)) for seed in (7, 8))
    targets = np.where(inputs[:, :1] > 0, inputs @ first, inputs @ second) / args.features**0.5
    return xp.asarray(inputs), xp.asarray(targets.astype(np.float32))


def main(comm, args):
    """One rank's program; `comm` is an mpi4py communicator or a cupyep.LocalComm. Returns the exit status."""
    with cupyep.Buffer(comm, max_tokens_per_rank=args.tokens, backend=args.backend) as buffer:
        if buffer.backend == "cuda":
            import cupy as xp
        else:
            xp = np
        w_in, w_out = (
            normal(xp, 3, (args.experts, args.hidden, args.ffn)),
            normal(xp, 4, (args.experts, args.ffn, args.hidden)),
        )
        num_local, rank = args.experts // buffer.size, buffer.rank
        mine = slice(rank * num_local, (rank + 1) * num_local)
        moe = SpreadMoE(buffer, Experts(xp, w_in[mine].copy(), w_out[mine].copy()), args.experts)
        spread, alone = Model(xp, args, moe), Model(xp, args, LocalMoE(Experts(xp, w_in, w_out)))

        def reduce(*values):  # in the order of ranks, so that all ranks get the same bits
            everyone = comm.allgather([value.get() if xp is not np else value for value in values])
            return [xp.asarray(sum(parts[1:], parts[0])) for parts in zip(*everyone, strict=True)]

        num_all_tokens, losses = args.tokens * buffer.size, []
        for step in tqdm(range(args.steps), "steps", disable=rank != 0):
            batches = [batch(xp, args, step, other) for other in range(buffer.size)]
            whole = [xp.concatenate(parts) for parts in zip(*batches, strict=True)]
            losses.append(
                (spread.step(*batches[rank], num_all_tokens, reduce),
                 alone.step(*whole, num_all_tokens, lambda *values: values))
            )  # fmt: skip
    return report(rank, args, buffer, np.array(losses))


def report(rank, args, buffer, losses):
    """Prints both curves on rank 0; returns 1 if they differ or too little was learnt."""
    difference = float(np.max(np.abs(losses[:, 0] / losses[:, 1] - 1)))
    learnt = losses[-1, 0] < LEARNT * losses[0, 0]
    passed = difference <= args.tolerance and learnt
    if rank == 0:
        print(f"{buffer.size} ranks, {buffer.backend} backend, {args.experts} experts, top-{args.topk}")
        for step in np.unique(np.linspace(0, args.steps - 1, 7).astype(int)):
            print(f"step {step:4d}: loss {losses[step, 0]:.6f}, in a single process {losses[step, 1]:.6f}")
        verdict = "ok" if difference <= args.tolerance else "TOO LARGE"
        verdict += f" (limit {args.tolerance:.0e})"
        print(f"largest relative difference of {args.steps} losses: {difference:.1e}, {verdict}")
        if not learnt:
            print(f"NOT LEARNT: the loss did not fall below {LEARNT} of the first one; --steps takes more")
    return 0 if passed else 1


if __name__ == "__main__":
    args = parse()
    if cupyep.env.launched_by_mpi():
        from mpi4py import MPI

        sys.exit(main(MPI.COMM_WORLD, args))
    sys.exit(max(cupyep.run_local(main, args.ranks, args)))
