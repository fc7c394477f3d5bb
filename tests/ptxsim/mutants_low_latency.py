"""Faults in the low-latency kernels, one at a time, each with the schedule that shows it, as in mutants.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cases import Case
from multirank.low_latency import Job

from ptxsim import low_latency
from ptxsim.low_latency import Run
from ptxsim.mutants import Mutant, mutant
from ptxsim.sources import PatchError

_TWO = Job(Case(num_ranks=2, hidden=32, num_topk=2, tokens=(5, 4), num_local_experts=2, dtype="bfloat16"))
_THREE = Job(replace(_TWO.case, num_ranks=3, tokens=(3, 0, 4), num_topk=3), travel=False)
RUNS = {
    "two": Run(_TWO, rounds=3),
    "halves": Run(replace(_TWO, split=True), rounds=2, slots=2, overlap=True),
    "three": Run(_THREE, rounds=2),
    "ahead": Run(replace(_TWO, travel=False, case=replace(_TWO.case, tokens=(12, 12))), rounds=2, dispatches_only=True),
    "ctas": Run(replace(_THREE, case=replace(_THREE.case, tokens=(9, 8, 9))), num_ctas=3),
    "fp8": Run(Job(replace(_TWO.case, hidden=256), fp8="plain"), num_ctas=1),
    "round": Run(Job(replace(_TWO.case, hidden=512), fp8="ue8m0"), num_ctas=1),
    "late": Run(replace(_THREE, masked=((0, 2), (1, 2))), rounds=3, late=(2, 2)),
    "absent": Run(_THREE, absent=(1, "dispatch")),
    "tardy": Run(replace(_TWO, travel=False), rounds=2, num_ctas=3, tardy=0, masks_on_timeout=True),
    "duplicates": Run(replace(_TWO, case=replace(_TWO.case, num_topk=4, routing="duplicates"))),
    "many": Run(replace(_TWO, case=replace(_TWO.case, tokens=(40, 37))), num_ctas=1),
    "ring": Run(_TWO, num_ctas=1),  # a warp has more shares than its ring has slots
    "terms": Run(replace(_TWO, case=replace(_TWO.case, hidden=16, num_topk=8, num_local_experts=4, tokens=(4, 4))),
                 num_ctas=1),  # one share behind the other, and two lanes have all of it
    "drains": Run(replace(_TWO, case=replace(_TWO.case, hidden=256, num_topk=1, tokens=(4, 4)))),  # one share a warp
    "nowhere": Run(replace(_TWO, case=replace(_TWO.case, tokens=(2, 2), routing="nowhere"))),
}
LL, IDS, FP8, RING, SYNC = (
    f"cupyep/{name}.cuh" for name in ("low_latency", "low_latency_ids", "fp8", "share_ring", "sync"))
DISPATCH, COMBINE = (f"kernels/low_latency_{verb}.cu" for verb in ("dispatch", "combine"))
_PUBLISH = "ptx::st_release_sys(arrival_word(sync, peer, sync.rank, kind), word);"
_DRAWN = "  if (threadIdx.x == 0) drawn = 0;\n"
_ROWS_CAME = "if (!await_arrivals(p.sync, p.ll, cfg::kArrivalRows"
_FROM = "  u8* from = region(p.sync, p.ll, p.sync.rank);\n"
_TAKE = "    if (under_way_ == cfg::kSlots) take(next_, use);\n    else ++under_way_;\n"
_COMMIT = "    ptx::cp_async_commit_group();\n"
_NUM_ROWS = (
    "  for (u32 rank = threadIdx.x; rank < cfg::kNumRanks; rank += blockDim.x) {\n"
    "    num_rows[rank] = reinterpret_cast<const u32*>(p.tables.num_rows)[rank];"
    "  // before the wait, which they are not for\n"
    "  }\n"
)
_RESET = "if (threadIdx.x == 0) ptx::st_relaxed_gpu(sent, 0u);"

MUTANTS = [
    # the handshake
    mutant("publish: release turned relaxed (H8)", "two", LL, _PUBLISH, _PUBLISH.replace("release", "relaxed")),
    mutant("publish: release at gpu scope", "two", LL, _PUBLISH, _PUBLISH.replace("_sys", "_gpu")),
    mutant("publish: every CTA tells (H9)", "ctas", LL, "if (!arrive_last(sent)) return;",
           "arrive_last(sent);", seed=1),
    mutant("publish: arrivals not reset", "two", LL, _RESET),
    mutant("arrivals: acquire turned relaxed (H5)", "two", LL, "seen = ptx::ld_acquire_sys(word);\n    if (masked)",
           "seen = ptx::ld_relaxed_sys(word);\n    if (masked)"),
    mutant("arrivals: not waited for", "two", LL, "if (static_cast<int>(epoch_of(seen) - epoch) >= 0) return kCame;",
           "if (sizeof(Word) == 8 || static_cast<int>(epoch_of(seen) - epoch) >= 0) return kCame;"),
    mutant("arrivals: no barrier behind the wait", "three", LL,
           "& 0xffffu : 0;\n    well &= outcome != kLeft;\n  }\n  return __syncthreads_and(well);",
           "& 0xffffu : 0;\n    well &= outcome != kLeft;\n  }\n  return well;"),
    mutant("arrivals: any epoch will do", "two", LL, "static_cast<int>(epoch_of(seen) - epoch) >= 0",
           "static_cast<int>(epoch_of(seen) - epoch) >= -1"),
    mutant("arrivals: a later word taken for this one", "late", LL, "kCame && epoch_of(seen) != epoch", "kLeft"),
    mutant("consumed: not waited for (H7)", "ahead", LL, "operation, peer, epoch - 1, seen);",
           "operation, peer, epoch - 9, seen);"),
    mutant("leave: the first CTA tells", "ahead", LL, "if (!arrive_last(sync)) return;\n  if (ll.phases",
           "if (arrive_last(sync) == (gridDim.x > 1)) return;\n  if (ll.phases", seed=54),
    mutant("leave: done word of a send half", "halves", LL, "if (ll.phases & cfg::kPhaseReceive) {", "if (true) {"),
    mutant("leave: arrivals of a send half not reset", "halves", LL,
           "    ptx::st_relaxed_gpu(&channel_state(sync)->arrived, 0u);", "", seed=37),
    mutant("arrive: no barrier before it (H9)", "three", SYNC, "have released.\n  __syncthreads();\n  if (threadIdx",
           "have released.\n  if (threadIdx"),
    mutant("settle: every CTA decides for itself", "tardy", LL,
           "const Outcome decided = settle(ll, peer, epoch, outcome);",
           "const Outcome decided = outcome;\n      if (outcome == kMissing) mask(ll, peer);", seed=4),
    mutant("settle: the last to know decides", "tardy", LL, "if (epoch_of(seen) != epoch) {", "if (true) {", seed=4),
    mutant("settle: a missing peer is not masked", "tardy", LL,
           "if (outcome == kMissing) mask(ll, peer);\n      return outcome;", "return outcome;", seed=1),
    mutant("late peers: nobody leaves", "absent", LL, "if (start == kLeave) return kLeft;"),
    # tables, of a CTA's threads, of peers and of the combine
    mutant("dispatch: begin read before it is there", "three", DISPATCH, "= num_rows[rank];\n  }\n  __syncthreads();",
           "= num_rows[rank];\n  }", seed=4),
    mutant("starts read before they are there", "three", LL, "    starts[rank] = sum;\n  }\n  __syncthreads();",
           "    starts[rank] = sum;\n  }"),
    Mutant(
        "combine: rows summed before they are there",
        "three",
        (
            (COMBINE, _NUM_ROWS, ""),
            (COMBINE, "  sum_up(num_rows, starts);\n", f"{_NUM_ROWS}  sum_up(num_rows, starts);\n"),
        ),
        seed=1,
    ),
    Mutant(
        "dispatch: counts sent behind the word that tells of them (H8)",
        "two",
        (
            (DISPATCH, "  if (blockIdx.x == 0) send_counts(p, ids, goes);\n", ""),
            (
                DISPATCH,
                "epoch, totals);\n  return true;",
                "epoch, totals);\n  if (blockIdx.x == 0) send_counts(p, ids, goes);\n  return true;",
            ),
        ),
        seed=1,
    ),
    mutant("combine: a row of torn tables sent", "tardy", COMBINE, "if (share.token >= p.ll.max_tokens) return;",
           seed=159),
    # rows
    Mutant(
        "dispatch: ids read without a barrier",
        "many",
        (
            (DISPATCH, "  read_ids(p, ids);  // before the wait, which they are not for\n", ""),
            (DISPATCH, "  leave_out(p, ids, goes, totals);", "  read_ids(p, ids);\n  leave_out(p, ids, goes, totals);"),
            (IDS, "ids.going[i] = 0;\n  }\n  __syncthreads();", "ids.going[i] = 0;\n  }"),
        ),
    ),
    mutant("dispatch: bits cleared without a barrier", "many", IDS, "ids.listing[i] = 0;  // both\n  __syncthreads();",
           "ids.listing[i] = 0;", seed=1),
    mutant("dispatch: place of a row off by one", "two", IDS, "count_bits(ids.going + rank * ids.words, token);",
           "count_bits(ids.going + rank * ids.words, token + 1);"),
    mutant("dispatch: place at the expert counts 32 tokens only", "many", IDS,
           "count_bits(ids.listing + expert * ids.words, token)",
           "count_bits(ids.listing + expert * ids.words, min(token, 32u))"),
    mutant("dispatch: an expert listed twice counts twice", "duplicates", IDS, "atomicOr(ids.listing",
           "atomicAdd(ids.listing"),
    mutant("dispatch: a warp begins where another one ends", "many", LL, "least + min(warp, more);", "least;"),
    mutant("dispatch: scales not fetched", "fp8", DISPATCH, "const u32* scales = reinterpret_cast<const u32*>(from",
           "return;\n  const u32* scales = reinterpret_cast<const u32*>(from"),
    mutant("dispatch: entries fetched for weights", "two", DISPATCH, "meta[1 + p.ll.num_topk + lane]",
           "meta[1 + lane]"),
    mutant("dispatch: rows of earlier sources not counted", "two", DISPATCH,
           "begin[source * num_local + expert] = sum;", "begin[source * num_local + expert] = 0;"),
    mutant("dispatch: meta of the first token only", "two", DISPATCH, "if (lane == 0) to[0] = token;",
           "if (lane == 0) to[0] = 0;"),
    mutant("combine: peers' weights not waited for", "three", COMBINE,
           "return await_arrivals(p.sync, p.ll, cfg::kArrivalWeights, kOperation, epoch, came);", "return true;"),
    mutant("combine: weights of another column", "two", COMBINE, "share.weight, column)", "share.weight, 0)"),
    mutant("combine: place by rank instead of token", "two", COMBINE, "max_tokens + share.token;",
           "max_tokens + share.home;"),
    mutant("combine: first rank left out", "two", COMBINE, "ours.ranks[word] & __ballot",
           "ours.ranks[word] & ~1u & __ballot"),
    # items that warps draw
    mutant("items: counter not reset before the receive half", "ring", COMBINE, f"{_DRAWN}  {_ROWS_CAME}",
           f"  {_ROWS_CAME}"),
    mutant("items: every CTA draws those of the first", "two", LL, "turn, 0) * gridDim.x + blockIdx.x",
           "turn, 0) * gridDim.x"),
    mutant("items: the first not loaded", "ring", LL, "  if (i < end) load(i, next);\n  while", "  while"),
    mutant("items: the next not loaded", "ring", LL, "    if (i < end) load(i, next);\n    use", "    use"),
    mutant("items: the next used in place of this one", "ring", LL, "    use(item);", "    use(next);"),
    # the ring of shares, and the sums that come out of it
    mutant("ring: no wait for the oldest share", "ring", RING, "ptx::cp_async_wait_group<cfg::kSlots - 1>();"),
    mutant("ring: the wait leaves a group too many", "ring", RING, "cp_async_wait_group<cfg::kSlots - 1>",
           "cp_async_wait_group<cfg::kSlots>"),
    mutant("ring: no commit", "ring", RING, "ptx::cp_async_commit_group();"),
    mutant("ring: part noted before all lanes have read the last one", "terms", RING,
           "__syncwarp();  // all lanes have read", "// all lanes have read", seed=7),
    mutant("ring: part read before it is noted", "drains", RING, "__syncwarp();  // the note is there",
           "// the note is there", seed=5),
    mutant("ring: part not noted", "ring", RING, "if (threadIdx.x % 32 == 0) slot.part = part;"),
    mutant("ring: note not written", "ring", RING, "write(slot.note);"),
    mutant("ring: no way back to the first slot", "ring", RING, "next_ + 1 == cfg::kSlots ? 0 : next_ + 1",
           "next_ + 1"),
    mutant("ring: the newest share taken", "ring", RING, "take(next_, use);",
           "take((next_ + cfg::kSlots - 1) % cfg::kSlots, use);"),
    Mutant("ring: slot refilled before its share is used", "ring", (
        (RING, _TAKE, ""), (RING, _COMMIT, f"{_COMMIT}{_TAKE}"))),
    mutant("ring: warps have the same slots", "ring", RING, " + threadIdx.x / 32 * cfg::kSlots"),
    mutant("ring: drain without a wait", "ring", RING, "ptx::cp_async_wait_group<0>();"),
    mutant("ring: drain from the first slot on", "ring", RING, "u32 i = cfg::kSlots + next_ - under_way_;",
           "u32 i = cfg::kSlots;"),
    mutant("ring: no drain before the rows are published", "ring", COMBINE, "  sums.drain();\n  publish", "  publish"),
    mutant("ring: no drain at the end", "ring", COMBINE, "  sums.drain();\n  return", "  return"),
    mutant("sums: not begun anew", "ring", COMBINE, "for (float& sum : sums_[j]) sum = 0.0f;", ";"),
    mutant("sums: weight left out", "ring", COMBINE, "batch[j], term.weight)", "batch[j], 1.0f)"),
    mutant("sums: every row of an expert taken for the last", "ring", COMBINE, "left == 0 ? sum : nullptr", "sum"),
    mutant("sums: every rank's row taken for the last", "ring", COMBINE,
           "(left | behind[word + 1]) == 0 ? sum : nullptr", "sum"),
    mutant("sums: nothing stored for a token that went nowhere", "nowhere", COMBINE,
           "if (behind[0] == 0) sums.add_none(ours.part, sum);"),
    # the cast
    mutant("fp8: amax of 64 values", "fp8", DISPATCH, "distance < 8; distance *= 2", "distance < 4; distance *= 2"),
    mutant("fp8: scale rounded down", "round", FP8, "+ 0x7fffffu)", "+ 0u)"),
    mutant("fp8: scale words in reverse", "round", DISPATCH, "(word >> 23) << lane / 8 * 8;",
           "(word >> 23) << (3 - lane / 8) * 8;"),
]

# Faults that no schedule of this model has shown, and why.
SURVIVORS = [
    # Up to 32 ranks the lanes that tell are of the warp of the one that resets, and none gets that far ahead of it.
    mutant("publish: no barrier behind the reset", "ctas", LL, "ptx::st_relaxed_gpu(sent, 0u);\n  __syncthreads();",
           "ptx::st_relaxed_gpu(sent, 0u);"),
    # Need a CTA between its last look at the word and its look at the fate while another one decides: not met in 40
    # schedules. What CTAs decide one after the other is in MUTANTS.
    mutant("settle: who comes second keeps its own", "tardy", LL, "    if (before == seen) {", "    if (true) {"),
    mutant("settle: the word is not read again", "tardy", LL,
           "if (decided == kCame && outcome == kMissing) seen = ptx::ld_acquire_sys(word);"),
    # Who reads an old fate tries to decide, and the compare-and-swap gives it the new one.
    mutant("settle: the fate read plainly", "tardy", LL, "ptx::ld_acquire_gpu(fate)", "*fate"),
    # One warp stores a row's token, positions and weights, and a row without a token is not sent.
    mutant("combine: a torn row's positions used", "tardy", COMBINE, "share.position < num_positions",
           "share.position != kNone"),
    # What is drawn twice is done twice, with the same results: this costs time only. That CTAs leave nothing out is in
    # MUTANTS. And a warp that draws before the counter is reset draws what will be drawn again, or nothing.
    mutant("items: every CTA draws all but the first ones", "drains", LL, "turn, 0) * gridDim.x + blockIdx.x",
           "turn, 0) + blockIdx.x"),
    Mutant("items: counter reset without a barrier behind it", "ring", (
        (COMBINE, f"{_DRAWN}  {_ROWS_CAME}", f"  {_ROWS_CAME}"), (COMBINE, _FROM, f"{_DRAWN}{_FROM}"))),
    # A row only comes where it has experts; where tables are in pieces, what a masked rank gets of them is undefined.
    mutant("sums: nothing stored for a row without experts", "tardy", COMBINE,
           "if (left == 0) sums.add_none(share.part, sum);"),
    # Ranks above 31 have a word of their own, and no job here has so many.
    mutant("sums: ranks of later words not looked for", "ring", COMBINE, "(left | behind[word + 1]) == 0",
           "left == 0"),
    # The word that counts rows is published behind them, and while shapes stay the same nobody else writes there: only
    # a masked rank that still sends when its peers have gone on to another shape could.
    mutant("dispatch: an expert of a region in pieces believed", "tardy", DISPATCH, " && expert < num_local"),
    mutant("dispatch: a place of a region in pieces believed", "tardy", DISPATCH, "if (place < expert_rows) position",
           "position"),
    # What a masked rank gets is undefined, so nobody looks; what it sends lands where its peers do not look either.
    mutant("publish: a masked rank is told of rows", "late", LL, "masked ? 0 : counts", "counts"),
    mutant("dispatch: rows to a masked rank", "late", IDS, "if (!goes[i / ids.words]) ids.going[i] = 0;"),
    mutant("consumed: rows for a peer that has gone on", "late", LL, "kCame && seen == epoch - 1;", "kCame;"),
]


def symptom(what: Mutant, seed: int, trace: Callable[[str], None] | None = None) -> str | None:
    """What goes wrong under this schedule, or None. Raises PatchError where the fault is none."""
    try:
        low_latency.run(replace(RUNS[what.job], patch=what.patch), seed, trace)
    except PatchError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None

