"""Inference against brute force on 20,000 random relations, and the judge itself."""

from __future__ import annotations

from random import Random

import pytest

from policies.retention.claims import Claim, Forever, Keys, Until
from policies.retention.evaluate import may_read
from policies.retention.fuzz import (
    SHAPES,
    FuzzReport,
    brute_last_reads,
    compare,
    draw,
    fuzz,
    judge,
)
from policies.retention.lifetime import Lifetime
from policies.retention.witness import Witness
from tests.policies.retention.samples import rel

RELATIONS = 20_000
#: A run with limits this tight finds about 1.2 % loose; far more would be a loss of precision.
LEAST_EXACT_SHARE = 0.98


def test_no_random_relation_is_unsound() -> None:
    """Zero keys read after their last reader; the few loose ones are known to be."""
    report = fuzz(seed=20_260_801, num_relations=RELATIONS)

    assert report.unsound == []
    assert report.num_flag_wrong == 0
    assert report.num_relations == RELATIONS
    assert report.num_exact + report.num_loose == RELATIONS
    assert report.exact_share > LEAST_EXACT_SHARE


def test_runs_repeat() -> None:
    """The same seed draws the same relations, whatever ran before."""
    first, second = Random(5), Random(5)

    assert [draw(first) for _ in range(40)] == [draw(second) for _ in range(40)]
    assert draw(Random(6)) != draw(Random(5))


def test_every_shape_is_drawn() -> None:
    """Alone and with others."""
    rng = Random(1)
    names = [draw(rng)[0] for _ in range(600)]

    assert all(any(shape in name for name in names) for shape in SHAPES)
    assert any(" & " in name for name in names)
    assert any(" + " in name for name in names)


@pytest.mark.parametrize("text", ["q - k < 5", "k % 3 == 0", "q + k < 30", "q % 4 == 1"])
def test_the_oracle_is_brute_force(text: str) -> None:
    """It agrees with asking for one pair after another."""
    relation = rel(text)
    wanted = [
        max((q for q in range(k, 60) if may_read(relation, q, k)), default=-1) for k in range(20)
    ]

    assert brute_last_reads(relation, 20, 60).tolist() == wanted


def lifetime_of(*claims: Claim, is_exact: bool = True) -> Lifetime:
    """A lifetime that says whatever it is told to."""
    witness = Witness(claims, ((0, 1),), 1, 0, is_exact)
    return Lifetime(rel("q - k < 5"), claims, is_exact, witness)


@pytest.mark.parametrize(
    ("claim", "outcome"),
    [
        (Claim(Keys(), Until(1, 1, 4)), "exact"),
        (Claim(Keys(), Until(1, 1, 3)), "unsound"),
        (Claim(Keys(), Until(1, 1, 5)), "loose"),
        (Claim(Keys(), Until(8, 8, 11)), "loose"),
        (Claim(Keys(), Forever()), "loose"),
    ],
)
def test_the_judge_sees_what_is_wrong(claim: Claim, outcome: str) -> None:
    """Against a window of five tokens."""
    seen_K = brute_last_reads(rel("q - k < 5"), 20, 100)

    assert compare(lifetime_of(claim), seen_K, 100) == outcome


def test_the_tally_counts_each_outcome() -> None:
    """A refusal counts as exact, if nothing reads."""
    report = FuzzReport()
    for text in ("q - k < 5", "q < k", "k < 3"):
        judge(report, "window", rel(text))

    assert (report.num_relations, report.num_exact, report.num_empty) == (3, 3, 1)
    assert report.exact_share == 1.0
    assert FuzzReport().exact_share == 0.0


def test_late_readers_do_not_pass_for_looseness() -> None:
    """Readers that begin after the grid are looked for on a larger one."""
    report = FuzzReport()

    judge(report, "bare terms", rel("44 < (q - k) // 31"))

    assert (report.num_exact, report.num_flag_wrong) == (1, 0)
