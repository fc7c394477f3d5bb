"""The kernel cache: what makes a new cubin, what does not, who compiles, and what happens when things go wrong."""

from __future__ import annotations

import fcntl
import pickle
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from compile_helpers import needs_nvrtc, sass

from cupyep.backends.cuda import jit
from cupyep.errors import CompileError

PROBE = """#include <cupyep/ptx/warp.cuh>
#include <cupyep/ptx/probe.cuh>
extern "C" __global__ void probe(unsigned* x) { *x = cupyep::ptx::smid() + kProbe + cfg::kNumRanks; }
"""
PRELUDE = "namespace cfg { constexpr int kNumRanks = 8; }"
REQUEST = jit.Request("probe", "sm_90", PRELUDE)

pytestmark = needs_nvrtc


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private copy of cuda_src with one more header and kernel, and a private empty cache."""
    folder = tmp_path / "cuda_src"
    shutil.copytree(jit.source_root(), folder)
    (folder / "kernels").mkdir(exist_ok=True)
    (folder / "kernels" / "probe.cu").write_text(PROBE)
    (folder / "cupyep" / "ptx" / "probe.cuh").write_text("constexpr unsigned kProbe = 1;\n")
    monkeypatch.setattr(jit, "source_root", lambda: folder)
    monkeypatch.setenv("CUPYEP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPYEP_DUMP_SOURCE", raising=False)
    return folder


@pytest.fixture
def compiled(sources: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was compiled, in order."""
    names: list[str] = []
    real = jit.compile_source

    def counting(name: str, *args: object) -> tuple[bytes, str]:
        names.append(name)
        return real(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(jit, "compile_source", counting)
    return names


def test_a_second_build_reads_the_cache(compiled: list[str]) -> None:
    path = jit.build(REQUEST)
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert jit.build(REQUEST) == path
    assert compiled == ["probe.cu"]


def test_an_edited_header_gives_a_new_cubin(sources: Path, compiled: list[str]) -> None:
    before = jit.build(REQUEST)
    (sources / "cupyep" / "ptx" / "probe.cuh").write_text("constexpr unsigned kProbe = 77;\n")
    after = jit.build(REQUEST)
    assert before != after and before.read_bytes() != after.read_bytes()
    assert len(compiled) == 2


def test_the_key_sees_everything_that_decides_the_cubin(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import nvrtc

    keys = [
        REQUEST.key(),
        jit.Request("other", "sm_90", PRELUDE).key(),
        jit.Request("probe", "sm_100", PRELUDE).key(),
        jit.Request("probe", "sm_90", PRELUDE + " ").key(),
        jit.Request("probe", "sm_90", PRELUDE, ("-G",)).key(),
    ]
    header = sources / "cupyep" / "ptx" / "probe.cuh"
    header.rename(header.with_name("renamed.cuh"))
    keys.append(REQUEST.key())
    header.with_name("renamed.cuh").rename(header)
    others = (jit, "OPTIONS", (*jit.OPTIONS, "-maxrregcount=64")), (nvrtc, "getVersion", lambda: (99, 0))
    for owner, name, value in others:
        assert REQUEST.key() == keys[0]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            keys.append(REQUEST.key())
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("damage", ["cut cubin", "empty cubin", "flipped bit", "no cubin", "no log", "garbled log"])
def test_a_damaged_entry_is_built_again(compiled: list[str], damage: str) -> None:
    path = jit.build(REQUEST)
    whole, log = path.read_bytes(), path.with_suffix(".log")
    damaged = {"cut cubin": whole[:1000], "empty cubin": b"", "flipped bit": whole[:500] + b"\x55" + whole[501:]}
    assert damaged["flipped bit"] != whole
    if damage in damaged:
        path.write_bytes(damaged[damage])
    elif damage == "garbled log":
        log.write_bytes(b"\xff\xfe\x00")
    else:
        (path if damage == "no cubin" else log).unlink()
    (path.parent / f".{path.name}.left-by-a-killed-process").write_bytes(whole[:10])
    assert jit.build(REQUEST) == path
    assert path.read_bytes() == whole and len(compiled) == 2
    assert jit.build(REQUEST) == path and len(compiled) == 2


TWO_PROCESSES = """
import sys, time
from pathlib import Path
from cupyep.backends.cuda import jit
folder, me, real = Path(sys.argv[1]), sys.argv[2], jit.compile_source
def slow(*args):
    (folder / f"compiled-by-{me}").touch()
    time.sleep(1)
    return real(*args)
jit.compile_source, jit.source_root = slow, lambda: folder / "cuda_src"
request = jit.Request("probe", "sm_90", sys.argv[3])
request.key()  # loads CuPy before the start
(folder / f"ready-{me}").touch()
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.001)
print(jit.build(request))
"""


def test_two_processes_compile_once(sources: Path) -> None:
    folder = sources.parent
    command = [sys.executable, "-c", TWO_PROCESSES, str(folder)]
    ranks = [subprocess.Popen([*command, str(i), PRELUDE], stdout=subprocess.PIPE, text=True) for i in range(2)]
    try:
        paths = {rank.communicate(timeout=60)[0] for rank in ranks}
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(paths) == 1 and Path(paths.pop().strip()).is_file()
    assert len(list(folder.glob("compiled-by-*"))) == 1


def test_threads_compile_once(compiled: list[str]) -> None:
    threads = [threading.Thread(target=jit.build, args=(REQUEST,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert compiled == ["probe.cu"]


def test_a_lock_that_is_never_released_costs_time_only(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = jit.build(REQUEST)
    path.unlink()
    monkeypatch.setattr(jit, "LOCK_TIMEOUT_S", 0.2)
    with path.with_suffix(".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert jit.build(REQUEST).is_file()
    assert len(compiled) == 2


@pytest.mark.parametrize(
    "line, message",
    [
        ("not C++ at all;", "identifier"),  # the compiler refuses it
        ('asm volatile("no.such.opcode;");', "ptxas"),  # ptxas refuses it
    ],
)
def test_an_error_carries_the_whole_log(sources: Path, line: str, message: str) -> None:
    (sources / "kernels" / "broken.cu").write_text(f'\nextern "C" __global__ void broken() {{\n{line}\n}}\n')
    with pytest.raises(CompileError) as caught:
        jit.build(jit.Request("broken", "sm_90", PRELUDE))
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.name == "broken.cu" and message in error.log and error.log in str(error)
    assert "\0" not in error.log
    assert not list(sources.parent.glob("cache/*.cubin"))


def test_an_error_names_the_line_of_the_kernel_file(sources: Path) -> None:
    (sources / "kernels" / "broken.cu").write_text("\n\nnot C++ at all;\n")
    with pytest.raises(CompileError, match=re.escape(f"{sources}/kernels/broken.cu(3)")):
        jit.build(jit.Request("broken", "sm_90", PRELUDE + "\n\n"))


def test_a_cache_that_cannot_be_written_falls_back(
    compiled: list[str], sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources.parent / "file").touch()
    monkeypatch.setenv("CUPYEP_CACHE_DIR", str(sources.parent / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="CUPYEP_CACHE_DIR"):
        path = jit.build(REQUEST)
    assert path.read_bytes()[:4] == b"\x7fELF" and sources.parent not in path.parents
    assert jit.build(REQUEST) == path and len(compiled) == 1


def test_the_dumped_source_is_what_was_compiled(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYEP_DUMP_SOURCE", str(sources.parent / "dump"))
    path = jit.build(REQUEST)
    text = (sources.parent / "dump" / f"{path.stem}.cu").read_text()
    assert text == REQUEST.source() and PRELUDE in text and PROBE in text
    assert jit.compile_source("probe.cu", text, "sm_90")[0] == path.read_bytes()


def test_resource_usage_shows_registers_and_spills(sources: Path) -> None:
    (sources / "kernels" / "spill.cu").write_text("""
extern "C" __global__ void light(float* x) { x[0] = 1; }
extern "C" __global__ void heavy(float* x) {
  float v[64];
  for (int i = 0; i < 64; ++i) v[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 64; ++i) x[i * 32 + threadIdx.x] = v[63 - i] * v[i];
}""")
    usage = jit.resource_usage(jit.Request("spill", "sm_90", options=("-maxrregcount=24",)))
    assert usage["light"].spill_bytes == 0 < usage["heavy"].spill_bytes
    assert usage["light"].num_registers < usage["heavy"].num_registers <= 24


def test_arithmetic_keeps_denormals_and_is_not_contracted() -> None:
    source = 'extern "C" __global__ void add(float* x) { x[0] = __fadd_rn(__fmul_rn(x[1], x[2]), x[3]); }'
    code = sass(jit.compile_source("add.cu", source, "sm_90")[0])["add"]
    assert "FMUL" in code and "FADD" in code and "FFMA" not in code and "FTZ" not in code


def test_warm_up_builds_all(compiled: list[str]) -> None:
    requests = [jit.Request("probe", arch, PRELUDE) for arch in ("sm_80", "sm_90", "sm_100")]
    paths = jit.warm_up(requests)
    assert [path.name.split("-")[1] for path in paths] == ["sm_80", "sm_90", "sm_100"]
    assert all(path.is_file() for path in paths) and len(compiled) == 3


def test_building_touches_no_device_and_importing_no_cupy(sources: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
from cupyep.backends.cuda import jit
assert "cupy" not in sys.modules
jit.source_root = lambda: Path({str(sources)!r})
print(jit.build(jit.Request("probe", "sm_90", {PRELUDE!r})))
names = {{os.path.basename(os.path.realpath(f"/proc/self/fd/{{fd}}")) for fd in os.listdir("/proc/self/fd")}}
assert not [name for name in names if name.startswith("nvidia")], names
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_file()
