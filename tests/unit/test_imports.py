"""Who may import whom, read from the sources; and that cupyep works where CuPy and MPI are missing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "cupyep"
HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))
MAX_LINES = 300

# From the ground up: a part imports parts of lower layers and itself, nothing else. "" is cupyep/__init__.py.
LAYERS = (
    {"errors", "env", "structs"},
    {"abi"},
    {"low_latency_abi"},
    {"layout", "checks", "handle"},
    {"config", "comm", "watch"},
    {"model"},
    {"backends"},
    {"group", "threads", "quantize"},
    {"dispatch", "combine", "low_latency"},
    {"buffer"},
    {"tma"},
    {""},
    {"doctor"},
    {"bench"},
    {"__main__"},
)
# Module -> the parts of cupyep that may import it, as prefixes of file names. Some need a GPU machine, some start MPI.
ONLY_IN = {
    "cupy": ("backends/cuda/", "tma/", "bench/"),
    "cuda": ("backends/cuda/", "tma/", "bench/"),
    "pynvml": ("backends/cuda/",),
    "mpi4py": ("comm/mpi.py",),
    "torch": (),
}


def in_package(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    """Every absolute module name imported anywhere in `tree`; `from a import b` gives a.b, which may be an object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def part(name: str) -> str:
    """The part of cupyep that the module cupyep.`name` belongs to; an object of the package itself belongs to ""."""
    head = name.split(".")[0]
    return head if (PACKAGE / head).is_dir() or (PACKAGE / f"{head}.py").exists() else ""


def violations(name: str, source: str) -> list[str]:
    """What `source`, as the file `name` below cupyep/, imports or reads against the rules."""
    found, tree = [], ast.parse(source)
    mine = "" if name == "__init__.py" else name.removesuffix(".py").split("/")[0]
    levels = {member: level for level, layer in enumerate(LAYERS) for member in layer}
    if mine not in levels:
        return [f"{mine}: not in LAYERS"]
    for module in imports(tree):
        top, _, rest = module.partition(".")
        if top == "":
            found.append(f"{module}: a relative import")
        elif top == "cupyep":
            theirs = part(rest)
            if theirs != mine and levels.get(theirs, len(LAYERS)) >= levels[mine]:
                found.append(f"{module}: upwards")
            for one, other in (("numpy", "cuda"), ("cuda", "numpy")):
                if name.startswith(f"backends/{one}/") and rest.startswith(f"backends.{other}"):
                    found.append(f"{module}: from one backend to the other")
        elif top in ONLY_IN and not name.startswith(ONLY_IN[top]):
            found.append(f"{module}: not here")
    for node in ast.walk(tree):
        reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
        if reads and name != "env.py":
            found.append(f"os.{node.attr}: not here")  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=in_package)
def test_imports_only_what_it_may(path):
    assert violations(in_package(path), path.read_text()) == []


@pytest.mark.parametrize("folder", ["cupyep", "cuda_src"])
def test_files_have_at_most_300_lines(folder):
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files}
    assert len(files) > 5
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("comm/base.py", "from cupyep.buffer import Buffer", "cupyep.buffer.Buffer: upwards"),
        ("comm/base.py", "def f():\n    from cupyep import backends", "cupyep.backends: upwards"),
        ("layout.py", "from cupyep.checks import same", "cupyep.checks.same: upwards"),
        ("buffer.py", "from cupyep import Buffer", "cupyep.Buffer: upwards"),
        ("buffer.py", "import cupyep", "cupyep: upwards"),
        ("backends/base.py", "from cupyep import doctor", "cupyep.doctor: upwards"),
        ("backends/numpy/sync.py", "import cupyep.backends.cuda.jit", "from one backend to the other"),
        ("backends/numpy/sync.py", "import cupy.cuda", "cupy.cuda: not here"),
        ("doctor/checks.py", "from mpi4py import MPI", "mpi4py.MPI: not here"),
        ("backends/cuda/arena.py", "import torch", "torch: not here"),
        ("buffer.py", "import os\nos.environ['A']", "os.environ: not here"),
        ("comm/mpi.py", "from .base import Communicator", ".base.Communicator: a relative import"),
        ("surprise.py", "import os", "not in LAYERS"),
    ],
)
def test_a_violation_is_seen(name, source, expected):
    assert any(expected in found for found in violations(name, source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("backends/cuda/arena.py", "import cupy\nfrom cupy.cuda import runtime\nimport cuda.bindings.driver"),
        ("comm/mpi.py", "from mpi4py import MPI\nfrom cupyep.comm.base import Communicator"),
        ("buffer.py", "from cupyep import abi, backends\nimport cupyep.comm.local"),
        ("env.py", "import os\nos.environ['A']"),
        ("__init__.py", "from cupyep.buffer import Buffer"),
    ],
)
def test_what_is_allowed_passes(name, source):
    assert violations(name, source) == []


def python(code: str, **variables: str) -> str:
    """What a new interpreter prints for `code`."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_brings_neither_cupy_nor_mpi4py():
    """On a GPU machine the import compiles kernels through CuPy, unless it is told not to."""
    skip = {"CUPYEP_SKIP_IMPORT_COMPILE": "1"} if HAS_GPU else {}
    code = "import sys, cupyep; print([name for name in ('cupy', 'mpi4py', 'pynvml', 'torch') if name in sys.modules])"
    assert python(code, **skip) == "[]"


def test_import_brings_what_the_readme_names():
    assert python("import cupyep; print(cupyep.tma.copy.__name__, cupyep.model.num_sms(14336, 8) > 0)") == "copy True"


def test_works_where_cupy_and_mpi4py_are_missing():
    code = """
import sys
sys.modules.update(dict.fromkeys(("cupy", "cuda", "pynvml", "mpi4py")))  # None: they cannot be found
import numpy, cupyep
def rank(comm):
    with cupyep.Buffer(comm) as buffer:
        x, ids = numpy.ones((3, 4), numpy.float32), numpy.array([[0, 1], [1, 2], [3, -1]])
        result = buffer.dispatch(x, ids, num_experts=4)
        return buffer.backend, buffer.combine(result.recv_x, result.handle).combined_x[:, 0].tolist()
print(cupyep.run_local(rank, 2))
"""
    assert python(code) == str([("numpy", [1.0, 2.0, 1.0])] * 2)
