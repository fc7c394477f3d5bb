"""Buffer.combine: checks arguments, hands them to the backend, wraps the results."""

from __future__ import annotations

from typing import Any

from cupyep import checks
from cupyep.backends.shapes import Outputs
from cupyep.group import Group
from cupyep.handle import CombineResult, Handle


class Combine(Group):
    """The verb combine of a Buffer."""

    def combine(
        self,
        x: Any,
        handle: Handle,
        topk_weights: Any = None,
        bias: Any = None,
        *,
        out: Any = None,
        wire_dtype: Any = None,
        num_sms: int | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        config: Any = None,
    ) -> CombineResult:
        """Brings the experts' outputs home: each token gets the sum of its rows at all ranks that it was sent to.

        Args:
            x: `[num_recv_tokens, hidden]` float32, float16 or bfloat16, rows in the order of dispatch's recv_x, already
                weighted. An array of this Buffer's arena is used in place; any other is staged there by a local copy.
                In the expert layout `[handle.expert_rows.num_rows, hidden]`, not weighted.
            handle: from that dispatch.
            topk_weights: `[num_recv_tokens, num_topk]` float32 to be summed the same way, or None. In the expert layout
                the factors of a token's rows. All ranks give some, or none does.
            bias: `[num_tokens, hidden]` of combined_x's type, or a pair of such arrays, added to the sums.
            out: `[num_tokens, hidden]` of that type, contiguous: gets combined_x. It may be an array of bias, and
                overlaps no input otherwise. None: a new array.
            wire_dtype: in the expert layout, the type that rows travel in and that combined_x has: float32, float16 or
                bfloat16. None: x's type, which for most models is bfloat16.
            num_sms: SMs for this call; None: the default.
            previous_event, async_finish, allocate_on_comm_stream: as in dispatch.
            config: ignored; DeepEP's tuning object.

        Returns: CombineResult of combined_x `[num_tokens, hidden]`, combined_topk_weights `[num_tokens, num_topk]` or
            None, event. Sums run in fp32 from +0: the addends of bias in their order, then a token's rows by ascending
            rank; they are rounded once, to x's type. Tokens sent nowhere are 0, or the bias. In the expert layout each
            rank first adds, in fp32 from +0 by ascending column, weight times row of a token's listings there and
            rounds that to wire_dtype, so that one row per (token, rank) travels: with a 16-bit wire_dtype results are
            rounded twice, with float32 not at all. combined_topk_weights is None there: gradients of
            weights take a combine of their own (docs/porting.md).
        Raises: ValueError, TypeError, StateError (another Buffer's handle) before anything is sent; MismatchError;
            ArenaExhaustedError; PeerError; StateError under graph capture, where the shape must have been used.
        Sync: collective. Ready in stream order (cuda) or complete (numpy).
        """
        backend = self._ready("combine")
        self._check_handle(backend, handle)
        x = backend.asarray("x", x)
        checks.payload("x", x)
        experts = handle.expert_rows
        if experts is None:
            checks.rows("x", x, handle.num_recv_tokens, "num_recv_tokens of the handle")
            if wire_dtype is not None:
                raise ValueError(f"wire_dtype: expected None in the rank layout, got {wire_dtype!r}")
        else:
            checks.rows("x", x, experts.num_rows, "expert_rows.num_rows of the handle")
            wire_dtype = x.dtype if wire_dtype is None else checks.addable("wire_dtype", wire_dtype)
        if topk_weights is not None:
            topk_weights = backend.asarray("topk_weights", topk_weights)
            checks.topk_weights(topk_weights, (handle.num_recv_tokens, handle.num_topk))
        combined = (handle.num_tokens, x.shape[1]), wire_dtype or x.dtype
        if bias is None:
            bias = ()
        addends = tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
        if len(addends) > 2:
            raise ValueError(f"bias: expected one array or a pair, got {len(addends)}")
        names = ("bias",) if len(addends) == 1 else ("bias[0]", "bias[1]")
        arrays = [backend.asarray(name, addend) for name, addend in zip(names, addends, strict=False)]
        for name, array in zip(names, arrays, strict=False):
            checks.like(name, array, *combined)
        if out is not None:
            out = backend.aswritable("out", out)
            checks.like("out", out, *combined)
            given = {"x": x, "topk_weights": topk_weights, **dict(zip(names, arrays, strict=False))}
            self._check_apart(backend, out, given)
        run = self._run(backend, num_sms, previous_event, async_finish, allocate_on_comm_stream)
        with self._watch:
            return CombineResult(
                *backend.combine(Outputs(x, topk_weights, tuple(arrays), wire_dtype), handle, out, run)
            )

    @staticmethod
    def _check_apart(backend: Any, out: Any, given: dict[str, Any]) -> None:
        """`out` overlaps nothing that is read meanwhile, but may be an addend: that is read where sums are written."""
        low, high = backend.bounds(out)
        for name, array in given.items():
            if array is None or not array.size:
                continue
            first, end = backend.bounds(array)
            is_same = first == low and array.flags.c_contiguous
            if first < high and low < end and not (is_same and name.startswith("bias")):
                raise ValueError(f"out: expected memory apart from {name}, which is read meanwhile, got an overlap")
