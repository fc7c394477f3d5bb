"""The command line of the benchmarks: `python -m cupyep.bench COMMAND --help`."""

from __future__ import annotations

import argparse
import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cupyep import env
from cupyep.bench import report
from cupyep.bench.cases import MODES, Case
from cupyep.bench.world import World
from cupyep.errors import CupyepError

PLOT_S = 120  # many panels take seconds, the first use of matplotlib on a machine many
MOST_S = 7 * 24 * 3600  # of --time-limit
FEW = 1 << 22  # elements of all rows that the NumPy backend moves within seconds
MOST_ROW_BYTES = 1 << 24  # of ceilings, whose arrays hold many
AXES = ["sms", "hidden", "tokens", "ranks"]
Results = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the process's own arguments) names; returns the exit status."""
    arguments = parser().parse_args(argv)
    faulthandler.dump_traceback_later(arguments.time_limit, exit=True)
    limit = threading.Timer(arguments.time_limit - 0.1, _say_late, [arguments])
    limit.daemon = True
    limit.start()
    if arguments.run is not _multi_gpu:  # whose children set it as they need it
        env.set_default_connections()
    try:
        report.check_files(arguments.json, arguments.plot)
        env.mover()  # one of the facts behind the results: raises now, not then
        results = arguments.run(arguments)
        if results is None:
            return 0
        known = report.publish(results, arguments.json)
        limit.cancel()
        if arguments.plot is not None:  # all is measured, printed and written: drawing has a time of its own
            faulthandler.dump_traceback_later(PLOT_S, exit=True)
            report.draw(results, known, arguments.plot)
        return int(any(result.get("failed") for result in results))
    except (CupyepError, ValueError) as error:
        print(f"cupyep.bench: {error}", file=sys.stderr)
        return 2
    finally:
        limit.cancel()
        faulthandler.cancel_dump_traceback_later()


def _say_late(arguments: argparse.Namespace) -> None:
    print(f"cupyep.bench: --time-limit: {arguments.time_limit} s are over", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line; each command's `run` is one of the functions below."""
    top = argparse.ArgumentParser("python -m cupyep.bench", description=__doc__)
    commands = top.add_subparsers(title="commands", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], Results | None], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        added.add_argument("--json", type=Path, metavar="FILE", help="write facts and results there")
        added.add_argument("--plot", type=Path, metavar="FILE", help="draw the results there (.png, .svg, .pdf)")
        added.add_argument("--calls", type=_positive, default=12, help="back-to-back calls of one series")
        added.add_argument(
            "--time-limit",
            type=_seconds,
            default=600,
            metavar="S",
            help="end the process after that; drawing does not count",
        )
        return added

    def group(added: argparse.ArgumentParser) -> argparse.ArgumentParser:
        added.add_argument("--ranks", type=_positive, help="threads of this process (4); nothing under mpirun")
        added.add_argument("--backend", choices=("auto", "cuda", "numpy"), default="auto")
        return added

    def case(
        added: argparse.ArgumentParser, tokens: list[int], modes: Sequence[str] = tuple(MODES), mode: str = "bf16"
    ) -> argparse.ArgumentParser:
        added.add_argument("--tokens", type=_positive, nargs="+", default=tokens, help="per rank")
        added.add_argument("--hidden", type=_positive, nargs="+", default=[7168], help="elements of a row")
        added.add_argument("--topk", type=_positive, default=8)
        added.add_argument("--experts", type=_positive, default=256)
        if modes:
            added.add_argument("--mode", choices=modes, nargs="+")
        added.set_defaults(mode=[mode])
        return added

    def sms(added: argparse.ArgumentParser, default: list[int]) -> argparse.ArgumentParser:
        added.add_argument("--sms", type=_positive, nargs="+", default=default, help="SMs per rank")
        return added

    sms(
        case(group(command("ep", _ep, "Dispatch and combine, kernels and calls, beside their ceilings.")), [4096]),
        [4, 8],
    )
    sweep = case(group(command("sweep", _sweep, "Cost along SMs, hidden, tokens and ranks, beside the model.")), [4096])
    sms(sweep, [8]).add_argument("--axes", choices=AXES, nargs="+", default=AXES)
    sms(case(group(command("barrier", _barrier, "Barriers, and batches of few tokens.")), [1, 8, 64, 128]), [8])
    text = "The options of dispatch and combine, each beside what it is to be compared with; bf16 and fp8."
    sms(case(group(command("options", _options, text)), [4096], modes=()), [8])
    text = "The low-latency mode, beside its bytes and the bare barrier."
    low_latency = case(group(command("low-latency", _low_latency, text)), [128], modes=("bf16", "fp8"), mode="fp8")
    low_latency.add_argument("--sms", type=_positive, nargs="+", help="per rank; default: all that a rank has")
    case(group(command("baseline", _baseline, "The same by MPI or NCCL; start it with mpirun.")), [4096])
    text = "What SMs can load, store and copy; with --peer, from and to other ranks' memory."
    ceilings = sms(group(command("ceilings", _ceilings, text)), [1, 4, 8, 16, 32, 64, 132])
    ceilings.add_argument("--row-bytes", type=_positive, default=14336)
    ceilings.add_argument("--peer", action="store_true", help="between each rank and the next")
    multi = group(command("multi-gpu", _multi_gpu, "Everything on the GPUs of this host, one rank per GPU."))
    multi.set_defaults(time_limit=480)
    multi.add_argument("--tokens", type=_positive, nargs="+", default=[128, 4096, 16384], help="per rank")
    multi.add_argument("--hidden", type=_positive, default=7168, help="elements of a row")
    multi.add_argument("--threads", action="store_true", help="ranks as threads: no MPI, and no MPS on one GPU")
    multi.add_argument("--tests", choices=("none", "quick", "full"), default="quick", help="full needs a longer limit")
    multi.add_argument("--quick", action="store_true", help="fewer points of each curve")
    return top


