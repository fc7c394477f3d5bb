"""Replays one schedule readably, or looks for schedules. `python -m tests.ptxsim --job ring --seed 7 --trace`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ptxsim import mutants


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.ptxsim", description=__doc__)
    parser.add_argument("--job", default="ring", choices=mutants.JOBS, help="of mutants.py")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    parser.add_argument("--kernel", help="trace only this kernel: count, push, pull")
    parser.add_argument("--trace", action="store_true", help="a line for every burst of instructions")
    parser.add_argument("--mutant", help="part of a mutant's name: run it in its job")
    parser.add_argument("--search", type=int, metavar="N", help="the first of N seeds that shows each mutant")
    options = parser.parse_args()
    chosen = [mutant for mutant in (*mutants.MUTANTS, *mutants.SURVIVORS) if (options.mutant or "") in mutant.name]
    if options.search:
        for mutant in chosen:
            found = next((s for s in range(options.search) if mutants.symptom(mutant, s)), None)
            print(f"{mutant.name}: {found}", flush=True)
        return

    def trace(line: str) -> None:
        if not options.kernel or f" {options.kernel} rank" in line:
            print(line)

    mutant = chosen[0] if options.mutant else mutants.Mutant("no fault", options.job, ())
    for seed in range(options.seed, options.seed + options.seeds):
        symptom = mutants.symptom(mutant, seed, trace if options.trace else None)
        print(f"{mutant.name}, job {mutant.job}, seed {seed}: {symptom or 'as the oracle has it'}")


if __name__ == "__main__":
    main()
