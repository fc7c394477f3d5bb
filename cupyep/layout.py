"""Where things lie in a rank's arena: the control block first, then the heap that blocks are cut from.

    arena of one rank
    | control block                                                                  | heap ...
    | abort | channel 0: state, posts[2][ranks], done[ranks], arrivals[2][ranks], counts[2][ranks] | channel 1 | ... |

Peers write posts, done words, counts and the abort word; the rank itself writes its channels' state. Offsets come from
the one list below; both backends slice it, and the kernels get it as `cfg::` constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from cupyep import abi
from cupyep.structs import Struct, camel

ALIGNMENT = 128  # bytes: of every region and of every heap block (a bulk copy's best case)
INITIAL_EPOCH = 0  # of every channel of a new arena; tests set it close to 2^32


class Channel(IntEnum):
    """Operations of different channels may run at once: nothing in the control block is shared between channels."""

    NORMAL = 0
    LOW_LATENCY_DISPATCH_0 = 1
    LOW_LATENCY_DISPATCH_1 = 2
    LOW_LATENCY_COMBINE_0 = 3
    LOW_LATENCY_COMBINE_1 = 4
    BARRIER = 5


# Words of a channel's state, all private to its rank. busy: an operation runs (to kernels one word with the epoch);
# arrived: CTAs that have finished theirs; sent: CTAs that have finished a step of a low-latency send half.
CHANNEL_STATE = Struct("ChannelState", epoch="u32", busy="u32", arrived="u32", sent="u32")


@dataclass(frozen=True)
class Region:
    """A named array inside the control block: byte offset, shape, NumPy dtype."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def align(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """`num_bytes` rounded up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


