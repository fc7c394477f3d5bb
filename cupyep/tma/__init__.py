"""The GPU's copy engine (TMA) for CuPy users: bulk copies, tiles of tensors, and pipelines around code of one's own.

from cupyep import tma
tma.copy(dst, src, num_sms=8)
"""

from cupyep.tma.copies import copy, reduce_add
from cupyep.tma.rows import copy_rows

__all__ = ["copy", "copy_rows", "reduce_add"]
