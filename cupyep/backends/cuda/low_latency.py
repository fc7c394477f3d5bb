"""The low-latency verbs on the GPU: one launch for a call, or one for each half, on the caller's own stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from cupyep import abi, env, layout, low_latency_abi
from cupyep.abi import AbortKind, Phase, Verdict
from cupyep.backends.cuda import devices
from cupyep.backends.cuda.arena import Arena, abort_word
from cupyep.backends.cuda.arrays import is_plain, plain
from cupyep.backends.cuda.kernels import Call, Kernel, Kernels
from cupyep.backends.cuda.launcher import host_records
from cupyep.backends.cuda.meetings import Meetings
from cupyep.backends.cuda.streams import CommStream, CudaEvent
from cupyep.backends.low_latency import LowLatency, LowLatencyCall
from cupyep.backends.low_latency_shape import CHANNELS, COMBINE, DISPATCH, GIVEN, NUM_REGIONS, LowLatencyShape, offsets
from cupyep.backends.verdict import abort_error
from cupyep.comm import Communicator
from cupyep.config import BufferConfig
from cupyep.errors import PeerError, StateError

RECORDS = {operation: index for index, operation in enumerate(CHANNELS)}  # of the pinned host memory
PARAMS = {DISPATCH: low_latency_abi.DISPATCH_PARAMS, COMBINE: low_latency_abi.COMBINE_PARAMS}


class LowLatencyLauncher:
    """Fills the kernels' parameters, launches, and reads what the device tells. Nothing here waits."""

    def __init__(self, arena: Any, kernels: Any, comm: Any, region_bytes: int, masks: Any, fates: Any) -> None:
        self._arena, self._kernels, self._rank, self._num_ranks = arena, kernels, comm.rank, comm.size
        self._region_bytes, self._masks, self._fates = region_bytes, masks, fates
        self._first_region = layout.ControlLayout(comm.size).num_bytes
        self._pinned, told = host_records(comm.size)
        self._told = {operation: told[index, "record"] for operation, index in RECORDS.items()}
        self._launches: dict[Any, tuple[Kernel, Call]] = {}
        self.operation = DISPATCH  # the last one launched, or about to be
        self._num_experts = 0  # of the last dispatch
        self.timeout_s: float | None = None  # of the waits of the next launch

    def launch(self, call: LowLatencyCall, phases: int, masks_on_timeout: bool, num_ctas: int, stream: Any) -> None:
        """Launches halves of a call."""
        idx64 = call.operation == DISPATCH and call.inputs["topk_idx"].itemsize == 8
        same = (
            call.channel,
            call.shape,
            id(call.tables),
            call.signature,
            call.with_weights,
        )  # tables stay as long as we
        key = (*same, phases, idx64, masks_on_timeout)
        if (found := self._launches.get(key)) is None:
            params = self._prepare(call)
            flags = {"masks_on_timeout": masks_on_timeout, "with_weights": call.with_weights, "idx64": idx64}
            params.within("ll", phases=phases, signature=call.signature, **flags)
            found = self._launches[key] = self._kernels.low_latency(call.operation, call.shape), params
        kernel, params = found
        params.within("sync", timeout_ns=int((self.timeout_s or 0) * 1e9))
        params.within("ll", num_tokens=call.num_tokens)
        params.set(**{name: 0 if array is None else array.data.ptr for name, array in call.inputs.items()})
        if call.operation == DISPATCH:
            self._num_experts = call.shape.num_experts
        else:  # which may be the caller's
            params.set(out=call.results["out"].data.ptr)
        kernel.launch(num_ctas, params, stream)

    def _sync(self, channel: layout.Channel) -> dict[str, int]:
        peers, own = self._arena.peers.data.ptr, self._arena.address
        return {"peers": peers, "own": own, "host": self._pinned.ptr, "rank": self._rank, "channel": channel}

    def _prepare(self, call: LowLatencyCall) -> Call:
        """The parameters that one channel, shape and tables have alike."""
        sync = self._sync(call.channel)
        index = call.channel - layout.Channel.LOW_LATENCY_DISPATCH_0
        places, shape = offsets(call.shape.region(call.operation)), call.shape
        params = Call(PARAMS[call.operation], sync)
        params.within(
            "ll",
            region=self._first_region + index * self._region_bytes,
            scales_offset=places["scales"],
            side_offset=places["side"],
            masks=self._masks.data.ptr,
            fates=self._fates.data.ptr + 8 * self._num_ranks * index,
            max_tokens=shape.max_tokens,
            num_topk=shape.num_topk,
            num_local_experts=shape.num_local_experts,
        )
        params.within("tables", **{name: array.data.ptr for name, array in call.tables.items()})
        if call.operation == DISPATCH:
            params.set(**{name: call.results[name].data.ptr for name in GIVEN})
        return params

    def abort(self, kind: AbortKind, peer: int, stream: Any) -> None:
        """Makes every rank leave."""
        call = Call(abi.ABORT_PARAMS, self._sync(layout.Channel.LOW_LATENCY_DISPATCH_0))
        call.set(word=abi.pack_abort(kind, self.operation, self._rank, peer, 0))
        self._kernels.abort_peers.launch(1, call, stream)

    def check(self) -> None:
        """Raises what an operation behind us has met, as far as the device has told."""
        for record in self._told.values():
            if record.verdict == Verdict.ABORTED:
                raise abort_error(record.abort, self.timeout_s or 0)

    def check_abort(self) -> None:
        """Raises if a rank has left for good, also when no kernel of ours has met it yet."""
        if word := abort_word(self._arena.address):
            raise abort_error(word, self.timeout_s or 0)

    def check_ids(self) -> None:
        """Raises ValueError for an id out of range that a dispatch has met, once."""
        record = self._told[DISPATCH]
        if record.has_bad_id and record.verdict != Verdict.ABORTED:  # which is what counts then
            record.has_bad_id = 0
            raise ValueError(f"topk_idx: expected ids in -1..{self._num_experts - 1}, got {record.bad_id}")


