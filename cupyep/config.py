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
        self._take("num_nvl_bytes", 0)
        self._take("num_rdma_bytes", 0)
        if not isinstance(self.low_latency_mode, bool):
            raise TypeError(f"low_latency_mode: expected a bool, got {self.low_latency_mode!r}")
        if self.max_tokens_per_rank is not None:
            self._take("max_tokens_per_rank", 1, checks.MAX_TOKENS)
        if self.backend not in ("auto", "numpy", "cuda"):
            raise ValueError(f"backend: expected 'auto', 'numpy' or 'cuda', got {self.backend!r}")
        checks.timeout(self.timeout_s)

    def _take(self, name: str, low: int, high: int | None = None) -> None:
        """Makes an int of a NumPy integer: addresses come of these numbers, and CuPy takes nothing else for one."""
        object.__setattr__(self, name, checks.integer(name, getattr(self, name), low, high))
