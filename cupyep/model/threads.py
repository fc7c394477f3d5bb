"""A real pipeline without a GPU: one thread brings tiles, another uses them; both wait as for a device that works."""

from __future__ import annotations

import threading
import time

import numpy as np

from cupyep import checks
from cupyep.model import reals

_TILE = 1024  # float32 elements: small, as time passes in waits, which other programs disturb the least
WORK_S = 1e-4  # seconds that one unit of work takes


class ThreadPipeline:
    """For compare(): `run(stages, work)` returns seconds.

    Args: num_tiles; load_s: seconds that the loading thread waits for each tile before it puts it into its slot.
    Raises: TypeError, ValueError, as a call does.
    """

    def __init__(self, num_tiles: int = 20, load_s: float = 4e-3) -> None:
        checks.integer("num_tiles", num_tiles, 1)
        reals.nonnegative("load_s", load_s)
        if load_s > checks.MAX_TIMEOUT_S:  # time.sleep has a limit too
            raise ValueError(f"load_s: expected at most {checks.MAX_TIMEOUT_S:,} seconds, got {load_s}")
        self.num_tiles, self.load_s = num_tiles, load_s
        self._source = np.arange(num_tiles * _TILE, dtype=np.float32).reshape(num_tiles, -1)

    def __call__(self, stages: int, work: int) -> float:
        """Seconds for all tiles, the best of three, with `work` times 100 us on each."""
        checks.integer("stages", stages, 1)
        checks.integer("work", work, 0, 2**32 - 1)  # the most of tma.Overlap too
        return min(self._once(stages, work) for _ in range(3))

    def _once(self, stages: int, work: int) -> float:
        slots = np.ones((stages, _TILE), np.float32)
        full, empty = threading.Semaphore(0), threading.Semaphore(stages)
        firsts = []

        def load() -> None:
            for i, tile in enumerate(self._source):
                empty.acquire()
                time.sleep(self.load_s)
                slots[i % stages] = tile
                full.release()

        loader = threading.Thread(target=load, daemon=True)
        begin = time.perf_counter()
        loader.start()
        for i in range(self.num_tiles):
            full.acquire()
            firsts.append(float(slots[i % stages, 0]))
            if work:
                time.sleep(work * WORK_S)
            empty.release()
        seconds = time.perf_counter() - begin
        loader.join()
        if firsts != self._source[:, 0].tolist():
            raise RuntimeError("tiles: expected each in its turn, got another order")
        return seconds