class _Event(CudaEvent):
    """The end of what was launched on `stream`, which holds for the caller's own stream without an event."""

    def __init__(self, stream: Any, event: Any, owner: CudaLowLatency) -> None:
        super().__init__(event, owner.completed)
        self._stream = stream

    def wait_on(self, stream: Any) -> None:
        if stream != self._stream:
            stream.wait_event(self.event or self._stream.record())

    def synchronize(self) -> None:
        self._stream.synchronize()
        self._check()


class CudaLowLatency(LowLatency):
    """One rank on a GPU. `failed` takes the error that ends the group."""

    def __init__(
        self,
        comm: Communicator,
        meetings: Meetings,
        config: BufferConfig,
        claim: devices.Claim,
        kernels: Kernels,
        comm_stream: CommStream,
        failed: Callable[[PeerError], None],
    ) -> None:
        self._device, self._kernels, self._comm_stream, self._failed = claim.device, kernels, comm_stream, failed
        self.max_num_sms, self._meetings = devices.whole_share(claim), meetings
        self._masks, self._poisons = cupy.zeros(comm.size, np.int32), env.poison()
        self._arenas: list[Arena] = []  # the last one is in use; captured graphs may still use the others
        self._launcher: LowLatencyLauncher | None = None
        self._behind: dict[layout.Channel, Any] = {}  # (event, call) on the Buffer's own stream
        super().__init__(comm, config)

    def _resize(self, region_bytes: int) -> None:
        initial, timeout_s = layout.ControlLayout(self._comm.size).initial(), self._config.timeout_s
        heap_bytes = NUM_REGIONS * region_bytes
        self._arenas.append(Arena(self._comm, self._device, initial, heap_bytes, timeout_s))
        fates = cupy.asarray(np.full((NUM_REGIONS, self._comm.size), layout.INITIAL_EPOCH << 32, np.uint64))
        cupy.cuda.get_current_stream().synchronize()  # kernels may run on any stream
        self._kept.append(self._launcher)
        self._launcher = LowLatencyLauncher(
            self._arenas[-1], self._kernels, self._comm, region_bytes, self._masks, fates
        )

    def _load(self, operation: abi.Operation, shape: LowLatencyShape) -> None:
        load = self._kernels.load_low_latency
        self._comm.together("load kernels", lambda: load(operation, shape), timeout_s=self._config.timeout_s)

    def _allocate(self, num_bytes: int) -> cupy.ndarray:
        return cupy.empty(num_bytes, np.uint8)  # 512-byte aligned

    def _capturing(self) -> bool:
        return cupy.cuda.get_current_stream().is_capturing()

    def address(self, array: cupy.ndarray) -> int:
        return array.data.ptr

    def _run(self, call: LowLatencyCall, phases: int, async_finish: bool) -> _Event:
        with cupy.cuda.Device(self._device):
            num_sms = self.max_num_sms
            assert self._launcher is not None and num_sms is not None
            current = cupy.cuda.get_current_stream()
            stream = self._comm_stream.stream if async_finish else current
            self._launcher.check()
            self._launcher.timeout_s, self._launcher.operation = self.timeout_s, call.operation
            for name, array in call.inputs.items():
                if array is not None and name != "stats" and not is_plain(array):
                    call.inputs[name] = self._copied(name, array)
            if call.operation == DISPATCH and phases & Phase.RECEIVE and self._poisons:
                for name in GIVEN:
                    runtime.memsetAsync(call.results[name].data.ptr, 0xFF, call.results[name].nbytes, current.ptr)
            # Where a rank may be late nobody meets.
            with nullcontext() if self.masks_on_timeout else self._meetings.around(self._launcher, current):
                if async_finish:
                    self._comm_stream.follow(current)
                elif call.channel in self._behind and not self._capturing():
                    current.wait_event(self._behind.pop(call.channel)[0])
                num_ctas = call.num_sms or num_sms
                self._launcher.launch(call, phases, self.masks_on_timeout, num_ctas, stream)
            event = None
            if async_finish:
                event = self._comm_stream.record()
                if not self._capturing():
                    self._behind[call.channel] = event, call  # its inputs must live
            return _Event(stream, event, self)

    def _copied(self, name: str, array: Any) -> Any:
        """What kernels can read."""
        if self._capturing():  # nothing would keep the copy's memory for the graph
            raise StateError(
                f"{name}: expected contiguous memory that starts at a multiple of 16 bytes, to be captured"
            )
        return plain(array)

    def set_mask(self, rank: int, masked: bool) -> None:
        with cupy.cuda.Device(self._device):  # on the current stream, without a kernel that might have to be loaded
            stream = cupy.cuda.get_current_stream()
            runtime.memsetAsync(self._masks.data.ptr + 4 * rank, int(masked), 1, stream.ptr)  # the lowest byte

    def masks(self) -> cupy.ndarray:
        with cupy.cuda.Device(self._device):
            masks = self._masks.copy()
            cupy.cuda.get_current_stream().synchronize()
            return masks

    def completed(self) -> None:
        """The host has waited for an operation."""
        try:
            self.check_launched()
        except PeerError as error:
            self._failed(error)
            raise
        self.check_ids()

    def check_launched(self) -> None:
        if self._launcher:
            self._launcher.check()

    def check_ids(self) -> None:
        if self._launcher:
            self._launcher.check_ids()

    def check(self) -> None:
        self.check_launched()
        if self._launcher:
            self._launcher.check_abort()

    def abort(self) -> None:
        if self._launcher:
            self._meetings.abort(self._launcher, AbortKind.RAISED, self._comm.rank)

    def close(self, *, collective: bool) -> None:
        self._launcher = None  # nobody looks at an arena's abort word when it is gone
        for arena in self._arenas:
            arena.close(collective=collective)
