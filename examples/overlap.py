"""A matrix product that runs while a dispatch is under way: how much time that saves, with few and with many SMs.

On a GPU, two threads:    python examples/overlap.py
On GPUs, four processes:  mpiexec -n 4 python -m mpi4py examples/overlap.py
On the CPU the sizes are smaller, unless you give them.

`with buffer.dispatch(..., async_finish=True).event:` holds what may run meanwhile; when the block ends, the current
stream waits for the dispatch. A dispatch with handle= (or num_worst_tokens=) needs no count, so the host comes back at
once. On the NumPy backend every call is complete when it returns: the program runs, and nothing is saved.
"""

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy comes: ranks share the cores

import numpy as np
from tqdm import tqdm

import cupyep


def positive(text):
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


DEFAULTS = {"cuda": {"tokens": 4096, "hidden": 7168, "size": 4096}, "numpy": {"tokens": 64, "hidden": 256, "size": 128}}


def parse(argv=None):
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=show_defaults)
    parser.add_argument("--ranks", type=positive, default=2, help="threads, where no MPI launcher started this")
    parser.add_argument("--tokens", type=positive, help="per rank; 4,096 on GPUs, 64 on CPUs if you say nothing")
    parser.add_argument("--hidden", type=positive, help="float16 elements of a token; 7,168 or 256")
    parser.add_argument("--experts", type=positive, default=64, help="experts of all ranks together")
    parser.add_argument("--topk", type=positive, default=8, help="experts per token")
    parser.add_argument("--size", type=positive, help="rows and columns of the product's matrices; 4,096 or 128")
    parser.add_argument("--sms", type=positive, nargs="+", default=[8, 24], help="SM budgets of the dispatch")
    parser.add_argument("--steps", type=positive, default=20, help="timed steps, after one that is not timed")
    parser.add_argument("--backend", choices=["auto", "numpy", "cuda"], default="auto")
    return parser.parse_args(argv)


def measure(buffer, args, xp):
    """Seconds by (SMs, what): the dispatch alone, the product alone, one after the other, both at once."""
    rng = np.random.default_rng(buffer.rank)
    x = xp.asarray(rng.standard_normal((args.tokens, args.hidden), np.float32).astype(np.float16))
    topk_idx = xp.asarray(rng.random((args.tokens, args.experts)).argsort(axis=1)[:, : args.topk])
    a, b = (xp.asarray(rng.standard_normal((args.size, args.size), np.float32).astype(np.float16)) for _ in range(2))
    product = xp.empty((args.size, args.size), np.float16)
    first = buffer.dispatch(x, topk_idx, num_experts=args.experts)
    expected = first.recv_x.copy()

    def multiply():
        xp.matmul(a, b, out=product)

    def dispatch(sms, **options):
        return buffer.dispatch(x, handle=first.handle, num_sms=sms, **options)

    def one_after_the_other(sms):
        dispatch(sms)
        multiply()

    def both_at_once(sms):
        result = dispatch(sms, async_finish=True)
        with result.event:
            multiply()
        return result

    ways = {"dispatch": dispatch, "product": lambda sms: multiply(), "sum": one_after_the_other, "both": both_at_once}
    seconds = {}
    for sms in tqdm(args.sms, "SM budgets", disable=buffer.rank != 0):
        for name, way in ways.items():
            for step in range(args.steps + 1):  # the first is not timed
                if step == 1:
                    synchronize(xp)
                    buffer.barrier().synchronize()
                    start = time.perf_counter()
                way(sms)
            synchronize(xp)
            seconds[sms, name] = (time.perf_counter() - start) / args.steps
        if not (both_at_once(sms).recv_x == expected).all():
            raise SystemExit(f"rank {buffer.rank}: the dispatch beside a product gave other rows")
    return seconds


def synchronize(xp):
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def main(comm, args):
    """One rank's program; `comm` is an mpi4py communicator or a cupyep.LocalComm. Returns the exit status."""
    cupyep.Buffer.set_num_sms(max(args.sms))
    with cupyep.Buffer(comm, backend=args.backend) as buffer:
        given = {name: value for name, value in vars(args).items() if value is not None}
        args = argparse.Namespace(**DEFAULTS[buffer.backend] | given)
        if buffer.backend == "cuda":
            import cupy as xp
        else:
            xp = np
        everyone = comm.allgather(measure(buffer, args, xp))
        slowest = {key: max(rank[key] for rank in everyone) * 1e6 for key in everyone[0]}
        if buffer.rank == 0:
            print(
                f"{buffer.size} ranks, {buffer.backend} backend, {args.tokens} tokens of {args.hidden} float16 per rank"
            )
            for sms in args.sms:
                alone, product, serial, both = (slowest[sms, name] for name in ("dispatch", "product", "sum", "both"))
                print(f"{sms:3d} SMs: dispatch {alone:.0f} us, product {product:.0f} us", end=", ")
                print(f"one after the other {serial:.0f} us, at once {both:.0f} us: saved {serial - both:.0f} us")
    return 0


if __name__ == "__main__":
    args = parse()
    if cupyep.env.launched_by_mpi():
        from mpi4py import MPI

        sys.exit(main(MPI.COMM_WORLD, args))
    sys.exit(max(cupyep.run_local(main, args.ranks, args)))
