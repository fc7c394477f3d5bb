"""A producer/consumer kernel around your own code: one warp loads tiles by TMA, groups of warps compute and store."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import ml_dtypes
import numpy as np

from cupyep import checks, layout
from cupyep.backends.cuda import jit
from cupyep.errors import UnsupportedDeviceError
from cupyep.structs import Struct, emit
from cupyep.tma import arrays
from cupyep.tma import launch as launches
from cupyep.tma.launch import Launch, Target

DEFAULT_NUM_SMS = 24
MAX_TILES = 2**31 - 1
_OUT_SLOTS = 2  # of a group: kOutSlots of tma_pipeline.cu
_C = {
    np.dtype(np.float32): "float",
    np.dtype(np.float16): "__half",
    np.dtype(ml_dtypes.bfloat16): "__nv_bfloat16",
    np.dtype(ml_dtypes.float8_e4m3fn): "__nv_fp8_e4m3",
    np.dtype(ml_dtypes.float8_e5m2): "__nv_fp8_e5m2",
    np.dtype(np.int32): "int",
    np.dtype(np.uint8): "unsigned char",
}
_LARGEST = {dtype: float(ml_dtypes.finfo(dtype).max) for dtype in _C if str(dtype).startswith("float8")}
_SCALARS = {"f32": np.float32, "i32": np.int32, "u32": np.uint32, "i64": np.int64, "u64": np.uint64}
_TAKEN = ("self", "y", "x", "num_sms", "stream", "tile", "scalars")  # by arguments of a call, or of compute
_FUNCTION = re.compile(r"\bvoid\s+compute\s*\(")


class Pipeline:
    """y = f(x), tile by tile, with loads, computation and stores overlapped.

    Args:
        stages: input tiles in flight per SM, at least 1 (then nothing overlaps with the load).
        tile_shape: rows of a tile, and the shape of a row: `x.shape[1:]`. A tile is a multiple of 16 bytes.
        dtype: of x: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int32 or uint8.
        compute: CUDA C++: an expression of `x`, a float, and of the scalars, as "a * x + b"; or code that defines
            `__device__ void compute(const cupyep::Tile& tile, const Scalars& scalars)`, see cuda_src/cupyep/tile.cuh.
        out_dtype, out_row_shape: of y; None: as of x.
        scalars: names of numbers given with each call; a mapping names their types too (f32, i32, u32, i64, u64).
        reference: the same in NumPy, `reference(x, **scalars)`, for NumPy arrays; scalars are np.float32 and so on.
        groups, warps_per_group: who computes: a group works on one tile while the others work on others. groups divides
            stages, so that a slot is always the same group's; None: 2 if stages is even, else 1.

    Raises: TypeError, ValueError naming the argument. Compiles at the first call, and then may raise CompileError.
    Source: PTX ISA, cp.async.bulk and mbarrier; cuda_src/kernels/tma_pipeline.cu.
    """

    def __init__(
        self,
        stages: int,
        tile_shape: Sequence[int],
        dtype: Any,
        compute: str,
        *,
        out_dtype: Any = None,
        out_row_shape: Sequence[int] | None = None,
        scalars: Sequence[str] | Mapping[str, str] = (),
        reference: Callable[..., np.ndarray] | None = None,
        groups: int | None = None,
        warps_per_group: int = 4,
    ) -> None:
        self.stages = checks.integer("stages", stages, 1, 64)
        sizes = arrays.per_axis("tile_shape", tile_shape, 1, 2**20)
        if not sizes:
            raise ValueError("tile_shape: expected at least one axis, got ()")
        self.tile_rows, self.row_shape = sizes[0], sizes[1:]
        out_row_shape = self.row_shape if out_row_shape is None else out_row_shape
        self.out_row_shape = arrays.per_axis("out_row_shape", out_row_shape, 1, 2**20)
        self.dtype = _element("dtype", dtype)
        self.out_dtype = self.dtype if out_dtype is None else _element("out_dtype", out_dtype)
        self.groups = checks.integer("groups", 2 - stages % 2 if groups is None else groups, 1, 15)
        if stages % self.groups:
            raise ValueError(f"groups: expected a divisor of the {stages} stages, got {groups}")
        self.warps_per_group = checks.integer("warps_per_group", warps_per_group, 1, 31 // self.groups)
        self.scalars = _kinds(scalars)
        if not isinstance(compute, str):
            raise TypeError(f"compute: expected a str of CUDA C++, got {compute!r}")
        if reference is not None and not callable(reference):
            raise TypeError(f"reference: expected a function or None, got {reference!r}")
        self.compute, self.reference = compute, reference
        if not _FUNCTION.search(compute) and self.row_shape != self.out_row_shape:
            raise ValueError(f"out_row_shape: expected {self.row_shape} for an expression, got {self.out_row_shape}")
        for name, num_bytes in (("tile_shape", self.in_bytes), ("out_row_shape", self.out_bytes)):
            if num_bytes % 16:
                raise ValueError(f"{name}: expected a tile of a multiple of 16 bytes, got {num_bytes}")

    @property
    def in_bytes(self) -> int:
        """Of an input tile."""
        return self.tile_rows * math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def out_bytes(self) -> int:
        """Of an output tile."""
        return self.tile_rows * math.prod(self.out_row_shape) * self.out_dtype.itemsize

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA, which takes an SM."""
        out_slots = self.groups * _OUT_SLOTS
        return self.stages * (layout.align(self.in_bytes) + 16) + out_slots * layout.align(self.out_bytes)

    def __call__(self, y: Any, x: Any, *, num_sms: int = DEFAULT_NUM_SMS, stream: Any = None, **scalars: float) -> Any:
        """Computes y from x.

        Args:
            y, x: C-contiguous, `[num_rows, *row_shape]`, NumPy or CUDA, of the pipeline's types (fp8 may be uint8);
                their bytes are a multiple of 16, and on a GPU their addresses too. They share no memory.
            num_sms: SMs to use. stream: CuPy stream; None: the current one. scalars: a number for each name,
                within its type.

        Returns: an event. Raises: TypeError, ValueError; UnsupportedDeviceError before compute capability 9.0, and for
            NumPy arrays without a reference; CompileError.
        Sync: on `stream`; the host does not wait, but for the compiler at the first call. NumPy is done on return.
        """
        launches.check(stream, num_sms)
        x, y = arrays.asarray("x", x), arrays.asarray("y", y)
        self._check(y, x)
        values = self._values(scalars)
        if arrays.is_numpy(x):
            if self.reference is None:
                raise UnsupportedDeviceError(
                    "tma.Pipeline without reference=", "compute capability 9.0", "NumPy arrays"
                )
            result = np.asarray(self.reference(x.view(self.dtype), **values))
            if result.shape != y.shape:
                raise ValueError(f"reference: expected a result of shape {y.shape} as y has, got {result.shape}")
            if self.out_dtype in _LARGEST:  # saturates, as tile.cuh does
                most = _LARGEST[self.out_dtype]
                result = np.clip(result.astype(np.float32), -most, most)
            y[...] = result.astype(self.out_dtype).view(y.dtype)
            return launches.done()
        with launches.on(stream):
            target = launches.target("tma.Pipeline")
            target.require_tma("tma.Pipeline")
            arrays.reach(y, x)
            num_sms = launches.num_sms(target, num_sms)
            return launches.run(self.plan(target, arrays.address(y), arrays.address(x), len(x), num_sms, values))

    def plan(self, target: Target, y: int, x: int, num_rows: int, num_sms: int, scalars: Mapping[str, float]) -> Launch:
        """The launch for arrays at the addresses y and x."""
        if self.smem_bytes > target.smem_limit:
            raise ValueError(
                f"stages: expected {target.smem_limit:,} bytes of shared memory at most, got {self.smem_bytes:,} "
                f"({self.stages} tiles of {self.in_bytes:,} and {self.groups * _OUT_SLOTS} of {self.out_bytes:,})"
            )
        num_tiles = math.ceil(num_rows / self.tile_rows)
        if num_tiles > MAX_TILES:
            raise ValueError(f"x: expected at most {MAX_TILES:,} tiles, got {num_tiles:,}")
        record = self._structs[1](x=x, y=y, num_rows=num_rows, num_tiles=num_tiles)
        for name in self.scalars:
            record["scalars"][name] = scalars[name]
        request = jit.Request("tma_pipeline", target.arch, self._prelude)
        num_threads = 32 * (1 + self.groups * self.warps_per_group)
        return Launch(request, "pipeline", num_sms, num_threads, self.smem_bytes, (record,))

    @functools.cached_property
    def _structs(self) -> tuple[Struct, Struct]:
        """Scalars, and the kernel's parameters with them."""
        numbers = Struct("Scalars", **(self.scalars or {"unused": "u32"}))
        sizes = {"num_rows": "u64", "num_tiles": "u32", "pad": "u32"}
        return numbers, Struct("PipelineParams", x="ptr", y="ptr", **sizes, scalars=numbers)

    @functools.cached_property
    def _prelude(self) -> str:
        constants = {
            "kStages": self.stages,
            "kTileRows": self.tile_rows,
            "kRowElements": math.prod(self.row_shape),
            "kOutRowElements": math.prod(self.out_row_shape),
            "kGroups": self.groups,
            "kGroupWarps": self.warps_per_group,
        }
        headers = [f"#include <cuda_{kind}.h>" for kind in ("bf16", "fp16", "fp8")]
        types = [f"using In = {_C[self.dtype]};", f"using Out = {_C[self.out_dtype]};", "#include <cupyep/tile.cuh>"]
        code = ['#line 1 "compute"', self.compute]
        if not _FUNCTION.search(self.compute):
            locals_ = "".join(f"const auto {name} = scalars.{name}; " for name in self.scalars)
            code = [
                "__device__ __forceinline__ void compute(const cupyep::Tile& tile, const Scalars& scalars) {",
                f"  {locals_}",
                "  cupyep::map_elements(tile, [&](float x) -> float { return (",  # parentheses: one, and not none
                *code,
                "); }); }",
            ]
        return "\n".join([*headers, emit(constants, self._structs), *types, *code, ""])

    def _check(self, y: Any, x: Any) -> None:
        for name, array, dtype, row in (
            ("x", x, self.dtype, self.row_shape),
            ("y", y, self.out_dtype, self.out_row_shape),
        ):
            if array.dtype != dtype and not (dtype.itemsize == 1 and array.dtype == np.uint8):
                raise TypeError(f"{name}: expected {dtype}, got {array.dtype}")
            if array.ndim == 0 or array.shape[1:] != row:
                raise ValueError(f"{name}: expected shape [num_rows, *{row}], got {array.shape}")
            arrays.contiguous(name, array)
            if array.nbytes % 16 or (not arrays.is_numpy(array) and arrays.address(array) % 16):
                raise ValueError(f"{name}: expected address and bytes in multiples of 16, got {array.nbytes} bytes")
        if len(y) != len(x):
            raise ValueError(f"y: expected {len(x)} rows as x has, got {len(y)}")
        if arrays.is_numpy(y) != arrays.is_numpy(x):
            raise TypeError("y: expected NumPy or CUDA as x is, got the other")
        arrays.apart("y", y, "x", x)
        arrays.writable("y", y)

    def _values(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers of a call, as the kernel gets them: the reference is to see the same ones."""
        if scalars.keys() != self.scalars.keys():
            raise TypeError(f"scalars: expected {sorted(self.scalars)}, got {sorted(scalars)}")
        return {name: _number(name, kind, scalars[name]) for name, kind in self.scalars.items()}


def _kinds(scalars: Any) -> dict[str, str]:
    """Names of scalars and their types, checked."""
    if isinstance(scalars, str) or not isinstance(scalars, Iterable):
        raise TypeError(f"scalars: expected names, or names and their types, got {scalars!r}")
    pairs = list(scalars.items() if isinstance(scalars, Mapping) else ((name, "f32") for name in scalars))
    for name, kind in pairs:
        valid = isinstance(name, str) and name.isidentifier() and name.isascii() and name not in _TAKEN
        if not valid or kind not in tuple(_SCALARS):
            kinds = ", ".join(_SCALARS)
            raise ValueError(
                f"scalars: expected names (not {', '.join(_TAKEN)}) with a type of {kinds}, got {name}: {kind}"
            )
    return dict(pairs)


def _number(name: str, kind: str, value: Any) -> Any:
    """A scalar as a number of its type."""
    number: Any = _SCALARS[kind]
    if kind != "f32":
        value = checks.integer(name, value, int(np.iinfo(number).min), int(np.iinfo(number).max))
    elif not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    return number(value)


def _element(name: str, dtype: Any) -> np.dtype:
    known = ", ".join(str(kind) for kind in _C)
    try:
        found = checks.dtype(name, dtype)
    except TypeError:
        raise TypeError(f"{name}: expected one of {known}, got {dtype!r}") from None
    if found not in _C:
        raise TypeError(f"{name}: expected one of {known}, got {found}")
    return found
