"""The language: what can be built, and what is refused with its term quoted."""

from __future__ import annotations

import pytest

from codec.errors import RetentionError
from policies.retention.ir import (
    INT_MAX,
    INT_MIN,
    MAX_DEPTH,
    MAX_NODES,
    MAX_POSITION,
    And,
    AtMost,
    Constant,
    Difference,
    FloorDivision,
    Key,
    Less,
    Modulo,
    Or,
    Query,
    Sum,
    Term,
    Truth,
    all_of,
    any_of,
)

Q, K = Query(), Key()


def test_equal_terms_are_equal_and_hash_alike() -> None:
    """Relations are values: inference is cached by them."""
    a, b = Less(Difference(Q, K), Constant(4)), Less(Difference(Q, K), Constant(4))

    assert a == b
    assert len({a, b, Less(Difference(Q, K), Constant(5))}) == 2


@pytest.mark.parametrize("divisor", [0, -3, True, 2.0, INT_MAX + 1])
@pytest.mark.parametrize(
    ("kind", "rule"), [(FloorDivision, "bad-divisor"), (Modulo, "bad-modulus")]
)
def test_divisor_must_be_a_positive_integer(
    kind: type[FloorDivision | Modulo], rule: str, divisor: int
) -> None:
    """Anything else has no rounding that is agreed on."""
    with pytest.raises(RetentionError) as caught:
        kind(Difference(Q, K), divisor)

    assert caught.value.rule == rule
    assert "(q - k)" in caught.value.term


@pytest.mark.parametrize("value", [INT_MAX + 1, INT_MIN - 1])
def test_constant_outside_64_bits_is_refused(value: int) -> None:
    """It could not be computed with."""
    with pytest.raises(RetentionError, match="64-bit") as caught:
        Constant(value)

    assert caught.value.rule == "overflow"


@pytest.mark.parametrize("value", [True, 1.0, "3", None])
def test_constant_must_be_an_integer(value: int) -> None:
    """A boolean would pass for 1, a float would lose digits."""
    with pytest.raises(RetentionError) as caught:
        Constant(value)

    assert caught.value.rule == "not-an-integer"


def test_term_that_could_overflow_is_refused_and_quoted() -> None:
    """The reference's case: the largest constant plus a distance."""
    with pytest.raises(RetentionError) as caught:
        Sum(Constant(INT_MAX), Difference(Q, K))

    assert caught.value.rule == "overflow"
    assert str(INT_MAX) in caught.value.term
    assert "q - k" in caught.value.term


def test_the_largest_window_is_not_an_overflow() -> None:
    """Comparing with the largest constant computes nothing larger."""
    assert str(Less(Difference(Q, K), Constant(INT_MAX)))


@pytest.mark.parametrize(
    ("term", "low", "high"),
    [
        (Q, 0, MAX_POSITION),
        (Difference(Q, K), -MAX_POSITION, MAX_POSITION),
        (Modulo(Difference(Q, K), 3), 0, 2),
        (FloorDivision(Difference(Q, K), 2), -(2**47), 2**47 - 1),
        (Sum(K, Constant(-1)), -1, MAX_POSITION - 1),
    ],
)
def test_term_knows_its_range(term: Term, low: int, high: int) -> None:
    """The overflow check rests on it."""
    assert (term.shape.low, term.shape.high) == (low, high)


def test_deep_terms_are_refused() -> None:
    """Depth is bounded, so that no walk over a relation overflows the stack."""
    term: Term = Q
    for _ in range(MAX_DEPTH - 1):
        term = FloorDivision(term, 2)

    with pytest.raises(RetentionError) as caught:
        FloorDivision(term, 2)
    assert caught.value.rule == "too-large"


def test_wide_relations_are_refused() -> None:
    """So is the number of nodes."""
    parts = tuple(AtMost(K, Constant(n)) for n in range(MAX_NODES // 3 + 1))

    with pytest.raises(RetentionError) as caught:
        Or(parts)

    assert caught.value.rule == "too-large"


@pytest.mark.parametrize("kind", [And, Or])
def test_empty_and_single_combinations_cannot_be_built(kind: type[And | Or]) -> None:
    """They have plainer forms, which `all_of` and `any_of` return."""
    with pytest.raises(ValueError, match="two or more"):
        kind((Truth(value=True),))

    assert all_of() == Truth(value=True)
    assert any_of() == Truth(value=False)
    assert all_of(Truth(value=False)) == any_of(Truth(value=False)) == Truth(value=False)


def test_printing_a_deep_term_is_not_exponential() -> None:
    """Each operand is rendered once."""
    term: Term = Sum(Q, Constant(-1))
    for _ in range(MAX_DEPTH - 4):
        term = FloorDivision(term, 1)

    assert str(term).count("//") == MAX_DEPTH - 4
