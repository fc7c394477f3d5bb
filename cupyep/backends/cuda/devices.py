"""Which GPU a rank takes, how many of its SMs, and whether the ranks can reach each other."""

from __future__ import annotations

import warnings
from typing import Any

from cupy.cuda import runtime

from cupyep import env
from cupyep.backends.cuda.kernels import Kernels
from cupyep.comm import Communicator
from cupyep.comm.host import check_same_host
from cupyep.errors import StateError, TopologyError

DEFAULT_NUM_SMS = 16  # 8 fill one direction of a link; more help where a GPU's own memory is the limit
_reserved: dict[int, int] = {}  # device -> SMs per rank that this process's live Buffers may use


def choose(comm: Communicator, device: int | None, num_sms: int | None, timeout_s: float | None) -> tuple[int, int]:
    """Collective: (this rank's device, the SMs that one of its kernels may take).

    Kernels of all ranks wait for each other, so those that may run at once must fit on their GPU together: each live
    Buffer has a budget, a share of the GPU divided by its ranks there.
    """
    check_same_host(comm, timeout_s)
    mine: list[Any] = []
    comm.together("choose device", lambda: mine.append(_describe(device, comm.rank)), timeout_s=timeout_s)
    ordinal, bus_id, total_sms = mine[0]
    everyone = comm.allgather((bus_id, _reserved.get(ordinal, 0)), operation="choose device", timeout_s=timeout_s)
    sharing = [reserved for bus, reserved in everyone if bus == bus_id]
    available = total_sms // len(sharing) - max(sharing)
    if len(sharing) > 1 and not comm.in_process and comm.rank == 0 and not (env.mps_pipe_dir() / "control").exists():
        warnings.warn(
            f"{len(sharing)} ranks share one GPU without MPS: each handshake then takes milliseconds; "
            "start nvidia-cuda-mps-control -d",
            RuntimeWarning,
            stacklevel=5,
        )
    budget = default_budget(available) if num_sms is None else num_sms
    if budget > available:
        failure: Exception | None = StateError(
            f"num_sms: expected at most {max(available, 0)} of the {total_sms} SMs of GPU {bus_id} for each of its "
            f"{len(sharing)} ranks (open Buffers hold the others), got {budget}"
        )
    else:
        failure = None

    def check() -> None:
        if failure:
            raise failure
        _check_peers(ordinal, comm.rank, [bus for bus, _ in everyone])

    comm.together("choose device", check, timeout_s=timeout_s)
    _reserved[ordinal] = _reserved.get(ordinal, 0) + (budget if not comm.in_process or comm.rank == 0 else 0)
    return ordinal, budget


def whole_share(comm: Communicator, device: int, timeout_s: float | None) -> int:
    """Collective: the SMs of `device` for each of its ranks, whatever budgets there are."""
    everyone = comm.allgather(runtime.deviceGetPCIBusId(device), operation="choose device", timeout_s=timeout_s)
    num_sms = runtime.getDeviceProperties(device)["multiProcessorCount"]
    return max(1, num_sms // everyone.count(everyone[comm.rank]))


def default_budget(available: int) -> int:
    """The SMs that a Buffer takes of those `available` to its rank: room stays for a second Buffer."""
    return min(DEFAULT_NUM_SMS, max(1, available // 2))


def release(device: int, comm: Communicator, num_sms: int) -> None:
    """Gives back the budget of a closed Buffer."""
    if not comm.in_process or comm.rank == 0:
        _reserved[device] -= num_sms


def load(device: int, num_ranks: int) -> Kernels:
    """The kernels that need no shape, for `device`."""
    properties = runtime.getDeviceProperties(device)
    capability = properties["major"] * 10 + properties["minor"]
    return Kernels(num_ranks, capability, properties["sharedMemPerBlockOptin"], env.mover())


def _describe(device: int | None, index: int) -> tuple[int, str, int]:
    count = runtime.getDeviceCount()
    if device is None:
        ordinal = index % count
        if (current := runtime.getDevice()) not in (0, ordinal):
            warnings.warn(f"Buffer uses GPU {ordinal}, the current device is {current}", RuntimeWarning, stacklevel=6)
    elif not 0 <= device < count:
        raise ValueError(f"device: expected 0..{count - 1}, got {device}")
    else:
        ordinal = device
    return ordinal, runtime.deviceGetPCIBusId(ordinal), runtime.getDeviceProperties(ordinal)["multiProcessorCount"]


def _check_peers(device: int, rank: int, bus_ids: list[str]) -> None:
    """Peers on GPUs that this process sees must be reachable; of others, opening the handle will tell."""
    visible = {runtime.deviceGetPCIBusId(ordinal): ordinal for ordinal in range(runtime.getDeviceCount())}
    matrix: list[list[str | None]] = [[None] * len(bus_ids) for _ in bus_ids]
    for peer, bus_id in enumerate(bus_ids):
        other = visible.get(bus_id)
        if other is not None and other != device and not runtime.deviceCanAccessPeer(device, other):
            matrix[rank][peer] = f"GPU {device} has no peer access to GPU {other}"
    if any(matrix[rank]):
        raise TopologyError("GPUs cannot reach each other's memory", matrix)


def usable() -> bool:
    """Whether CuPy sees a GPU; makes no context. (cupy.cuda.is_available denies a second thread that asks early.)"""
    try:
        return runtime.getDeviceCount() > 0
    except runtime.CUDARuntimeError:
        return False
