"""Rounding down to strides, against trying every query."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.retention.axis import Budget, TooFineError
from policies.retention.claims import Keys
from policies.retention.clauses import Atom
from policies.retention.forms import Form, add, at, of_term
from policies.retention.strides import Ending, Part, Strides, class_line
from tests.policies.retention.samples import key_forms, key_sets, rel, relaxed

SPAN = 70
STRIDES = [
    "(q - k) % 3 == 0",
    "(q - k) % 4 == 3",
    "q % 4 == 1",
    "(q + k) % 3 == 1",
    "q % 4 == k % 4",
    "q % 6 // 2 == 1",
    "(q - k) % 6 == 7",
    "(q + k + k) % 5 == 2",
]


def strides_of(*texts: str) -> Strides:
    """The strides that the equalities ``texts`` spell."""
    relations = [rel(text) for text in texts]
    forms = [add(of_term(found.left), of_term(found.right), -1) for found in relations]
    return Strides.of(tuple(Atom(form, is_equality=True) for form in forms))


def value_at(parts: list[Part], key: int) -> int | Ending:
    """The last reader that ``parts`` say of ``key``, which must be in exactly one."""
    (value,) = [value for keys, value in parts if key in keys]
    return at(value, 0, key) if isinstance(value, Form) else value


@pytest.mark.parametrize("text", STRIDES)
@relaxed
@given(keys=key_sets(), high=key_forms())
def test_rounding_finds_the_last_admitted_query(text: str, keys: Keys, high: Form) -> None:
    """For every key, by stepping down from the bound."""
    strides = strides_of(text)
    parts = strides.round_down(keys, high, Budget(10**6))

    for key in keys.walk(0, SPAN):
        top = at(high, 0, key)
        queries = range(top, top - strides.period, -1)
        wanted = next((q for q in queries if strides.atoms[0].holds(q, key)), Ending.NEVER)
        assert value_at(parts, key) == wanted


@pytest.mark.parametrize("text", STRIDES)
@relaxed
@given(keys=key_sets())
def test_without_a_bound_a_key_is_read_forever_or_never(text: str, keys: Keys) -> None:
    """As its residue has an admitted query or none."""
    strides = strides_of(text)
    parts = strides.last_forever(keys, Budget(10**6))

    for key in keys.walk(0, SPAN):
        is_read = any(strides.atoms[0].holds(q, key) for q in range(strides.period))
        assert value_at(parts, key) is (Ending.FOREVER if is_read else Ending.NEVER)


def test_strides_together_need_all_of_them() -> None:
    """Two strides of distances 3 and 5 meet at multiples of 15."""
    parts = strides_of("(q - k) % 3 == 0", "(q - k) % 5 == 0").round_down(
        Keys(), Form(key=1, constant=127), Budget(100)
    )

    assert parts == [(Keys(), Form(key=1, constant=120))]


def test_a_distance_stride_does_not_split_a_window() -> None:
    """However long, it costs one period."""
    budget = Budget(5000)
    parts = strides_of("(q - k) % 4096 == 0").round_down(
        Keys(), Form(key=1, constant=2**20), budget
    )

    assert parts == [(Keys(), Form(key=1, constant=2**20))]
    assert budget.steps == 5000 - 4096


def test_a_long_stride_is_too_fine() -> None:
    """The caller then does without rounding."""
    with pytest.raises(TooFineError):
        strides_of("(q + k) % 4096 == 0").round_down(Keys(), Form(key=1), Budget(5000))


@relaxed
@given(key_forms(), st.integers(0, 40))
def test_a_class_line_equals_its_form(form: Form, key: int) -> None:
    """On the class of the key."""
    modulus = 5040  # a multiple of every period of these forms
    line = class_line(form, modulus, key % modulus)

    assert at(line, 0, key) == at(form, 0, key)
    assert at(line, 0, key + modulus) == at(form, 0, key + modulus)
