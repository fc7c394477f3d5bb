"""The preflight behind `cupyep doctor`: what this machine has, whether its parts work, and the one thing to fix.

bounded.py runs a probe in a process of its own, with a deadline; checks.py gathers the facts; selftest.py moves rows
between two CPU processes; report.py draws the verdict and prints. Probes of CUDA lie in backends/cuda/probe.py.
"""

from cupyep.doctor.checks import examine
from cupyep.doctor.report import as_json, as_text, verdict

__all__ = ["as_json", "as_text", "examine", "verdict"]
