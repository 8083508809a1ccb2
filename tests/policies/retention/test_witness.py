"""The checker: it accepts what is right, rejects what is not, and stands alone."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from codec.errors import RetentionError
from policies.retention import witness as witness_module
from policies.retention.claims import Claim, Forever, Keys, Unread, Until
from policies.retention.fuzz import draw
from policies.retention.lifetime import infer
from policies.retention.witness import MAX_PAIRS, Witness, check_witness
from tests.policies.retention.samples import KNOWN, rel

SOURCE = Path(str(witness_module.__file__)).read_text()


def witness_of(*claims: Claim, is_exact: bool = True, recurrence: int = 1) -> Witness:
    """A witness on a small grid."""
    return Witness(claims, ((0, 20),), 100, recurrence, is_exact)


WINDOW = rel("q - k < 8 or k < 4")
RIGHT = (Claim(Keys(0, 4), Forever()), Claim(Keys(4), Until(1, 1, 7)))


@pytest.mark.parametrize("text", list(KNOWN))
def test_witnesses_of_known_shapes_are_accepted(text: str) -> None:
    """On the grid that inference chose."""
    relation = rel(text)

    verdict = check_witness(relation, infer(relation).witness)

    assert verdict.accepted, verdict.reason
    assert verdict.num_pairs > 0


def test_witnesses_of_random_relations_are_accepted() -> None:
    """Exact and loose ones."""
    rng = Random(11)
    for _ in range(250):
        _, relation = draw(rng)
        try:
            lifetime = infer(relation, steps=4000)
        except RetentionError:
            continue
        verdict = check_witness(relation, lifetime.witness)
        assert verdict.accepted, f"{relation}: {verdict.reason}"


WRONG: list[tuple[str, tuple[Claim, ...], str]] = [
    ("too early", (RIGHT[0], Claim(Keys(4), Until(1, 1, 6))), "is read by query"),
    ("too late", (RIGHT[0], Claim(Keys(4), Until(1, 1, 8))), "last read is"),
    ("sink too short", (Claim(Keys(0, 3), Forever()), Claim(Keys(3), Until(1, 1, 7))), "key 3"),
    ("sink too long", (Claim(Keys(0, 5), Forever()), Claim(Keys(5), Until(1, 1, 7))), "forever"),
    ("never", (RIGHT[0], Claim(Keys(4), Unread())), "is read by query"),
    ("a gap", (RIGHT[0], Claim(Keys(5), Until(1, 1, 7))), "key 4 is in 0 claims"),
    ("an overlap", (RIGHT[0], Claim(Keys(3), Until(1, 1, 7))), "key 3 is in 2 claims"),
    ("a residue", (RIGHT[0], Claim(Keys(4, None, 2), Until(1, 1, 7))), "key 5 is in 0 claims"),
]


@pytest.mark.parametrize(("claims", "reason"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_claims_are_rejected(claims: tuple[Claim, ...], reason: str) -> None:
    """With the first key that shows it."""
    assert check_witness(WINDOW, witness_of(*RIGHT)).accepted

    verdict = check_witness(WINDOW, witness_of(*claims))

    assert not verdict.accepted
    assert reason in verdict.reason


def test_the_unsound_claim_of_the_reference_is_rejected() -> None:
    """Sink 16 and window 8, where a floor division moves the bound."""
    relation = rel("k - q // 4 < 16 or q - k < 8")
    claims = (Claim(Keys(0, 16), Forever()), Claim(Keys(16), Until(1, 1, 7)))

    verdict = check_witness(relation, witness_of(*claims, is_exact=False))

    assert not verdict.accepted
    assert "key 16 is read by query" in verdict.reason


def test_later_claims_pass_if_they_are_not_said_to_be_exact() -> None:
    """Sound is enough for a loose lifetime."""
    late = (Claim(Keys(), Forever()),)

    assert not check_witness(WINDOW, witness_of(*late)).accepted
    assert check_witness(WINDOW, witness_of(*late, is_exact=False)).accepted


def test_rare_readers_are_waited_for() -> None:
    """A key read every seventh query is read in any seven, not in any six."""
    relation = rel("q % 7 == 3")
    claims = (Claim(Keys(), Forever()),)

    assert check_witness(relation, witness_of(*claims, recurrence=7)).accepted
    assert not check_witness(relation, witness_of(*claims, recurrence=2)).accepted


@pytest.mark.parametrize("change", ["shorter", "longer", "dropped"])
def test_any_change_to_a_claim_is_noticed(change: str) -> None:
    """One claim of each known shape at a time, where the grid reaches."""
    for text in KNOWN:
        relation = rel(text)
        witness = infer(relation).witness
        for index, claim in enumerate(witness.claims):
            claims = list(witness.claims)
            if change == "dropped":
                del claims[index]
            elif not isinstance(claim.rule, Until):
                continue
            else:
                by = -1 if change == "shorter" else 1
                rule = replace(claim.rule, offset=claim.rule.offset + by)
                claims[index] = replace(claim, rule=rule)
            assert not check_witness(relation, replace(witness, claims=tuple(claims))).accepted


@pytest.mark.parametrize(
    ("ranges", "num_queries"),
    [(((0, 20),), 0), ((), 10), (((0, 4), (2, 6)), 10), (((0, 2**20),), MAX_PAIRS)],
)
def test_impossible_grids_are_rejected(
    ranges: tuple[tuple[int, int], ...], num_queries: int
) -> None:
    """Empty, overlapping, or too large to try."""
    witness = Witness(RIGHT, ranges, num_queries, 1, is_exact=True)

    assert not check_witness(WINDOW, witness).accepted


def test_the_checker_is_short() -> None:
    """Under 150 lines, so that it can be read in one sitting."""
    assert SOURCE.count("\n") < 150


def test_the_checker_knows_nothing_of_inference() -> None:
    """It imports the language and the meaning of a claim."""
    nodes = ast.walk(ast.parse(SOURCE))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    ours = {name for name in modules if name.startswith("policies")}

    assert ours == {
        "policies.retention.claims",
        "policies.retention.evaluate",
        "policies.retention.ir",
    }
