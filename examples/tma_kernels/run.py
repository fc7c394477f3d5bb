"""Three worked TMA kernels in a cupy.RawModule of your own: compiled, checked against NumPy, timed.

    python examples/tma_kernels/run.py [--num-sms 24] [--mbytes 256]

Each .cu file beside this one is complete: mbarriers initialised and fenced, bytes announced before a load, phases
flipped, writes fenced before a store, stores committed and waited for. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import cupyep
from cupyep import tma
from cupyep.tma import bench

FOLDER = Path(__file__).resolve().parent
COLUMNS = 2048  # kColumns of row_softmax.cu


def kernel(name: str, smem_bytes: int) -> Any:
    """The kernel of a .cu file, allowed its shared memory. CuPy's cache does not see headers, hence the version."""
    import cupy

    code = f"// cupyep {cupyep.__version__}\n" + (FOLDER / f"{name}.cu").read_text()
    module = cupy.RawModule(code=code, options=("-std=c++17", f"-I{cupyep.include_dir()}"))
    function = module.get_function(name)
    function.max_dynamic_shared_size_bytes = smem_bytes
    return function


def scale_shift(num_bytes: int) -> tuple[Callable, Callable, int]:
    """(launch(num_sms), check(), bytes moved) of y = a * x + b."""
    import cupy

    smem = 8 * 3 * (8192 + 8)
    function, x = kernel("scale_shift", smem), cupy.random.default_rng(1).standard_normal(num_bytes // 4, np.float32)
    y = cupy.full_like(x, np.nan)

    def launch(num_sms: int) -> None:
        function((num_sms,), (8 * 32,), (y, x, np.uint64(x.nbytes), np.float32(3), np.float32(0.5)), shared_mem=smem)

    return launch, lambda: np.allclose(y.get(), 3 * x.get() + np.float32(0.5), rtol=1e-6, atol=1e-6), 2 * x.nbytes


def row_softmax(num_bytes: int) -> tuple[Callable, Callable, int]:
    """The same of softmax over rows."""
    import cupy

    smem = 24 * (4 * COLUMNS + 16)
    shape = (num_bytes // (4 * COLUMNS), COLUMNS)
    function, x = kernel("row_softmax", smem), cupy.random.default_rng(2).standard_normal(shape, np.float32)
    y = cupy.full_like(x, np.nan)

    def launch(num_sms: int) -> None:
        function((num_sms,), (13 * 32,), (y, x, np.uint64(len(x))), shared_mem=smem)

    def check() -> bool:
        e = np.exp(x.get().astype(np.float64) - x.get().max(1, keepdims=True))
        return np.allclose(y.get(), e / e.sum(1, keepdims=True), rtol=1e-4, atol=1e-9)

    return launch, check, 2 * x.nbytes


def cast_fp8(num_bytes: int) -> tuple[Callable, Callable, int]:
    """The same of the cast to fp8."""
    import cupy

    smem = 16 * (2 * 4096 + 2 * 2048 + 2 * 8)
    host = (np.random.default_rng(3).standard_normal(num_bytes // 2, np.float32) * 200).astype(ml_dtypes.bfloat16)
    function, x = kernel("cast_fp8", smem), cupy.asarray(host.view(np.uint16))
    y = cupy.full(x.size, 0xFF, np.uint8)

    def launch(num_sms: int) -> None:
        function((num_sms,), (16 * 32,), (y, x, np.uint64(x.size), np.float32(0.5)), shared_mem=smem)

    def check() -> bool:
        expected = np.clip(host.astype(np.float32) * 0.5, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return np.array_equal(y.get(), expected.view(np.uint8))

    return launch, check, x.nbytes + y.nbytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-sms", type=int, default=24)
    parser.add_argument("--mbytes", type=int, default=256, help="of input")
    options = parser.parse_args()
    try:
        tma.require("the worked kernels")
    except cupyep.UnsupportedDeviceError as error:
        print(error, file=sys.stderr)
        return 1
    ceiling = bench.copy_gbps(options.mbytes << 20, options.num_sms)
    print(f"{options.num_sms} SMs, {options.mbytes} MiB; GB/s of bytes read plus written. tma.copy: {2 * ceiling:.0f}")
    failed = False
    for make in (scale_shift, row_softmax, cast_fp8):
        launch, check, num_bytes = make(options.mbytes << 20)
        launch(options.num_sms)
        right = check()
        gbps = num_bytes / bench.seconds(lambda launch=launch: launch(options.num_sms)) / 1e9
        failed |= not right
        print(
            f"{make.__name__:12} {'ok' if right else 'WRONG'}  {gbps:6.0f} GB/s, {gbps / (2 * ceiling):.0%} of tma.copy"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
