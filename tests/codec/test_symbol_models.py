"""Frequencies add up, cost least, and their tables agree with each other."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.entropy.models import TOTAL, SymbolModels, fit_frequencies
from tests.suites.quiet import QUIET

TINY_TOTAL = 9
#: Few distinct counts, so that ties are common; a tiny one beside a huge one.
counts = st.one_of(
    st.integers(1, 20).map(float), st.sampled_from([0.0, 0.0, 1.0, 3.5, 100.0, 1e-300, 1e300])
)
wide_counts = st.one_of(counts, st.floats(0, 1e308, allow_subnormal=True))


def cost_bits(counts_A: Any, freq_A: Any) -> float:
    """Bits that symbols counted like this cost, up to a constant; scaled to the greatest."""
    seen = np.asarray(counts_A) > 0
    if (np.asarray(freq_A)[seen] == 0).any():
        return float("inf")
    weights = np.asarray(counts_A)[seen] / max(counts_A)
    return float(-(weights * np.log2(np.asarray(freq_A)[seen])).sum())


def brute_force_bits(counts_A: Any, floor_A: Any) -> float:
    """The least cost of any frequencies that add up to `TINY_TOTAL`."""
    least = [int(bool(floor) or count > 0) for count, floor in zip(counts_A, floor_A, strict=True)]
    choices = product(*(range(low, TINY_TOTAL + 1 if low else 1) for low in least))
    return min(cost_bits(counts_A, f) for f in choices if sum(f) == TINY_TOTAL)


@settings(QUIET, max_examples=300)
@given(st.lists(st.tuples(counts, st.booleans()), min_size=1, max_size=4))
def test_no_other_frequencies_cost_less(rows: list[tuple[float, bool]]) -> None:
    """Against every way to cut a small total into parts."""
    counts_A, floor_A = (np.array(column) for column in zip(*rows, strict=True))
    if not ((counts_A > 0) | floor_A).any():
        return

    freq_A = fit_frequencies(counts_A, floor_A, TINY_TOTAL)

    assert freq_A.sum() == TINY_TOTAL
    if counts_A.any():
        assert cost_bits(counts_A, freq_A) == pytest.approx(brute_force_bits(counts_A, floor_A))


@QUIET
@given(st.lists(st.floats(0, 1).map(lambda share: share**6), min_size=2, max_size=256))
def test_no_part_moves_with_profit(counts: list[float]) -> None:
    """Of the full total: the cost is convex, so that this is enough."""
    counts_A = np.array([1.0, *counts][:256])

    freq_A = SymbolModels.fit([counts_A]).freq_KA[0].astype(np.int64)

    gain_A = counts_A * np.log2((freq_A + 1) / freq_A)
    can_give = freq_A > 1
    loss_A = counts_A[can_give] * np.log2(freq_A[can_give] / (freq_A[can_give] - 1))
    assert gain_A.max() <= loss_A.min() * (1 + 1e-9)


def test_a_part_moves_although_the_sum_is_right() -> None:
    """Three floors cost the great one three parts; a fourth is worth more to the second."""
    models = SymbolModels.fit([[4093.01, 2.99, 0, 0, 0]])

    assert models.freq_KA.tolist() == [[4090, 3, 1, 1, 1]]


@QUIET
@given(st.data(), st.integers(1, 3), st.integers(1, 40), st.booleans())
def test_what_must_be_codable_is(data: st.DataObject, num: int, size: int, floor: bool) -> None:
    """Frequency 0 is for those that were neither seen nor asked for."""
    row = st.lists(wide_counts, min_size=size, max_size=size).filter(lambda r: floor or any(r))
    counts_KA = np.array([data.draw(row) for _ in range(num)])

    models = SymbolModels.fit(counts_KA, floor=floor)

    assert ((models.freq_KA > 0) == ((counts_KA > 0) | floor)).all()
    assert (models.num_models, models.num_symbols) == (num, size)


def test_a_floor_can_differ_by_symbol_and_by_row() -> None:
    """Broadcast over models, or given for each."""
    counts_KA = [[5, 0, 0], [0, 0, 5]]

    by_symbol = SymbolModels.fit(counts_KA, floor=[False, True, False])
    by_row = SymbolModels.fit(counts_KA, floor=[[False, True, False], [False] * 3])

    assert by_symbol.freq_KA.tolist() == [[4095, 1, 0], [0, 1, 4095]]
    assert by_row.freq_KA.tolist() == [[4095, 1, 0], [0, 0, 4096]]


def test_a_row_without_counts_is_even_over_its_floor() -> None:
    """Nothing seen is no reason to expect one symbol more than another."""
    models = SymbolModels.fit(np.zeros((1, 4)), floor=[True, False, True, True])

    assert models.freq_KA.tolist() == [[1366, 0, 1365, 1365]]


def test_ties_go_to_the_lower_number() -> None:
    """So that every machine fits the same models."""
    assert SymbolModels.fit([[1, 1, 1]]).freq_KA.tolist() == [[1366, 1365, 1365]]
    assert fit_frequencies(np.ones(4), np.ones(4, bool), 6).tolist() == [2, 2, 1, 1]


def test_proportions_that_fit_are_kept() -> None:
    """Where counts are whole parts of the total, the best frequencies are the counts."""
    counts_A = np.array([3000, 1000, 64, 32])

    assert SymbolModels.fit([counts_A]).freq_KA.tolist() == [counts_A.tolist()]
    assert SymbolModels.fit([counts_A * 1e-200]).freq_KA.tolist() == [counts_A.tolist()]


def test_models_are_a_copy_that_cannot_change() -> None:
    """A thing that exists is valid, and stays so."""
    mine = np.array([[4000, 96]])
    models = SymbolModels(mine)

    mine[0] = 0

    assert models.freq_KA.tolist() == [[4000, 96]]
    assert models.freq_KA.dtype == np.uint16
    for table in (models.freq_KA, models.cum_KA, models.share_KA, models.symbol_of_slot_KS):
        with pytest.raises(ValueError, match="read-only"):
            table[0, 0] = 1


def test_tables_agree() -> None:
    """Each symbol owns as many slots as its frequency, from its first slot on."""
    freq_KA = np.array([[1000, 0, 96, 3000], [0, 0, 0, TOTAL]])
    models = SymbolModels(freq_KA)

    assert models.cum_KA.tolist() == [[0, 1000, 1000, 1096], [0, 0, 0, 0]]
    assert models.symbol_of_slot_KS.shape == (2, TOTAL)
    for k, a in np.ndindex(freq_KA.shape):
        slots = np.flatnonzero(models.symbol_of_slot_KS[k] == a)
        assert len(slots) == freq_KA[k, a]
        assert not len(slots) or slots[0] == models.cum_KA[k, a]


def test_shares_cover_every_byte() -> None:
    """A symbol outside the alphabet is one that cannot be coded, not an index too far."""
    models = SymbolModels(np.array([[1000, 0, 3096, 0]]))

    assert models.share_KA.shape == (1, 256)
    assert models.share_KA[0, :3].tolist() == [1000 << 16, 0, 3096 << 16 | 1000]
    assert not models.share_KA[0, 3:].any()


def test_bits_are_the_ideal_cost() -> None:
    """From nothing, for a sure symbol, to infinite, for one that cannot be coded."""
    models = SymbolModels(np.array([[2048, 2047, 1, 0], [0, 0, 0, TOTAL]]))

    expected = [[1, 12 - np.log2(2047), 12, np.inf], [np.inf, np.inf, np.inf, 0]]
    assert models.bits_KA.tolist() == expected


@pytest.mark.parametrize(
    "freq_KA",
    [
        np.array([[4095, 0]]),
        np.array([[2048, 2048], [2048, 2049]]),
        np.array([[4097, -1]]),
        np.array([[65536 + 4096]]),  # 4096, once cut to 16 bits
        np.array([4096]),
        np.array([[4096.0]]),
        np.array([[True] * 2]),
        np.zeros((0, 4), int),
        np.zeros((1, 0), int),
        np.full((1, 512), 8),
    ],
)
def test_what_is_no_model_is_refused(freq_KA: Any) -> None:
    """Wrong sums, signs, types and shapes."""
    with pytest.raises(ValueError, match=r"need|must"):
        SymbolModels(freq_KA)


@pytest.mark.parametrize(
    ("counts_KA", "floor"),
    [
        ([[1, -1]], True),
        ([[1, float("nan")]], True),
        ([[1, float("inf")]], True),
        ([1, 2], True),
        ([[0, 0]], False),
        ([[1] * 257], True),
        (np.zeros((0, 3)), True),
        (np.zeros((2, 0)), True),
    ],
)
def test_what_are_no_counts_is_refused(counts_KA: Any, floor: bool) -> None:
    """There must be something to fit, and it must be numbers of things."""
    with pytest.raises(ValueError, match="need"):
        SymbolModels.fit(counts_KA, floor=floor)


def test_more_symbols_than_parts_are_refused() -> None:
    """Not every one of them could get a part."""
    with pytest.raises(ValueError, match="need 1 to 2 codable symbols, got 3"):
        fit_frequencies(np.ones(3), np.ones(3, bool), 2)
