"""Tensor copies: bulk copies whose bytes lie where a tensor map says. Its 128 bytes are ours here, not the driver's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxsim import async_copies
from ptxsim.async_copies import BulkLoad, BulkStore
from ptxsim.instructions import Operands, Run, address_of, lanes_of
from ptxsim.memory import GLOBAL, PARAM, Fault
from ptxsim.state import Cta

AXES = 5
MAP = np.dtype([("address", "u8"), ("strides", "i8", AXES), ("shape", "i8", AXES), ("tile", "u2", AXES),
                ("element_strides", "u1", AXES), ("itemsize", "u1"), ("pieces", "u1")])
assert MAP.itemsize <= 128


def describe(tensor_map: Any, address: int) -> np.ndarray:
    """The 128 bytes of a cupyep TensorMap whose array's content lies at `address`; innermost axis first."""
    descriptor = np.zeros(128, np.uint8)
    record = descriptor[: MAP.itemsize].view(MAP)[0]
    record["address"], record["itemsize"] = address, tensor_map.dtype.itemsize
    record["pieces"] = {"none": 0, "32B": 1, "64B": 3, "128B": 7}[tensor_map.swizzle]
    rank = len(tensor_map.shape)
    record["shape"] = record["tile"] = record["element_strides"] = 1
    for name, values in (("strides", tensor_map.strides), ("shape", tensor_map.shape), ("tile", tensor_map.tile_shape),
                         ("element_strides", tensor_map.element_strides)):
        record[name][:rank] = values[::-1]
    return descriptor


def tile_places(record: Any, coordinates: list[int]) -> np.ndarray:
    """Where in global memory each byte of a tile lies, or -1."""
    at, inside = np.zeros(1, np.int64), np.ones(1, bool)
    for axis in reversed(range(AXES)):
        first = coordinates[axis] if axis < len(coordinates) else 0
        index = first + np.arange(int(record["tile"][axis])) * int(record["element_strides"][axis])
        valid = (index >= 0) & (index < record["shape"][axis])
        at = (at[:, None] + index * record["strides"][axis]).reshape(-1)
        inside = (inside[:, None] & valid).reshape(-1)
    offset = np.arange(int(record["itemsize"]))
    places = int(record["address"]) - GLOBAL + at[:, None] + offset
    return np.where(inside[:, None], places, -1).reshape(-1)


def _swizzled(address: np.ndarray, pieces: int) -> np.ndarray:
    return address ^ (address >> 3 & pieces << 4)


@dataclass(eq=False)
class TensorLoad(BulkLoad):
    at: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    pieces: int = 0

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        return _swizzled(self.to + np.arange(self.size), self.pieces), self.at


@dataclass(eq=False)
class TensorStore(BulkStore):
    at: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    pieces: int = 0

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        inside = self.at >= 0
        return _swizzled(self.source + np.arange(self.size), self.pieces)[inside], self.at[inside]


def compile_copy(use: Operands, op: list[str], operands: list[Any]) -> Run:
    """cp.async.bulk.tensor of either direction, tile mode."""
    is_load = operands[0].__class__.__name__ == "Memory"
    (tensor_map, coordinates), shared = (operands[1], operands[0]) if is_load else operands[:2]
    map_address, shared_address = address_of(use, tensor_map), address_of(use, shared)
    mbar = address_of(use, operands[2]) if is_load else shared_address
    gets = [use.get(coordinate, "s32") for coordinate in coordinates]

    def run(cta: Cta, mask: np.ndarray) -> None:
        columns = zip(map_address(cta, mask), shared_address(cta, mask), mbar(cta, mask), *(
            lanes_of(cta, get(cta), mask) for get in gets), strict=True)
        for lane, (where, to, barrier, *first) in zip(np.flatnonzero(mask), columns, strict=True):
            offset = int(where) - PARAM
            if offset % 64:
                raise Fault(f"tensor map at {int(where):#x}: expected a multiple of 64")
            record = cta.grid.params[offset : offset + MAP.itemsize].view(MAP)[0]
            _issue(cta, int(lane), record, [int(x) for x in first], int(to), int(barrier) if is_load else None)

    return run


def _issue(cta: Cta, lane: int, record: Any, coordinates: list[int], shared: int, mbar: int | None) -> None:
    at, pieces = tile_places(record, coordinates), int(record["pieces"])
    if shared % 128:
        raise Fault(f"tile at {shared:#x}: expected a multiple of 128")
    if coordinates[0] * int(record["itemsize"]) % 16:
        raise Fault(f"innermost coordinate {coordinates[0]}: expected a multiple of 16 bytes")
    if mbar is None and min(coordinates) < 0:
        raise Fault(f"store at {coordinates}: expected no negative coordinate")
    inside = at[at >= 0]
    if inside.size:
        cta.space.index((inside + GLOBAL).astype(np.uint64), 1)
    if mbar is not None:
        async_copies.check_load(cta, shared, at.size, mbar)
        cta.inflight.append(TensorLoad(cta, shared, 0, at.size, mbar, cta.place, at=at, pieces=pieces))
    elif inside.size:
        async_copies.check_store(cta, shared, at.size)
        async_copies.issue(cta, lane, TensorStore(cta, 0, shared, at.size, lane // 32, cta.place, at=at, pieces=pieces))
