"""Small dispatches and combines for compute-sanitizer: `sanitizer_case.py [NUM_RANKS]`, threads, one by default.

Rows of a few bytes, of a whole slot, and of several chunks; some tokens and none; both movers; the low-latency mode.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # multirank, which gpu_helpers imports

from gpu_helpers import Traffic, check, open_buffer
from multirank import low_latency

import cupyep

ROWS = ((8, "bfloat16"), (3, "bfloat16"), (100, "float16"), (7168, "bfloat16"), (7168, "float32"))


def small(comm: Any) -> None:
    for hidden, dtype in ROWS:
        traffics = [Traffic(comm.size, num_tokens, hidden, dtype) for num_tokens in (33, 0)]
        with open_buffer(comm, *traffics, timeout_s=60) as buffer:
            for traffic in traffics:
                result = check(buffer, traffic, num_sms=2)
                buffer.dispatch(traffic.inputs(comm.rank)[0], handle=result.handle)
                buffer.barrier()


def low_latency_jobs(num_ranks: int) -> tuple[low_latency.Job, ...]:
    cases = (
        low_latency.small_case(num_ranks=num_ranks, hidden=hidden, num_local_experts=4) for hidden in (128, 97, 2048)
    )
    as_it_is, odd, long = cases
    return low_latency.Job(as_it_is, travel=False), low_latency.Job(odd, split=True), low_latency.Job(long, fp8="plain")


def main(num_ranks: int) -> None:
    cupyep.run_local(low_latency.run_jobs, num_ranks, low_latency_jobs(num_ranks), "cuda", timeout_s=240)
    for mover in ("auto", "vector"):
        os.environ["CUPYEP_MOVER"] = mover
        cupyep.run_local(small, num_ranks, timeout_s=240)
        print(f"sanitizer_case.py: {num_ranks} ranks, mover {mover}: ok", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
