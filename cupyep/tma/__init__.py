"""The GPU's copy engine (TMA) for CuPy users: bulk copies, tiles of tensors, and pipelines around code of one's own.

from cupyep import tma
tma.copy(dst, src, num_sms=8)
"""

from cupyep.tma.copies import copy, reduce_add
from cupyep.tma.launch import require
from cupyep.tma.overlap import Overlap
from cupyep.tma.pipeline import Pipeline
from cupyep.tma.rows import copy_rows
from cupyep.tma.tensor_map import TensorMap, swizzled
from cupyep.tma.tiles import copy_tensor, load_tile, store_tile

__all__ = [
    "Overlap",
    "Pipeline",
    "TensorMap",
    "copy",
    "copy_rows",
    "copy_tensor",
    "load_tile",
    "reduce_add",
    "require",
    "store_tile",
    "swizzled",
]
