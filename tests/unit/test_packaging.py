"""What a user installs: the wheel, the sdist, and the commands and tables of the README."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from cupyep import errors

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def run(*command: str, cwd: Path, **variables: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources, so that nobody edits them between two builds."""
    folder = tmp_path_factory.mktemp("packaging") / "checkout"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "dist", "build", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout):
    """The wheel, built from the sources with what is installed: no network."""
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "../wheel", cwd=checkout)
    [path] = (checkout.parent / "wheel").glob("cupyep-*-py3-none-any.whl")
    return path


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_holds_package_and_cuda_sources(wheel, checkout):
    files = contents(wheel)
    expected = {
        f"cupyep/{path.relative_to(checkout / 'cupyep').as_posix()}": path
        for path in (checkout / "cupyep").rglob("*")
        if path.is_file()
    }
    expected |= {
        f"cupyep/cuda_src/{path.relative_to(checkout / 'cuda_src').as_posix()}": path
        for path in (checkout / "cuda_src").rglob("*")
        if path.is_file()
    }
    assert {name for name in files if ".dist-info/" not in name} == set(expected)
    assert all(files[name] == path.read_bytes() for name, path in expected.items())
    assert "cupyep/py.typed" in files and "cupyep/cuda_src/cupyep/tma.cuh" in files
    [license_text] = [text for name, text in files.items() if name.endswith(".dist-info/licenses/LICENSE")]
    assert license_text == (checkout / "LICENSE").read_bytes()


def test_installed_wheel_finds_its_cuda_sources(wheel, tmp_path):
    site = tmp_path / "site"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
        cwd=tmp_path,
    )
    code = "import cupyep; from cupyep.backends.cuda import jit; print(cupyep.__file__, jit.source_root(), sep='\\n')"
    files = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert files == [str(site / "cupyep/__init__.py"), str(site / "cupyep/cuda_src")]
    run(sys.executable, str(ROOT / "examples/01_hello_dispatch.py"), cwd=tmp_path, PYTHONPATH=str(site))
    assert run(str(site / "bin/cupyep"), "--version", cwd=tmp_path, PYTHONPATH=str(site)).startswith("cupyep ")


def test_sdist_builds_the_same_wheel(wheel, checkout):
    """Without --wheel, `build` makes the sdist and then the wheel from the unpacked sdist."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "../both", cwd=checkout)
    [from_sdist] = (checkout.parent / "both").glob("*.whl")
    assert contents(from_sdist) == contents(wheel)


def test_ci_runs_the_test_line_of_the_readme():
    lines = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)
    assert len(lines) == 2
    script = (ROOT / ".ci/run").read_text().splitlines()
    assert script[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in script
    assert [line for line in script if line.startswith("python3")] == [lines[1]]
    assert (ROOT / ".ci/run").stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", str(ROOT / ".ci/run")], check=True, timeout=20)


def test_readme_names_what_there_is():
    extras = {extra for group in re.findall(r"'?\.\[([\w,-]+)\]", README) for extra in group.split(",")}
    assert (
        extras <= set(metadata.metadata("cupyep").get_all("Provides-Extra"))
        and {"demo", "test", "cuda12", "cuda13"} <= extras
    )
    for example in re.findall(r"examples/\w+\.py", README):
        assert (ROOT / example).exists()
    variables = set(re.findall(r"CUPYEP_\w+", (ROOT / "cupyep/env.py").read_text()))
    assert set(re.findall(r"^\| `(CUPYEP_\w+)`", README, flags=re.MULTILINE)) == variables
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert set(re.findall(r"^\| `(\w+Error)`", README, flags=re.MULTILINE)) == classes - {"CupyepError"}


def test_changelog_tells_of_this_version():
    from cupyep import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
