"""Kernels of cuda_src as PTX programs, also with faults put into their text."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from cupy.cuda import nvrtc

from cupyep.backends.cuda import jit, plan
from ptxsim.parser import Program, parse

Patch = tuple[tuple[str, str, str], ...]  # (file under cuda_src, text, its replacement)


class PatchError(Exception):
    """A mutant that is none: its text is not in the sources, or NVRTC refuses it."""


@functools.cache
def sources() -> dict[str, str]:
    """The texts of cuda_src by path."""
    root = jit.source_root()
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.cu*")}


@functools.cache
def included(name: str) -> frozenset[str]:
    """A source file and all that it includes."""
    names = re.findall(r"#include <(cupyep/[^>]+)>", sources()[name])
    return frozenset({name}).union(*(included(other) for other in names))


def program(kernel: str, file: str, arch: str, num_ranks: int, constants: dict[str, int], patch: Patch) -> Program:
    """A kernel of dispatch or combine as NVRTC compiles it, with `patch` applied to the sources. Raises PatchError."""
    return requested(jit.Request(file, arch, plan.prelude(num_ranks, dict(constants))), kernel, patch)


def requested(request: jit.Request, kernel: str, patch: Patch = ()) -> Program:
    """The same for any kernel, as the package would build it."""
    concerned = tuple(part for part in patch if part[0] in included(f"kernels/{request.kernel}.cu"))
    return _program(kernel, f"kernels/{request.kernel}.cu", request.arch, request.prelude, concerned)


@functools.lru_cache(maxsize=256)
def _program(kernel: str, name: str, arch: str, prelude: str, patch: Patch) -> Program:
    texts = dict(sources())
    for file, old, new in patch:
        if texts[file].count(old) != 1:
            raise PatchError(f"{file}: expected the text once, found it {texts[file].count(old)} times: {old}")
        texts[file] = texts[file].replace(old, new)
    source = f'{prelude}\n#line 1 "{name}"\n{texts[name]}'
    return _compiled(source, name, texts, arch, kernel)


@functools.lru_cache(maxsize=256)
def text(file: Path, kernel: str, replacements: tuple[tuple[str, str], ...], arch: str = "sm_90") -> Program:
    """A kernel of a file that is no part of cuda_src but includes it."""
    source = file.read_text()
    for old, new in replacements:
        if source.count(old) != 1:
            raise PatchError(f"{file.name}: expected the text once, found it {source.count(old)} times: {old}")
        source = source.replace(old, new)
    return _compiled(source, file.name, sources(), arch, kernel)


def _compiled(source: str, name: str, texts: dict[str, str], arch: str, kernel: str) -> Program:
    headers = [key for key in texts if key.endswith(".cuh")]
    contents = [texts[key].encode() for key in headers]
    handle = nvrtc.createProgram(source, name, contents, [key.encode() for key in headers])
    try:
        virtual = arch.replace("sm_", "compute_")  # gives the same PTX, and no machine code: half of the time
        nvrtc.compileProgram(handle, [*jit.OPTIONS, f"-arch={virtual}", *jit._include_options()])
        return parse(nvrtc.getPTX(handle).decode(), kernel)
    except nvrtc.NVRTCError:
        raise PatchError(nvrtc.getProgramLog(handle)) from None
    finally:
        nvrtc.destroyProgram(handle)
