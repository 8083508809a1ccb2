"""Alternatives: together they admit exactly the pairs of the relation."""

from __future__ import annotations

import pytest
from hypothesis import given

from policies.retention import clauses
from policies.retention.clauses import Bounds, bound, multiply_out
from policies.retention.evaluate import may_read
from policies.retention.forms import at
from policies.retention.ir import Relation
from tests.policies.retention.samples import KNOWN, rel, relations, relaxed


def admits(bounds: Bounds, query: int, key: int) -> bool:
    """Whether one alternative admits a pair."""
    modulus, remainder = bounds.residue
    return (
        key % modulus == remainder
        and all(at(guard, 0, key) <= 0 for guard in bounds.guards)
        and all(query <= at(high, 0, key) for high in bounds.highs)
        and all(query >= at(low, 0, key) for low in bounds.lows)
        and all(stride.holds(query, key) for stride in bounds.strides)
    )


def alternatives(relation: Relation) -> tuple[list[Bounds], bool]:
    """All alternatives, and whether any step was loose."""
    found, is_loose = multiply_out(relation)
    bounds = [b for clause in found for b in bound(clause)]
    return bounds, is_loose or any(b.is_loose for b in bounds)


def check(relation: Relation, *, num_keys: int = 14, num_queries: int = 40) -> None:
    """Compare with the evaluator on a grid; loose alternatives may admit more."""
    bounds, is_loose = alternatives(relation)
    for key in range(num_keys):
        for query in range(key, num_queries):
            reads = may_read(relation, query, key)
            admitted = any(admits(b, query, key) for b in bounds)
            assert admitted == reads or (is_loose and admitted), (query, key)


@relaxed
@given(relations(1))
def test_alternatives_are_the_relation(relation: Relation) -> None:
    """Every pair, on random relations."""
    check(relation)


@pytest.mark.parametrize(
    "text",
    [
        *KNOWN,
        "q + q % 4 <= k + 20",
        "(q + k) // 3 + q // 2 <= 10 + k",
        "(q - k) - (q - k) // 5 <= 9",
        "q % 8 // 2 == 1 and q - k < 30",
        "(q % 4) + k <= 10",
        "q // 3 + k // 2 == k",
        "q % 3 <= k % 2 or q == k + k",
        "q // 4 // 3 - (k + 1) // 12 <= 1",
        "k + 10 <= q + q + q and q - k < 4",
        "(q + k) // 2 + q // 2 <= 10 + k and (q + k) // 3 + q // 3 <= 8",
    ],
)
def test_known_shapes_are_exact(text: str) -> None:
    """None of these meets a limit."""
    relation = rel(text)

    assert not alternatives(relation)[1]
    check(relation, num_keys=30, num_queries=90)


def test_atoms_that_always_hold_leave_nothing() -> None:
    """And those that never do leave no alternative."""
    assert bound(multiply_out(rel("k <= q and q - k < 4"))[0][0]) == bound(
        multiply_out(rel("q - k < 4"))[0][0]
    )
    assert bound(multiply_out(rel("q < k and q - k < 4"))[0][0]) == []


def test_too_many_conjunctions_drop_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which admits more, and says so."""
    monkeypatch.setattr(clauses, "MAX_CLAUSES", 4)
    relation = rel("(k < 1 or k == 3 or k == 5) and (q < 9 or q == 12 or q == 20)")

    found, is_loose = multiply_out(relation)

    assert is_loose
    assert len(found) == 3
    check(relation)


def test_too_many_alternatives_admit_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing tighter to say at that size."""
    monkeypatch.setattr(clauses, "MAX_CLAUSES", 2)

    assert multiply_out(rel("k == 1 or k == 3 or k == 5")) == ([()], True)


def test_too_many_residues_drop_the_atom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other atoms of the conjunction stay."""
    monkeypatch.setattr(clauses, "MAX_SPLITS", 3)
    relation = rel("q + q % 4 <= k + 20 and q - k < 9")

    bounds, is_loose = alternatives(relation)

    assert is_loose
    assert [len(b.highs) for b in bounds] == [1]
    check(relation)
