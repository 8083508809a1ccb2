"""The ladder of classes: what may be one, and where coefficients stand on it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.entropy.models import SymbolModels
from codec.symbol_classes import (
    CLASSES_PER_OCTAVE,
    MAX_FIRST_CLASS,
    MAX_LEVEL,
    MAX_LOW_BITS,
    MAX_SHIFT,
    NUM_CLASSES,
    ZERO_LEVEL,
    SymbolClasses,
    class_of,
    levels_of,
    split_levels,
    step_factor,
)


def some_classes() -> SymbolClasses:
    """Class ``k`` can code ``3 + k`` symbols, its escape included."""
    floor_KA = np.arange(256) < np.arange(3, 3 + NUM_CLASSES)[:, None]
    return SymbolClasses(
        models=SymbolModels.fit(np.zeros((NUM_CLASSES, 256)), floor=floor_KA),
        offset_K=np.full(NUM_CLASSES, 0.4, np.float32),
        bias1_K=np.zeros(NUM_CLASSES, np.float32),
        bias2_K=np.zeros(NUM_CLASSES, np.float32),
    )


def with_zero_alone(classes: range) -> SymbolModels:
    """The models of `some_classes`, but some have symbol 0 and no other."""
    freq_KA = np.array(some_classes().models.freq_KA)
    for k in classes:
        freq_KA[k] = 0
        freq_KA[k, 0] = 4096
    return SymbolModels(freq_KA)


def test_an_alphabet_ends_with_the_last_codable_symbol() -> None:
    """Each class has its own."""
    assert some_classes().alphabet_K.tolist() == list(range(3, 3 + NUM_CLASSES))


@pytest.mark.parametrize("name", ["offset_K", "bias1_K", "bias2_K"])
@pytest.mark.parametrize(
    ("values", "why"),
    [
        (np.full(NUM_CLASSES - 1, 0.4, np.float32), "must be float32"),
        (np.full((NUM_CLASSES, 1), 0.4, np.float32), "must be float32"),
        (np.full(NUM_CLASSES, 0.4), "must be float32"),
        (np.full(NUM_CLASSES, np.nan, np.float32), "must be finite"),
        (np.full(NUM_CLASSES, np.inf, np.float32), "must be finite"),
    ],
)
def test_a_bad_array_is_refused_by_name(name: str, values: Any, why: str) -> None:
    """The compiled loops believe shapes and types."""
    with pytest.raises(ValueError, match=f"{name} {why}"):
        dataclasses.replace(some_classes(), **{name: values})


@pytest.mark.parametrize("offset", [0.0, -0.1, 0.5001])
def test_a_rounding_offset_is_positive_and_at_most_a_half(offset: float) -> None:
    """Beyond a half a code would be further from its value than the next one."""
    offset_K = some_classes().offset_K.copy()
    offset_K[7] = offset

    with pytest.raises(ValueError, match=r"offsets must be in \(0, 0\.5\]"):
        dataclasses.replace(some_classes(), offset_K=offset_K)


def test_an_alphabet_with_a_gap_is_refused() -> None:
    """The escape is the last symbol, so none before it may be missing."""
    freq_KA = np.array(some_classes().models.freq_KA)
    freq_KA[3, 1] += freq_KA[3, 0]
    freq_KA[3, 0] = 0

    with pytest.raises(ValueError, match="must be its first ones"):
        dataclasses.replace(some_classes(), models=SymbolModels(freq_KA))


@pytest.mark.parametrize(
    ("alone", "why"),
    [
        (range(5, 6), "must be the narrowest ones"),
        (range(1, 3), "must be the narrowest ones"),
        (range(MAX_FIRST_CLASS + 1), f"classes from {MAX_FIRST_CLASS} on must be coded"),
    ],
)
def test_only_the_narrowest_classes_may_be_left_out(alone: range, why: str) -> None:
    """Else a token's coefficients were not its first ones, or low bits were lost."""
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(some_classes(), models=with_zero_alone(alone))


@pytest.mark.parametrize("first_class", [0, 1, MAX_FIRST_CLASS])
def test_the_first_class_is_the_narrowest_that_is_coded(first_class: int) -> None:
    """Those before it have symbol 0 alone."""
    made = dataclasses.replace(some_classes(), models=with_zero_alone(range(first_class)))

    assert made.first_class == first_class
    assert made.alphabet_K[:first_class].tolist() == [1] * first_class


def test_there_is_a_model_for_each_class() -> None:
    """No level or shift points outside the table."""
    models = SymbolModels(some_classes().models.freq_KA[:-1])

    with pytest.raises(ValueError, match=f"need {NUM_CLASSES} classes, got {NUM_CLASSES - 1}"):
        dataclasses.replace(some_classes(), models=models)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_a_level_is_the_nearest_quarter_octave(spread: float, step: float) -> None:
    """A level's own spread is within an eighth of an octave of the coefficient's."""
    (level,) = levels_of(np.array([spread]), step)

    octaves = np.log2(spread / step) - (int(level) - ZERO_LEVEL) / CLASSES_PER_OCTAVE
    half = 0.5 / CLASSES_PER_OCTAVE + 1e-9
    assert level >= 0
    assert octaves <= half
    # What is narrower than the ladder stands on its lowest class.
    assert octaves >= -half or level == 0


def test_a_coefficient_that_never_varies_has_the_lowest_level() -> None:
    """A spread of zero is narrow, not an error."""
    assert levels_of(np.array([0.0]), 1.0).tolist() == [0]


@given(st.lists(st.integers(0, 400), max_size=20))
def test_low_bits_are_the_fewest_that_bring_a_level_down(levels: list[int]) -> None:
    """Compared with trying 0, 1, 2, ... bits."""
    low_bits_C, rest_C = split_levels(np.array(levels, np.int32))

    for level, low_bits, rest in zip(levels, low_bits_C, rest_C, strict=True):
        fits = (
            bits
            for bits in range(MAX_LOW_BITS + 1)
            if level - bits * CLASSES_PER_OCTAVE <= MAX_LEVEL or bits == MAX_LOW_BITS
        )
        assert low_bits == next(fits)
        assert rest == level - low_bits * CLASSES_PER_OCTAVE


@given(st.integers(0, MAX_LEVEL), st.integers(-MAX_SHIFT, MAX_SHIFT))
def test_a_class_is_level_and_shift_within_the_ladder(level: int, shift: int) -> None:
    """Both ends hold what would leave them."""
    (found,) = class_of(np.array([level], np.int32), np.array([shift], np.int32))

    assert found == sorted([0, level + shift, NUM_CLASSES - 1])[1]


def test_both_ends_of_the_ladder_are_reached() -> None:
    """The lowest level shifted down stays; the highest one shifted up is held."""
    ends = class_of(np.array([0, NUM_CLASSES - 1], np.int32), np.array([-1, 1], np.int32))

    assert ends.tolist() == [0, NUM_CLASSES - 1]
    assert MAX_LEVEL + MAX_SHIFT < NUM_CLASSES
    assert MAX_FIRST_CLASS <= MAX_LEVEL - MAX_SHIFT


def test_a_shift_of_an_octave_halves_the_step() -> None:
    """The step of a token and the class of its coefficients move together."""
    factors = step_factor(np.array([-CLASSES_PER_OCTAVE, 0, CLASSES_PER_OCTAVE], np.int32))

    assert factors.tolist() == [2.0, 1.0, 0.5]
    assert factors.dtype == np.float32
