"""The command line: `cupyep COMMAND`, the same as `python -m cupyep COMMAND`. Each command is one function below."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cupyep import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the process's own arguments) names; returns the exit status."""
    parser = argparse.ArgumentParser("cupyep", description="Expert-parallel dispatch and combine for CuPy and NumPy.")
    parser.add_argument("--version", action="version", version=f"cupyep {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    doctor = commands.add_parser(
        "doctor",
        help="check this machine: libraries, GPUs, peer access, MPI, shared memory",
        description="Checks this machine. The last line says what it is ready for, or the one thing to fix.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object with the same facts")
    doctor.set_defaults(run=_doctor)

    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from cupyep import doctor

    facts = doctor.examine()
    print(doctor.as_json(facts) if arguments.json else doctor.as_text(facts))
    return 0 if facts["ready"] else 1


if __name__ == "__main__":
    sys.exit(main())
