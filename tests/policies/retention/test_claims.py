"""Sets of keys and rules, against plain enumeration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.retention.claims import Claim, Forever, Keys, Rule, Unread, Until, last_read
from policies.retention.ir import MAX_POSITION
from tests.policies.retention.samples import key_sets, relaxed, rules

SPAN = range(130)


def members(keys: Keys) -> list[int]:
    """The set's members below the end of `SPAN`, the slow way."""
    stop = SPAN.stop if keys.stop is None else keys.stop
    return [k for k in SPAN if keys.start <= k < stop and k % keys.modulus in keys.residues]


@pytest.mark.parametrize(
    "fields",
    [
        {"start": -1},
        {"start": 3, "stop": 3},
        {"modulus": 0},
        {"modulus": 2, "residues": (2,)},
        {"modulus": 2, "residues": (-1,)},
        {"modulus": 3, "residues": (1, 0)},
        {"modulus": 3, "residues": (1, 1)},
        {"residues": ()},
    ],
)
def test_impossible_sets_cannot_be_built(fields: dict[str, object]) -> None:
    """Empty ranges, residues out of range or order."""
    with pytest.raises(ValueError, match="need"):
        Keys(**fields)


@relaxed
@given(key_sets(), st.integers(0, 120), st.integers(0, 120))
def test_counting_agrees_with_enumeration(keys: Keys, a: int, b: int) -> None:
    """Membership, counts, and the members themselves."""
    found = members(keys)

    assert [k for k in SPAN if k in keys] == found
    assert keys.below(a) == sum(k < a for k in found)
    assert keys.between(min(a, b), max(a, b)) == sum(min(a, b) <= k < max(a, b) for k in found)
    assert list(keys.walk(a, SPAN.stop)) == [k for k in found if k >= a]
    assert keys.last_before(a) == max((k for k in found if k < a), default=None)
    assert [keys.select(i) for i in range(len(found))] == found


@relaxed
@given(key_sets(), st.integers(0, 60), st.none() | st.integers(0, 120))
def test_clipping_agrees_with_enumeration(keys: Keys, start: int, stop: int | None) -> None:
    """Nothing is left exactly if no member is inside."""
    part = keys.clip(start, stop)

    end = SPAN.stop if stop is None else stop
    wanted = [k for k in members(keys) if start <= k < end]
    assert (members(part) if part else []) == wanted


@relaxed
@given(key_sets(), rules(), st.integers(0, 110))
def test_live_keys_are_those_read_later(keys: Keys, rule: Rule, boundary: int) -> None:
    """Stored before the boundary, read at or after it."""
    claim = Claim(keys, rule)
    live = claim.live_keys(boundary)

    def is_live(key: int) -> bool:
        last = claim.last_read(key)
        return key < boundary and (last is None or last >= boundary)

    assert (members(live) if live else []) == [k for k in members(keys) if is_live(k)]


@pytest.mark.parametrize(
    ("rule", "boundary", "wanted"),
    [
        (Until(1, 0, 30), 30, list(range(30))),
        (Until(1, 0, 30), 31, []),
        (Until(1, 1, 7), 30, list(range(23, 30))),
        (Until(8, 8, 7), 24, []),
        (Until(8, 8, 7), 25, [24]),
        (Until(1, -1, 40), 30, list(range(11))),
        (Forever(), 3, [0, 1, 2]),
    ],
)
def test_live_keys_at_the_edge(rule: Rule, boundary: int, wanted: list[int]) -> None:
    """A key whose last reader is the next query is live; one boundary later it is not."""
    live = Claim(Keys(), rule).live_keys(boundary)

    assert (members(live) if live else []) == wanted


def test_a_last_reader_before_the_key_is_none() -> None:
    """Only later queries, and the key's own, can read it."""
    claim = Claim(Keys(), Until(1, 0, 5))

    assert [claim.last_read(k) for k in (4, 5, 6)] == [5, 5, -1]
    assert Claim(Keys(), Unread()).last_read(0) == -1
    assert Claim(Keys(), Forever()).last_read(0) is None


@pytest.mark.parametrize(
    ("rule", "window", "chunk"),
    [
        (Until(1, 1, 0), 1, None),
        (Until(1, 1, 127), 128, None),
        (Until(16, 16, 15), None, 16),
        (Until(16, 16, 31), None, None),
        (Until(16, 16, 15, 3), None, None),
        (Until(1, 0, 9), None, None),
    ],
)
def test_windows_and_chunks_are_recognized(
    rule: Until, window: int | None, chunk: int | None
) -> None:
    """And nothing else is taken for one."""
    assert (rule.window_tokens, rule.chunk_tokens) == (window, chunk)


@pytest.mark.parametrize(("step", "shift"), [(0, 0), (-2, 0), (4, 4), (4, -1)])
def test_impossible_rules_cannot_be_built(step: int, shift: int) -> None:
    """The shift is a remainder of the step."""
    with pytest.raises(ValueError, match="shift"):
        Until(step, 1, 0, shift)


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        (Claim(Keys(), Until(1, 1, 7)), "k in [0, ...): window 8"),
        (Claim(Keys(2, 9), Until(4, 4, 3)), "k in [2, 9): chunk 4"),
        (Claim(Keys(0, None, 4, (1, 3)), Forever()), "k in [0, ...), k % 4 in {1,3}: forever"),
        (Claim(Keys(), Until(1, 0, 7)), "k in [0, ...): until query 7"),
        (Claim(Keys(), Until(1, 2, -1)), "k in [0, ...): until query 2*k + -1"),
        (Claim(Keys(), Until(8, 3, 1, 2)), "k in [0, ...): until query 3*((k + 2) // 8) + 1"),
        (Claim(Keys(4), Unread()), "k in [4, ...): never read"),
    ],
)
def test_claims_read_as_sentences(claim: Claim, text: str) -> None:
    """Reports and refusals quote them."""
    assert str(claim) == text


def test_the_claim_of_a_key_answers_for_it() -> None:
    """Positions that do not exist are refused."""
    claims = (Claim(Keys(0, 4), Forever()), Claim(Keys(4), Until(1, 1, 7)))

    assert [last_read(claims, k) for k in (0, 3, 4)] == [None, None, 11]
    for key in (-1, MAX_POSITION + 1):
        with pytest.raises(ValueError, match="position"):
            last_read(claims, key)
