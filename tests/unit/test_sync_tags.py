"""The comments of cuda_src that name memory handovers (docs/memory-model.md): no tag is unknown, none is missing, and
no side of a handover stands alone.

A handover between two sites has a name. Each site says which side it is, at which scope, and by which rule:

    // sync(post) RELEASE.sys: what is handed over (H8). Read by: wait_posts.
    // sync(post) ACQUIRE.sys: pairs with RELEASE in post (H5).

The instruction follows within a few lines. One atomic may be both sides: ACQ_REL.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CUDA_SRC = Path(__file__).resolve().parents[2] / "cuda_src"
TAGS = {f"H{number}" for number in range(1, 10)}
SITE = re.compile(r"sync\(([a-z_.]+)\) (?:(RELEASE|ACQUIRE|ACQ_REL)\.(cta|cluster|gpu|sys): )?(.*)")
NEAR = 4  # lines of code after the comment, within which the instruction stands
INSTRUCTIONS = {  # what a side looks like; a copy's last act, at cluster scope, is to complete its mbarrier's bytes
    ("RELEASE", "sys"): "st_release_sys(",
    ("ACQUIRE", "sys"): "wait_word(",
    ("ACQ_REL", "gpu"): "atom_acq_rel_gpu_add(",
    ("RELEASE", "cluster"): "cp_async_bulk_g2s(",
    ("RELEASE", "cta"): "mbarrier_arrive(",
    ("ACQUIRE", "cta"): "wait",  # TmaGather::wait, or mbarrier_try_wait_parity itself
}


def comments(source: str) -> list[tuple[str, list[str]]]:
    """Every comment with the NEAR lines of code that follow it; lines that are nothing but comment form one comment."""
    lines, found, block = source.splitlines(), [], ""
    for number, line in enumerate(lines):
        code, slashes, text = line.partition("//")
        if slashes and not code.strip():
            block += f"{text.strip()} "
            continue
        if block:
            following = [later for later in lines[number:] if not later.lstrip().startswith("//")]
            found.append((block, following[:NEAR]))
            block = ""
        if slashes:
            found.append((text, [code]))
    return [*found, (block, [])]


def problems(sources: dict[str, str]) -> list[str]:
    """What is wrong with the handover comments of `sources`, texts by file name."""
    found: list[str] = []
    named: set[str] = set()
    sides: dict[str, set[str]] = {}  # of every handover
    for file, source in sources.items():
        for comment, code in comments(source):
            tags = set(re.findall(r"\bH\d\d?\b", comment))
            named |= tags
            found += [f"{file}: {tag}: unknown" for tag in sorted(tags - TAGS)]
            for name, side, scope, text in SITE.findall(comment):
                if not side:
                    found.append(f"{file}: sync({name}): expected a side and a scope, as in RELEASE.sys:")
                    continue
                sides.setdefault(name, set()).update({"RELEASE", "ACQUIRE"} if side == "ACQ_REL" else {side})
                if not re.search(r"\bH\d\b", text):
                    found.append(f"{file}: sync({name}) {side}: names no rule")
                if INSTRUCTIONS.get((side, scope), "no such") not in "\n".join(code):
                    found.append(f"{file}: sync({name}) {side}.{scope}: the instruction does not follow")
    found += [f"sync({name}): only {side}" for name, (side, *other) in sides.items() if not other]
    return found + [f"{tag}: nowhere named" for tag in sorted(TAGS - named)]


def test_every_handover_is_named_on_both_sides() -> None:
    sources = {path.relative_to(CUDA_SRC).as_posix(): path.read_text() for path in sorted(CUDA_SRC.rglob("*.cu*"))}
    assert {"cupyep/sync.cuh", "kernels/push.cu"} < set(sources)
    assert problems(sources) == []


GOOD = """// All rules: H1, H2, H3, H4, H5, H6, H7, H8, H9. Tested on an H200.
// sync(post) RELEASE.sys: the words above (H8).
st_release_sys(slot, epoch);
// Waits. sync(post) ACQUIRE.sys: pairs with RELEASE in post
// (H5, H7).
for (;;) {
  wait_word(word);
}
// sync(arrive) ACQ_REL.gpu: by one thread (H9).
__syncthreads();
last = atom_acq_rel_gpu_add(arrived, 1);
"""


def test_good_comments_pass() -> None:
    assert problems({"good.cuh": GOOD}) == []


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [
        ("(H9)", "(H10)", "bad.cuh: H10: unknown"),
        ("H5, H6", "H5", "H6: nowhere named"),
        ("RELEASE.sys: the", "the", "bad.cuh: sync(post): expected a side and a scope, as in RELEASE.sys:"),
        ("(post) ACQUIRE", "(done) ACQUIRE", "sync(done): only ACQUIRE"),
        ("ACQ_REL.gpu", "ACQUIRE.gpu", "sync(arrive): only ACQUIRE"),
        ("above (H8)", "above", "bad.cuh: sync(post) RELEASE: names no rule"),
        ("st_release_sys", "st_relaxed_sys", "bad.cuh: sync(post) RELEASE.sys: the instruction does not follow"),
        ("RELEASE.sys", "RELEASE.gpu", "bad.cuh: sync(post) RELEASE.gpu: the instruction does not follow"),
        ("for (;;) {", "a;\nb;\nc;\nd;", "bad.cuh: sync(post) ACQUIRE.sys: the instruction does not follow"),
    ],
)
def test_bad_comments_are_seen(good: str, bad: str, expected: str) -> None:
    assert GOOD.count(good) == 1
    assert expected in problems({"bad.cuh": GOOD.replace(good, bad)})
