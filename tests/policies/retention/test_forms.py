"""Quasi-affine forms: every simplification keeps the value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.retention.evaluate import may_read
from policies.retention.forms import (
    KEY,
    QUERY,
    Form,
    add,
    at,
    common_period,
    constant,
    floor,
    growth,
    key_period,
    of_term,
    scale,
    shift,
)
from policies.retention.ir import Constant, Equal, Term
from tests.policies.retention.samples import key_forms, rel, relaxed, terms

POSITIONS = st.tuples(st.integers(0, 90), st.integers(0, 90))


def form_of(text: str) -> Form:
    """The form of the left side of ``text < 0``."""
    relation = rel(f"{text} < 0")
    return of_term(relation.left)


@relaxed
@given(terms(), st.integers(0, 60), st.integers(0, 60))
def test_form_of_a_term_has_its_value(term: Term, key: int, distance: int) -> None:
    """On the causal domain, where the evaluator answers."""
    value = at(of_term(term), key + distance, key)

    assert may_read(Equal(term, Constant(value)), key + distance, key)


@relaxed
@given(terms(2), terms(2), st.integers(-4, 4), POSITIONS)
def test_arithmetic_is_arithmetic(a: Term, b: Term, factor: int, pair: tuple[int, int]) -> None:
    """Sum, multiple and offset."""
    x, y = of_term(a), of_term(b)

    assert at(add(x, y, factor), *pair) == at(x, *pair) + factor * at(y, *pair)
    assert at(scale(x, factor), *pair) == factor * at(x, *pair)
    assert at(shift(x, factor), *pair) == at(x, *pair) + factor
    assert add(x, x, -1) == Form()


@relaxed
@given(terms(2), st.integers(1, 12), st.integers(1, 12), POSITIONS)
def test_floor_is_floor(term: Term, a: int, b: int, pair: tuple[int, int]) -> None:
    """Alone, and of a multiple, where factors are pulled out."""
    form = of_term(term)

    assert at(floor(form, a), *pair) == at(form, *pair) // a
    assert at(floor(scale(form, b), a), *pair) == b * at(form, *pair) // a
    assert at(floor(floor(form, a), b), *pair) == at(form, *pair) // a // b


@pytest.mark.parametrize(
    ("messy", "plain"),
    [
        ("q // 4 // 2", "q // 8"),
        ("(q // 4 + 1) // 2", "(q + 4) // 8"),
        ("(k + k + 6) // 2", "k + 3"),
        ("(q - k + 7) // 3", "(q - k + 1) // 3 + 2"),
        ("(k + k + k + k + 2) // 6", "(k + k + 1) // 3"),
        ("q // 1", "q"),
        ("5 // 2", "2"),
        ("(q // 3 + q // 3) // 2", "q // 3"),
    ],
)
def test_equal_functions_of_these_shapes_get_equal_forms(messy: str, plain: str) -> None:
    """Recognition of windows and chunks is better for it."""
    assert form_of(messy) == form_of(plain)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("(q - k) // 3", True),
        ("(q - k) % 4 + 2", True),
        ("q - k + q", False),
        ("q // 3 - k // 3", False),
        ("7", True),
    ],
)
def test_distances_are_recognized(text: str, *, wanted: bool) -> None:
    """Only if every occurrence is one."""
    assert form_of(text).is_distance is wanted


def test_reading_looks_inside_floors() -> None:
    """A position under a floor is still read."""
    assert form_of("q // 3").reads_query
    assert not form_of("q // 3").reads_key
    assert form_of("(k // 2) // 3").reads_key
    assert not form_of("q - q").reads_query


@relaxed
@given(terms(), POSITIONS)
def test_growth_is_a_band(term: Term, pair: tuple[int, int]) -> None:
    """No value lies outside."""
    form = of_term(term)
    rise = growth(form)

    line = rise.query * pair[0] + rise.key * pair[1]
    assert line + rise.low <= rise.scale * at(form, *pair) <= line + rise.high


def test_the_band_of_one_floor_is_tight() -> None:
    """Both ends are reached, so plain chunks need no splitting."""
    rise = growth(form_of("k - (k // 8) - (k // 8) - (k // 8) - (k // 8)"))
    values = {2 * (k - 4 * (k // 8)) - k for k in range(16)}

    assert (rise.low * 2, rise.high * 2) == (min(values) * rise.scale, max(values) * rise.scale)


@relaxed
@given(terms(2), st.integers(0, 20), st.integers(0, 20))
def test_forms_are_straight_on_residue_classes(term: Term, query: int, key: int) -> None:
    """Three points in a row, along either position."""
    form = of_term(term)
    period = common_period(form)

    for step in ((period, 0), (0, period)):
        first, second, third = (at(form, query + n * step[0], key + n * step[1]) for n in range(3))
        assert third - second == second - first


@relaxed
@given(key_forms(), st.integers(0, 30))
def test_key_period_straightens_forms_of_the_key(form: Form, key: int) -> None:
    """With one slope for all classes, which `axis.cut` relies on."""
    period = key_period(form)

    slope = at(form, 0, period) - at(form, 0, 0)
    assert at(form, 0, key + period) - at(form, 0, key) == slope


@pytest.mark.parametrize(
    ("text", "wanted"), [("k // 4", 4), ("(k + k) // 4", 2), ("k // 4 + k // 6", 12), ("k", 1)]
)
def test_key_period_is_the_least(text: str, wanted: int) -> None:
    """A smaller one costs fewer steps."""
    assert key_period(form_of(text)) == wanted


def test_forms_print_readably() -> None:
    """For refusals and debugging."""
    assert str(add(scale(floor(KEY, 4), 2), QUERY)) == "q + 2*((k + 0) // 4) + 0"
    assert str(constant(-3)) == "-3"
