"""The notebooks run top to bottom, each in a new interpreter within two minutes, and hold the outputs of such a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
TIME_LIMIT_S = 120


def cells(notebook, kind):
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_top_to_bottom(notebook):
    """Cell by cell in one namespace, as Jupyter does."""
    pytest.importorskip("matplotlib")
    sources = ["".join(cell["source"]) for cell in cells(notebook, "code")]
    program = "import json, sys\nspace = {}\nfor source in json.load(sys.stdin): exec(source, space)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(sources),
        env=os.environ | {"MPLBACKEND": "Agg", "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_holds_outputs_and_says_what_it_needs(notebook):
    opening = "".join(cells(notebook, "markdown")[0]["source"])
    assert opening.startswith("# ") and "**You need**" in opening
    counts = [cell["execution_count"] for cell in cells(notebook, "code")]
    assert counts == list(range(1, len(counts) + 1))  # of one run, in order
    outputs = [output for cell in cells(notebook, "code") for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert len(notebook.read_bytes()) < 300_000


def test_there_are_three():
    assert [path.stem[3:] for path in NOTEBOOKS] == ["tma_in_ten_minutes", "overlap", "dispatch_and_combine"]
