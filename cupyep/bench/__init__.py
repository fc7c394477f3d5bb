"""Benchmarks: `python -m cupyep.bench COMMAND`. docs/benchmarks.md says what each figure means.

cases.py     what is moved, and how bytes are counted        world.py     the ranks: threads or processes
ranks.py     one rank's data, calls and verification         kernels.py   the same with its kernels, on a GPU
gpu.py       what all ranks on a GPU have                    option_*, low_latency_*   ranks of those commands
timing.py    clocks and series                               timed.py     an action's time over all ranks
report.py    table, JSON, progress                           plot.py      pictures
The commands: ep.py options.py low_latency.py sweep.py barrier.py ceilings.py peers.py baseline.py (with exchange.py)
multi_gpu.py
"""
