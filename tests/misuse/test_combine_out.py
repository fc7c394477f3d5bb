"""combine's `out` over memory that is read meanwhile."""

from __future__ import annotations

import re

import numpy as np
import pytest
from multirank import checks, launch

import cupyep


def combine_into_an_addend(comm, backend):
    """`out` may be an addend itself; every other overlap with what is read is refused, and nothing is lost by it."""
    xp = checks.namespace(backend)
    with cupyep.Buffer(comm, 1 << 20, backend=backend, timeout_s=checks.TIMEOUT_S) as buffer:
        x, topk_idx = xp.ones((8, 16), np.float32), xp.zeros((8, 16), np.int64)
        _, _, _, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=1)
        y, memory, other = buffer.empty((8, 16), np.float32), xp.zeros((10, 16), np.float32), xp.ones((8, 16), "f4")
        y[...] = memory[1] = 1
        for name, arguments in {
            "x": {"x": memory[:8], "out": memory[1:9]},
            "x,": {"x": memory[:8], "out": memory[:8]},
            "topk_weights": {"x": y, "topk_weights": memory[:8], "out": memory[:8]},
            "bias": {"x": y, "bias": memory[:8], "out": memory[1:9]},
            "bias[1]": {"x": y, "bias": (memory[1:9], memory[:8]), "out": memory[1:9]},
            "bias,": {"x": y, "bias": memory[7::-1], "out": memory[:8]},
        }.items():
            with pytest.raises(ValueError, match=re.escape(f"out: expected memory apart from {name}")):
                buffer.combine(handle=handle, **arguments)
        out = memory[1:9]
        expected = checks.asnumpy(out) + 2
        buffer.combine(y, handle, bias=(out, other), out=out)
        checks.assert_bits("out", out, expected)


def test_out_and_what_is_read(backend):
    launch.threads(1, combine_into_an_addend, backend)
