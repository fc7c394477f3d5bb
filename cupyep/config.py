"""The numbers that a Buffer is made from, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from cupyep import checks


@dataclass(frozen=True)
class BufferConfig:
    """Arguments of `Buffer`, validated; every rank must give the same. Units: bytes, rows, seconds."""

    num_nvl_bytes: int = 0
    num_rdma_bytes: int = 0
    low_latency_mode: bool = False
    max_tokens_per_rank: int | None = None
    backend: str = "auto"
    timeout_s: float | None = 120.0

    def __post_init__(self) -> None:
        checks.integer("num_nvl_bytes", self.num_nvl_bytes, 0)
        checks.integer("num_rdma_bytes", self.num_rdma_bytes, 0)
        if not isinstance(self.low_latency_mode, bool):
            raise TypeError(f"low_latency_mode: expected a bool, got {self.low_latency_mode!r}")
        if self.max_tokens_per_rank is not None:
            checks.integer("max_tokens_per_rank", self.max_tokens_per_rank, 1, checks.MAX_TOKENS)
        if self.backend not in ("auto", "numpy", "cuda"):
            raise ValueError(f"backend: expected 'auto', 'numpy' or 'cuda', got {self.backend!r}")
        checks.timeout(self.timeout_s)
