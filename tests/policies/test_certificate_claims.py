"""Deaths by enumeration, against the boundaries that people and the compiler have found."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.arena.table.certificates import describe_classes
from codec.errors import RetentionError
from policies.certificate_claims import MAX_PAGE_TOKENS, ClassRecord
from policies.retention.fuzz import draw
from policies.retention.plan import Plan, PlannedClass, compile_program
from tests.policies.retention.oracle import program_for
from tests.policies.retention.samples import KNOWN, rel
from tests.suites.certificate_logs import claim, described, window
from tests.suites.quiet import QUIET

FAR = 2**40
STRIDED = claim("forever", 3, None, modulus=8, residues=[1, 6])


def record(*claims: dict[str, Any], **fields: Any) -> ClassRecord:
    """A class with pages of 4 tokens."""
    return ClassRecord.read(described("some", *claims, **fields))


def death(found: ClassRecord, ordinal: int, most: int = 200) -> int | None:
    """The first boundary at which a page is dead."""
    return next((b for b in range(most) if found.is_dead(ordinal, b)), None)


@pytest.mark.parametrize("ordinal", [0, 1, 5])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 9])
def test_a_window_keeps_one_token_less_at_a_boundary(tokens: int, ordinal: int) -> None:
    """A page dies when its last key is too far away for the next query, and not before."""
    found = record(claim(window(tokens)))

    assert death(found, ordinal) == (ordinal + 1) * 4 + tokens - 1


def test_a_chunk_dies_as_a_whole() -> None:
    """Of 8 tokens: two pages that die at the same boundary."""
    chunk = {"step": 8, "slope": 8, "offset": 7, "shift": 0}
    found = record(claim(chunk))

    assert [death(found, ordinal) for ordinal in range(4)] == [8, 8, 16, 16]


def test_a_sink_page_lives_for_the_one_key_that_does() -> None:
    """Keys 0 to 4 are read forever: so are two pages, and no third."""
    found = record(claim("forever", 0, 5), claim(window(6), 5))

    assert [death(found, ordinal) for ordinal in range(3)] == [None, None, 17]


def test_keys_that_nothing_reads_keep_no_page() -> None:
    """Be it said of them, or nothing said at all."""
    found = record(claim("unread", 0, 4), claim("forever", 8))

    assert [death(found, ordinal) for ordinal in range(3)] == [0, 0, None]


def test_a_key_read_only_before_it_exists_is_not_read() -> None:
    """A rule may answer a last reader before the key itself."""
    found = record(claim({"step": 1, "slope": 0, "offset": 5, "shift": 0}))

    assert [death(found, ordinal) for ordinal in range(3)] == [6, 6, 0]


def test_the_shift_moves_the_blocks() -> None:
    """Blocks of 8 that begin 2 positions early."""
    found = record(claim({"step": 8, "slope": 8, "offset": 5, "shift": 2}))

    assert [death(found, ordinal) for ordinal in range(4)] == [6, 14, 14, 22]


def test_a_ranked_page_counts_members() -> None:
    """Page 0 of the positions 6, 9, 14, 17, 22, ... holds the first four."""
    found = record(STRIDED, ranked=True)

    assert list(found.keys_of(0)) == [6, 9, 14, 17]
    assert list(found.keys_of(1)) == [22, 25, 30, 33]
    assert (found.tokens_of(0), found.tokens_of(1)) == ((6, 18), (22, 34))
    assert not found.is_dead(0, FAR)


def test_a_ranked_page_ends_with_its_claim() -> None:
    """Members behind the claim's end are nobody's; a page of none of them is dead."""
    found = record(claim(window(6), 3, 20, modulus=8, residues=[1, 6]), ranked=True)

    assert list(found.keys_of(0)) == [6, 9, 14, 17]
    assert list(found.keys_of(1)) == []
    assert (death(found, 0), death(found, 1)) == (23, 0)
    assert list(found.written(17, 40)) == [0]
    assert list(found.written(18, 40)) == []


def test_the_other_kinds_never_die_in_a_head() -> None:
    """They are replaced, or go with their request."""
    state = record(kind="recurrent", page_tokens=1, stop_page=1)
    encoder = record(claim("forever", 0, 8), kind="cross", stop_page=2)

    assert not state.is_dead(0, FAR)
    assert not encoder.is_dead(1, FAR)
    assert [state.has_page(ordinal) for ordinal in (0, 1)] == [True, False]
    assert [encoder.has_page(ordinal) for ordinal in (1, 2)] == [True, False]


def test_a_class_has_the_pages_from_first_to_stop() -> None:
    """And none beyond the last position."""
    found = record(claim("forever"), first_page=2, stop_page=5)

    assert [o for o in range(8) if found.has_page(o)] == [2, 3, 4]
    assert not record(claim("forever")).has_page(2**48 + 1)


def test_what_a_step_writes_are_the_pages_of_its_positions() -> None:
    """In whole pages, or in members of a ranked class."""
    dense, ranked = record(claim("forever"), first_page=1), record(STRIDED, ranked=True)

    assert dense.written(0, 3) == range(0)
    assert list(dense.written(3, 5)) == [1]
    assert list(dense.written(7, 13)) == [1, 2, 3]
    assert list(ranked.written(0, 6)) == []
    assert list(ranked.written(0, 7)) == [0]
    assert list(ranked.written(17, 23)) == [0, 1]
    assert list(ranked.written(18, 22)) == []


def test_the_first_key_that_is_still_read_is_found() -> None:
    """Of those that the step wrote, on the page."""
    found = record(claim(window(6)))

    assert found.first_read(1, 4, 10) == 5
    assert found.first_read(1, 6, 10) == 6
    assert found.first_read(1, 4, 13) is None
    assert found.first_read(2, 4, 6) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": 3},
        {"kind": "convolution"},
        {"kind": "convolution", "page_tokens": 1, "stop_page": 1},
        {"kind": ["attention"]},
        {"page_tokens": 0},
        {"page_tokens": MAX_PAGE_TOKENS + 1},
        {"page_tokens": True},
        {"first_page": -1},
        {"stop_page": -1},
        {"ranked": 1},
        {"ranked": True, "claims": []},
        {"claims": {}},
        {"claims": [1]},
        {"claims": [{"start": 0}]},
        {"extra": 0},
        {"kind": "recurrent"},
        {"kind": "recurrent", "page_tokens": 1, "stop_page": 2},
        {"kind": "recurrent", "page_tokens": 1, "stop_page": 1, "first_page": 1},
        {"kind": "cross"},
        {"kind": "cross", "stop_page": 2, "ranked": True, "claims": [claim("forever")]},
        *(
            {"claims": [claim(**{"rule": "forever", **bad})]}
            for bad in (
                {"start": -1},
                {"stop": -1},
                {"stop": 1.5},
                {"modulus": 0},
                {"modulus": 1.5},
                {"modulus": None},
                {"residues": []},
                {"residues": [1]},
                {"residues": [-1]},
                {"residues": 0},
                {"modulus": 2, "residues": [1, 0]},
                {"modulus": 2, "residues": [0, 0]},
                {"rule": "sometimes"},
                {"rule": None},
                {"rule": {"step": 1}},
                {"rule": {**window(4), "step": 0}},
                {"rule": {**window(4), "shift": 1}},
                {"rule": {**window(4), "shift": -1}},
                {"rule": {**window(4), "slope": 2**63}},
                {"rule": {**window(4), "offset": 1.0}},
            )
        ),
    ],
)
def test_what_is_no_class_is_refused(changes: dict[str, Any]) -> None:
    """With a sentence; never with another exception."""
    with pytest.raises(ValueError, match=r"class|not "):
        ClassRecord.read({**described("some", claim("forever")), **changes})


def plans(relation: Any, page_tokens: int) -> Plan | None:
    """The plan of a relation, if pages of that size can hold it."""
    try:
        return compile_program(program_for(relation, page_tokens))
    except RetentionError:
        return None


def disagreement(plan: Plan) -> str:
    """Where enumeration and the compiler's own arithmetic differ; empty if nowhere."""
    described_classes = json.loads(json.dumps(describe_classes(plan)))
    for found, row in zip(plan.classes, described_classes, strict=True):
        ours = ClassRecord.read(row)
        for ordinal in range(found.region.first_page, found.region.first_page + 12):
            if found.region.stop_page is not None and ordinal >= found.region.stop_page:
                break
            if why := _page_disagreement(found, ours, ordinal):
                return f"{found.name}, page {ordinal}: {why}"
        for key in range(40):
            page = found.page_of(key)
            if page is not None and page not in ours.written(key, key + 1):
                return f"{found.name}: key {key} is written to {page}"
    return ""


def _page_disagreement(found: PlannedClass, ours: ClassRecord, ordinal: int) -> str:
    theirs = found.death(ordinal)
    if ours.tokens_of(ordinal) != found.tokens_of(ordinal):
        return f"spans {found.tokens_of(ordinal)}"
    if theirs is None:
        return "never dies" if ours.is_dead(ordinal, FAR) else ""
    if not ours.is_dead(ordinal, theirs):
        return f"dies at {theirs}"
    return f"does not die before {theirs}" if theirs and ours.is_dead(ordinal, theirs - 1) else ""


@pytest.mark.parametrize("text", KNOWN)
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_known_shapes_die_when_the_plan_says(text: str, page_tokens: int) -> None:
    """Window, chunk, sink, forever, strided and ranked: at that boundary, and not before."""
    plan = plans(rel(text), page_tokens)

    assert plan is None or disagreement(plan) == ""


@QUIET
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 4, 8]))
def test_random_shapes_die_when_the_plan_says(seed: int, page_tokens: int) -> None:
    """Two ways to find a death, which share no code, find the same."""
    plan = plans(draw(Random(seed))[1], page_tokens)

    assert plan is None or disagreement(plan) == ""
