"""Every fault of mutants.py is seen under its schedule, and those that the model cannot show are really not seen.

The text of a fault must occur in the sources: who edits a kernel edits its mutants as well.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from ptxsim import mutants
from ptxsim.sources import PatchError


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_fault_is_seen(mutant: mutants.Mutant) -> None:
    mutants.check_seen(mutants.symptom, mutant, 200)


@pytest.mark.parametrize("mutant", mutants.SURVIVORS, ids=lambda mutant: mutant.name)
def test_limit_is_still_one(mutant: mutants.Mutant) -> None:
    assert mutants.symptom(mutant, mutant.seed) is None, "seen now: move it to MUTANTS"


def test_a_fault_must_be_in_the_sources() -> None:
    with pytest.raises(PatchError, match="once"):
        mutants.symptom(mutants.mutant("nothing", "ring", "kernels/push.cu", "this is nowhere"), 0)
