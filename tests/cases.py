"""The table of dispatch and combine cases: every pair of values of two axes occurs in at least one case.

A Case makes its own data from its seed, for every rank, so ranks need not exchange any to know what to expect.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import asdict, dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.dtype("f4"), "float16": np.dtype("f2"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

AXES: dict[str, tuple[Any, ...]] = {
    "num_ranks": (1, 2, 3, 4, 5, 7, 8),
    "hidden": (7, 8, 100, 128, 2048, 2880, 7168),  # rows of 7, and of 100 in 16 bits, are no multiple of 16 bytes
    "num_topk": (1, 2, 8, 32),
    "tokens": ("none", "none on one rank", 1, 127, "uneven", 4096),
    "routing": ("random", "nowhere", "one rank", "some -1", "duplicates"),
    "num_local_experts": (1, 4, 32),
    "dtype": tuple(DTYPES),
    "idx_dtype": ("int32", "int64"),
    "weights": (True, False),
    "memory": ("contiguous", "fortran", "strided", "reversed", "offset", "read-only"),  # of all inputs
    "expert_output": ("new array", "arena array", "transposed arena array", "odd arena array", "recv_x"),  # combine's x
    "copy": (False, True),
    "capacity": ("given", "grown"),  # max_tokens_per_rank
}


@dataclass(frozen=True)
class Case:
    """One job, the same on all ranks: see AXES; `tokens` may also be a tuple, one number per rank."""

    num_ranks: int = 2
    hidden: int = 8
    num_topk: int = 2
    tokens: int | str | tuple[int, ...] = 5
    routing: str = "random"
    num_local_experts: int = 4
    dtype: str = "float32"
    idx_dtype: str = "int64"
    weights: bool = True
    memory: str = "contiguous"
    expert_output: str = "new array"
    copy: bool = False
    capacity: str = "given"
    seed: int = 0

    def __str__(self) -> str:
        parts = (
            f"R{self.num_ranks}",
            f"H{self.hidden}",
            f"K{self.num_topk}",
            f"T:{self.tokens}",
            self.routing,
            f"E{self.num_local_experts}",
            self.dtype,
            self.memory,
            f"seed{self.seed}",
        )
        return "-".join(parts).replace(" ", "_")

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.num_local_experts

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of every rank."""
        if isinstance(self.tokens, tuple):
            return list(self.tokens)
        if isinstance(self.tokens, int):
            return [self.tokens] * self.num_ranks
        rng = random.Random(self.seed)
        if self.tokens == "none on one rank":
            empty = rng.randrange(self.num_ranks)
            return [0 if rank == empty else 33 for rank in range(self.num_ranks)]
        return [rng.randint(0, 200) if self.tokens == "uneven" else 0 for _ in range(self.num_ranks)]

    def inputs(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """x, topk_idx and topk_weights (None when the case has none) of `rank`: contiguous, not to be written."""
        return _inputs(self, rank)

    def outputs(self, rank: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """What the experts of `rank` answer to `count` received tokens: x [count, H] and weights [count, K] or None."""
        return _outputs(self, rank, count)


@functools.lru_cache(maxsize=32)
def _inputs(case: Case, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    rng = np.random.default_rng((case.seed, rank))
    count = case.num_tokens[rank]
    x = values(rng, (count, case.hidden), DTYPES[case.dtype])
    weights = values(rng, (count, case.num_topk), DTYPES["float32"]) if case.weights else None
    return frozen(x), frozen(ids(case, rng, count)), frozen(weights)


@functools.lru_cache(maxsize=32)
def _outputs(case: Case, rank: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
    rng = np.random.default_rng((case.seed, rank, 1))
    weights = values(rng, (count, case.num_topk), DTYPES["float32"]) if case.weights else None
    return frozen(values(rng, (count, case.hidden), DTYPES[case.dtype])), frozen(weights)


def frozen(array: np.ndarray | None) -> np.ndarray | None:
    if array is not None:
        array.flags.writeable = False
    return array


def ids(case: Case, rng: np.random.Generator, count: int) -> np.ndarray:
    """The expert ids of `count` tokens, routed as the case says."""
    shape = (count, case.num_topk)
    if case.routing == "nowhere":
        chosen = np.full(shape, -1)
    elif case.routing == "duplicates":  # of three experts, so that even a short list repeats one
        chosen = rng.choice(rng.choice(case.num_experts, 3), shape)
    elif case.routing == "one rank":
        chosen = np.full(shape, -1)
        target = random.Random(case.seed).randrange(case.num_ranks)
        local = rng.random((count, case.num_local_experts)).argsort(axis=1)[:, : case.num_topk]
        chosen[:, : local.shape[1]] = local + target * case.num_local_experts
    else:
        chosen = rng.random((count, case.num_experts)).argsort(axis=1)[:, : case.num_topk]
        if case.routing == "some -1":
            chosen = np.where(rng.random(shape) < 0.4, -1, chosen)
    return chosen.astype(case.idx_dtype)


def values(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Normal numbers, and in a third of the places: any finite bit pattern, denormals, or the special values below."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    infinity = int(np.array(np.inf, dtype).view(unsigned))
    least_normal = int(np.array(ml_dtypes.finfo(dtype).smallest_normal, dtype).view(unsigned))
    specials = np.array([0, 1, least_normal - 1, least_normal, infinity - 1, infinity], unsigned)
    bits = rng.standard_normal(shape, np.float32).astype(dtype).view(unsigned).ravel()
    odd = np.flatnonzero(rng.random(bits.size, np.float32) < 1 / 3)
    bits[odd[0::3]] = rng.integers(0, infinity, odd[0::3].size, unsigned)
    bits[odd[1::3]] = rng.integers(0, least_normal, odd[1::3].size, unsigned)
    bits[odd[2::3]] = rng.choice(specials, odd[2::3].size, p=[0.4, 0.1, 0.1, 0.1, 0.2, 0.1])
    bits[odd] |= rng.integers(0, 2, odd.size, unsigned) << (8 * dtype.itemsize - 1)  # signs
    return bits.view(dtype).reshape(shape)


LIMITED = ("num_ranks", "hidden", "num_topk", "tokens", "num_local_experts")  # axes that exclude each other's values


def is_possible(row: dict[str, Any]) -> bool:
    """Whether a case with these values, and some values on the other axes, exists and runs in seconds."""
    return _is_possible(tuple(row.get(name) for name in LIMITED))


@functools.cache
def _is_possible(chosen: tuple[Any, ...]) -> bool:
    if None in chosen:
        at = chosen.index(None)
        return any(_is_possible((*chosen[:at], value, *chosen[at + 1 :])) for value in AXES[LIMITED[at]])
    num_ranks, hidden, num_topk, tokens, num_local_experts = chosen
    if num_topk > num_ranks * num_local_experts:
        return False
    return tokens != 4096 or (num_ranks <= 4 and hidden <= 128 and num_topk <= 8)


def pairwise(axes: dict[str, tuple[Any, ...]], seed: int = 1) -> list[dict[str, Any]]:
    """Rows that together hold every possible pair of values: each starts from an open pair, the rest is greedy."""
    rng = random.Random(seed)

    def pairs(row: dict[str, Any]) -> set[tuple]:
        return set(itertools.combinations([(name, row[name]) for name in axes if name in row], 2))

    options = [[(name, value) for value in axes[name]] for name in axes]
    open_pairs = {
        pair
        for one, other in itertools.combinations(options, 2)
        for pair in itertools.product(one, other)
        if is_possible(dict(pair))
    }
    rows = []
    while open_pairs:
        candidates = []
        for _ in range(10):
            row = dict(rng.choice(sorted(open_pairs, key=repr)))
            for name in rng.sample(list(axes), len(axes)):
                if name not in row:
                    choices = [{**row, name: value} for value in axes[name] if is_possible({**row, name: value})]
                    rng.shuffle(choices)
                    row = max(choices, key=lambda choice: len(pairs(choice) & open_pairs))
            candidates.append(row)
        rows.append(max(candidates, key=lambda row: len(pairs(row) & open_pairs)))
        open_pairs -= pairs(rows[-1])
    return rows


CASES = tuple(Case(**row, seed=seed) for seed, row in enumerate(pairwise(AXES), start=100))
assert {field.name for field in fields(Case)} == {*AXES, "seed"}


def covered_pairs(cases: tuple[Case, ...]) -> set[tuple]:
    """The pairs of axis values that occur in `cases`; for the test of the table."""
    return {pair for case in cases for pair in itertools.combinations(list(asdict(case).items())[: len(AXES)], 2)}
