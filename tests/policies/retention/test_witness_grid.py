"""The grid of a witness: it shows the structure, and stays bounded."""

from __future__ import annotations

import pytest

from policies.retention.lifetime import infer
from policies.retention.witness_grid import MAX_GRID
from tests.policies.retention.samples import KNOWN, rel


@pytest.mark.parametrize("text", [*KNOWN, "k < 100000 or q - k < 70000", "k == 123456"])
def test_grids_are_bounded(text: str) -> None:
    """Whatever the sizes in the relation."""
    witness = infer(rel(text)).witness

    assert 0 < witness.num_keys * witness.num_queries <= MAX_GRID


@pytest.mark.parametrize(
    "text", ["q - k < 8 or k < 4", "q // 16 == k // 16", "q - k < 8 or k % 64 == 0"]
)
def test_small_structures_are_covered_without_gaps(text: str) -> None:
    """From key 0, past every place where a claim turns, and two turns more."""
    witness = infer(rel(text)).witness

    assert len(witness.key_ranges) == 1
    assert witness.key_ranges[0][0] == 0
    turn = max(claim.keys.modulus for claim in witness.claims)
    assert witness.key_ranges[0][1] >= 2 * turn
    assert witness.num_queries > witness.key_ranges[0][1]


def test_large_structures_are_covered_around_their_edges() -> None:
    """The keys on both sides of each edge."""
    witness = infer(rel("k < 100000 or q - k < 64")).witness

    for key in (0, 99_999, 100_000, 100_004):
        assert any(start <= key < stop for start, stop in witness.key_ranges)


def test_queries_reach_past_the_last_reader() -> None:
    """By a recurrence, or the witness claims none."""
    window = infer(rel("q - k < 5000 or k < 4")).witness
    huge = infer(rel("q - k < 9223372036854775807")).witness

    assert window.recurrence == 1
    assert window.num_queries > 5000 + window.key_ranges[-1][1]
    assert huge.recurrence == 0


def test_late_beginnings_are_waited_for() -> None:
    """Readers of a key that begin long after it."""
    witness = infer(rel("k + k + k + k <= q")).witness

    assert witness.num_queries > 4 * (witness.key_ranges[-1][1] - 1)
