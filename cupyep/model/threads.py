"""A real pipeline without a GPU: one thread copies tiles into a ring of slots, another computes on them."""

from __future__ import annotations

import threading
import time

import numpy as np


class ThreadPipeline:
    """For compare(): `run(stages, work)` returns seconds. Needs two idle cores; NumPy lets go of the GIL in both parts.

    Args: num_tiles; tile_bytes: of each, more than a cache holds makes loads independent of the computation's.
    """

    def __init__(self, num_tiles: int = 40, tile_bytes: int = 4 << 20) -> None:
        self.num_tiles, self.tile_bytes = num_tiles, tile_bytes
        self._source = np.arange(num_tiles * tile_bytes // 4, dtype=np.float32).reshape(num_tiles, -1)

    def __call__(self, stages: int, work: int) -> float:
        """Seconds for all tiles, the best of three: with `work` passes over a small part of each."""
        return min(self._once(stages, work) for _ in range(3))

    def _once(self, stages: int, work: int) -> float:
        slots = np.zeros((stages, self._source.shape[1]), np.float32)
        full, empty = threading.Semaphore(0), threading.Semaphore(stages)
        scratch, firsts = np.zeros(1 << 14, np.float32), []

        def load() -> None:
            for i, tile in enumerate(self._source):
                empty.acquire()
                np.copyto(slots[i % stages], tile)
                full.release()

        loader = threading.Thread(target=load, daemon=True)
        begin = time.perf_counter()
        loader.start()
        for i in range(self.num_tiles):
            full.acquire()
            part = slots[i % stages][: scratch.size]
            firsts.append(float(part[0]))
            for _ in range(work):
                np.sqrt(part, out=scratch)
            empty.release()
        seconds = time.perf_counter() - begin
        loader.join()
        if firsts != self._source[:, 0].tolist():
            raise RuntimeError("tiles: expected each in its turn, got another order")
        return seconds
