"""What one GPU can load, store and copy: the kernels of ceilings.cu, alone, by number of SMs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import cupy
import numpy as np

from cupyep import abi
from cupyep.abi import Operation
from cupyep.backends.cuda import jit, plan
from cupyep.backends.cuda.kernels import Call, Kernel
from cupyep.backends.shapes import Shape
from cupyep.bench.timing import CudaClock, measure
from cupyep.layout import RowLayout, align

FILL = 0x5A  # what `mix` stores
COPY_WARPS = 16
BYTES_PER_SM, MOST_BYTES = 32 << 20, 1 << 30  # moved by a launch: a fraction of a millisecond, and more than L2 holds


class Probe:
    """The kernels for units of one row (or of a part of a long one), on the current device and a stream.

    With the ring that PUSH has for such rows, so that a ceiling is that of the same ring.
    """

    def __init__(self, row_bytes: int, stream: Any) -> None:
        device = cupy.cuda.Device()
        self._stream, self._call = stream, Call(abi.CEILING_PARAMS, {})
        smem_limit = cupy.cuda.runtime.getDeviceProperties(device.id)["sharedMemPerBlockOptin"]
        constants = ring(row_bytes, smem_limit)
        self.chunk_bytes = constants["kChunkBytes"]
        arch = f"sm_{device.compute_capability}"
        self._kernels = {}
        for name in ("fan", "mix", "copy") if int(device.compute_capability) >= 90 else ("copy",):
            warps = COPY_WARPS if name == "copy" else constants["kWarps"]
            prelude = plan.prelude(1, {**constants, "kWarps": warps})
            smem = 0 if name == "copy" else smem_bytes(constants)
            module = jit.load(jit.build(jit.Request("ceilings", arch, prelude)))
            self._kernels[name] = Kernel(jit.function(module, name, smem), 32 * warps, smem)

    @staticmethod
    def able(row_bytes: int) -> bool:
        """Whether the current device has bulk copies and can move such rows by them."""
        return row_bytes % 16 == 0 and int(cupy.cuda.Device().compute_capability) >= 90

    def launch(
        self, kernel: str, num_sms: int, src: list[int], dst: list[int], num_bytes: int, reads: int = 1, writes: int = 1
    ) -> None:
        """Moves units until one array of `src` or `dst` is through; see ceilings.cu. The host goes on at once."""
        self._call.set(
            src=tuple(src[: abi.CEILING_ARRAYS]),  # the rest is 0
            dst=tuple(dst[: abi.CEILING_ARRAYS]),
            num_units=num_bytes // self.chunk_bytes,
            num_src=max(1, len(src)),
            num_dst=max(1, len(dst)),
            reads=reads,
            writes=writes,
        )
        self._kernels[kernel].launch(num_sms, self._call, self._stream)


def ring(row_bytes: int, smem_limit: int) -> dict[str, int]:
    """The constants of ceilings.cu: PUSH's ring for such rows, with room for the fixed slot."""
    shape = Shape(Operation.PUSH, row_bytes, np.dtype(np.uint8), RowLayout(row_bytes))
    chosen = plan.push_plan(shape, abi.MAX_RANKS, "tma", smem_limit).constants
    slots = chosen["kWarps"] * chosen["kStages"] + 1
    chunk = min(chosen["kChunkBytes"], (smem_limit - 2048) // slots // 128 * 128) // 16 * 16
    names = ("kWarps", "kStages")
    return {**{name: chosen[name] for name in names}, "kChunkBytes": chunk, "kSlotBytes": align(chunk), "kFill": FILL}


def smem_bytes(constants: dict[str, int]) -> int:
    """Dynamic shared memory of `fan` and `mix`: the rings, the fixed slot, and the mbarriers behind it."""
    slots = constants["kWarps"] * constants["kStages"]
    return (slots + 1) * constants["kSlotBytes"] + 8 * slots


# name -> (kernel, reads, writes); GB/s counts what is loaded (load), stored (the others), or both (mix).
LINES = {
    "TMA store": ("mix", 0, 1),
    "TMA load": ("mix", 1, 0),
    "vector copy": ("copy", 1, 1),
    "TMA copy": ("fan", 1, 1),
    **{f"load once, store to {count}": ("fan", 1, count) for count in (2, 4, 8)},
    **{f"mix {reads}:{writes}, read + written": ("mix", reads, writes) for reads, writes in ((1, 2), (1, 5), (5, 1))},
}


def run(num_sms: list[int], row_bytes: int, calls: int) -> Iterator[dict[str, Any]]:
    """The results of one GPU, the current one: a line for each number of SMs (at most all) and each of LINES."""
    free = cupy.cuda.runtime.memGetInfo()[0]
    size = min(MOST_BYTES, free // 4) // (8 * row_bytes) * (8 * row_bytes)
    src, dst = cupy.arange(size // 4, dtype=np.uint32).view(np.uint8), cupy.empty(size, np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    probe = Probe(row_bytes, stream)
    most = cupy.cuda.runtime.deviceGetAttribute(cupy.cuda.runtime.cudaDevAttrMultiProcessorCount, cupy.cuda.Device().id)
    num_sms = sorted({min(sms, most) for sms in num_sms})
    cupy.cuda.Device().synchronize()
    for name, (kernel, reads, writes) in LINES.items():
        if kernel not in probe._kernels:
            continue
        parts = max(reads, writes)
        check(probe, kernel, reads, writes, src, dst)
        for sms in num_sms:
            part = min(size, BYTES_PER_SM * sms) // parts // probe.chunk_bytes * probe.chunk_bytes
            launch = _launcher(probe, kernel, reads, writes, src, dst, part)
            timing = measure([partial(launch, sms)], [CudaClock(stream)], cupy.cuda.Device().synchronize, calls)[0]
            moved = part // probe.chunk_bytes * probe.chunk_bytes * _counted(name, reads, writes)
            yield {
                "benchmark": "ceilings",
                "name": name,
                "num_sms": sms,
                "row_bytes": row_bytes,
                "bytes": moved,
                "time_us": timing.mean * 1e6,
                "gbps": moved / timing.mean / 1e9,
            }


def _counted(name: str, reads: int, writes: int) -> int:
    return reads + writes if name.startswith("mix") else writes or reads


def _launcher(probe: Probe, kernel: str, reads: int, writes: int, src: Any, dst: Any, part: int) -> Any:
    sources, destinations = (
        [array.data.ptr + i * part for i in range(n)] for array, n in ((src, reads), (dst, writes))
    )

    def launch(sms: int) -> None:
        probe.launch(kernel, sms, sources, destinations, part, reads, writes)

    return launch


def check(probe: Probe, kernel: str, reads: int, writes: int, src: Any, dst: Any) -> None:
    """That the kernel stores what it should, all of it and nothing else. Raises AssertionError."""
    part = min(src.size // 8, 64 << 20) // 128 * 128
    dst.fill(0)
    cupy.cuda.Device().synchronize()
    _launcher(probe, kernel, reads, writes, src, dst, part)(7)
    cupy.cuda.Device().synchronize()
    whole = part // probe.chunk_bytes * probe.chunk_bytes
    for i in range(8):
        got = dst[i * part : (i + 1) * part]
        expected = (src[:whole] if kernel != "mix" else FILL) if i < writes else 0
        if not bool((got[:whole] == expected).all()) or bool(got[whole:].any()):
            raise AssertionError(f"ceilings: {kernel} {reads}:{writes}: array {i} is wrong")
