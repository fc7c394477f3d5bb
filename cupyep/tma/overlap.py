"""A pipeline on this GPU with as much computation as one likes, for model.compare."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyep import checks
from cupyep.tma import launch as launches
from cupyep.tma.pipeline import Pipeline

_REPEATS = 5
# Every thread reads its part of the tile, then goes through a chain of `work` dependent multiply-adds. The condition
# keeps the compiler from computing in the four threads only that write.
COMPUTE = """
__device__ void compute(const cupyep::Tile& tile, const Scalars& scalars) {
  float value = 0;
  for (unsigned i = tile.thread; i < cfg::kRowElements; i += tile.num_threads) value += tile.in[i];
  for (unsigned i = 0; i < scalars.work; ++i) value = fmaf(value, 0.999f, 0.001f);
  if (tile.thread < 4 || value == 123.456f) tile.out[tile.thread % 4] = value;
}
"""


class Overlap:
    """For model.compare: `run(stages, work)` returns seconds of the GPU.

    Args: num_tiles: of each SM, one after the other; tile_bytes; num_sms: that do so at the same time. Their product is
        the memory that is read: more than L2 holds makes loads come from HBM.
    Raises: TypeError, ValueError; UnsupportedDeviceError before compute capability 9.0, and without a GPU.
    Sync: creation and run wait on the host.
    """

    def __init__(self, num_tiles: int = 1024, tile_bytes: int = 16384, num_sms: int = 8) -> None:
        checks.integer("num_tiles", num_tiles, 1)
        checks.integer("num_sms", num_sms, 1)
        if checks.integer("tile_bytes", tile_bytes, 16) % 16:
            raise ValueError(f"tile_bytes: expected a multiple of 16, got {tile_bytes}")
        launches.require("tma.Overlap")
        import cupy

        self.num_tiles, self.tile_bytes, self.num_sms = num_tiles, tile_bytes, num_sms
        self._x = cupy.zeros((num_tiles * num_sms, tile_bytes // 4), np.float32)
        self._y = cupy.empty((num_tiles * num_sms, 4), np.float32)

    def pipeline(self, stages: int) -> Pipeline:
        """What is run: one group, as the model computes one tile at a time."""
        shape, scalars = (1, self.tile_bytes // 4), {"work": "u32"}
        return Pipeline(stages, shape, "float32", COMPUTE, out_row_shape=(4,), scalars=scalars, groups=1)

    def __call__(self, stages: int, work: int) -> float:
        """Seconds for all tiles, the best of five."""
        import cupy

        pipeline = self.pipeline(stages)
        times: list[Any] = []
        for _ in range(1 + _REPEATS):  # the first compiles and warms up
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            pipeline(self._y, self._x, num_sms=self.num_sms, work=work)
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
        return min(times[1:])
