"""Models of what is faster, and why: pipelines of loads and computations."""

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
from cupyep.model.threads import ThreadPipeline

__all__ = [
    "Comparison",
    "ThreadPipeline",
    "bytes_in_flight",
    "compare",
    "interval",
    "load_time",
    "pipeline_time",
    "serial_time",
    "stages_needed",
]
