"""Random relations, and what brute force says of them.

The generator draws from every shape that the compiler claims to handle, with random
parameters, and from the bare grammar.  The oracle evaluates the relation on a grid and takes
the last reader of each key; it shares nothing with inference.  `fuzz` compares the two:

* *unsound*: some key is read after the last reader that was inferred.  Must never happen.
* *exact*: every key's last reader is the inferred one, as far as the grid can show.
* *loose*: sound, but some key is kept longer than its last reader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

import numpy as np

from codec.errors import RetentionError
from policies.retention.claims import Forever
from policies.retention.evaluate import Ints, may_read_grid
from policies.retention.ir import (
    AtMost,
    Constant,
    Difference,
    Equal,
    FloorDivision,
    Key,
    Less,
    Modulo,
    Query,
    Relation,
    Sum,
    Term,
    all_of,
    any_of,
)
from policies.retention.lifetime import Lifetime, infer

NUM_KEYS: Final = 32
NUM_QUERIES: Final = 1000
STEPS: Final = 6_000
"""Less than inference may spend by default, so that giving way is tried as well."""

Q, K = Query(), Key()
D = Difference(Q, K)


def distance_below(window: int) -> Relation:
    """``q - k < window``."""
    return Less(D, Constant(window))


def _same_chunk(size: int) -> Relation:
    return Equal(FloorDivision(Q, size), FloorDivision(K, size))


def _window(rng: Random) -> Relation:
    return distance_below(rng.randint(1, 90))


def _chunk(rng: Random) -> Relation:
    size = rng.randint(1, 24)
    if rng.random() < 0.3:
        moved = Constant(rng.randint(1, 20))
        return Equal(FloorDivision(Sum(Q, moved), size), FloorDivision(Sum(K, moved), size))
    return _same_chunk(size)


def _reach_back(rng: Random) -> Relation:
    size = rng.randint(1, 24)
    gap = Difference(FloorDivision(Q, size), FloorDivision(K, size))
    return AtMost(gap, Constant(rng.randint(0, 4)))


def _prefix(rng: Random) -> Relation:
    return Less(K, Constant(rng.randint(1, 50)))


def _stride(rng: Random) -> Relation:
    modulus = rng.randint(1, 16)
    terms: list[Term] = [D, Q, K, Sum(Q, K), Sum(Q, Sum(K, K))]
    term = rng.choice(terms)
    remainder = Constant(rng.randint(0, modulus))
    if rng.random() < 0.3:
        return AtMost(Modulo(term, modulus), remainder)
    return Equal(Modulo(term, modulus), remainder)


def _global_keys(rng: Random) -> Relation:
    modulus = rng.randint(2, 24)
    return Equal(Modulo(K, modulus), Constant(rng.randrange(modulus)))


def _coefficient(rng: Random) -> Relation:
    query, key = rng.randint(1, 4), rng.randint(-4, 4)
    term: Term = Q
    for _ in range(query - 1):
        term = Sum(term, Q)
    for _ in range(abs(key)):
        term = Sum(term, K) if key > 0 else Difference(term, K)
    return AtMost(term, Constant(rng.randint(0, 120)))


def _nested(rng: Random) -> Relation:
    small = rng.randint(2, 8)
    large = small * rng.randint(2, 6)
    summary = Equal(Modulo(K, small), Constant(rng.randrange(small)))
    return any_of(_same_chunk(small), all_of(_same_chunk(large), summary))


def _term(rng: Random, depth: int) -> Term:
    pick = rng.random()
    if depth == 0 or pick < 0.25:
        leaves: list[Term] = [Q, K, D, Constant(rng.randint(-20, 60))]
        return rng.choice(leaves)
    inner = _term(rng, depth - 1)
    if pick < 0.43:
        return Sum(inner, _term(rng, depth - 1))
    if pick < 0.6:
        return Difference(inner, _term(rng, depth - 1))
    divisor = rng.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 10, 12, 16])
    return FloorDivision(inner, divisor) if pick < 0.8 else Modulo(inner, divisor)


def _bare(rng: Random) -> Relation:
    left, right = _term(rng, 2), _term(rng, 1)
    pick = rng.random()
    if pick < 0.2:
        return Equal(left, right)
    return Less(left, right) if pick < 0.6 else AtMost(left, right)


SHAPES: Final[dict[str, Callable[[Random], Relation]]] = {
    "window": _window,
    "chunk": _chunk,
    "chunks back": _reach_back,
    "prefix": _prefix,
    "stride": _stride,
    "global keys": _global_keys,
    "coefficients": _coefficient,
    "nested partitions": _nested,
    "bare terms": _bare,
}


def random_relation(rng: Random) -> tuple[str, Relation]:
    """A relation of one to four random shapes, and the names of those."""
    names: list[str] = []
    parts: list[Relation] = []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        name = rng.choice(list(SHAPES))
        part = SHAPES[name](rng)
        if rng.random() < 0.2:
            other = rng.choice(list(SHAPES))
            part = rng.choice([all_of, any_of])(part, SHAPES[other](rng))
            name = f"{name} & {other}"
        names.append(name)
        parts.append(part)
    return " + ".join(sorted(names)), rng.choice([all_of, any_of])(*parts)


def brute_last_reads(relation: Relation, num_keys: int, num_queries: int) -> Ints:
    """Last of ``num_queries`` queries that reads each key, -1 for none; shape ``(K,)``."""
    queries_Q = np.arange(num_queries, dtype=np.int64)
    reads_QK = may_read_grid(relation, queries_Q, np.arange(num_keys, dtype=np.int64))
    last_K = num_queries - 1 - reads_QK[::-1].argmax(axis=0)
    return np.asarray(np.where(reads_QK.any(axis=0), last_K, -1))


@dataclass(slots=True)
class FuzzReport:
    """Tally of one run; the counts of outcomes sum to ``num_relations``."""

    num_relations: int = 0
    num_exact: int = 0
    num_loose: int = 0
    num_unsound: int = 0
    num_empty: int = 0
    """Relations that were refused because nothing reads; counted as exact too."""

    num_flag_wrong: int = 0
    """Relations said to be exact that are not."""

    loose: dict[str, str] = field(default_factory=dict)
    """An example for each combination of shapes that was loose."""

    unsound: list[str] = field(default_factory=list)
    """Text of each unsound relation."""

    @property
    def exact_share(self) -> float:
        """Share of the relations whose last readers are exact."""
        return self.num_exact / self.num_relations if self.num_relations else 0.0


def draw(rng: Random) -> tuple[str, Relation]:
    """A random relation that can be built, and the names of its shapes."""
    while True:
        try:
            return random_relation(rng)
        except RetentionError:  # such as a constant out of range
            continue


def fuzz(seed: int, num_relations: int) -> FuzzReport:
    """Compare inference with brute force on random relations."""
    rng, report = Random(seed), FuzzReport()
    for _ in range(num_relations):
        judge(report, *draw(rng))
    return report


def judge(report: FuzzReport, shape: str, relation: Relation) -> None:
    """Add one relation to ``report``."""
    report.num_relations += 1
    seen_K = brute_last_reads(relation, NUM_KEYS, NUM_QUERIES)
    try:
        lifetime = infer(relation, steps=STEPS)
    except RetentionError:
        report.num_empty += 1
        outcome = "unsound" if (seen_K >= 0).any() else "exact"
    else:
        outcome = compare(lifetime, seen_K, NUM_QUERIES)
        if outcome == "loose" and lifetime.is_exact:  # perhaps the readers come later
            seen_K = brute_last_reads(relation, NUM_KEYS, 32 * NUM_QUERIES)
            outcome = compare(lifetime, seen_K, 32 * NUM_QUERIES)
        report.num_flag_wrong += lifetime.is_exact and outcome == "loose"
    if outcome == "unsound":
        report.num_unsound += 1
        report.unsound.append(str(relation))
    elif outcome == "loose":
        report.num_loose += 1
        report.loose.setdefault(shape, str(relation))
    else:
        report.num_exact += 1


def compare(lifetime: Lifetime, seen_K: Ints, num_queries: int) -> str:
    """``unsound``, ``loose`` or ``exact``, given the last reader seen of the first keys."""
    outcome = "exact"
    for claim in lifetime.claims:
        for key in claim.keys.walk(0, len(seen_K)):
            seen = int(seen_K[key])
            claimed = claim.last_read(key)
            if claimed is not None and seen > claimed:
                return "unsound"
            is_forever = isinstance(claim.rule, Forever)
            if is_forever and seen < num_queries // 2:
                outcome = "loose"
            if claimed is not None and seen < claimed < num_queries:
                outcome = "loose"
    return outcome
