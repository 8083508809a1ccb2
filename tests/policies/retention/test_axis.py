"""Cutting the key axis: exact, and bounded in cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.retention.axis import (
    ALL_KEYS,
    Budget,
    TooFineError,
    always_sign,
    cut,
    of_class,
    simplify,
    split_classes,
)
from policies.retention.claims import Keys
from policies.retention.forms import KEY, Form, add, at, floor
from tests.policies.retention.samples import key_forms, key_sets, relaxed

SPAN = 160


def members(parts: list[Keys]) -> list[int]:
    """Members of all parts, with repeats."""
    return sorted(key for part in parts for key in part.walk(0, SPAN))


@relaxed
@given(key_sets(), key_forms())
def test_cut_parts_the_keys_by_sign(keys: Keys, form: Form) -> None:
    """Every key lands on its side, once."""
    holds, fails = cut(keys, form, Budget(10**6))

    assert members(holds) == [k for k in keys.walk(0, SPAN) if at(form, 0, k) <= 0]
    assert members(fails) == [k for k in keys.walk(0, SPAN) if at(form, 0, k) > 0]


@relaxed
@given(key_sets(), key_forms())
def test_a_plain_sign_is_right(keys: Keys, form: Form) -> None:
    """It may not know, but it never errs."""
    sign = always_sign(form, keys)

    if sign is not None:
        assert all((at(form, 0, k) <= 0) is sign for k in keys.walk(0, SPAN))


def test_a_chunk_never_ends_before_its_keys() -> None:
    """Plain to see at any size, so large chunks cost nothing."""
    size = 2**40
    end = add(add(KEY, floor(KEY, size), -size), Form(constant=1 - size))

    assert always_sign(end, ALL_KEYS) is True


def test_cutting_costs_one_step_per_residue() -> None:
    """Nothing is spent if the budget does not reach."""
    form = add(add(KEY, floor(KEY, 50), -50), Form(constant=-9))
    budget = Budget(120)

    cut(ALL_KEYS, form, budget)
    assert budget.steps == 70
    cut(ALL_KEYS, form, budget)
    with pytest.raises(TooFineError):
        cut(ALL_KEYS, form, budget)
    assert budget.steps == 20


def test_a_modulus_in_common_is_paid_once() -> None:
    """Cutting residues modulo 50 by a form of period 50."""
    keys = Keys(0, None, 50, (0, 7))
    form = add(add(KEY, floor(KEY, 50), -50), Form(constant=-3))
    budget = Budget(10)

    assert cut(keys, form, budget) == ([Keys(0, None, 50, (0,))], [Keys(0, None, 50, (7,))])
    assert budget.steps == 8


@relaxed
@given(key_sets(), st.integers(1, 5))
def test_classes_make_up_the_set(keys: Keys, turns: int) -> None:
    """Each class once."""
    modulus = keys.modulus * turns
    residues = split_classes(keys, modulus, Budget(1000))
    parts = [part for r in residues if (part := of_class(keys, modulus, r))]

    assert members(parts) == list(keys.walk(0, SPAN))


@relaxed
@given(key_sets(), st.integers(1, 6))
def test_simplifying_keeps_the_set(keys: Keys, turns: int) -> None:
    """With the least modulus: blowing a set up changes nothing."""
    residues = tuple(sorted(
        turn * keys.modulus + r for turn in range(turns) for r in keys.residues
    ))  # fmt: skip
    blown = Keys(keys.start, keys.stop, keys.modulus * turns, residues)

    assert simplify(blown) == simplify(keys)
    assert list(simplify(keys).walk(0, SPAN)) == list(keys.walk(0, SPAN))
