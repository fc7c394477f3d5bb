"""Of mutants_low_latency.py what test_mutants.py tests of mutants.py."""

from __future__ import annotations

import pytest

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from ptxsim import mutants, mutants_low_latency


@pytest.mark.parametrize("mutant", mutants_low_latency.MUTANTS, ids=lambda mutant: mutant.name)
def test_fault_is_seen(mutant: mutants_low_latency.Mutant) -> None:
    mutants.check_seen(mutants_low_latency.symptom, mutant, 60)


@pytest.mark.parametrize("mutant", mutants_low_latency.SURVIVORS, ids=lambda mutant: mutant.name)
def test_limit_is_still_one(mutant: mutants_low_latency.Mutant) -> None:
    assert mutants_low_latency.symptom(mutant, mutant.seed) is None, "seen now: move it to MUTANTS"
