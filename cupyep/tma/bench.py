"""Figures of the toolkit on this GPU: `python -m cupyep.tma.bench [copy] [rings] [tiles] [pipelines] [overlap]`.

GB/s is payload: bytes copied, once, divided by time. Every result is checked before it is timed. Times are of the GPU,
between events around calls that follow each other without a gap, each of which moves more than L2 holds.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cupyep import model
from cupyep.errors import UnsupportedDeviceError
from cupyep.tma import copies, overlap
from cupyep.tma import launch as launches
from cupyep.tma.launch import Target
from cupyep.tma.pipeline import Pipeline
from cupyep.tma.tensor_map import TensorMap
from cupyep.tma.tiles import copy_tensor, plan_copy_tensor

SMS = (1, 2, 4, 8, 16, 24, 32, 64, 132)
SOFTMAX = """
__device__ __forceinline__ float exp2_of(float x) {  // subnormal results become 0: one instruction
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
}

__device__ void compute(const cupyep::Tile& tile, const Scalars&) {  // a warp per row, which it holds in registers
  constexpr int kVecs = cfg::kRowElements / 128;
  constexpr float kLog2E = 1.4426950408889634f;
  const unsigned lane = tile.thread % 32;
  for (unsigned row = tile.thread / 32; row < tile.num_rows; row += cfg::kGroupWarps) {
    const float4* in = reinterpret_cast<const float4*>(tile.in + row * cfg::kRowElements);
    float4* out = reinterpret_cast<float4*>(tile.out + row * cfg::kRowElements);
    float4 v[kVecs], sums = {};
    float most = __int_as_float(0xff800000);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) v[i] = in[lane + 32 * i];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) most = fmaxf(most, fmaxf(fmaxf(v[i].x, v[i].y), fmaxf(v[i].z, v[i].w)));
    for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    const auto exp_of = [&](float x) { return exp2_of(fmaf(x, kLog2E, -most * kLog2E)); };  // e^(x - most)
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      v[i] = make_float4(exp_of(v[i].x), exp_of(v[i].y), exp_of(v[i].z), exp_of(v[i].w));
      sums = make_float4(sums.x + v[i].x, sums.y + v[i].y, sums.z + v[i].z, sums.w + v[i].w);
    }
    float sum = sums.x + sums.y + sums.z + sums.w;
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    const float scale = 1 / sum;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      out[lane + 32 * i] = make_float4(v[i].x * scale, v[i].y * scale, v[i].z * scale, v[i].w * scale);
    }
  }
}
"""


def seconds(run: Callable[[], Any], repeats: int = 7, calls: int = 4) -> float:
    """GPU time of `run()` on the current stream: the median of `repeats` means over `calls` of them, back to back.

    A run that is not counted goes before each: the host then queues the others while the GPU is busy, so that its own
    time, tens of microseconds per call, does not show.
    """
    import cupy

    run()
    times = []
    for _ in range(repeats):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        run()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3 / calls)
    return float(np.median(times))


def pair(num_bytes: int) -> tuple[Any, Any]:
    """(dst, src) of so many bytes, src with content."""
    import cupy

    src = cupy.arange(num_bytes // 4, dtype=np.uint32)
    return cupy.zeros_like(src), src


def check(dst: Any, expected: Any) -> None:
    """Raises if a copy has not arrived; what is wrong is not timed."""
    if not bool((dst == expected).all()):
        raise RuntimeError("result: expected a copy of the source, got something else")


def copy_gbps(num_bytes: int, num_sms: int, ring: copies.Ring | None = None, **options: Any) -> float:
    """GB/s of a copy of `num_bytes` by TMA with `num_sms` SMs, checked."""
    dst, src = pair(num_bytes)
    rows = copies.run_of_bytes(dst.data.ptr, src.data.ptr, dst.nbytes)
    launch = copies.plan_copy(launches.target(), rows, num_sms, ring=ring, **options)
    launches.run(launch)
    check(dst, src)
    return dst.nbytes / seconds(lambda: launches.run(launch)) / 1e9


def memcpy_gbps(num_bytes: int) -> float:
    """GB/s of cudaMemcpyAsync."""
    dst, src = pair(num_bytes)
    return dst.nbytes / seconds(lambda: dst.data.copy_from_device_async(src.data, src.nbytes)) / 1e9


def bench_copy(target: Target) -> None:
    num_bytes = 1 << 30
    print(f"copy of 1 GiB, GB/s by TMA and by vectors; cudaMemcpyAsync {memcpy_gbps(num_bytes):.0f}")
    for num_sms in (n for n in SMS if n <= target.num_sms):
        figures = [copy_gbps(num_bytes, num_sms, mover=mover) for mover in ("tma", "vector")]
        print(f"  {num_sms:4} SMs {figures[0]:7.0f} {figures[1]:7.0f}", flush=True)


def bench_rings(target: Target) -> None:
    """Other rings than the usual: warps, stages and slot bytes of a CTA."""
    print("rings: GB/s of 1 GiB at 8 SMs and at all")
    slots = (4096, 8192, 14336, 16384, 32768)
    for warps, stages, slot in itertools.product((1, 2, 4, 8, 16), (2, 3, 4, 6, 8, 12), slots):
        ring = copies.Ring(warps, stages, slot)
        if 96 << 10 <= ring.smem_bytes <= target.smem_limit:
            figures = [copy_gbps(1 << 30, num_sms, ring) for num_sms in (8, target.num_sms)]
            print(f"  {warps:2} warps x {stages:2} x {slot:5} B {figures[0]:7.0f} {figures[1]:7.0f}", flush=True)
    for warps, slot in itertools.product((8, 16, 32), (4096, 8192, 16384)):
        ring = copies.Ring(warps, 1, slot)
        figures = [copy_gbps(1 << 30, num_sms, ring, mover="vector") for num_sms in (8, target.num_sms)]
        print(f"  {warps:2} warps of vectors, {slot:5} B {figures[0]:7.0f} {figures[1]:7.0f}", flush=True)


def bench_tiles(target: Target) -> None:
    """2-D tile copies against the plain copy."""
    import cupy

    rows, columns = 16384, 16384
    src = cupy.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    dst = cupy.zeros_like(src)
    print(f"copy_tensor of float32 [{rows}, {columns}], GB/s")
    for box, num_sms in itertools.product(((64, 64), (32, 128), (16, 256), (64, 256)), (8, target.num_sms)):
        dst[...] = 0
        to, of = TensorMap(dst, box), TensorMap(src, box)
        copy_tensor(to, of, num_sms=num_sms)
        check(dst, src)
        launch = plan_copy_tensor(target, to, (to.descriptor, of.descriptor), num_sms)
        gbps = dst.nbytes / seconds(functools.partial(launches.run, launch)) / 1e9
        print(f"  tiles {box!s:10} {num_sms:4} SMs {gbps:7.0f}", flush=True)


def softmax(x: np.ndarray) -> np.ndarray:
    """Of each row."""
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def pipelines() -> dict[str, tuple[Pipeline, dict[str, Any]]]:
    """Three pipelines, and the scalars to call each with; the fastest shapes of those tried (docs/performance.md)."""
    line = Pipeline(
        6, (4096,), "float32", "a * x + b", scalars=("a", "b"), reference=lambda x, a, b: a * x + b, groups=3
    )
    rows = Pipeline(12, (2, 1024), "float32", SOFTMAX, reference=softmax, groups=6, warps_per_group=2)
    cast = Pipeline(8, (8192,), "bfloat16", "x", out_dtype="float8_e4m3fn", reference=lambda x: x, groups=4)
    return {"a * x + b": (line, {"a": 3.0, "b": 0.5}), "row softmax": (rows, {}), "bf16 -> fp8": (cast, {})}


def check_pipeline(pipeline: Pipeline, y: Any, x: Any, scalars: dict[str, Any]) -> None:
    """Raises unless the first and the last rows of y are what NumPy makes of x."""
    for part in (slice(0, 4096), slice(-4096, None)):
        expected = np.zeros(y[part].shape, pipeline.out_dtype)
        pipeline(expected, x[part].get(), **scalars)
        got = y[part].get().view(pipeline.out_dtype).astype(np.float32)
        if not np.allclose(got, expected.astype(np.float32), rtol=1e-4, atol=1e-6):
            raise RuntimeError(f"{pipeline.compute}: expected what NumPy computes, got something else")


def bench_pipelines(target: Target) -> None:
    import cupy

    num_sms, num_elements = min(24, target.num_sms), 1 << 27
    ceiling = 2 * copy_gbps(4 * num_elements, num_sms)
    print(f"pipelines at {num_sms} SMs, GB/s of bytes read plus written; tma.copy {ceiling:.0f}")
    for name, (pipeline, scalars) in pipelines().items():
        x = cupy.random.default_rng(1).standard_normal(num_elements, np.float32).reshape(-1, *pipeline.row_shape)
        x = x.astype(ml_dtypes.bfloat16) if pipeline.dtype.itemsize == 2 else x
        y = cupy.empty(x.shape, np.uint8 if pipeline.out_dtype.itemsize == 1 else pipeline.out_dtype)
        run = functools.partial(pipeline, y, x, num_sms=num_sms, **scalars)
        run()
        check_pipeline(pipeline, y, x, scalars)
        gbps = (x.nbytes + y.nbytes) / seconds(run) / 1e9
        print(f"  {name:12} {gbps:7.0f}, {gbps / ceiling:.0%}", flush=True)


def bench_overlap(target: Target) -> None:
    for work in (0, 16, 64):
        measured = overlap.Overlap()
        print(f"overlap: {measured.num_tiles} tiles per SM of {measured.tile_bytes:,} bytes, work {work}")
        print(model.compare(measured, measured.num_tiles, work))


BENCHES = {
    "copy": bench_copy,
    "rings": bench_rings,
    "tiles": bench_tiles,
    "pipelines": bench_pipelines,
    "overlap": bench_overlap,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cupyep.tma.bench", description=__doc__)
    parser.add_argument("what", nargs="*", choices=[*BENCHES, []], help="which figures; all but rings if none is named")
    chosen = parser.parse_args().what or [name for name in BENCHES if name != "rings"]
    try:
        launches.require("cupyep.tma.bench")
    except UnsupportedDeviceError as error:
        parser.exit(1, f"{error}\n")
    for name in chosen:
        BENCHES[name](launches.target())


if __name__ == "__main__":
    main()
