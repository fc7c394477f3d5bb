"""From a kernel's source file to a loaded function: assemble the source, compile it once per node, load the cubin.

NVRTC compiles straight to a cubin, which needs no device, no context and no driver, so a kernel can be built at import
time or on a machine with no GPU. The cubin goes into a cache of our own: CuPy's does not see included headers, and its
compiler forces -ftz=true, with which denormals would differ between the backends.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import os
import re
import shutil
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cupyep import env
from cupyep.errors import CompileError

if TYPE_CHECKING:
    import cupy

LOCK_TIMEOUT_S = 60  # how long a rank waits for another one's compilation before it compiles by itself

# Denormals stay (no -ftz) and nothing is approximate. Sums that both backends must round alike use __fmul_rn and
# __fadd_rn, which are never contracted, so -fmad may stay on for addresses. There is no host code: functions and
# constants are the device's by default. ptxas reports registers and spills into the log.
OPTIONS = ("-std=c++17", "-lineinfo", "-default-device", "--ptxas-options=-v")


class Usage(NamedTuple):
    """What one kernel takes of an SM: registers per thread, and bytes spilled per thread (stores plus loads)."""

    num_registers: int
    spill_bytes: int


def source_root() -> Path:
    """The folder of the CUDA sources, for -I: cupyep/cuda_src of an installed wheel, else cuda_src of the checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "cuda_src", package.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"cuda_src: expected in {package} or beside it, found in neither")


def sources_digest() -> str:
    """Hex digest of every file under `source_root()`, names and bytes: an edited header makes another cubin."""
    root, digest = source_root(), hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


@dataclass(frozen=True)
class Request:
    """All that decides a cubin, beside the files of cuda_src and NVRTC's version.

    kernel: file name in cuda_src/kernels without ".cu"; arch: "sm_90"; prelude: generated constants and structs, which
    the kernel file may use; options: for NVRTC, after `OPTIONS`.
    """

    kernel: str
    arch: str
    prelude: str = ""
    options: tuple[str, ...] = ()

    def key(self) -> str:
        """Hex digest of everything that decides the cubin."""
        from cupy.cuda import nvrtc

        parts = (self.kernel, self.arch, self.prelude, *OPTIONS, *self.options, sources_digest(), nvrtc.getVersion())
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def source(self) -> str:
        """What NVRTC reads: the prelude, then the kernel file; messages and line info keep each one's own lines."""
        path = source_root() / "kernels" / f"{self.kernel}.cu"
        head = f"// {self.kernel} for {self.arch}; cuda_src {sources_digest()[:32]}"
        return f'{head}\n#line 1 "prelude"\n{self.prelude}\n#line 1 "{path}"\n{path.read_text()}'


def build(request: Request) -> Path:
    """The cubin of `request`, from the cache or compiled now. Ranks of a node that come together compile it once.

    Returns: its path. Raises: CompileError with NVRTC's log. Sync: none with a GPU; blocks while another rank compiles.
    """
    name = f"{request.kernel}-{request.arch}-{request.key()}"
    if dump := env.dump_source_dir():
        dump.mkdir(parents=True, exist_ok=True)
        _write(dump / f"{name}.cu", request.source().encode())
    cubin = env.cache_dir() / f"{name}.cubin"
    if _is_whole(cubin):
        return cubin
    cubin = _writable(env.cache_dir()) / cubin.name
    with _lock(cubin.with_suffix(".lock")):
        if not _is_whole(cubin):  # nobody has built it while we waited
            code, log = compile_source(f"{request.kernel}.cu", request.source(), request.arch, request.options)
            _write(cubin, code)
            _write(cubin.with_suffix(".log"), f"sha256 {hashlib.sha256(code).hexdigest()}\n{log}".encode())
    return cubin


def warm_up(requests: Iterable[Request]) -> list[Path]:
    """Builds all `requests`, several at a time, before anything else needs them. No context is made."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(build, requests))


def compile_source(name: str, source: str, arch: str, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """(cubin, NVRTC's log) of a source text, past the cache; `name` stands for it in messages. Raises: CompileError."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, name, [], [])
    try:
        ours = (*OPTIONS, *_without_cache(), *options, f"-arch={arch}", f"-I{source_root()}")
        nvrtc.compileProgram(program, [*ours, *_include_options()])
        return nvrtc.getCUBIN(program) + b"\0", _log(program)  # CuPy cuts the cubin's last byte off
    except nvrtc.NVRTCError as error:
        raise CompileError(name, _log(program) or str(error)) from None
    finally:
        nvrtc.destroyProgram(program)


def _log(program: int) -> str:
    from cupy.cuda import nvrtc

    return nvrtc.getProgramLog(program).rstrip("\0 \n")


def load(path: Path) -> cupy.RawModule:
    """The module of a cubin, in the current device's context."""
    import cupy

    return cupy.RawModule(path=str(path))


def function(module: cupy.RawModule, name: str, dynamic_smem_bytes: int = 0) -> cupy.RawKernel:
    """The kernel `name`, allowed `dynamic_smem_bytes` of shared memory per CTA.

    Every rank must have its function before any rank launches one that waits for peers: a module that loads beside such
    a kernel never returns. Setting the attribute makes the driver load the code now instead of at the first launch.
    """
    kernel = module.get_function(name)
    # CuPy gives everybody who names a cubin the same function: others may have asked for more.
    kernel.max_dynamic_shared_size_bytes = max(kernel.max_dynamic_shared_size_bytes, dynamic_smem_bytes)
    return kernel


def resource_usage(request: Request) -> dict[str, Usage]:
    """Registers and spills of every kernel in `request`, as ptxas reported them; builds it if needed."""
    log = build(request).with_suffix(".log").read_text()
    pattern = r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    return {
        name: Usage(int(registers), int(stores) + int(loads))
        for name, stores, loads, registers in re.findall(pattern, log, re.DOTALL)
    }


def _without_cache() -> tuple[str, ...]:
    """Turns off the cache that NVRTC has since 12.9: it initialises CUDA, and what it finds comes without a log."""
    from cupy.cuda import nvrtc

    return ("--no-cache",) if nvrtc.getVersion() >= (12, 9) else ()


@functools.cache
def _include_options() -> tuple[str, ...]:
    """-I of the CUDA headers that belong to CuPy's NVRTC, wherever that came from (wheels, conda, a toolkit)."""
    from cupy._core import core

    return tuple(option for option in core.assemble_cupy_compiler_options(()) if option.startswith("-I"))


def _is_whole(cubin: Path) -> bool:
    """Whether the cubin is there and is what its log says was written: a full disk or a copy may have cut it."""
    try:
        with cubin.with_suffix(".log").open() as log:
            return log.readline().split() == ["sha256", hashlib.sha256(cubin.read_bytes()).hexdigest()]
    except (OSError, UnicodeDecodeError):
        return False


def _write(path: Path, data: bytes) -> None:
    """Writes so that other processes see the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _writable(folder: Path) -> Path:
    """`folder`, made if missing; where that cannot be, a folder of this process, with a warning."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return folder
    except OSError as error:
        return _process_cache(str(folder), str(error))


@functools.cache
def _process_cache(folder: str, reason: str) -> Path:
    warnings.warn(
        f"the kernel cache {folder} cannot be written ({reason}), so every process compiles its kernels; "
        "set CUPYEP_CACHE_DIR to a folder that can",
        RuntimeWarning,
        stacklevel=4,
    )
    temporary = tempfile.mkdtemp(prefix="cupyep-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process or thread of the node at a time. It only saves work: when it cannot be had, go on without."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("a") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        yield  # closing the file releases it
