"""Which GPU a rank takes, how many of its SMs, and whether the ranks can reach each other."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Any

from cupy.cuda import runtime

from cupyep import checks, env, model
from cupyep.backends.cuda.kernels import Kernels
from cupyep.comm import Communicator
from cupyep.comm.host import check_same_host
from cupyep.comm.local import callers
from cupyep.errors import StateError, TopologyError

SHORT_ROW_BYTES = 2048  # a budget is enough for rows as short as this; longer rows need fewer SMs


@dataclass(frozen=True, eq=False)
class Claim:
    """What a live Buffer's ranks of this process have taken of one GPU: `num_sms` each. One of them holds it."""

    device: int
    num_sms: int
    ranks_per_device: int  # of all processes
    threads: frozenset[int]  # native ids of these ranks' threads: an ident goes to the next thread when one ends


_claims: list[Claim] = []
_claims_lock = threading.RLock()  # a dropped Buffer may be collected, and release its claim, wherever we hold it


def claims(device: int) -> list[Claim]:
    """What is taken of `device`. Threads that ended without closing their Buffer hold nothing."""
    alive = {thread.native_id for thread in threading.enumerate()}
    return [claim for claim in tuple(_claims) if claim.device == device and claim.threads <= alive]


def choose(comm: Communicator, device: int | None, num_sms: int | None, timeout_s: float | None) -> Claim:
    """Collective: this rank's device and the SMs that one of its kernels may take; to be given back by `release`.

    Kernels of all ranks wait for each other, so those that may run at once must fit on their GPU together: each live
    Buffer has a budget, a share of the GPU divided by its ranks there. Ranks as threads meet around each launch, for
    nothing else may happen to the GPU then, so only one set of threads can be at it. A thread that waits in run_local
    is not at it, whatever Buffers it has open.
    """
    check_same_host(comm, timeout_s)
    described: list[Any] = []
    comm.together("choose device", lambda: described.append(_describe(device, comm)), timeout_s=timeout_s)
    ordinal, bus_id, total_sms = described[0]
    used = sum(claim.num_sms * claim.ranks_per_device for claim in claims(ordinal))
    mine = bus_id, used, threading.get_native_id()
    everyone = comm.allgather(mine, operation="choose device", timeout_s=timeout_s)
    sharing = [rank for rank, (bus, *_) in enumerate(everyone) if bus == bus_id]
    available = (total_sms - max(everyone[rank][1] for rank in sharing)) // len(sharing)
    if len(sharing) > 1 and not comm.in_process and comm.rank == 0 and not (env.mps_pipe_dir() / "control").exists():
        warnings.warn(
            f"{len(sharing)} ranks share one GPU without MPS: each handshake then takes milliseconds; "
            "start nvidia-cuda-mps-control -d",
            RuntimeWarning,
            stacklevel=5,
        )
    budget = default_budget(available, machine(ordinal), comm.size, len(sharing)) if num_sms is None else num_sms
    threads = [everyone[rank][2] for rank in sharing] if comm.in_process else [threading.get_native_id()]
    claim = Claim(ordinal, budget, len(sharing), frozenset(threads))

    def take() -> None:
        if budget > available:
            raise StateError(
                f"num_sms: expected at most {max(available, 0)} of the {total_sms} SMs of GPU {bus_id} for each of its "
                f"{len(sharing)} ranks (open Buffers hold the others), got {budget}"
            )
        _check_peers(ordinal, comm.rank, [bus for bus, *_ in everyone])
        if comm.in_process and comm.rank != sharing[0]:
            return
        with _claims_lock:
            groups = {other.threads for other in (claim, *claims(ordinal)) if not other.threads <= callers}
            largest = max(groups, key=len)
            others = [group for group in groups if group != largest and (len(group) > 1 or not group <= largest)]
            if len(largest) > 1 and others:  # a rank of the group may have a Buffer alone beside it
                raise StateError(
                    f"comm: expected one group of threads at a time on GPU {bus_id}, got a second while another has a "
                    "Buffer open; use processes for groups side by side"
                )
            _claims.append(claim)

    try:
        comm.together("choose device", take, timeout_s=timeout_s)
    except BaseException:
        release(claim)
        raise
    return claim


def whole_share(claim: Claim) -> int:
    """The SMs of the claim's device for each of its ranks, whatever budgets there are."""
    return max(1, runtime.getDeviceProperties(claim.device)["multiProcessorCount"] // claim.ranks_per_device)


def default_budget(available: int, machine: model.Machine, num_ranks: int, ranks_per_device: int) -> int:
    """The SMs that a Buffer takes of those `available` to its rank.

    What the model wants for short rows, but at most half, so that room stays for a second Buffer.
    """
    wanted = max(
        model.num_sms(SHORT_ROW_BYTES, num_ranks, verb=verb, ranks_per_device=ranks_per_device, machine=machine)
        for verb in ("dispatch", "combine")
    )
    return min(wanted, max(1, available // 2))


def release(claim: Claim) -> None:
    """Gives back what a closed Buffer has taken. Nothing happens in the ranks that do not hold the claim."""
    with _claims_lock:
        if claim in _claims:
            _claims.remove(claim)


def machine(device: int) -> model.Machine:
    """`device` for the model."""
    properties = runtime.getDeviceProperties(device)
    clock_khz, memory_khz, bus_bits = (
        runtime.deviceGetAttribute(attribute, device)
        for attribute in (
            runtime.cudaDevAttrClockRate,
            runtime.cudaDevAttrMemoryClockRate,
            runtime.cudaDevAttrGlobalMemoryBusWidth,
        )
    )
    memory_gbps = 2 * memory_khz * bus_bits / 8e6  # two transfers per clock
    capability = properties["major"] * 10 + properties["minor"]
    return model.Machine.of(capability, properties["multiProcessorCount"], clock_khz / 1e6, memory_gbps)


def load(device: int, num_ranks: int) -> Kernels:
    """The kernels that need no shape, for `device`."""
    properties = runtime.getDeviceProperties(device)
    capability = properties["major"] * 10 + properties["minor"]
    return Kernels(num_ranks, capability, properties["sharedMemPerBlockOptin"], env.mover())


def _describe(device: int | None, comm: Communicator) -> tuple[int, str, int]:
    count, current = runtime.getDeviceCount(), runtime.getDevice()
    if device is None:
        ordinal = current if comm.local_rank is None else comm.local_rank % count
        if current not in (0, ordinal):
            warnings.warn(f"Buffer uses GPU {ordinal}, the current device is {current}", RuntimeWarning, stacklevel=6)
    else:
        ordinal = checks.integer("device", device, 0, count - 1)
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
