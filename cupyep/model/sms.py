"""How many SMs a kernel should have: as many as keep the memory or the link busy, and none beyond."""

from __future__ import annotations

import functools
import math

from cupyep.model.machine import Machine
from cupyep.model.times import Traffic, combine_time, dispatch_time

_TIMES = {"dispatch": dispatch_time, "combine": combine_time}
_MANY_TOKENS = 1 << 20  # the balance of terms does not depend on it


def num_sms(
    row_bytes: int,
    num_ranks: int,
    *,
    verb: str = "dispatch",
    num_topk: int = 8,
    ranks_per_device: int = 1,
    machine: Machine | None = None,
    explain: bool = False,
) -> int:
    """The fewest SMs per rank with which the SMs no longer limit `verb`.

    Args:
        row_bytes: payload of one row, hidden x bytes per element.
        num_ranks: of the group; ranks_per_device: how many of them share a GPU.
        verb: "dispatch" or "combine".
        num_topk: experts of a token, taken to be random.
        machine: None: an H200.
        explain: print the rates and the limiting term.

    Returns: 1 .. the GPU's SMs divided by ranks_per_device.
    Raises: TypeError, ValueError. Sync: none.
    """
    if not isinstance(verb, str) or verb not in _TIMES:
        raise ValueError(f"verb: expected dispatch or combine, got {verb!r}")
    machine = Machine.given(machine)
    traffic = Traffic(_MANY_TOKENS, row_bytes, num_ranks, ranks_per_device, num_topk)
    chosen, most = _fewest(verb, traffic, machine), max(1, machine.num_sms // ranks_per_device)
    if explain:
        print(_explanation(verb, traffic, machine, chosen, most))
    return min(chosen, most)


@functools.lru_cache(maxsize=256)
def _fewest(verb: str, traffic: Traffic, machine: Machine) -> int:
    terms = _TIMES[verb](traffic, 1, machine).terms
    return max(1, math.ceil(terms["SMs"] / max(terms["memory"], terms["link"])))


def _explanation(verb: str, traffic: Traffic, machine: Machine, chosen: int, most: int) -> str:
    terms = _TIMES[verb](traffic, 1, machine).terms
    rates = {name: traffic.logical_bytes / seconds / 1e9 for name, seconds in terms.items() if seconds}
    limit = min((name for name in rates if name != "SMs"), key=rates.__getitem__)
    lines = [
        f"{verb} of {traffic.row_bytes:,}-byte rows among {traffic.num_ranks} ranks, {traffic.ranks_per_device} per "
        f"GPU, {traffic.fan:.2f} rows per token; logical GB/s per rank:",
        f"  one SM  {rates['SMs']:8.1f}",
        *(f"  {name:6s}  {rate:8.1f}" for name, rate in rates.items() if name != "SMs"),
    ]
    if chosen <= most:
        return "\n".join([*lines, f"limited by {limit}: {chosen} SMs fill it"])
    best = _TIMES[verb](traffic, most, machine).limit
    return "\n".join([*lines, f"limited by {best}: {chosen} SMs would fill the {limit}, a rank can have {most}"])