def _cases(arguments: argparse.Namespace) -> list[Case]:
    return [
        Case(tokens, hidden, arguments.topk, arguments.experts, mode)
        for mode in arguments.mode
        for hidden in arguments.hidden
        for tokens in arguments.tokens
    ]


def _world(arguments: argparse.Namespace, cases: Sequence[Case] = ()) -> World:
    """Collective: the job's ranks. Says so if `cases` would keep CPUs busy for long."""
    world = World(arguments.ranks, arguments.backend)
    if world.is_first and world.backend == "numpy" and any(case.num_tokens * case.hidden > FEW for case in cases):
        print("cupyep.bench: sizes are a GPU's, on NumPy minutes each; try --tokens 256 --hidden 512", file=sys.stderr)
    return world


def _collect(arguments: argparse.Namespace, world: World, results: Iterator[dict[str, Any]]) -> Results | None:
    """All `results`, on the first process; None on the others."""
    common = {"backend": world.backend, "ranks_are": "processes" if world.is_mpi else "threads"}
    collected = report.collect(({**result, **common} for result in results), arguments.json if world.is_first else None)
    return collected if world.is_first else None


def _ep(arguments: argparse.Namespace) -> Results | None:
    from cupyep.bench import ep

    world = _world(arguments, cases := _cases(arguments))
    return _collect(arguments, world, ep.run(world, cases, arguments.sms, arguments.calls))


def _sweep(arguments: argparse.Namespace) -> Results | None:
    from cupyep.bench import sweep

    for name in ("tokens", "hidden", "mode", "sms"):
        if len(given := getattr(arguments, name)) > 1:
            raise ValueError(f"--{name}: expected one value, around which sweep goes, got {' '.join(map(str, given))}")
    world = _world(arguments, cases := _cases(arguments))
    results = _collect(arguments, world, sweep.run(world, cases[0], arguments.sms[0], arguments.axes, arguments.calls))
    return results and results + sweep.prediction_note(results)


def _barrier(arguments: argparse.Namespace) -> Results | None:
    from cupyep.bench import barrier

    world = _world(arguments, cases := _cases(arguments))
    return _collect(arguments, world, barrier.run(world, cases, arguments.sms, arguments.calls))


def _options(arguments: argparse.Namespace) -> Results | None:
    from cupyep.bench import options

    world = _world(arguments, cases := _cases(arguments))
    results = _collect(arguments, world, options.run(world, cases, arguments.sms, arguments.calls))
    return results and options.compared(results)


def _low_latency(arguments: argparse.Namespace) -> Results | None:
    from cupyep.bench import low_latency

    world = _world(arguments, cases := _cases(arguments))
    results = low_latency.run(world, cases, arguments.sms or [], arguments.calls)
    return _collect(arguments, world, results)


def _baseline(arguments: argparse.Namespace) -> Results | None:
    from cupyep.bench import baseline

    world = _world(arguments, cases := _cases(arguments))
    return _collect(arguments, world, baseline.run(world, cases, arguments.calls))


def _ceilings(arguments: argparse.Namespace) -> Results | None:
    world = _world(arguments)
    if world.backend != "cuda":
        raise ValueError("ceilings: expected a GPU that CuPy can use, found none")
    if arguments.row_bytes % 16 or arguments.row_bytes > MOST_ROW_BYTES:
        expected = f"a multiple of 16 bytes, at most {MOST_ROW_BYTES}"
        raise ValueError(f"--row-bytes: expected {expected}, got {arguments.row_bytes}")
    if not arguments.peer:
        from cupyep.bench import ceilings

        if not world.is_first:
            return None
        return _collect(arguments, world, ceilings.run(arguments.sms, arguments.row_bytes, arguments.calls))
    from cupyep.bench import peers

    return _collect(arguments, world, peers.run(world, arguments.sms, arguments.row_bytes, arguments.calls))


def _multi_gpu(arguments: argparse.Namespace) -> Results | None:
    from cupyep.bench import multi_gpu

    if env.launched_by_mpi():
        raise ValueError("multi-gpu: expected to be started without mpirun; it starts its ranks itself")
    if arguments.time_limit < 60:
        raise ValueError(f"--time-limit: expected at least 60 for multi-gpu, got {arguments.time_limit}")
    return multi_gpu.run(
        arguments.ranks,
        threads=arguments.threads,
        tests=arguments.tests,
        steps=multi_gpu.steps(arguments.tokens, arguments.hidden, quick=arguments.quick, calls=arguments.calls),
        backend=arguments.backend,
        limit_s=arguments.time_limit - 15,
    )


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _seconds(text: str) -> int:
    if _positive(text) > MOST_S:
        raise argparse.ArgumentTypeError(f"expected at most {MOST_S} seconds, got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
