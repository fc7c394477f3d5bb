"""One simulated GPU for the kernels of cupyep.tma: memory, and launches as the package plans them."""

from __future__ import annotations

import numpy as np

from cupyep.tma.launch import Launch, Target
from ptxsim.memory import POISON, Space
from ptxsim.parser import Program
from ptxsim.scheduler import Scheduler
from ptxsim.sources import Patch, requested

HOPPER, AMPERE = Target(90, 227 * 1024, 132), Target(80, 163 * 1024, 108)


class Gpu:
    """Poisoned memory, and kernels under the schedule of a seed."""

    def __init__(self, num_bytes: int = 1 << 17) -> None:
        self.space = Space(1, num_bytes)

    def empty(self, num_bytes: int, offset: int = 0) -> int:
        """The address of so many poisoned bytes, `offset` behind a multiple of 256."""
        return self.space.allocate(num_bytes + offset) + offset

    def array(self, content: np.ndarray, offset: int = 0) -> int:
        address = self.empty(max(16, content.nbytes), offset)
        self.space.write(0, address, content)
        return address

    def read(self, address: int, like: np.ndarray) -> np.ndarray:
        return self.space.read(0, address, like.shape, like.dtype)

    def is_poison(self, address: int, num_bytes: int) -> bool:
        return bool((self.space.read(0, address, (num_bytes,), np.uint8) == POISON).all())

    def run(self, launch: Launch, seed: int, patch: Patch = ()) -> None:
        """Raises SimulationError for what a kernel must not do."""
        program, shape = requested(launch.request, launch.function, patch), (launch.num_ctas, launch.num_threads)
        self.run_text(program, launch.arguments, *shape, launch.smem_bytes, seed)

    def run_text(self, program: Program, arguments: tuple, num_ctas: int, num_threads: int, smem_bytes: int,
                 seed: int) -> None:
        """The same for any program; arguments are NumPy values, each aligned as it follows the others."""
        params = b"".join(argument.tobytes() for argument in arguments)
        scheduler = Scheduler(self.space, seed)
        scheduler.run({0: [lambda: scheduler.launch(0, program, num_ctas, num_threads, smem_bytes, params)]})
