"""Benchmarks: `python -m cupyep.bench COMMAND`. docs/benchmarks.md says what each figure means.

world.py starts ranks, cases.py says what is moved, ranks.py holds one rank's data and verifies it, timing.py measures.
ep.py, ceilings.py, barrier.py, baseline.py and multi_gpu.py are the commands; report.py and plot.py show the results.
"""
