"""Every fault of mutants.py is seen under its schedule, and those that the model cannot show are really not seen.

The text of a fault must occur in the sources: who edits a kernel edits its mutants as well.
"""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from ptxsim import mutants
from ptxsim.sources import PatchError


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_fault_is_seen(mutant: mutants.Mutant) -> None:
    """Under the seed that the table names; a kernel that was edited, or another NVRTC, may need another one."""
    if mutants.symptom(mutant, mutant.seed):
        return
    seed = next((seed for seed in range(200) if mutants.symptom(mutant, seed)), None)
    assert seed is not None, "not seen under any of 200 schedules"
    warnings.warn(f"{mutant.name}: now seen under seed {seed}, no longer under {mutant.seed}", stacklevel=1)


@pytest.mark.parametrize("mutant", mutants.SURVIVORS, ids=lambda mutant: mutant.name)
def test_limit_is_still_one(mutant: mutants.Mutant) -> None:
    assert mutants.symptom(mutant, 0) is None, "seen now: move it to MUTANTS"


def test_jobs_are_sound_without_faults() -> None:
    for name in mutants.JOBS:
        assert mutants.symptom(mutants.Mutant("no fault", name, ()), 3) is None


def test_a_fault_must_be_in_the_sources() -> None:
    with pytest.raises(PatchError, match="once"):
        mutants.symptom(mutants.mutant("nothing", "ring", "kernels/push.cu", "this is nowhere"), 0)
