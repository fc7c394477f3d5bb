"""class Buffer: the verbs of one rank."""

from __future__ import annotations

from typing import Any

from cupyep import checks
from cupyep.combine import Combine
from cupyep.dispatch import Dispatch
from cupyep.handle import DispatchLayout
from cupyep.low_latency import LowLatencyVerbs


class Buffer(Dispatch, Combine, LowLatencyVerbs):
    """One rank's end of an expert-parallel group: dispatch sends tokens to experts, combine brings the outputs back.

    Args:
        comm: an mpi4py communicator (also one from Split), a LocalComm from run_local, or None: MPI.COMM_WORLD under
            an MPI launcher, else one rank alone.
        num_nvl_bytes: bytes of the arena's heap on this rank; 0: sized from max_tokens_per_rank and the first call.
        num_rdma_bytes: bytes of the low-latency calls' receive regions, see get_low_latency_rdma_size_hint; 0: they
            grow with the shapes. No RDMA is involved.
        low_latency_mode: allows the low-latency calls.
        max_tokens_per_rank: the most tokens a rank will dispatch in one call. None: agreed at the first call and
            grown, collectively, by a later larger one.
        backend: "cuda", "numpy", or "auto": cuda where a GPU and CuPy are present.
        device: CUDA device ordinal; None: the rank's number on this host modulo the GPUs.
        timeout_s: deadline in seconds of every wait; None waits for ever (for debuggers).

    Attributes: rank, size, backend (the name of the one chosen).
    Raises: TypeError, ValueError; MismatchError if ranks differ in these arguments; TopologyError if they cannot reach
        each other's memory; PeerTimeoutError if one does not come.
    Sync: creation, every verb and close() are collective: all ranks of comm call them in the same order. A Buffer
        belongs to one thread at a time.
    """

    def get_dispatch_layout(self, topk_idx: Any, num_experts: int) -> DispatchLayout:
        """How a dispatch of `topk_idx` would spread; DeepEP's callers want it, dispatch itself does not.

        Args: topk_idx `[num_tokens, num_topk]` int32 or int64; num_experts of all ranks.
        Returns: DispatchLayout of num_tokens_per_rank `[num_ranks]` int32, None, num_tokens_per_expert `[num_experts]`
            int32, is_token_in_rank `[num_tokens, num_ranks]` bool, event.
        Sync: local.
        """
        backend = self._ready("get_dispatch_layout")
        topk_idx = backend.asarray("topk_idx", topk_idx)
        checks.matrix("topk_idx", topk_idx)
        checks.topk_idx(topk_idx, topk_idx.shape[0])
        num_experts = checks.num_experts(num_experts, self.size)
        per_rank, per_expert, in_rank, event = backend.layout(topk_idx, num_experts, strict=True)
        return DispatchLayout(per_rank, None, per_expert, in_rank, event)
