"""Evaluation: scalar and grid agree, and an error means "may read"."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from policies.retention.evaluate import may_read, may_read_grid
from policies.retention.ir import MAX_POSITION, Relation
from tests.policies.retention.samples import rel, relations, relaxed


@pytest.mark.parametrize(("query", "key"), [(3, 4), (3, -1), (-1, -1), (-5, -9)])
def test_nothing_is_read_outside_the_causal_domain(query: int, key: int) -> None:
    """Even where the predicate says true."""
    assert not may_read(rel("true"), query, key)


def test_division_and_remainder_round_down() -> None:
    """A remainder is never negative, whatever its term."""
    assert may_read(rel("(k - q) % 3 == 1"), 5, 0)
    assert may_read(rel("(k - q) // 3 == -2"), 5, 0)


@pytest.mark.parametrize(
    ("text", "query", "key", "wanted"),
    [
        ("q - k < 4", 7, 4, True),
        ("q - k < 4", 8, 4, False),
        ("q - k <= 4 and k < 5", 8, 4, True),
        ("q - k <= 4 and k < 4", 8, 4, False),
        ("q // 4 == k // 4", 7, 4, True),
        ("q // 4 == k // 4", 8, 7, False),
        ("false or k + q == 3", 2, 1, True),
    ],
)
def test_predicates_mean_what_they_say(text: str, query: int, key: int, *, wanted: bool) -> None:
    """One case on each side of each edge."""
    assert may_read(rel(text), query, key) is wanted


def test_what_cannot_be_computed_may_be_read() -> None:
    """Beyond the last position sums can overflow; the safe answer is yes."""
    relation = rel("q + q + q + q < 0")

    assert not may_read(relation, MAX_POSITION, 0)
    assert may_read(relation, 2**61, 0)


@relaxed
@given(relations())
def test_grid_agrees_with_single_pairs(relation: Relation) -> None:
    """The two evaluators are written apart."""
    keys_K = np.arange(9, dtype=np.int64)
    reads_QK = may_read_grid(relation, np.arange(12, dtype=np.int64), keys_K)

    wanted = [[may_read(relation, query, key) for key in range(9)] for query in range(12)]
    assert reads_QK.tolist() == wanted


@pytest.mark.parametrize("position", [-1, MAX_POSITION + 1])
def test_grid_refuses_positions_that_do_not_exist(position: int) -> None:
    """It does not check each value, so it must not be asked."""
    with pytest.raises(ValueError, match="positions"):
        may_read_grid(rel("true"), np.array([position]), np.array([0]))
