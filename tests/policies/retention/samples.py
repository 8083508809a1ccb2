"""Strategies and shorthands for the retention tests."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from policies.retention.claims import Claim, Forever, Keys, Rule, Unread, Until
from policies.retention.forms import Form, floor
from policies.retention.forms import add as plus
from policies.retention.ir import (
    And,
    AtMost,
    Constant,
    Difference,
    Equal,
    FloorDivision,
    Key,
    Less,
    Modulo,
    Or,
    Query,
    Relation,
    Sum,
    Term,
    Truth,
)
from policies.retention.lifetime import infer
from policies.retention.text import parse_relation

#: For properties: the machine may be busy, so no example has a deadline.
relaxed = settings(deadline=None)

#: Relations in text form, with the claims that are right for them; each checked by hand.
KNOWN: dict[str, list[str]] = {
    "true": ["k in [0, ...): forever"],
    "q - k < 1024": ["k in [0, ...): window 1024"],
    "q - k == 5": ["k in [0, ...): window 6"],
    "q == k": ["k in [0, ...): window 1"],
    "q // 16 == k // 16": ["k in [0, ...): chunk 16"],
    "q // 8192 == k // 8192": ["k in [0, ...): chunk 8192"],
    "q - k < 8 or k < 4": ["k in [0, 4): forever", "k in [4, ...): window 8"],
    "k < 3 or q - k < 8": ["k in [0, 3): forever", "k in [3, ...): window 8"],
    "k < 16": ["k in [0, 16): forever", "k in [16, ...): never read"],
    "5 <= k and k < 9": [
        "k in [0, 5): never read",
        "k in [5, 9): forever",
        "k in [9, ...): never read",
    ],
    "q - k < 8 or k % 64 == 0": [
        "k in [0, ...), k % 64 in {0}: forever",
        "k in [0, ...), k % 64 in {1,2,3,4,5,6,...}: window 8",
    ],
    "q - k < 8 or q % 4 == 0": ["k in [0, ...): forever"],
    "q - k < 128 and (q - k) % 3 == 0": ["k in [0, ...): window 127"],
    "q - k < 128 and (q - k) % 3 == 1": ["k in [0, ...): window 128"],
    "q - k < 128 and (q - k) % 3 == 0 and (q - k) % 5 == 0": ["k in [0, ...): window 121"],
    "q - k < 1048576 and (q - k) % 4096 == 0": ["k in [0, ...): window 1044481"],
    "q - k + (q - k) < 64": ["k in [0, ...): window 32"],
    "q + k < 128": ["k in [0, 64): until query -1*k + 127", "k in [64, ...): never read"],
    "q // 16 == k // 8": ["k in [0, ...): until query 16*(k // 8) + 15"],
    "q // 16 - k // 16 <= 1": ["k in [0, ...): until query 16*(k // 16) + 31"],
    "(q + 3) // 16 == (k + 3) // 16": ["k in [0, ...): until query 16*((k + 3) // 16) + 12"],
    "k < 16 or q // 16 == k // 16": ["k in [0, 16): forever", "k in [16, ...): chunk 16"],
    "q // 64 == k // 64 and (q // 16 == k // 16 or k % 16 == 15)": [
        "k in [0, ...), k % 16 in {0,1,2,3,4,5,...}: chunk 16",
        "k in [0, ...), k % 16 in {15}: chunk 64",
    ],
    "k - q // 4 < 16 or q - k < 8": ["k in [0, ...): forever"],
}


def rel(text: str) -> Relation:
    """The relation that ``text`` spells."""
    return parse_relation(text)


def claims_of(text: str) -> tuple[Claim, ...]:
    """The claims inferred for the relation that ``text`` spells."""
    return infer(rel(text)).claims


def terms(depth: int = 3) -> st.SearchStrategy[Term]:
    """Terms with small constants."""
    leaves = st.one_of(st.just(Query()), st.just(Key()), st.integers(-40, 40).map(Constant))
    if depth == 0:
        return leaves
    inner = terms(depth - 1)
    divisors = st.integers(1, 9)
    return st.one_of(
        leaves,
        st.builds(Sum, inner, inner),
        st.builds(Difference, inner, inner),
        st.builds(FloorDivision, inner, divisors),
        st.builds(Modulo, inner, divisors),
    )


def relations(depth: int = 2) -> st.SearchStrategy[Relation]:
    """Relations of a few comparisons."""
    leaf: st.SearchStrategy[Relation] = st.one_of(
        st.booleans().map(Truth),
        st.builds(Less, terms(2), terms(2)),
        st.builds(AtMost, terms(2), terms(2)),
        st.builds(Equal, terms(2), terms(2)),
    )
    if depth == 0:
        return leaf
    parts = st.lists(relations(depth - 1), min_size=2, max_size=3).map(tuple)
    return st.one_of(leaf, parts.map(And), parts.map(Or))


def key_forms() -> st.SearchStrategy[Form]:
    """Forms of the key alone."""

    def build(factor: int, offset: int, floors: list[tuple[int, int, int, int]]) -> Form:
        found = Form(key=factor, constant=offset)
        for inner, moved, divisor, times in floors:
            found = plus(found, floor(Form(key=inner, constant=moved), divisor), times)
        return found

    part = st.tuples(st.integers(-3, 3), st.integers(-9, 9), st.integers(1, 7), st.integers(-3, 3))
    return st.builds(build, st.integers(-3, 3), st.integers(-60, 60), st.lists(part, max_size=2))


def key_sets() -> st.SearchStrategy[Keys]:
    """Sets of keys, bounded or not, with gaps or without."""

    def build(start: int, length: int | None, modulus: int, bits: int) -> Keys:
        chosen = tuple(r for r in range(modulus) if bits >> r & 1) or (0,)
        return Keys(start, None if length is None else start + length, modulus, chosen)

    lengths = st.none() | st.integers(1, 60)
    return st.builds(build, st.integers(0, 40), lengths, st.integers(1, 8), st.integers(0, 255))


def rules() -> st.SearchStrategy[Rule]:
    """Rules of every kind."""
    until = st.builds(
        lambda step, slope, offset, shift: Until(step, slope, offset, shift % step),
        st.integers(1, 9),
        st.integers(-9, 12),
        st.integers(-20, 90),
        st.integers(0, 8),
    )
    return st.one_of(st.just(Forever()), st.just(Unread()), until)
