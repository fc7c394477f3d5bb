"""Argument checks of the low-latency verbs. Each error names the argument, what was expected and what came."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import numpy as np

from cupyep import checks, layout
from cupyep.backends.low_latency_shape import LowLatencyShape, shape_of

MAX_TOKENS = 4096  # of a rank in one call
# Every CTA keeps all ids in shared memory, and a bit for each token and expert.
MAX_IDS = 32768  # num_tokens * num_topk
MAX_LISTINGS = 262144  # num_tokens, rounded up to a multiple of 32, * num_experts


class Meta(NamedTuple):
    """Of an array: what its checks look at."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)


def meta(array: Any) -> Meta:
    return Meta(array.shape, array.dtype)


def dispatch_shape(*arguments: Any) -> LowLatencyShape:
    """As _dispatch_shape, looked up if the same arguments were right before: that is a third of a call's checks."""
    with contextlib.suppress(Exception):  # of a check, which says it again below, or one cannot be looked up
        return _dispatch_shape(*arguments)
    return _dispatch_shape.__wrapped__(*arguments)


@functools.lru_cache(maxsize=1024, typed=True)
def _dispatch_shape(
    size: int,
    x: Meta,
    topk_idx: Meta,
    topk_weights: Meta | None,
    num_max_tokens: Any,
    num_experts: Any,
    use_fp8: Any,
    round_scale: Any,
    use_ue8m0: Any,
) -> LowLatencyShape:
    """Of a dispatch on `size` ranks with these arguments."""
    checks.payload("x", x)
    checks.topk_idx(topk_idx, x.shape[0])
    if topk_weights is not None:
        checks.topk_weights(topk_weights, topk_idx.shape)
    casts(x.shape[1], use_fp8, round_scale, use_ue8m0)
    num_tokens, num_topk = topk_idx.shape
    num_experts = checks.num_experts(num_experts, size)
    most = max_tokens(num_max_tokens, num_tokens, num_topk, num_experts)
    return shape_of(size, most, x.shape[1], x.dtype, num_topk, num_experts, use_fp8, round_scale, use_ue8m0)


def max_tokens(value: Any, num_tokens: int, num_topk: int, num_experts: int) -> int:
    """`value`, the most tokens of any rank, which are not too many and no fewer than ours."""
    name = "num_max_dispatch_tokens_per_rank"
    most = checks.integer(name, value, 1, MAX_TOKENS)
    if most * num_topk > MAX_IDS:
        raise ValueError(f"{name} * num_topk: expected at most {MAX_IDS}, got {most} * {num_topk}")
    if (rounded := layout.align(most, 32)) * num_experts > MAX_LISTINGS:
        got = f"{most} * {num_experts}" + f" ({most} counts as {rounded})" * (rounded != most)
        raise ValueError(f"{name} * num_experts: expected at most {MAX_LISTINGS}, got {got}")
    if num_tokens > most:
        raise ValueError(f"num_tokens: expected at most {name} = {most}, got {num_tokens}")
    return most


def casts(hidden: int, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> None:
    """The options of the cast go together, and `hidden` can be divided into their groups."""
    for name, flag in {"use_fp8": use_fp8, "round_scale": round_scale, "use_ue8m0": use_ue8m0}.items():
        checks.boolean(name, flag)
    if round_scale and not use_fp8:
        raise ValueError("round_scale: expected use_fp8=True beside it, got False")
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0: expected use_fp8=True and round_scale=True beside it, got one of them False")
    multiple = 512 if use_ue8m0 else 128
    if use_fp8 and hidden % multiple:
        raise ValueError(f"hidden: expected a multiple of {multiple} for these scales, got {hidden}")


def finish(async_finish: bool, return_recv_hook: bool) -> None:
    """Whether the call runs on another stream, or in halves; not both."""
    checks.boolean("async_finish", async_finish)
    if checks.boolean("return_recv_hook", return_recv_hook) and async_finish:
        raise ValueError("async_finish: expected False with return_recv_hook=True, got True")


def own(name: str, backend: Any, array: Any, shape: tuple[int, ...], dtype: Any, alignment: int) -> None:
    """An array that is written to: of this backend, as it is, at a multiple of `alignment` bytes."""
    if backend.asarray(name, array) is not array:
        raise TypeError(f"{name}: expected an array of the {backend.name} backend, got {type(array).__name__}")
    if array.dtype != dtype or tuple(array.shape) != shape:
        raise ValueError(f"{name}: expected {np.dtype(dtype)} {shape}, got {array.dtype} {tuple(array.shape)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: expected contiguous memory, got strides {array.strides} of {array.dtype} {shape}")
    if not getattr(array.flags, "writeable", True):  # CuPy's can all be written to
        raise ValueError(f"{name}: expected an array that can be written to, got a read-only one")
    if rest := backend.low_latency.address(array) % alignment:
        raise ValueError(f"{name}: expected memory at a multiple of {alignment} bytes, got one that is {rest} behind")
