"""What the compile tests share: the skip without NVRTC, PTX and SASS of a source text, its kernels one by one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from cupyep.backends.cuda import jit


def _why_no_nvrtc() -> str | None:
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        return f"CuPy with NVRTC cannot be imported: {error}"
    return None


_reason = _why_no_nvrtc()
needs_nvrtc = pytest.mark.skipif(_reason is not None, reason=str(_reason))


def ptx(source: str, arch: str = "sm_90") -> str:
    """The PTX of a source text."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, "test.cu", [], [])
    try:
        options = [*jit.OPTIONS, f"-arch={arch}", f"-I{jit.source_root()}", *jit._include_options()]
        nvrtc.compileProgram(program, options)
        return nvrtc.getPTX(program).decode()
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def kernels(ptx_text: str) -> dict[str, str]:
    """The body of every kernel in a PTX text, by name."""
    parts = re.split(r"^\.visible \.entry (\w+)\(", ptx_text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def inline_instructions(body: str) -> list[str]:
    """The instructions that came from inline assembly, without the predicate boilerplate around some of them."""
    blocks = re.findall(r"// begin inline asm\n(.*?)// end inline asm", body, flags=re.DOTALL)
    lines = [line.strip(" \t{}") for block in blocks for line in block.split("\n")]
    return [line for line in lines if line and not line.startswith((".reg", "selp.", "// "))]


def sass(cubin: bytes) -> dict[str, str]:
    """The machine code of every kernel in a cubin, by name, as nvdisasm prints it."""
    from cuda.pathfinder import find_nvidia_binary_utility

    tool = find_nvidia_binary_utility("nvdisasm")
    assert tool is not None, "nvdisasm: expected the nvidia-cuda-nvdisasm wheel, found none"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "test.cubin")
        path.write_bytes(cubin)
        text = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True, timeout=60).stdout
    parts = re.split(r"^\.text\.(\w+):$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
