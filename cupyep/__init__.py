"""cupyep: expert-parallel dispatch and combine of MoE tokens for CuPy and NumPy.

with cupyep.Buffer(comm) as buffer:
    recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(x, topk_idx, topk_weights, num_experts=64)
    y = experts(recv_x, recv_idx, recv_weights)
    combined_x, _, event = buffer.combine(y, handle)
"""

from cupyep import model, tma
from cupyep.backends.cuda.jit import source_root as include_dir
from cupyep.backends.cuda.warmup import compile_at_import
from cupyep.buffer import Buffer
from cupyep.comm import LocalComm
from cupyep.errors import (
    ArenaExhaustedError,
    CompileError,
    CupyepError,
    MismatchError,
    PeerError,
    PeerTimeoutError,
    StateError,
    TopologyError,
    UnsupportedDeviceError,
)
from cupyep.handle import (
    CombineResult,
    DispatchLayout,
    DispatchResult,
    EventOverlap,
    Handle,
    LowLatencyCombineResult,
    LowLatencyDispatchResult,
    LowLatencyHandle,
)
from cupyep.quantize import dequantize_fp8, quantize_fp8
from cupyep.threads import run_local

__version__ = "0.1.0"

__all__ = [
    "ArenaExhaustedError",
    "Buffer",
    "CombineResult",
    "CompileError",
    "CupyepError",
    "DispatchLayout",
    "DispatchResult",
    "EventOverlap",
    "Handle",
    "LocalComm",
    "LowLatencyCombineResult",
    "LowLatencyDispatchResult",
    "LowLatencyHandle",
    "MismatchError",
    "PeerError",
    "PeerTimeoutError",
    "StateError",
    "TopologyError",
    "UnsupportedDeviceError",
    "dequantize_fp8",
    "include_dir",
    "model",
    "quantize_fp8",
    "run_local",
    "tma",
]

compile_at_import()
