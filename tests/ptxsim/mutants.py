"""Faults put into the CUDA sources one at a time, each with the schedule that shows it.

`python -m tests.ptxsim --search 200` looks for the seeds anew. SURVIVORS are faults that this model cannot show.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from cases import Case

from ptxsim import failures, harness
from ptxsim.harness import Job
from ptxsim.sources import Patch, PatchError

_TWO = Case(num_ranks=2, hidden=64, num_topk=2, tokens=(9, 7), num_local_experts=2, dtype="bfloat16")
_THREE = Case(num_ranks=3, hidden=32, num_topk=3, tokens=(4, 0, 7), num_local_experts=2, dtype="float32",
              routing="some -1")
JOBS = {
    "ring": Job(_TWO, num_ctas=1),  # every warp goes round its ring
    "push": Job(_TWO, num_ctas=1, kernels=("count", "push")),
    "ctas": Job(_TWO, num_ctas=3),
    "three": Job(_THREE, rounds=2),
    "experts": Job(replace(_TWO, num_local_experts=40)),  # more than a warp writes
    "rows": Job(replace(_TWO, tokens=(15, 14)), num_ctas=1, kernels=("count", "push"), rows_only=True),
    "sparse": Job(replace(_TWO, num_topk=1, routing="some -1"), num_ctas=1),  # units without rows
    "counts": Job(_THREE, rounds=2, kernels=("count", "push")),
    "vector": Job(_TWO, mover="vector", num_ctas=2),
    "vector3": Job(_THREE, mover="vector", rounds=2),
    "scales": Job(_TWO, num_ctas=1, kernels=("count", "push"), scale_bytes=40 * 16),  # more than a warp's vectors
    "side warps": Job(replace(_TWO, hidden=8, tokens=(21, 3), num_topk=32, num_local_experts=16), num_ctas=1,
                      own_plan=True, kernels=("count", "push")),  # which has two of them
    "scales only": Job(_TWO, num_ctas=1, kernels=("count", "push"), scale_bytes=12, rows_only=True),
    "bias": Job(_THREE, num_bias=2),
    "short": Job(replace(_TWO, hidden=1096, dtype="float16", tokens=(3, 2)), num_ctas=1, chunks=2, consumers=2),
    "many": Job(replace(_TWO, hidden=8, tokens=(1100, 30)), kernels=("count",)),  # more than COUNT has threads
    "listings": Job(replace(_TWO, hidden=8, num_local_experts=40), kernels=("count",)),  # cleared by three warps
    "wide": Job(replace(_TWO, hidden=8, tokens=(70, 33), num_topk=11, num_local_experts=8), kernels=("count",)),
    "count": Job(replace(_THREE, hidden=8), kernels=("count",), rounds=3),  # nothing else keeps ranks together
    "absent": Job(_THREE, absent=(1, "push")),
    "stalled": Job(_TWO, stalled=(1, "push")),
    "revoked": Job(Case(num_ranks=3, num_topk=1, tokens=1, num_local_experts=1), num_ctas=1, stalled=(1, "push"),
                   kernels=("count", "push")),  # so small that who gave up and who comes meet in the middle
}
MOVER, SIDE, GATHER, SYNC, LD_ST = (
    f"cupyep/{name}.cuh" for name in ("mover", "side_rows", "gather", "sync", "ptx/ld_st"))
PUSH, PULL, COUNT = (f"kernels/{name}.cu" for name in ("push", "pull", "count"))


@dataclass(frozen=True)
class Mutant:
    name: str
    job: str
    patch: Patch
    seed: int = 0


def mutant(name: str, job: str, file: str, old: str, new: str = "", seed: int = 0) -> Mutant:
    return Mutant(name, job, ((file, old, new),), seed)


def check_seen(symptom: Callable[[Mutant, int], str | None], mutant: Mutant, num_seeds: int) -> None:
    """Under the seed that the table names; a kernel that was edited, or another NVRTC, may need another one.

    The job itself must be well under that seed, or the symptom would not be the fault's.
    """
    def shows(seed: int) -> bool:
        return bool(symptom(mutant, seed)) and _is_sound(symptom, mutant.job, seed)

    if shows(mutant.seed):
        return
    seed = next(filter(shows, range(num_seeds)), None)
    assert seed is not None, f"not seen under any of {num_seeds} schedules"
    warnings.warn(f"{mutant.name}: now seen under seed {seed}, no longer under {mutant.seed}", stacklevel=2)


@functools.cache
def _is_sound(symptom: Callable[[Mutant, int], str | None], job: str, seed: int) -> bool:
    return symptom(Mutant("no fault", job, ()), seed) is None


def symptom(mutant: Mutant, seed: int, trace: Callable[[str], None] | None = None) -> str | None:
    """What goes wrong under this schedule, or None. Raises PatchError where the fault is none."""
    try:
        group = harness.Group(replace(JOBS[mutant.job], patch=mutant.patch), seed, trace)
        group.run()
        failures.check_failures(group)
    except PatchError:
        raise
    except Exception as error:  # poison may end in any exception of the host's code
        return f"{type(error).__name__}: {error}"
    return None


_FLIP = "if (++stage_ == cfg::kStages) stage_ = 0, phase_ ^= 1;"
_SLOT_FLIP = "if (++slot == cfg::kSlots) slot = 0, phase ^= 1;"
_TELL = "ptx::st_release_sys(done_word(sync, peer, sync.rank), epoch);"
MUTANTS = [
    # Scales and bias
    mutant("push: scales of a warp's first vectors only", "scales", SIDE,
           "for (u32 vec = lane % kWidth; vec < kScaleVecs; vec += kWidth) {",
           "for (u32 vec = lane % kWidth; vec < kWidth; vec += kWidth) {"),
    mutant("push: scales without ids are left out", "scales only", PUSH, "    push_scales(p, to);",
           "    if (p.topk_idx != 0) push_scales(p, to);"),
    mutant("push: scales of the token before", "scales", SIDE, "from[static_cast<u64>(token) * kScaleVecs + vec]",
           "from[static_cast<u64>(token ? token - 1 : 0) * kScaleVecs + vec]"),
    mutant("push: side warps walk the same tokens", "side warps", SIDE,
           "(threadIdx.x / 32 - cfg::kWarps) * gridDim.x + blockIdx.x, size", "blockIdx.x, size"),
    mutant("pull: one addend only", "bias", GATHER, "for (u32 i = 0; i < 2; ++i) {", "for (u32 i = 0; i < 1; ++i) {"),
    mutant("pull: bias of the first row", "bias", GATHER, "add_bias<16>(p, place + at * 16, sums[j])",
           "add_bias<16>(p, at * 16, sums[j])"),
    # PUSH through the ring
    mutant("push: no wait for the load (H1)", "push", PUSH, "mover.wait(i);"),
    mutant("push: no expect_tx", "push", MOVER, "ptx::mbarrier_arrive_expect_tx(full_ + stage, unit.bytes);",
           "ptx::mbarrier_arrive(full_ + stage);"),
    mutant("push: expects 16 bytes too few", "push", MOVER, "(full_ + stage, unit.bytes);",
           "(full_ + stage, unit.bytes - 16);"),
    mutant("push: expects 16 bytes too many", "push", MOVER, "(full_ + stage, unit.bytes);",
           "(full_ + stage, unit.bytes + 16);"),
    mutant("push: no phase flip", "push", MOVER, f"{_FLIP}\n    waited_",
           "if (++stage_ == cfg::kStages) stage_ = 0;\n    waited_"),
    mutant("push: drain waits with .read (H4)", "push", MOVER, "ptx::cp_async_bulk_wait_group<0>();",
           "ptx::cp_async_bulk_wait_group_read<0>();"),
    mutant("push: no drain", "push", PUSH, "mover.drain();"),
    mutant("push: drain leaves one group", "push", MOVER, "ptx::cp_async_bulk_wait_group<0>();",
           "ptx::cp_async_bulk_wait_group<1>();", seed=1),
    mutant("push: no commit", "push", MOVER, "ptx::cp_async_bulk_commit_group();"),
    mutant("push: slot refilled unread", "push", MOVER, "ptx::cp_async_bulk_wait_group_read<1>();"),
    mutant("push: slot refilled a group early", "push", MOVER, "ptx::cp_async_bulk_wait_group_read<1>();",
           "ptx::cp_async_bulk_wait_group_read<2>();"),
    mutant("push: lane 0 refills before the other lanes' stores have read", "rows", MOVER,
           "ptx::cp_async_bulk_wait_group_read<1>();\n      __syncwarp();",
           "ptx::cp_async_bulk_wait_group_read<1>();", seed=85),
    mutant("push: no fence after mbarrier.init (H6)", "push", MOVER, "ptx::fence_mbarrier_init_release_cluster();"),
    mutant("push: drain without the loads under way", "stalled", MOVER, "for (; waited_ < issued_; ++waited_) {",
           "for (; false;) {", seed=1),
    mutant("push: row off by one", "push", PUSH, "places.order[word] + static_cast<int>(to.base[rank])",
           "places.order[word] + static_cast<int>(to.base[rank]) + 1"),
    mutant("push: base of the rank left out", "three", PUSH, "places.order[word] + static_cast<int>(to.base[rank])",
           "places.order[word]"),
    mutant("push: destinations read before the barrier", "push", PUSH, "__syncthreads();\n\n  bool leave",
           "bool leave", seed=4),
    mutant("push: weights of experts elsewhere travel", "push", SIDE, "here ? weights[j] : 0.0f", "weights[j]"),
    # PULL through the rings
    mutant("pull: no wait for the load (H1)", "ring", GATHER, "wait(full + slot * 8, phase);"),
    mutant("pull: no expect_tx", "ring", GATHER, "ptx::mbarrier_arrive_expect_tx(full_ + slot, num_rows * bytes);",
           "ptx::mbarrier_arrive(full_ + slot);"),
    mutant("pull: expects the bytes of one row", "ring", GATHER, "(full_ + slot, num_rows * bytes);",
           "(full_ + slot, bytes);"),
    mutant("pull: no wait for the empty slot", "ring", GATHER,
           "wait_empty(empty + slot * 8, phase);"),
    mutant("pull: loader starts with phase 0", "ring", GATHER, "u32 slot = 0, phase = 1;", "u32 slot = 0, phase = 0;"),
    mutant("pull: consumers do not flip their phase", "ring", GATHER, f"{_SLOT_FLIP}\n      }}\n      u8* out",
           "if (++slot == cfg::kSlots) slot = 0;\n      }\n      u8* out"),
    mutant("pull: slot never given back", "ring", GATHER,
           "if (lane == 0) ptx::mbarrier_arrive(full + (cfg::kSlots + slot) * 8);"),
    mutant("pull: no proxy fence before the slot is given back (H3)", "ring", GATHER,
           "ptx::fence_proxy_async_shared_cta();"),
    mutant("pull: slot given back before all lanes have read", "ring", GATHER,
           "ptx::fence_proxy_async_shared_cta();\n            __syncwarp();",
           "ptx::fence_proxy_async_shared_cta();", seed=12),
    mutant("pull: no fence after mbarrier.init (H6)", "ring", GATHER, "ptx::fence_mbarrier_init_release_cluster();"),
    mutant("pull: no kind", "sparse", GATHER,
           "kind_[slot] = num_left == 0 ? num_rows | kLast : num_rows;", ""),
    mutant("pull: slot given back before its last row is read", "ring", GATHER, "if (++row >= num_rows) {",
           "if (++row == 1) {"),
    mutant("pull: a slot's rows in one place", "ring", GATHER, " + place * cfg::kSlotBytes,", ","),
    mutant("pull: sources read before the barrier", "three", PULL, "  }\n  __syncthreads();\n\n  if (verdict",
           "  }\n\n  if (verdict", seed=4),
    mutant("pull: the last chunk as long as the others", "short", GATHER,
           "return left < cfg::kChunkBytes ? left : cfg::kChunkBytes;", "return cfg::kChunkBytes;"),
    mutant("pull: the second warp adds what the first one adds", "short", GATHER, "thread = warp_ * 32 + lane;",
           "thread = lane;"),
    mutant("pull: slot empty when one warp of two has read it", "short", GATHER,
           "full_ + cfg::kSlots + slot, cfg::kConsumerWarps);", "full_ + cfg::kSlots + slot, 1);"),
    mutant("pull: row off by one", "ring", GATHER, "static_cast<u64>(order[word]) * cfg::kRowBytes",
           "static_cast<u64>(order[word] + 1) * cfg::kRowBytes"),
    mutant("pull: says done before it has read (no done word)", "ctas", PULL,
           "verdict == cfg::kVerdictDone && !exchange_done", "false && !exchange_done"),
    mutant("pull: a CTA leaves without arriving", "ctas", PULL, "if (!arrive_last(p.sync)) return;",
           "if (blockIdx.x == 0 || !arrive_last(p.sync)) return;", seed=2),
    # the handshake
    mutant("post: release turned relaxed (H8)", "three", SYNC, "ptx::st_release_sys(slot + kPostEpochWord, epoch);",
           "ptx::st_relaxed_sys(slot + kPostEpochWord, epoch);"),
    mutant("post: release at gpu scope", "three", SYNC, "ptx::st_release_sys(slot + kPostEpochWord, epoch);",
           "ptx::st_release_gpu(slot + kPostEpochWord, epoch);"),
    mutant("post: no barrier before it (H8)", "experts", SYNC,
           "u32 epoch) {\n  __syncthreads();\n  const u32* words", "u32 epoch) {\n  const u32* words"),
    mutant("wait_posts: acquire turned relaxed (H5)", "three", SYNC, "ptx::ld_acquire_sys(word)",
           "ptx::ld_relaxed_sys(word)"),
    mutant("wait_posts: does not wait", "three", SYNC,
           "arrived &= wait_word(sync, &posts[peer].epoch, epoch, operation, peer);", "arrived &= true;"),
    mutant("wait_posts: no proxy fence (H5)", "three", SYNC, "ptx::fence_proxy_async();"),
    mutant("wait_posts: no barrier after it", "three", SYNC, "if (!__syncthreads_and(arrived))", "if (!arrived)"),
    mutant("arrive_last: no barrier before it (H9)", "ctas", SYNC,
           "have released.\n  __syncthreads();\n  if (threadIdx", "have released.\n  if (threadIdx"),
    mutant("arrive_last: atomic turned relaxed (H9)", "ctas", LD_ST, "atom.acq_rel.gpu.global.add.u32 %0",
           "atom.relaxed.gpu.global.add.u32 %0"),
    mutant("arrive_last: the first CTA tells", "ctas", SYNC, "== gridDim.x - 1", "== 0"),
    mutant("done: release turned relaxed (H4)", "ctas", SYNC, _TELL,
           _TELL.replace("release", "relaxed")),
    mutant("done: release at gpu scope", "vector", SYNC, _TELL,
           _TELL.replace("sys(", "gpu(")),
    mutant("done: not told", "ctas", SYNC, _TELL),
    mutant("done: not waited for", "ctas", SYNC,
           "complete &= wait_word(sync, done_word(sync, sync.rank, peer), epoch, operation, peer);"),
    mutant("end: epoch does not advance", "three", SYNC, "ptx::st_relaxed_gpu(turn(sync), static_cast<u64>(epoch));"),
    mutant("end: arrivals are not reset", "three", SYNC, "ptx::st_relaxed_gpu(&channel_state(sync)->arrived, 0u);"),
    mutant("posts: one slot instead of two", "three", SYNC, "+ (epoch & 1) * cfg::kNumRanks + sender;", "+ sender;"),
    # leaving
    mutant("deadline never checked", "absent", SYNC, "sync.timeout_ns == 0 || now - start < sync.timeout_ns",
           "now >= start"),
    mutant("abort told to rank 0 only", "absent", SYNC,
           "for (u32 rank = 0; rank < cfg::kNumRanks; ++rank) ptx::st_release_sys(abort_word(sync, rank), verdict);"),
    mutant("abort names the wrong peer", "absent", SYNC, "static_cast<u64>(peer) << 32",
           "static_cast<u64>(sync.rank) << 32"),
    mutant("abort: every rank keeps its own record", "absent", SYNC, "first == 0 ? record : first", "record", seed=3),
    mutant("done: told by a rank that has left", "stalled", SYNC, "if (__syncthreads_or(aborted(sync))) return false;",
           seed=105),
    # COUNT and the vector mover
    mutant("count: places start anew every 32 tokens", "many", COUNT,
           "if (lane == bit + i) places[word] += __popc(ballot);"),
    mutant("count: rows of the last 32 tokens only", "many", COUNT, "if (lane == bit) places[word] += __popc(ballot);",
           "if (lane == bit) places[word] = __popc(ballot);"),
    Mutant("count: one table of counts instead of two", "count", (
        (COUNT, "((epoch & 1) * cfg::kNumRanks + p.sync.rank) * cfg::kCountsWords", "p.sync.rank * cfg::kCountsWords"),
        (COUNT, "(epoch & 1) * cfg::kNumRanks * cfg::kCountsWords;", "0;")), seed=3),
    Mutant("count: posted before the counts are there (H8)", "count", (
        (COUNT, "  post(p.sync, p.post, epoch);\n\n  // Second", "  // Second"),
        (COUNT, "  // Counts to every peer", "  post(p.sync, p.post, epoch);\n  // Counts to every peer"))),
    mutant("count: histogram cleared without a barrier", "listings", COUNT,
           "if (threadIdx.x == 0) bad_at = ~0ull;\n  __syncthreads();",
           "if (threadIdx.x == 0) bad_at = ~0ull;", seed=6),
    mutant("count: scan without a barrier before it", "counts", COUNT,
           "= places[word];\n  }\n  __syncthreads();", "= places[word];\n  }", seed=4),
    mutant("count: counts published before the scan is done", "counts", COUNT,
           "totals[rank] = sum;\n  }\n  __syncthreads();", "totals[rank] = sum;\n  }", seed=4),
    mutant("count: a scan that adds the lanes below anew", "counts", COUNT, "if (lane >= distance) sum", "sum"),
    mutant("count: ranks read before all lanes have written them", "many", COUNT,
           "  __syncwarp();\n  RankMask mask = {};", "  RankMask mask = {};", seed=17),
    mutant("count: ids past a warp's share", "counts", COUNT, "is_there = i < count", "is_there = true"),
    mutant("count: a warp takes 32 tokens though they have too many ids", "wide", COUNT,
           "min(32u, 32 * kLoads / p.post.num_topk)", "32u"),
    mutant("vector push: done relaxed (H8)", "vector", SYNC, _TELL,
           _TELL.replace("release", "relaxed")),
    mutant("vector push: CTAs arrive relaxed (H9)", "vector", LD_ST, "atom.acq_rel.gpu.global.add.u32 %0",
           "atom.relaxed.gpu.global.add.u32 %0"),
    mutant("vector pull: done not waited for", "vector3", PULL, "verdict == cfg::kVerdictDone && !exchange_done",
           "false && !exchange_done"),
]

# Faults that no schedule of this model shows, and why.
SURVIVORS = [
    # Revoking and leaving early spare work and time; the records agree without them, and no block is used again.
    mutant("push: goes on after an abort", "stalled", PUSH, "stop = aborted(p.sync);", "stop = false;"),
    # Every rank then waits for its own deadline, and finds the first one's record: the same end, later.
    mutant("abort word not looked at", "absent", SYNC, "if (aborted(sync)) return kLeave;"),
    # The ballots in between use what was read, but a ballot orders no memory: the barriers are for the memory model.
    mutant("count: ranks overwritten before all lanes have read them", "many", COUNT,
           "  __syncwarp();  // all lanes have read the ranks of the tokens before\n"),
    mutant("count: ranks overwritten by the sums of a warp", "counts", COUNT,
           "  __syncwarp();  // all lanes have read the last ranks\n"),
    # A bulk store is written after it was issued, so an early one (H7) would need a past that the model does not keep.
    mutant("push: no proxy fence before stores to a peer (H7)", "push", SYNC, "ptx::fence_proxy_async();"),
    # A revoked post only hastens the end: who takes it for a ready one moves rows into blocks that are not used again,
    # waits for a done word that does not come, and meets the record there. And the record is there before the last CTA
    # reads it for the host, which is long after the post was seen: in 3 of 60 schedules a rank meets the post first.
    mutant("revoked: taken for ready", "revoked", SYNC, "if (status == cfg::kStatusRevoked) {", "if (false) {"),
    mutant("revoked: the record is not awaited", "revoked", SYNC,
           "while (!aborted(sync) && !patience.exhausted(sync, operation, peer, epoch)) {", "while (false) {", seed=30),
    mutant("abort: nothing revoked", "revoked", SYNC,
           "->status, static_cast<u32>(cfg::kStatusRevoked));", "->status, static_cast<u32>(cfg::kStatusReady));"),
    # The words of a revoked post and its record are looked at with strong loads, one at a time.
    mutant("abort: no fence between revoking and the record", "absent", SYNC,
           "  ptx::fence_acq_rel_sys();\n  const u64 first", "  const u64 first"),
    # The end of a kernel publishes what the host reads; the fence matters to a host that looks before.
    mutant("end: no fence behind the host record", "absent", SYNC, "      ptx::fence_acq_rel_sys();\n    }"  , "    }"),
    # Needs a lane that lags in its wait while the others hand out the slot and all consumers give it back: seen once in
    # 128 schedules of a job with duplicates, and never in these.
    mutant("pull: lanes of the loader leave the empty wait apart", "ring", GATHER,
           "    wait(barrier, phase);\n    __syncwarp();", "    wait(barrier, phase);"),
]
