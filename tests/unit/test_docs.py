"""The Python code of the pages runs, in order; what needs CuPy, on a GPU only. Links lead somewhere."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from compile_helpers import needs_nvrtc, sass

import cupyep
from cupyep import model, tma
from cupyep.backends.cuda import jit

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


def has_tma():
    try:
        tma.require("docs/tma.md")
    except cupyep.UnsupportedDeviceError:
        return False
    return True


@pytest.mark.parametrize(("page", "count"), [("tma.md", 4), ("overlap.md", 1), ("low-latency.md", 1)])
def test_code_runs(page, count):
    sources, space = blocks(page), {}
    assert len(sources) == count
    for source in sources:
        if "import cupy\n" not in source or has_tma():
            exec(source, space)


@pytest.mark.parametrize(("page", "module", "count"), [("tma.md", tma, 5), ("overlap.md", model, 5)])
def test_calls_of_the_tables_are_possible(page, module, count):
    cells = re.findall(
        r"^\| `(\w+\([^`.]+\))` \|", (DOCS / page).read_text().replace(", ...)", ")"), flags=re.MULTILINE
    )
    assert len(cells) == count
    for cell in cells:
        call = ast.parse(cell, mode="eval").body
        signature = inspect.signature(getattr(module, call.func.id))
        signature.bind_partial(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords})


@needs_nvrtc
def test_the_kernel_of_the_page_compiles():
    [code] = re.findall(r'r"""\n(.*?)"""', blocks("tma.md")[-1], flags=re.DOTALL)
    cubin, log = jit.compile_source("corner.cu", code, "sm_90")
    assert "warning" not in log and "UTMALDG.2D" in sass(cubin)["corner"]


def test_links_lead_somewhere():
    for page in (DOCS.parent / "README.md", *DOCS.glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert ":" in link or (page.parent / link).exists(), (page, link)
