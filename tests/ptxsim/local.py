"""Kernels of one rank that wait for nobody: arrays in, a launch, arrays out."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupyep.backends.cuda.kernels import Call
from cupyep.structs import Struct
from ptxsim.memory import Space
from ptxsim.scheduler import Scheduler
from ptxsim.sources import Patch, program


class Gpu:
    """One simulated GPU with some memory, all of it poison at first."""

    def __init__(self, seed: int, num_bytes: int = 1 << 18) -> None:
        self.space, self.seed = Space(1, num_bytes), seed

    def array(self, content: np.ndarray) -> int:
        """The address of a copy of `content`."""
        address = self.empty(content.nbytes)
        self.space.write(0, address, content)
        return address

    def empty(self, num_bytes: int) -> int:
        """The address of so many poisoned bytes."""
        return self.space.allocate(max(16, num_bytes))

    def read(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return self.space.read(0, address, shape, np.dtype(dtype))

    def launch(self, kernel: str, file: str, arch: str, constants: dict[str, int], params: Struct,
               num_ctas: int, num_threads: int, smem_bytes: int = 0, patch: Patch = (), **fields: int) -> None:
        """Runs the kernel, with `patch` in its text, to its end under a schedule of this GPU's seed."""
        call = Call(params, {})
        call.set(**fields)
        code = program(kernel, file, arch, 1, constants, patch)
        struct = ctypes.c_uint64.from_address(call.arguments).value
        scheduler = Scheduler(self.space, self.seed, 0, None, None)
        scheduler.run({0: [lambda: scheduler.launch(0, code, num_ctas, num_threads, smem_bytes,
                                                    ctypes.string_at(struct, code.param_bytes), lambda: None)]})


def pointer(address: int) -> Any:
    """An array as far as a Launcher cares."""
    return SimpleNamespace(data=SimpleNamespace(ptr=address))
