"""A benchmark's rank on the simulated machine: its kernels, launched alone, make right what was made wrong."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from multirank.checks import assert_bits

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="PTX needs CuPy with NVRTC", exc_type=ImportError)

from cupyep import quantize_fp8
from cupyep.backends.cuda.launcher import CudaHandle
from cupyep.bench import ranks
from cupyep.bench.cases import MODES, Case
from cupyep.bench.kernels import CudaRank
from cupyep.bench.option_kernels import CudaOptionRank
from cupyep.comm import run_threads
from ptxsim.backend import HEAP_BYTES, Machine, enter_rank, simulated


class SimulatedRank(CudaRank):
    """What CuPy's own kernels would do is done by NumPy."""

    def __init__(self, machine: Machine, comm: Any, case: Case) -> None:
        enter_rank(machine, comm.rank)
        self.machine = machine
        super().__init__(comm, case, "cuda", HEAP_BYTES)

    def load(self) -> None:
        self.device, self.stream, self._probes = nullcontext(), self.buffer.get_comm_stream(), {}

    def verify(self) -> None:
        """Combined rows and weights, and received rows, against what the benchmark sends."""
        self.machine.wait()
        read, mode = self.machine.read, MODES[self.case.mode]
        rows = self.case.rows(self.rank)
        if mode.sent is not None:
            rows = mode.decode(quantize_fp8(rows))
        times = (self.sent.handle.send_row >= 0).sum(axis=1, keepdims=True)
        assert_bits("sums", read(self.combined.combined_x), (rows.astype(np.float32) * times).astype(rows.dtype))
        assert_bits("weights", read(self.combined.combined_topk_weights), self.case.routing(self.rank)[1])
        received = self.sent.recv_x
        if mode.sent is not None:
            received = mode.decode(tuple(map(read, received)))
            assert_bits("received rows", received, read(self.y))

    def poison(self) -> None:
        self.machine.wait()
        names = {name: part for name, part in self._received.items() if name != "idx"}
        for array in (*names.values(), *self.combined[:2]):
            self.machine.memset(array.data.ptr, 0xFF, array.nbytes, 0)
        self.machine.wait()


@pytest.fixture
def machine(monkeypatch):
    """Two simulated ranks, and quantize_fp8 on the host."""
    with simulated(2) as machine:

        def on_host(array: Any) -> np.ndarray:
            if isinstance(array, np.ndarray):
                return array
            machine.wait()
            return machine.read(array)

        def by_host(function: Any, array: Any) -> Any:
            made = function(tuple(map(on_host, array)) if isinstance(array, tuple) else on_host(array))
            return tuple(map(machine.array, made)) if isinstance(made, tuple) else machine.array(made)

        def send_row(handle: CudaHandle) -> np.ndarray:
            order, words = machine.read(handle.routing.order), machine.read(handle.routing.words)
            return np.where(order < 0, -1, order + words[2 : 2 + order.shape[1]])

        def namespace(backend: str) -> Any:
            return SimpleNamespace(asarray=machine.array, copyto=machine.copy)

        encode, decode = MODES["fp8"].encode, MODES["fp8"].decode
        by_machine = replace(MODES["fp8"], encode=partial(by_host, encode), decode=partial(by_host, decode))
        monkeypatch.setattr(CudaHandle, "send_row", property(send_row))
        for name, value in (("namespace", namespace), ("on_host", on_host), ("MODES", MODES | {"fp8": by_machine})):
            monkeypatch.setattr(ranks, name, value)
        yield machine


@pytest.mark.parametrize("mode", ["bf16", "fp8"])
def test_kernels_alone(machine: Machine, mode: str) -> None:
    case = Case(num_tokens=6, hidden=32, num_topk=3, num_experts=8, mode=mode)

    def program(comm: Any) -> None:
        rank = SimulatedRank(machine, comm, case)
        rank.prepare()
        rank.poison()
        with pytest.raises(AssertionError):
            rank.verify()
        for action in (rank.push, rank.pull):
            action(1)
            machine.wait()
        rank.check()
        assert rank.bytes["dispatch"][0] * 2 == rank.bytes["combine"][0] * (1 if mode == "fp8" else 2)
        rank.close()

    run_threads(program, 2, (), 200, lambda rank: nullcontext())


def test_options_alone(machine: Machine) -> None:
    """What only a GPU's rank has of the options: the expansion, and the pair that a graph holds."""
    case = Case(num_tokens=6, hidden=32, num_topk=3, num_experts=8)

    def program(comm: Any) -> None:
        rank: Any = SimulatedRank(machine, comm, case)
        rank.most_rows, rank.out = 2 * case.num_tokens, machine.array(np.zeros_like(case.rows(0)))
        rank.experts = rank._dispatch(layout="expert")
        machine.wait()
        CudaOptionRank.expand(rank, 1)
        CudaOptionRank.call_pair(rank, 1)
        machine.wait()
        assert_bits("sums", machine.read(rank.out), machine.read(rank.combined.combined_x))
        rank.check()
        rank.close()

    run_threads(program, 2, (), 200, lambda rank: nullcontext())
