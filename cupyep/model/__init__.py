"""What is faster, and why: dispatch and combine from bytes and rates, and pipelines of loads and computations.

machine.py holds what a GPU can do, times.py what an operation costs on it, sms.py where more SMs stop helping; no
tuning tables. pipeline.py predicts what overlap buys. Units: bytes, seconds, GB/s = 1e9 bytes per second. No CuPy.
"""

from cupyep.model.machine import Machine
from cupyep.model.pipeline import (
    Comparison,
    bytes_in_flight,
    compare,
    interval,
    load_time,
    pipeline_time,
    serial_time,
    stages_needed,
)
from cupyep.model.sms import num_sms
from cupyep.model.threads import ThreadPipeline
from cupyep.model.times import Estimate, Traffic, combine_time, dispatch_time

__all__ = [
    "Comparison",
    "Estimate",
    "Machine",
    "ThreadPipeline",
    "Traffic",
    "bytes_in_flight",
    "combine_time",
    "compare",
    "dispatch_time",
    "interval",
    "load_time",
    "num_sms",
    "pipeline_time",
    "serial_time",
    "stages_needed",
]
