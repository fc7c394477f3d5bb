"""The structs that the low-latency kernels share with Python; see abi.py for all others."""

from __future__ import annotations

from cupyep.abi import SYNC
from cupyep.structs import Struct

# What both low-latency kernels are told (docs/low-latency.md). Offsets are bytes: of `region` from the arena's start,
# of scales and side rows (a dispatch's meta words, a combine's weights) from there. masks: [num_ranks] u32, ranks left
# out; fates: [num_ranks] u64 of this channel. with_weights: topk_weights are given, which a rank without tokens
# has no address for.
COMMON = Struct(
    "LowLatency",
    **dict.fromkeys(("region", "scales_offset", "side_offset"), "u64"),
    **dict.fromkeys(("masks", "fates"), "ptr"),
    **dict.fromkeys(("phases", "signature", "max_tokens", "num_tokens", "num_topk", "num_local_experts"), "u32"),
    **dict.fromkeys(("idx64", "with_weights", "masks_on_timeout"), "u32"),
)
# What a dispatch leaves at its own rank for the combine of its handle; [num_ranks * max_tokens] rows in all but the
# first two, which are [num_tokens][words of 32 ranks] and [num_ranks].
TABLES = Struct(
    "LowLatencyTables", **dict.fromkeys(("token_ranks", "num_rows", "tokens", "positions", "weights"), "ptr")
)
DISPATCH_PARAMS = Struct(
    "LowLatencyDispatchParams",
    sync=SYNC,
    ll=COMMON,
    tables=TABLES,
    **dict.fromkeys(("x", "topk_idx", "topk_weights"), "ptr"),
    **dict.fromkeys(("recv_x", "recv_scales", "recv_count", "src_info", "layout_range", "stats"), "ptr"),
)
COMBINE_PARAMS = Struct(
    "LowLatencyCombineParams",
    sync=SYNC,
    ll=COMMON,
    tables=TABLES,
    **dict.fromkeys(("x", "topk_weights", "out"), "ptr"),
)
KERNEL_STRUCTS = (COMMON, TABLES, DISPATCH_PARAMS, COMBINE_PARAMS)
