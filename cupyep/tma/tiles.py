"""Tiles of tensor maps: one at a time, to look at, or all of them, to copy a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyep import abi, layout
from cupyep.backends.cuda import jit
from cupyep.tma import arrays, copies
from cupyep.tma import launch as launches
from cupyep.tma.launch import Launch, Target
from cupyep.tma.tensor_map import TensorMap, swizzled

MAX_TILES = 2**31 - 1
_MBARRIER_BYTES = 16  # of shared memory, behind a single tile


def load_tile(tensor_map: TensorMap, coordinates: Sequence[int], *, raw: bool = False, stream: Any = None) -> Any:
    """One tile, as a kernel finds it in shared memory after a TMA load.

    Args:
        tensor_map: with interleave "none".
        coordinates: of the tile's first element, along each axis of the array, also outside of it. Along the last axis
            a multiple of 16 bytes, as H200s end a kernel with "illegal instruction" at any other.
        raw: as `[tile_bytes]` uint8, in the order in which bytes lie in shared memory (see swizzled).
        stream: CuPy stream; None: the current one.

    Returns: `[*tile_shape]`, an array of the map's kind and dtype. Outside of the array it holds the fill.
    Raises: TypeError, ValueError; UnsupportedDeviceError before compute capability 9.0.
    Sync: on `stream`; the host does not wait. Source: PTX ISA, cp.async.bulk.tensor.
    """
    coordinates = _check(tensor_map, coordinates, stream)
    if arrays.is_numpy(tensor_map.array):
        tile = gather(tensor_map, coordinates)
        if not raw:
            return tile
        image = np.empty(tensor_map.tile_bytes, np.uint8)
        image[swizzled(np.arange(image.size), tensor_map.swizzle)] = tile.reshape(-1).view(np.uint8)
        return image
    import cupy

    with launches.on(stream):
        target = _target("tma.load_tile")
        arrays.reach(tensor_map.array)
        out = cupy.empty(tensor_map.tile_bytes, np.uint8)
        launches.run(plan_tile("load_tile", target, tensor_map, tensor_map.descriptor, coordinates, out.data.ptr, raw))
        return out if raw else out.view(tensor_map.dtype).reshape(tensor_map.tile_shape)


def store_tile(tensor_map: TensorMap, coordinates: Sequence[int], tile: Any, *, stream: Any = None) -> Any:
    """Writes one tile by a TMA store; what lies outside of the array is dropped.

    Args: tensor_map, coordinates, stream: as of load_tile, without element_strides; tile: `[*tile_shape]`,
        C-contiguous, 16-byte aligned, of the map's kind and dtype.
    Returns: an event. Raises, Sync: as load_tile.
    """
    coordinates = _check(tensor_map, coordinates, stream)
    _check_unstrided("tensor_map", tensor_map)
    arrays.writable("tensor_map.array", tensor_map.array)
    tile = arrays.asarray("tile", tile)
    if arrays.is_numpy(tile) != arrays.is_numpy(tensor_map.array) or tile.dtype != tensor_map.dtype:
        raise TypeError(f"tile: expected {tensor_map.dtype} where the map's array is, got {tile.dtype} of {type(tile)}")
    if tile.shape != tensor_map.tile_shape:
        raise ValueError(f"tile: expected shape {tensor_map.tile_shape}, got {tile.shape}")
    arrays.contiguous("tile", tile)
    if arrays.address(tile) % 16:
        raise ValueError(f"tile: expected an address that is a multiple of 16, got {arrays.address(tile):#x}")
    if arrays.is_numpy(tile):
        scatter(tensor_map, coordinates, tile)
        return launches.done()
    with launches.on(stream):
        target = _target("tma.store_tile")
        arrays.reach(tensor_map.array, tile)
        if (left := from_zero(tensor_map, coordinates, tile)) is None:
            return launches.done()
        tensor_map, coordinates, tile = left
        where = arrays.address(tile)
        return launches.run(plan_tile("store_tile", target, tensor_map, tensor_map.descriptor, coordinates, where))


def copy_tensor(
    dst_map: TensorMap, src_map: TensorMap, *, num_sms: int = copies.DEFAULT_NUM_SMS, stream: Any = None
) -> Any:
    """Fills the whole of dst's array with the same elements of src's, tile by tile by TMA.

    Where dst reaches beyond src it gets src's fill; where src reaches beyond dst it is not read.

    Args:
        dst_map, src_map: of one rank, dtype, box and swizzle, without interleave and element_strides. Arrays of any
            strides that a map allows: this also packs and unpacks.
        num_sms, stream: as of tma.copy.

    Returns: an event. Raises, Sync: as load_tile.
    """
    launches.check(stream, num_sms)
    for name, tensor_map in (("dst_map", dst_map), ("src_map", src_map)):
        _check_map(name, tensor_map)
        _check_unstrided(name, tensor_map)
    for field in ("dtype", "box", "swizzle"):
        if (ours := getattr(dst_map, field)) != (theirs := getattr(src_map, field)):
            raise ValueError(f"src_map.{field}: expected {ours} as dst_map has, got {theirs}")
    arrays.pair(dst_map.array, src_map.array)
    if arrays.is_numpy(dst_map.array):
        for corner in itertools.product(*(range(0, n, b) for n, b in zip(dst_map.shape, dst_map.box, strict=True))):
            scatter(dst_map, corner, gather(src_map, corner))
        return launches.done()
    with launches.on(stream):
        target = _target("tma.copy_tensor")
        num_sms = launches.num_sms(target, num_sms)
        arrays.reach(dst_map.array, src_map.array)
        return launches.run(plan_copy_tensor(target, dst_map, (dst_map.descriptor, src_map.descriptor), num_sms))


def plan_tile(
    function: str,
    target: Target,
    tensor_map: TensorMap,
    descriptor: np.ndarray,
    coordinates: Sequence[int],
    tile: int,
    raw: bool = False,
) -> Launch:
    """The launch that loads or stores one tile; `tile` is the address of its own memory."""
    _check_size(tensor_map, target.smem_limit - _MBARRIER_BYTES)
    pieces = 0 if raw else swizzled(7 << 7, tensor_map.swizzle) >> 4 & 7
    constants = {"kRank": len(tensor_map.box), **copies.RINGS[-1].constants()}  # the ring is copy_tensor's business
    params = abi.TILE_PARAMS(
        tile=tile,
        coordinates=_innermost_first(coordinates),
        tile_bytes=tensor_map.tile_bytes,
        swizzle_pieces=pieces,
    )
    smem_bytes = tensor_map.tile_bytes + _MBARRIER_BYTES
    return _launch(function, target, constants, 1, 128, smem_bytes, (descriptor, params))


def plan_copy_tensor(
    target: Target,
    dst_map: TensorMap,
    descriptors: tuple[np.ndarray, np.ndarray],
    num_sms: int,
    ring: copies.Ring | None = None,
) -> Launch:
    """The launch that copies all tiles of `dst_map`. descriptors: of dst and src."""
    slot_bytes = layout.align(dst_map.tile_bytes)
    if ring is None:
        most = target.smem_limit // (slot_bytes + copies.SLOT_STATE_BYTES)  # slots of a CTA
        num_warps = next((warps for warps in (4, 2) if most // warps >= 3), 1)
        ring = copies.Ring(num_warps, max(2, min(12, most // num_warps)), slot_bytes)
    _check_size(dst_map, target.smem_limit // 2 - 2 * copies.SLOT_STATE_BYTES)
    along = [math.ceil(size / box) for size, box in zip(dst_map.shape, dst_map.box, strict=True)]
    if math.prod(along) > MAX_TILES or max(dst_map.shape) > MAX_TILES:
        raise ValueError(f"dst_map: expected at most {MAX_TILES:,} tiles and elements per axis, got {along} tiles")
    params = abi.TILES_PARAMS(
        num_tiles_along=_innermost_first(along),
        box=_innermost_first(dst_map.box),
        num_tiles=math.prod(along),
        tile_bytes=dst_map.tile_bytes,
    )
    constants = {"kRank": len(along), **ring.constants()}
    smem_bytes, num_threads = ring.smem_bytes, ring.num_warps * 32
    return _launch("copy_tensor", target, constants, num_sms, num_threads, smem_bytes, (*descriptors, params))


def from_zero(
    tensor_map: TensorMap, coordinates: tuple[int, ...], tile: Any
) -> tuple[TensorMap, tuple[int, ...], Any] | None:
    """The same store without what lies before the array, and so without negative coordinates; None: nothing is left.

    An H200 ends a kernel that stores a tile at one with "illegal instruction"; loads are right there.
    """
    if min(coordinates) >= 0:
        return tensor_map, coordinates, tile
    part = tile[tuple(slice(max(0, -first), None) for first in coordinates)]
    if not part.size:
        return None
    part = part if part.flags.c_contiguous else part.copy()
    return TensorMap(tensor_map.array, part.shape), tuple(max(0, first) for first in coordinates), part


def gather(tensor_map: TensorMap, coordinates: Sequence[int]) -> np.ndarray:
    """A tile by NumPy."""
    inside, where = _overlap(tensor_map, coordinates)
    tile = np.zeros(tensor_map.tile_shape, tensor_map.dtype)
    if tensor_map.oob_fill == "nan":
        tile[...] = np.nan
    tile[inside] = tensor_map.array[where]
    return tile


def scatter(tensor_map: TensorMap, coordinates: Sequence[int], tile: np.ndarray) -> None:
    """Writes a tile by NumPy."""
    inside, where = _overlap(tensor_map, coordinates)
    tensor_map.array[where] = tile[inside]


def _overlap(tensor_map: TensorMap, coordinates: Sequence[int]) -> tuple[tuple, tuple]:
    """Index arrays, into the tile and into the array, of what both have."""
    inside, where = [], []
    axes = zip(coordinates, tensor_map.tile_shape, tensor_map.element_strides, tensor_map.shape, strict=True)
    for first, count, stride, size in axes:
        index = first + np.arange(count) * stride
        valid = np.flatnonzero((index >= 0) & (index < size))
        inside.append(valid)
        where.append(index[valid])
    return np.ix_(*inside), np.ix_(*where)


def _launch(
    function: str,
    target: Target,
    constants: dict[str, int],
    num_ctas: int,
    num_threads: int,
    smem_bytes: int,
    arguments: tuple[np.ndarray, ...],
) -> Launch:
    prelude = launches.prelude(constants, abi.TILES_PARAMS, abi.TILE_PARAMS)
    request = jit.Request("tma_tiles", target.arch, prelude)
    return Launch(request, function, num_ctas, num_threads, smem_bytes, arguments)


def _target(what: str) -> Target:
    target = launches.target(what)
    target.require_tma(what)
    return target


def _innermost_first(values: Sequence[int]) -> list[int]:
    return [*values[::-1], *[0] * (5 - len(values))]


def _check_map(name: str, tensor_map: TensorMap) -> None:
    if not isinstance(tensor_map, TensorMap):
        raise TypeError(f"{name}: expected a TensorMap, got {type(tensor_map).__name__}")
    if tensor_map.interleave != "none":
        raise ValueError(f"{name}.interleave: expected none here, got {tensor_map.interleave}")


def _check(tensor_map: TensorMap, coordinates: Sequence[int], stream: Any) -> tuple[int, ...]:
    launches.check(stream)
    _check_map("tensor_map", tensor_map)
    checked = arrays.per_axis("coordinates", coordinates, -(2**31), 2**31 - 1, len(tensor_map.shape))
    if checked[-1] * tensor_map.dtype.itemsize % 16:
        per_vector = 16 // tensor_map.dtype.itemsize
        raise ValueError(
            f"coordinates[{len(checked) - 1}]: expected a multiple of {per_vector} (16 bytes), got {checked[-1]}"
        )
    return checked


def _check_unstrided(name: str, tensor_map: TensorMap) -> None:
    if any(stride != 1 for stride in tensor_map.element_strides):
        raise ValueError(f"{name}.element_strides: expected all 1, got {tensor_map.element_strides}")


def _check_size(tensor_map: TensorMap, most: int) -> None:
    if tensor_map.tile_bytes > most:
        raise ValueError(f"box: expected a tile of at most {most:,} bytes, got {tensor_map.tile_bytes:,}")
