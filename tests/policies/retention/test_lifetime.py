"""Lifetimes: the shapes that must come out right, and soundness where limits bite."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given

from codec.errors import RetentionError
from policies.retention.axis import Budget
from policies.retention.claims import Keys
from policies.retention.evaluate import may_read
from policies.retention.forms import Form, add, at, floor, scale
from policies.retention.fuzz import brute_last_reads, compare, draw
from policies.retention.ir import Relation
from policies.retention.lifetime import ceiling, coalesce, infer
from policies.retention.strides import Ending
from tests.policies.retention.samples import (
    KNOWN,
    claims_of,
    key_forms,
    rel,
    relations,
    relaxed,
)


@pytest.mark.parametrize("text", list(KNOWN))
def test_known_shapes_come_out_exactly(text: str) -> None:
    """The claims, in words."""
    lifetime = infer(rel(text))

    assert [str(claim) for claim in lifetime.claims] == KNOWN[text]
    assert lifetime.is_exact


def test_the_unsound_case_of_the_reference_is_sound() -> None:
    """A floor in a bound on the key is not a sink: query 27 still reads key 16."""
    relation = rel("k - q // 4 < 16 or q - k < 8")

    assert may_read(relation, 27, 16)
    assert infer(relation).last_read(16) is None


@pytest.mark.parametrize("sink", [1, 2, 3, 5, 7, 16, 17])
def test_sinks_of_any_alignment(sink: int) -> None:
    """The boundary between sink and window is where it is said to be."""
    lifetime = infer(rel(f"k < {sink} or q - k < 8"))

    assert lifetime.last_read(sink - 1) is None
    assert lifetime.last_read(sink) == sink + 7


def test_a_huge_window_costs_nothing() -> None:
    """Sizes are numbers, not loops."""
    lifetime = infer(rel("q - k < 9223372036854775807"), steps=0)

    assert lifetime.is_exact
    assert lifetime.last_read(5) == 2**63 - 2 + 5


def test_a_window_within_a_chunk_ends_with_either() -> None:
    """Two bounds of different shape, and a large modulus."""
    lifetime = infer(rel("q - k < 128 and q // 8192 == k // 8192"))

    assert lifetime.is_exact
    assert [lifetime.last_read(k) for k in (0, 8063, 8065, 8191)] == [127, 8190, 8191, 8191]


def test_nested_partitions_keep_their_summaries_longer() -> None:
    """The last key of each small chunk lives as long as the large one."""
    lifetime = infer(rel("q // 4 == k // 4 or (q // 16 == k // 16 and k % 4 == 3)"))

    assert [lifetime.last_read(k) for k in (0, 2, 3, 7, 14, 15)] == [3, 3, 15, 15, 15, 15]


@pytest.mark.parametrize(
    "text",
    ["false", "q - k < 4 and 8 < q - k", "q < k", "(q - k) % 3 == 3", "q % 4 == 1 and q % 2 == 0"],
)
def test_a_relation_without_readers_is_refused(text: str) -> None:
    """Even where that takes residues to see; the text is quoted."""
    with pytest.raises(RetentionError) as caught:
        infer(rel(text))

    assert caught.value.rule == "unsatisfiable"
    assert caught.value.term == str(rel(text))


@relaxed
@given(relations(1))
def test_every_key_has_one_claim(relation: Relation) -> None:
    """The claims part the key axis."""
    try:
        claims = infer(relation).claims
    except RetentionError:
        return

    for key in (*range(70), 10**6, 2**40):
        assert sum(key in claim.keys for claim in claims) == 1


@relaxed
@given(relations(1))
def test_random_relations_are_exact(relation: Relation) -> None:
    """On small relations no limit is met; shrinking gives the least counterexample."""
    seen_K = brute_last_reads(relation, 24, 6000)
    try:
        lifetime = infer(relation)
    except RetentionError:
        assert not (seen_K >= 0).any()
        return

    outcome = compare(lifetime, seen_K, 6000)
    assert outcome == "exact" or (outcome == "loose" and not lifetime.is_exact)


@pytest.mark.parametrize("steps", [0, 10, 100, 500, 2000])
def test_giving_way_is_sound(steps: int) -> None:
    """With next to no budget the answers are later, never earlier."""
    rng = Random(steps)
    outcomes = set()
    for _ in range(150):
        _, relation = draw(rng)
        seen_K = brute_last_reads(relation, 32, 600)
        try:
            lifetime = infer(relation, steps=steps)
        except RetentionError:
            assert not (seen_K >= 0).any()
            continue
        outcome = compare(lifetime, seen_K, 600)
        if outcome == "loose" and lifetime.is_exact:  # perhaps the readers come later
            outcome = compare(lifetime, brute_last_reads(relation, 32, 40_000), 40_000)
        assert outcome != "unsound", str(relation)
        assert (outcome, lifetime.is_exact) != ("loose", True), str(relation)
        outcomes.add((outcome, lifetime.is_exact))

    assert ("loose", False) in outcomes or steps >= 500
    assert ("exact", True) in outcomes


def test_a_spent_budget_is_said() -> None:
    """A loose lifetime does not pass for an exact one."""
    relation = rel("q % 13 <= k % 11 and q // 7 == k // 7")

    assert infer(relation).is_exact
    assert not infer(relation, steps=50).is_exact


def test_coalescing_joins_what_belongs_together() -> None:
    """Residues over one range, then ranges that meet; the values decide."""
    one, two = Form(key=1, constant=7), Form(constant=3)
    parts = [
        (Keys(0, 8, 2, (0,)), one),
        (Keys(0, 8, 2, (1,)), one),
        (Keys(8, 20), one),
        (Keys(20), two),
        (Keys(30, 40), Ending.NEVER),
    ]

    assert coalesce(parts) == [
        (Keys(0, 20), one),
        (Keys(20), two),
        (Keys(30, 40), Ending.NEVER),
    ]


@relaxed
@given(key_forms(), key_forms())
def test_a_ceiling_is_nowhere_below(a: Form, b: Form) -> None:
    """It is what is answered when cutting costs too much."""
    top = ceiling(a, b)

    assert top.is_linear
    for key in range(60):
        assert at(top, 0, key) >= max(at(a, 0, key), at(b, 0, key))


def test_shifted_chunks_need_one_claim() -> None:
    """Not one for each residue."""
    assert len(claims_of("(q + 5) // 8192 == (k + 5) // 8192")) == 1


def test_stairs_that_no_rule_fits_are_split() -> None:
    """A slope of two thirds, one claim for each residue."""
    lifetime = infer(rel("q + q + q <= k + k + 30"))
    form = floor(add(scale(Form(key=1), 2), Form(constant=30)), 3)

    assert lifetime.is_exact
    for key in range(31):
        assert lifetime.last_read(key) == at(form, 0, key)


def test_the_budget_is_all_that_bounds_the_work() -> None:
    """A relation that would need millions of steps returns after the given number."""
    budget = Budget(100)
    lifetime = infer(rel("q % 4093 <= k % 4091"), steps=budget.steps)

    assert not lifetime.is_exact
    assert len(lifetime.claims) == 1
