"""The text form: it parses and prints, and what is not of the grammar is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import RetentionError
from policies.retention.ir import MAX_DEPTH, Relation
from policies.retention.text import MAX_TEXT, parse_relation
from tests.policies.retention.samples import KNOWN, relations, relaxed


@relaxed
@given(relations())
def test_printed_text_parses_back(relation: Relation) -> None:
    """Equal, not just equivalent."""
    assert parse_relation(str(relation)) == relation


@pytest.mark.parametrize("text", list(KNOWN))
def test_plain_text_prints_as_it_was_written(text: str) -> None:
    """No parenthesis is added or lost."""
    assert str(parse_relation(text)) == text


@pytest.mark.parametrize(
    ("loose", "plain"),
    [
        ("  q-k<1024or k<4 ", "q - k < 1024 or k < 4"),
        ("((q))-((k))<3", "q - k < 3"),
        ("q-(k-1)<3", "q - (k - 1) < 3"),
        ("q%4//2==1", "q % 4 // 2 == 1"),
        ("true and(k<2 or k==5)", "true and (k < 2 or k == 5)"),
        ("(q-k)%3<=-1", "(q - k) % 3 <= -1"),
        ("q--5<k", "q - (-5) < k"),
    ],
)
def test_spaces_and_extra_parentheses_do_not_matter(loose: str, plain: str) -> None:
    """Nor does tight spacing."""
    assert str(parse_relation(loose)) == plain


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "q",
        "q <",
        "< 3",
        "q < 3 or",
        "and k < 3",
        "q * k < 3",
        "q > 3",
        "q >= 3",
        "q != 3",
        "not q < 3",
        "(q < 3",
        "q < 3)",
        "q - k < 3 < 4",
        "k % (3) < 2",
        "k % q < 2",
        "x < 3",
        "q < 3 k < 4",
        "q < 3 ;",
        "q < 3.5",
        "q < 1e3",
        "q < ٣",
        "(q < 3) < 4",
        "true < 3",
        "q < " + "9" * 21,
        "(" * (MAX_DEPTH + 1) + "q < 3" + ")" * (MAX_DEPTH + 1),
        "q" + " " * MAX_TEXT + "< 3",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    """With what was expected and what was found."""
    with pytest.raises(RetentionError) as caught:
        parse_relation(text)

    assert caught.value.rule == "syntax"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("q // 0 < 3", "bad-divisor"),
        ("q % 0 == 0", "bad-modulus"),
        ("(q - k) % -3 == 0", "bad-modulus"),
        ("q < 9223372036854775808", "overflow"),
        ("9223372036854775807 + (q - k) < -1", "overflow"),
    ],
)
def test_text_of_impossible_terms_is_refused_for_what_it_is(text: str, rule: str) -> None:
    """The grammar admits them, the language does not."""
    with pytest.raises(RetentionError) as caught:
        parse_relation(text)

    assert caught.value.rule == rule


@relaxed
@given(st.text(alphabet="qk0189 ()<=+-/%andortruefalse", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Never another exception."""
    try:
        relation = parse_relation(text)
    except RetentionError:
        return
    assert parse_relation(str(relation)) == relation
