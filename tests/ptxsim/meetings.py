"""Instructions by which lanes and warps meet: votes, shuffles, barriers, mbarriers, and asynchronous copies."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ptxsim import async_copies, tensor_copies
from ptxsim.instructions import DTYPES, Compiled, Operands, Run, address_of, lanes_of
from ptxsim.memory import Fault
from ptxsim.parser import Instruction
from ptxsim.state import Cta


def warp_barrier(use: Operands, op: list[str], operands: list[Any]) -> Run:
    return lambda cta, mask: cta.hand_over(mask)


def vote(use: Operands, op: list[str], operands: list[Any]) -> Run:
    get, put = use.get(operands[1], "pred"), use.put(operands[0])

    def run(cta: Cta, mask: np.ndarray) -> None:
        yes = (get(cta) & mask).reshape(-1, 32)
        if op[2] == "ballot":
            result = np.packbits(yes, axis=1, bitorder="little").view(np.uint32)[:, 0]
        else:
            result = yes.any(1) if op[2] == "any" else (yes | ~mask.reshape(-1, 32)).all(1)
        put(cta, mask, np.repeat(result, 32))

    return run


def shuffle(use: Operands, op: list[str], operands: list[Any]) -> Run:
    target, valid = operands[0] if isinstance(operands[0], list) else (operands[0], "_")
    put, put_valid, mode = use.put(target), use.put(valid), op[2]
    value, b, c = use.get(operands[1], "b32"), use.get(operands[2], "u32"), use.get(operands[3], "u32")

    def run(cta: Cta, mask: np.ndarray) -> None:
        lane = cta.special["%laneid"].astype(np.int64)
        by, clamp = np.asarray(b(cta)).astype(np.int64), np.asarray(c(cta)).astype(np.int64)
        segment = clamp >> 8 & 31
        last, first = (lane & segment) | (clamp & 31 & ~segment), lane & segment
        source = {"idx": first | (by & ~segment & 31), "up": lane - by, "down": lane + by, "bfly": lane ^ by}[mode]
        inside = source >= last if mode == "up" else source <= last
        at = cta.warp_of * 32 + np.where(inside, source, lane)
        if not mask[at[mask]].all():
            raise Fault("shfl reads a lane that does not take part")
        put(cta, mask, np.broadcast_to(value(cta), mask.shape)[at])
        put_valid(cta, mask, inside)

    return run


def match(use: Operands, op: list[str], operands: list[Any]) -> Run:
    """match.any.sync: the lanes that hold the same value."""
    if op[1] != "any":
        raise NotImplementedError(".".join(op))
    get, put = use.get(operands[1], op[-1]), use.put(operands[0])

    def run(cta: Cta, mask: np.ndarray) -> None:
        values, taking = (np.broadcast_to(x, mask.shape).reshape(-1, 32) for x in (get(cta), mask))
        same = (values[:, :, None] == values[:, None, :]) & taking[:, None, :]
        put(cta, mask, np.packbits(same, axis=2, bitorder="little").view(np.uint32).ravel())

    return run


def elect(use: Operands, op: list[str], operands: list[Any]) -> Run:
    put_lane, put = use.put(operands[0][0]), use.put(operands[0][1])

    def run(cta: Cta, mask: np.ndarray) -> None:
        leader = np.repeat(mask.reshape(-1, 32).argmax(1), 32)
        put_lane(cta, mask, leader.astype(np.uint32))
        put(cta, mask, cta.special["%laneid"] == leader)

    return run


def barrier(use: Operands, op: list[str], operands: list[Any], instruction: Instruction) -> Compiled:
    """Runs when all have come, for the lanes that came at this instruction."""
    reduces = op[1] == "red"
    at = operands[1:-1] if reduces else operands
    identity, threads = use.get(at[0], "u32"), use.get(at[1] if len(at) > 1 else "0", "u32")
    if op[1] not in ("sync", "red"):
        raise NotImplementedError(instruction.text)
    put, get = (use.put(operands[0]), use.get(operands[-1], "pred")) if reduces else (None, None)

    def run(cta: Cta, mask: np.ndarray, everybody: np.ndarray) -> None:
        if put and get:
            value = np.broadcast_to(get(cta), mask.shape)[everybody]
            put(cta, mask, value.all() if op[2] == "and" else value.any())

    return Compiled("barrier", run, instruction, True, lambda cta: identity(cta) | threads(cta) << np.uint32(8))


# --- the async proxy --------------------------------------------------------------------------------------------------


def mbarrier(use: Operands, op: list[str], operands: list[Any]) -> Run:
    at = next(i for i, operand in enumerate(operands) if hasattr(operand, "offset"))
    address, kind = address_of(use, operands[at]), op[1]
    get = use.get(operands[at + 1] if len(operands) > at + 1 else "1", "u32")
    put = use.put(operands[0]) if kind in ("try_wait", "test_wait") else None

    def one(cta: Cta, lane: int, place: int, number: int) -> None:
        warp = lane // 32
        if kind == "init":
            if place % 8 or place in cta.mbarriers:
                raise Fault(f"mbarrier.init at {place:#x}: misaligned, or initialised already")
            cta.shared_index(np.array([place]), 8)
            zeros = np.zeros(cta.num_warps, np.int64)
            cta.mbarriers[place] = async_copies.Mbarrier(number, warp, cta.tick(warp), zeros, zeros)
            return
        mbarrier = cta.mbarrier(place, warp)
        if kind == "inval":
            del cta.mbarriers[place]
            return
        if "expect_tx" in op:
            mbarrier.tx += number
        if kind == "arrive":
            mbarrier.known = np.maximum(mbarrier.known, cta.known[warp])
            mbarrier.pending -= 1 if "expect_tx" in op else number
            mbarrier.settle(cta)

    def run(cta: Cta, mask: np.ndarray) -> None:
        places, numbers = address(cta, mask).tolist(), lanes_of(cta, get(cta), mask).tolist()
        lanes = np.flatnonzero(mask).tolist()
        if put is None:
            if kind == "arrive":
                cta.hand_over(mask)
            for lane, place, number in zip(lanes, places, numbers, strict=True):
                one(cta, lane, place, number)
            return
        complete = np.zeros(cta.num_lanes, bool)
        for place, parity, warp in set(zip(places, numbers, cta.warp_of[mask].tolist(), strict=True)):
            mbarrier = cta.mbarrier(place, warp)
            if mbarrier.phase != parity:
                cta.known[warp] = np.maximum(cta.known[warp], mbarrier.handed)
                complete[[x for x, p, n in zip(lanes, places, numbers, strict=True)
                          if (p, n, x // 32) == (place, parity, warp)]] = True
        put(cta, mask, complete)
        cta.progress[complete & mask] = True
        cta.poll(mask & ~complete, np.zeros(int((mask & ~complete).sum()), np.uint64))

    return run


def copy(use: Operands, op: list[str], operands: list[Any]) -> Run:
    """cp.async and cp.reduce.async: those of the async proxy say "bulk"."""
    return bulk(use, op, operands) if "bulk" in op else lane_copy(use, op, operands)


def lane_wait(op: list[str], operands: list[Any], instruction: Instruction) -> Compiled:
    """cp.async.wait_group and wait_all, which comprises the group that is not committed."""
    newest = int(operands[0], 0) if op[2] == "wait_group" else -1
    return Compiled("wait", lambda cta, mask: cta.wait(mask, newest), instruction)


def lane_copy(use: Operands, op: list[str], operands: list[Any]) -> Run:
    if op[2] == "commit_group":
        return lambda cta, mask: cta.copies.commit(mask)
    hint = ["L2::cache_hint"] * (len(operands) - 3)  # the policy changes nothing here
    if op[2] not in ("ca", "cg") or op[3].split("::")[0] != "shared" or op[4:] != ["global", *hint]:
        raise NotImplementedError(f"{'.'.join(op)} of {len(operands)} operands")
    shared, source, size = address_of(use, operands[0]), address_of(use, operands[1]), int(operands[2], 0)
    if size not in ((4, 8, 16) if op[2] == "ca" else (16,)):
        raise ValueError(f"{'.'.join(op)}: no copy of {size} bytes")

    def run(cta: Cta, mask: np.ndarray) -> None:
        to = cta.shared_index(shared(cta, mask), 1, size)
        at = cta.space.index(source(cta, mask), 1, size)
        cta.copies.issue(mask, to, at)

    return run


def bulk(use: Operands, op: list[str], operands: list[Any]) -> Run:
    text = ".".join(op)
    if "prefetch" in op:
        return lambda cta, mask: None
    if "commit_group" in op:
        return lambda cta, mask: [cta.groups(int(lane)).commit() for lane in np.flatnonzero(mask)]
    if "wait_group" in op:
        newest, read = int(operands[0], 0), "read" in op
        return lambda cta, mask: [cta.groups(int(lane)).wait(newest, read) for lane in np.flatnonzero(mask)]
    if "tensor" in op:
        return tensor_copies.compile_copy(use, op, operands)
    addresses = [address_of(use, operand) for operand in operands if hasattr(operand, "offset")]
    size = use.get(operands[2], "u32")
    start = async_copies.load if op[3].startswith("shared") else async_copies.store
    if text.startswith("cp.reduce.async.bulk.global.shared::cta.bulk_group.add"):
        start = functools.partial(async_copies.store, add=DTYPES[op[-1]])
    elif not text.startswith(("cp.async.bulk.shared::cluster.global.mbarrier", "cp.async.bulk.global.shared::cta")):
        raise NotImplementedError(text)

    def run(cta: Cta, mask: np.ndarray) -> None:
        columns = [address(cta, mask).tolist() for address in addresses]
        sizes = lanes_of(cta, size(cta), mask).tolist()
        for i, lane in enumerate(np.flatnonzero(mask).tolist()):
            start(cta, lane, columns[0][i], columns[1][i], sizes[i], *(column[i] for column in columns[2:]))

    return run
