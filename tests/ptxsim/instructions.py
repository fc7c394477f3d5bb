"""PTX instructions as Python closures over the lanes of a CTA: `run(cta, mask)` computes for all, keeps for the mask.

Here are registers and arithmetic; memory accesses, barriers and bulk copies are in accesses.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ptxsim.memory import PARAM, SHARED
from ptxsim.parser import Instruction, Program, Register, Symbol
from ptxsim.state import Cta
from ptxsim.values import (
    bf16_bits,
    e4m3_bits,
    f16_bits,
    leading_zeros,
    quotient,
    remainder,
    reverse_bits,
    shift,
)

DTYPES = {f"{kind}{bits}": np.dtype(f"{letter}{bits // 8}") for kind, letter in (("u", "u"), ("s", "i"), ("b", "u"))
          for bits in (8, 16, 32, 64)} | {"f32": np.dtype("f4"), "f64": np.dtype("f8"), "f16": np.dtype("f2"),
                                          "bf16": np.dtype(ml_dtypes.bfloat16),
                                          "pred": np.dtype(bool), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4")}
Run = Callable[[Cta, np.ndarray], Any]
Get = Callable[[Cta], Any]


@dataclass
class Compiled:
    """kind: plain, branch, call, return, exit, warp (waits for its warp's lanes), barrier (for the CTA's), wait (for
    each lane's copies; `run` moves those on that need not wait, and tells whether there are others).

    A warp instruction's `meeting` gives its member mask, a barrier's its id and, 8 bits up, the number of threads.
    """

    kind: str
    run: Callable[..., Any]
    instruction: Instruction
    visible: bool = False  # others may notice it: a place to switch to somebody else
    meeting: Get | None = None
    poll: bool = False  # a look at a flag
    reads: bool = False  # a load, which is no progress: a wait that loads something beside its flag still waits

    def __post_init__(self) -> None:
        self.guard, self.target = self.instruction.guard, self.instruction.target


class Operands:
    """Reads and writes operands of one program by type."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def get(self, operand: Any, kind: str) -> Get:
        """A function from a CTA to the operand's values: an array over lanes, or a scalar."""
        dtype = DTYPES[kind]
        if isinstance(operand, Register):
            index, size = operand.index, self.program.register_bytes[operand.index]
            if dtype.kind == "b":
                return lambda cta: cta.registers[index]
            if size == dtype.itemsize:
                if dtype.kind == "u":
                    return lambda cta: cta.registers[index]
                return lambda cta: cta.registers[index].view(dtype)
            unsigned = np.dtype(f"u{dtype.itemsize}")
            return lambda cta: cta.registers[index].astype(unsigned).view(dtype)
        if isinstance(operand, Symbol):
            if operand.name in self.program.params:
                at = dtype.type(self.program.params[operand.name])
                return lambda cta: at
            if operand.name in self.program.shared:
                offset = Cta.static_start + self.program.shared[operand.name]
                return lambda cta: dtype.type(offset)
            return lambda cta: dtype.type(cta.dynamic_start)
        if operand.startswith("%"):
            if operand == "%globaltimer":
                return lambda cta: np.uint64(cta.clock.now)
            return lambda cta: cta.special[operand]
        if operand.startswith(("0f", "0d")):
            raw = int(operand[2:], 16)
            value = np.array(raw, "u4" if operand[1] == "f" else "u8").view("f4" if operand[1] == "f" else "f8")[()]
            return lambda cta: value
        number = int(operand, 0)
        constant = dtype.type(bool(number)) if dtype.kind == "b" else np.array(
            number & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").view(dtype)[()]
        return lambda cta: constant

    def put(self, operand: Any, kind: str = "") -> Callable[[Cta, np.ndarray, Any], None]:
        """A function that stores values into a register for the lanes of a mask; signed values are extended so."""
        if operand == "_":
            return lambda cta, mask, value: None
        index, size = operand.index, self.program.register_bytes[operand.index]
        unsigned, signed = (np.dtype(f"u{size}"), np.dtype(f"i{size}")) if size else (np.dtype(bool),) * 2

        def put(cta: Cta, mask: np.ndarray, value: Any) -> None:
            value = np.asarray(value)
            if size and value.dtype != unsigned:
                if value.dtype.itemsize == size:
                    value = value.view(unsigned)
                elif value.dtype.kind == "i":
                    value = value.astype(signed).view(unsigned)
                else:
                    value = value.astype(unsigned)
            if mask is cta.everyone:
                cta.registers[index] = value if value.ndim else np.full(mask.shape, value)
            else:
                cta.registers[index] = np.where(mask, value, cta.registers[index])

        return put

    def address(self, memory: Any, kind: str) -> Get:
        """The address of a Memory operand."""
        get, dtype = self.get(memory.base, kind), DTYPES[kind]
        offset = dtype.type(memory.offset % 2 ** (8 * dtype.itemsize))
        return (lambda cta: get(cta) + offset) if memory.offset else get


def lanes_of(cta: Cta, value: Any, mask: np.ndarray) -> np.ndarray:
    return value[mask] if np.ndim(value) else np.full(np.count_nonzero(mask), value)


def address_of(use: Operands, memory: Any) -> Callable[[Cta, np.ndarray], np.ndarray]:
    base = memory.base
    short = isinstance(base, Register) and use.program.register_bytes[base.index] == 4
    get = use.address(memory, "u32" if short else "u64")
    return lambda cta, mask: lanes_of(cta, get(cta), mask).astype(np.uint64)


BINARY = {"add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
          "min": np.minimum, "max": np.maximum, "shl": shift(True), "shr": shift(False), "div": quotient,
          "rem": remainder}
FLOAT = {"div": np.divide, "min": np.fmin, "max": np.fmax}  # of NaN and a number: the number
COMPARE = {"eq": operator.eq, "ne": operator.ne, "neu": operator.ne, "lt": operator.lt, "le": operator.le,
           "gt": operator.gt, "ge": operator.ge, "lo": operator.lt, "ls": operator.le, "hi": operator.gt,
           "hs": operator.ge}
UNARY = {"not": operator.invert, "neg": operator.neg, "abs": np.abs, "brev": reverse_bits, "ex2": np.exp2,
         "rcp": np.reciprocal, "popc": lambda value: np.bitwise_count(value).astype(np.uint32)}


def arithmetic(program: Program, instruction: Instruction) -> Run | None:
    """The closure of an instruction that touches registers only, or None for any other."""
    op, operands = instruction.opcode, instruction.operands
    name, kind, use = op[0], op[-1], Operands(program)
    if name in ("mov", "cvta"):
        if name == "mov" and isinstance(operands[0], list):
            return _unpack(use, kind, operands)
        if name == "mov" and isinstance(operands[1], list):
            return _pack(use, kind, operands)
        window = {"shared": SHARED, "param": PARAM}.get(op[-2], 0)
        offset = np.uint64(-window % 2**64 if op[1] == "to" else window)
        get, put = use.get(operands[1], kind), use.put(operands[0])
        return (lambda cta, mask: put(cta, mask, get(cta) + offset)) if window else (
            lambda cta, mask: put(cta, mask, get(cta)))
    if name in ("ld", "st") and "param" in op:
        memory = operands[1] if name == "ld" else operands[0]
        if isinstance(memory.base, Register) and memory.base.index in program.moved_params:
            to, of = (operands[0], memory.base) if name == "ld" else (memory.base, operands[1])
            get, put = use.get(of, kind), use.put(to)
            return lambda cta, mask: put(cta, mask, get(cta))
    if name in BINARY and len(operands) == 3:
        function, put = (FLOAT if kind == "f32" else {}).get(name, BINARY[name]), use.put(operands[0])
        a, b = use.get(operands[1], kind), use.get(operands[2], "u32" if name in ("shl", "shr") else kind)
        return lambda cta, mask: put(cta, mask, function(a(cta), b(cta)))
    if name in UNARY:
        unary, a, put = UNARY[name], use.get(operands[1], kind), use.put(operands[0])
        return lambda cta, mask: put(cta, mask, unary(a(cta)))
    if name == "fma" and kind == "f32":  # rounded twice, which small integers do not show
        a, b, c, put = *(use.get(operand, kind) for operand in operands[1:]), use.put(operands[0])
        return lambda cta, mask: put(cta, mask, (np.float64(1) * a(cta) * b(cta) + c(cta)).astype(np.float32))
    if name in ("mul", "mad"):
        return _multiply(use, op, operands)
    if name == "setp":
        compare, put = COMPARE[op[1]], use.put(operands[0])
        a, b = use.get(operands[1], kind), use.get(operands[2], kind)
        return lambda cta, mask: put(cta, mask, compare(a(cta), b(cta)))
    if name == "selp":
        a, b, p = use.get(operands[1], kind), use.get(operands[2], kind), use.get(operands[3], "pred")
        put = use.put(operands[0])
        return lambda cta, mask: put(cta, mask, np.where(p(cta), a(cta), b(cta)))
    if name == "bfi":
        a, b, put = use.get(operands[1], kind), use.get(operands[2], kind), use.put(operands[0])
        bits = DTYPES[kind].type(((1 << int(operands[4], 0)) - 1) << int(operands[3], 0))
        at = DTYPES[kind].type(int(operands[3], 0))
        return lambda cta, mask: put(cta, mask, (a(cta) << at & bits) | (b(cta) & ~bits))
    if name == "bfind" and "shiftamt" in op:
        a, put = use.get(operands[1], kind), use.put(operands[0])
        return lambda cta, mask: put(cta, mask, leading_zeros(a(cta)))
    if name == "cvt":
        return _convert(use, op, operands)
    return None


def _convert(use: Operands, op: list[str], operands: list[Any]) -> Run:
    to, of, put = op[-2], op[-1], use.put(operands[0])
    if to == "e4m3x2":
        upper, lower = (use.get(x, "f32") for x in operands[1:3])
        return lambda cta, mask: put(cta, mask, e4m3_bits(upper(cta)) << np.uint32(8) | e4m3_bits(lower(cta)))
    if to in ("bf16x2", "f16x2"):
        bits, upper, lower = bf16_bits if to == "bf16x2" else f16_bits, *(use.get(x, "f32") for x in operands[1:3])
        return lambda cta, mask: put(cta, mask, bits(upper(cta)) << np.uint32(16) | bits(lower(cta)))
    if to == "bf16" and of == "f32":
        value = use.get(operands[1], of)
        return lambda cta, mask: put(cta, mask, bf16_bits(value(cta)).astype(np.uint16))
    get, dtype = use.get(operands[1], of), DTYPES[to]
    if DTYPES[of].kind == "f" and dtype.kind != "f":
        if "rni" not in op:
            raise NotImplementedError(".".join(op))
        return lambda cta, mask: put(cta, mask, np.rint(np.nan_to_num(get(cta))).astype(dtype))
    return lambda cta, mask: put(cta, mask, np.asarray(get(cta)).astype(dtype))


def _multiply(use: Operands, op: list[str], operands: list[Any]) -> Run:
    kind, put = op[-1], use.put(operands[0])
    wide = "wide" in op
    a, b = use.get(operands[1], kind), use.get(operands[2], kind)
    if "hi" in op:
        bits, to = 8 * DTYPES[kind].itemsize, DTYPES[kind]
        return lambda cta, mask: put(cta, mask, np.asarray(
            np.asarray(a(cta)).astype(object) * np.asarray(b(cta)).astype(object) >> bits).astype(to))
    dtype = np.dtype(f"{DTYPES[kind].kind}{DTYPES[kind].itemsize * (2 if wide else 1)}")
    if op[0] == "mul":
        if wide:
            return lambda cta, mask: put(cta, mask, a(cta).astype(dtype) * b(cta).astype(dtype))
        return lambda cta, mask: put(cta, mask, a(cta) * b(cta))
    c = use.get(operands[3], f"{kind[0]}{8 * dtype.itemsize}")
    return lambda cta, mask: put(cta, mask, a(cta).astype(dtype) * b(cta).astype(dtype) + c(cta))


def _unpack(use: Operands, kind: str, operands: list[Any]) -> Run:
    """mov.b64 {low, high}, value."""
    parts, get = operands[0], use.get(operands[1], kind)
    puts, bits = [use.put(part) for part in parts], 8 * DTYPES[kind].itemsize // len(parts)

    def run(cta: Cta, mask: np.ndarray) -> None:
        value = get(cta)
        for i, put in enumerate(puts):
            put(cta, mask, (value >> value.dtype.type(bits * i)).astype(f"u{bits // 8}"))

    return run


def _pack(use: Operands, kind: str, operands: list[Any]) -> Run:
    """mov.b64 value, {low, high}."""
    parts, put, dtype = operands[1], use.put(operands[0]), DTYPES[kind]
    bits = 8 * dtype.itemsize // len(parts)
    gets = [use.get(part, f"b{bits}") for part in parts]

    def run(cta: Cta, mask: np.ndarray) -> None:
        put(cta, mask, sum((get(cta).astype(dtype) << dtype.type(bits * i) for i, get in enumerate(gets)),
                           dtype.type(0)))

    return run
