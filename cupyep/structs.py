"""Structs and constants for Python and CUDA alike, described once.

A Struct gives a NumPy dtype for memory, a ctypes structure for kernel arguments, whose fields are set several times as
fast, and a C declaration whose static_asserts fix its size and every offset. Constants go into `namespace cfg` of the
generated prelude.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

import numpy as np

_TYPES: dict[str, tuple[str, str, Any]] = {  # our name -> (NumPy, C, ctypes)
    "u8": ("u1", "unsigned char", ctypes.c_uint8),
    "u32": ("u4", "unsigned int", ctypes.c_uint32),
    "i32": ("i4", "int", ctypes.c_int32),
    "u64": ("u8", "unsigned long long", ctypes.c_uint64),
    "i64": ("i8", "long long", ctypes.c_int64),
    "f32": ("f4", "float", ctypes.c_float),
    "ptr": ("u8", "unsigned long long", ctypes.c_uint64),  # device addresses travel as integers
}


class Struct:
    """A C struct: `Struct("Post", epoch="u32", rows_offset="u64", words=("u32", 4))`, laid out by C's rules.

    Attributes: name; dtype (NumPy, aligned, with trailing padding); fields (name -> type, (type, length) or Struct).
    """

    def __init__(self, name: str, **fields: str | tuple[str, int] | Struct) -> None:
        self.name = name
        self.fields = fields
        self.dtype = np.dtype([(key, *self._numpy(kind)) for key, kind in fields.items()], align=True)

    @staticmethod
    def _numpy(kind: str | tuple[str, int] | Struct) -> tuple:
        if isinstance(kind, Struct):
            return (kind.dtype,)
        return (_TYPES[kind][0],) if isinstance(kind, str) else (_TYPES[kind[0]][0], (kind[1],))

    @staticmethod
    def _ctype(kind: str | tuple[str, int] | Struct) -> Any:
        if isinstance(kind, Struct):
            return kind.record
        return _TYPES[kind][2] if isinstance(kind, str) else _TYPES[kind[0]][2] * kind[1]

    @staticmethod
    def _c(key: str, kind: str | tuple[str, int] | Struct) -> str:
        if isinstance(kind, Struct):
            return f"{kind.name} {key}"
        return f"{_TYPES[kind][1]} {key}" if isinstance(kind, str) else f"{_TYPES[kind[0]][1]} {key}[{kind[1]}]"

    @cached_property
    def record(self) -> Any:
        """The struct as a class of ctypes, laid out alike. A field that it does not have is an AttributeError."""
        fields = [(key, self._ctype(kind)) for key, kind in self.fields.items()]
        return type(self.name, (ctypes.Structure,), {"__slots__": (), "_fields_": fields})

    def declaration(self) -> str:
        """The struct in C, with static_asserts on its size and on the offset of every field."""
        lines = [f"struct {self.name} {{", *(f"  {self._c(key, kind)};" for key, kind in self.fields.items()), "};"]
        lines.append(f"static_assert(sizeof({self.name}) == {self.dtype.itemsize});")
        assert self.dtype.fields is not None
        for key, (_, offset, *_) in self.dtype.fields.items():  # NVRTC has no offsetof; __INTADDR__ is its constant
            lines.append(f"static_assert(__INTADDR__(&(static_cast<{self.name}*>(nullptr)->{key})) == {offset});")
        return "\n".join(lines)

    def __call__(self, **values: object) -> np.ndarray:
        """One record of this struct (a 0-d structured array), zero where no value is given."""
        record = np.zeros((), self.dtype)
        for key, value in values.items():
            record[key] = value
        return record


def camel(name: str) -> str:
    """snake_case or SCREAMING_CASE as CamelCase."""
    return "".join(part.capitalize() for part in name.split("_"))


def emit(constants: dict[str, int], structs: tuple[Struct, ...]) -> str:
    """The prelude of a kernel: `namespace cfg { constexpr int kNumRanks = 8; ... }` and the structs.

    Values from 2^31 on become `unsigned long long`; all others are `int`.
    """
    kinds = {name: "int" if -(2**31) <= value < 2**31 else "unsigned long long" for name, value in constants.items()}
    lines = ["namespace cfg {"]
    lines += [
        f"constexpr {kinds[name]} {name} = {value}{'' if kinds[name] == 'int' else 'ULL'};"
        for name, value in constants.items()
    ]
    lines.append("}  // namespace cfg")
    return "\n".join([*lines, *(struct.declaration() for struct in structs), ""])
