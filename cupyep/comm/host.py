"""What tells hosts apart."""

from __future__ import annotations

import os
from pathlib import Path

from cupyep import env
from cupyep.comm.base import Communicator
from cupyep.errors import TopologyError


def host_id() -> str:
    """The kernel's boot id and the IPC namespace: host names repeat among containers, and one host has several."""
    if name := env.host_name():
        return name
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.readlink('/proc/self/ns/ipc')}"


def check_same_host(comm: Communicator, timeout_s: float | None) -> None:
    """Collective: raises TopologyError on every rank if some two do not share a kernel and an IPC namespace."""
    hosts = comm.allgather(host_id(), operation="Buffer", timeout_s=timeout_s)
    if len(set(hosts)) > 1:
        why = "on another host or in another IPC namespace"
        raise TopologyError("ranks cannot share memory", [[why if a != b else None for b in hosts] for a in hosts])