def counts_words(num_ranks: int) -> int:
    """u32 words of one rank's counts: rows for every rank, then rows for each of the reader's local experts."""
    return align(num_ranks + abi.MAX_LOCAL_EXPERTS, ALIGNMENT // 4)


class ControlLayout:
    """Offsets of the control block of an arena shared by `num_ranks` ranks; all in bytes from the arena's start."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        u32, u64 = np.dtype("u4"), np.dtype("u8")
        self.abort = Region("abort", 0, (1,), u64)
        self.channels_offset = ALIGNMENT
        parts = (
            ("state", (), CHANNEL_STATE.dtype),
            ("posts", (2, num_ranks), abi.POST.dtype),  # [parity of the epoch][sender]
            ("done", (num_ranks,), u32),  # [sender]: the last epoch that this peer has finished
            ("arrivals", (2, num_ranks), u64),  # [rows, weights][sender]: a low-latency word, see arrival_word
            ("counts", (2, num_ranks, counts_words(num_ranks)), u32),  # [parity of the epoch][sender]
        )
        self._regions, offset = {}, 0
        for name, shape, dtype in parts:
            self._regions[name] = Region(name, offset, shape, dtype)
            offset = align(offset + self._regions[name].num_bytes)
        self.channel_bytes = offset
        self.num_bytes = self.channels_offset + len(Channel) * self.channel_bytes

    def region(self, channel: Channel, name: str) -> Region:
        """The region `name` (state, posts, done, arrivals, counts) of `channel`."""
        inner = self._regions[name]
        return Region(
            name, self.channels_offset + channel * self.channel_bytes + inner.offset, inner.shape, inner.dtype
        )

    def view(self, memory: np.ndarray, region: Region) -> np.ndarray:
        """`region` as an array over `memory`, an arena's bytes as uint8."""
        return memory[region.offset : region.offset + region.num_bytes].view(region.dtype).reshape(region.shape)

    def initial(self) -> np.ndarray:
        """A new control block's bytes: all epochs are INITIAL_EPOCH, also those that peers will write.

        With zeros there, an epoch close to 2^32 would be behind them, and a wait would end before anybody came.
        """
        memory = np.zeros(self.num_bytes, np.uint8)
        for channel in Channel:
            for name in ("state", "posts"):
                self.view(memory, self.region(channel, name))["epoch"] = INITIAL_EPOCH
            self.view(memory, self.region(channel, "done"))[...] = INITIAL_EPOCH
            self.view(memory, self.region(channel, "arrivals"))[...] = INITIAL_EPOCH << 32
        return memory

    def constants(self) -> dict[str, int]:
        """The layout as `cfg::` constants."""
        names = {f"k{camel(name)}Offset": region.offset for name, region in self._regions.items()}
        return {
            "kNumRanks": self.num_ranks,
            "kAbortOffset": self.abort.offset,
            "kChannelsOffset": self.channels_offset,
            "kChannelBytes": self.channel_bytes,
            "kCountsWords": counts_words(self.num_ranks),
            "kSignatureWords": len(abi.SIGNATURE_FIELDS),
            "kPostEpochOffset": abi.POST.dtype.fields["epoch"][1],  # type: ignore[index]
            **names,
            **{f"kChannel{camel(channel.name)}": int(channel) for channel in Channel},
        }


# What the device tells the host, in pinned memory: one record for COUNT, one for the operations that nobody waits for.
# verdict and abort stay until the host clears them; the posts that led to a verdict follow in HostLayout.
HOST_RECORD = Struct(
    "HostRecord",
    abort="u64",
    bad_id="i64",
    verdict="u32",
    epoch="u32",
    most_tokens="u32",
    has_bad_id="u32",
    failed_rank="u32",
    failed_rows="u32",
)


class HostLayout:
    """Offsets within the pinned memory of one rank; both records have the same parts."""

    def __init__(self, num_ranks: int) -> None:
        parts = (
            ("record", (), HOST_RECORD.dtype),
            ("host_posts", (num_ranks,), abi.POST.dtype),  # every rank's, when the verdict is not DONE
            ("host_rows", (num_ranks,), np.dtype("u4")),  # COUNT: rows from each rank
            ("host_experts", (abi.MAX_LOCAL_EXPERTS,), np.dtype("u4")),  # COUNT: listings of each local expert
        )
        self.regions, offset = {}, 0
        for name, shape, dtype in parts:
            self.regions[name] = Region(name, offset, shape, dtype)
            offset = align(offset + self.regions[name].num_bytes)
        self.record_bytes = offset
        self.num_bytes = 2 * offset

    def views(self, memory: np.ndarray) -> dict[tuple[int, str], Any]:
        """Every part over the pinned bytes `memory`, by (number of the record, name). 0: COUNT, 1: the others.

        Arrays, but "record", which is read in every call, a HOST_RECORD.record.
        """
        found: dict[tuple[int, str], Any] = {}
        for index in range(2):
            for name, region in self.regions.items():
                start = index * self.record_bytes + region.offset
                part = memory[start : start + region.num_bytes]
                is_record = name == "record"
                found[index, name] = (
                    HOST_RECORD.record.from_buffer(part) if is_record else part.view(region.dtype).reshape(region.shape)
                )
        return found

    def constants(self) -> dict[str, int]:
        """The layout as `cfg::` constants; kHostRecordBytes is the distance of the two records."""
        names = {f"k{camel(name)}Offset": region.offset for name, region in self.regions.items() if name != "record"}
        return {"kHostRecordBytes": self.record_bytes, **names}


@dataclass(frozen=True)
class RowLayout:
    """How one arena block holds `capacity` received rows: payload rows first, side rows apart, each part aligned.

    A row's payload is opaque bytes; ids, weights and scales are side rows with a pitch of their own.
    """

    row_bytes: int
    num_topk: int = 0
    idx_bytes: int = 0  # bytes of one id: 4, 8, or 0 when no ids travel
    with_weights: bool = False
    scale_bytes: int = 0  # bytes of one token's scales, 0 when none travel

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of one row of each part that travels, the smallest first."""
        sizes = {
            "rows": self.row_bytes,
            "idx": self.num_topk * self.idx_bytes,
            "weights": self.num_topk * 4 * self.with_weights,
            "scales": self.scale_bytes,
        }
        return {name: size for name, size in sorted(sizes.items(), key=lambda part: part[1]) if size}

    def parts(self, capacity: int) -> dict[str, int]:
        """Bytes of `capacity` rows of each part that travels, the smallest first."""
        return {name: capacity * size for name, size in self.sizes.items()}

    def fitting(self, num_bytes: int) -> int:
        """The most rows whose parts, one block each, fit into a gap of `num_bytes`."""
        sizes = self.sizes.values()
        capacity = num_bytes // sum(sizes)
        while capacity > 0 and sum(align(capacity * size) for size in sizes) > num_bytes:
            capacity -= 1  # a few times: rounding up takes less than 128 bytes of each part
        return capacity

    def offsets(self, capacity: int) -> dict[str, int]:
        """Byte offsets of rows, idx, weights and scales from the block's start, and its size as `num_bytes`."""
        parts, offsets, end = self.parts(capacity), {}, 0
        for name in ("rows", "idx", "weights", "scales"):
            offsets[name], end = end, align(end + max(parts[name], 1)) if name in parts else end
        return {**offsets, "num_bytes": end}
