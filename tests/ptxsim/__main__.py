"""Replays one schedule readably, or looks for schedules. `python -m tests.ptxsim --job ring --seed 7 --trace`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ptxsim import mutants, mutants_low_latency
from ptxsim.mutants import Mutant

FAULTS = (*mutants.MUTANTS, *mutants.SURVIVORS)
LOW_LATENCY = (*mutants_low_latency.MUTANTS, *mutants_low_latency.SURVIVORS)
KERNELS = ("count", "push", "pull", "low_latency_dispatch", "low_latency_combine")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.ptxsim", description=__doc__)
    parser.add_argument("--job", default="", help="of mutants.py (ring) or mutants_low_latency.py (two)")
    parser.add_argument("--low-latency", action="store_true", help="a job of the latter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    parser.add_argument("--kernel", choices=KERNELS, help="trace only this kernel")
    parser.add_argument("--trace", action="store_true", help="a line for every burst of instructions")
    parser.add_argument("--mutant", help="part of a mutant's name: run it in its job")
    parser.add_argument("--search", type=int, metavar="N", help="the first of N seeds that shows each mutant")
    options = parser.parse_args()
    chosen = [mutant for mutant in (*FAULTS, *LOW_LATENCY) if (options.mutant or "") in mutant.name]
    if options.search:
        for mutant in chosen:
            kind = mutants_low_latency if mutant in LOW_LATENCY else mutants
            found = next((seed for seed in range(options.search) if kind.symptom(mutant, seed)), None)
            print(f"{mutant.name}: {found}", flush=True)
        return
    if options.mutant and len(chosen) != 1:
        names = "".join(f"\n  {mutant.name}" for mutant in chosen)
        parser.error(f"--mutant: expected a part of one name, got {options.mutant!r}, which {len(chosen)} have{names}")

    def trace(line: str) -> None:
        if not options.kernel or f" {options.kernel} rank" in line:
            print(line)

    is_low_latency = chosen[0] in LOW_LATENCY if options.mutant else options.low_latency
    kind, jobs = (mutants_low_latency, mutants_low_latency.RUNS) if is_low_latency else (mutants, mutants.JOBS)
    job = options.job or ("two" if is_low_latency else "ring")
    if job not in jobs:
        parser.error(f"--job: expected one of {', '.join(jobs)}, got {job}")
    mutant = chosen[0] if options.mutant else Mutant("sources as they are", job, ())
    for seed in range(options.seed, options.seed + options.seeds):
        seen = kind.symptom(mutant, seed, trace if options.trace else None)
        print(f"{mutant.name}, job {mutant.job}, seed {seed}: {seen or 'as the oracle has it'}")


if __name__ == "__main__":
    main()
