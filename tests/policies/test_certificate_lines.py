"""Lines of a certificate log: canonical, numbered, chained, and nothing else gets through."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import CertificateError
from policies.certificate_lines import FIELDS, MAX_LINE_BYTES, MAX_NUMBER, Chain, shown
from tests.suites.certificate_logs import Event, begin, chained, everything
from tests.suites.quiet import QUIET

#: What a field may be instead of what it should be.
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.just("x" * 300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def refusal(line: bytes, *before: bytes) -> str:
    """Why a line does not follow."""
    chain = Chain()
    for earlier in before:
        chain.follow(earlier)
    digest = chain.digest
    with pytest.raises(CertificateError) as caught:
        chain.follow(line)
    assert caught.value.line == len(before) + 1
    assert (chain.num_lines, chain.digest) == (len(before), digest)
    return caught.value.why


def line(**changes: Any) -> bytes:
    """The line of a request's beginning, as first line; a change to None takes a field out."""
    record: dict[str, Any] = {"event": "open", "n": 0, "prev": "0" * 64, "request": 1} | changes
    kept = {name: value for name, value in record.items() if value is not None}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def test_a_line_yields_its_event_and_fields() -> None:
    """Without what only places it; and the chain moves on."""
    chain = Chain()

    assert chain.follow(line()) == ("open", {"request": 1})
    assert chain.num_lines == 1
    assert chain.digest == hashlib.sha256(line()[:-1]).hexdigest()


def test_the_sample_has_every_event() -> None:
    """So that tests which go over it go over everything."""
    assert {event for event, _ in everything()} == FIELDS.keys()


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (line()[:-1], "torn"),
        (b"", "torn"),
        (b"\n", "not JSON"),
        (b"{\n", "not JSON"),
        (b"\xff\xfe\n", "not JSON"),
        (b"[1]\n", "need an object"),
        (b'"begin"\n', "need an object"),
        (line()[:-1] + b" \n", "canonical"),
        (line()[:-1] + b"\r\n", "canonical"),
        (b"\xef\xbb\xbf" + line(), "canonical"),
        (line().replace(b",", b", "), "canonical"),
        (line().replace(b"}", b',"request":1}'), "canonical"),
        (line().replace(b":1", b":1.0"), "request must be a number"),
        (line().replace(b":1", b":-0"), "canonical"),
        (line().replace(b":1", b":NaN"), "request must be a number"),
        (line().replace(b":1", b":" + b"9" * 5000), "not JSON"),
        (line().replace(b":1", b":" + b"[" * 100_000), "not JSON"),
        (line().replace(b":1", b":" + b"[" * 400 + b"]" * 400), "request must be a number"),
        (line(pad="x" * MAX_LINE_BYTES), "longer than"),
        (line(n=1), "need n=0, got 1"),
        (line(n=False), "need n=0, got False"),
        (line(n=None), "need n=0, got None"),
        (line(prev="0" * 63), "prev"),
        (line(prev=None), "prev"),
        (line(event="close"), "no such event: 'close'"),
        (line(event=["open"]), "no such event"),
        (line(event=None), "no such event"),
        (line(extra=1), "too many or too few: ['extra']"),
        (line(request=None), "too many or too few: ['request']"),
        (line(request=True), "request must be a number, got True"),
        (line(request=-1), "request must be a number"),
        (line(request=MAX_NUMBER + 1), "request must be a number"),
    ],
)
def test_a_damaged_line_is_refused_for_what_it_is(damaged: bytes, why: str) -> None:
    """Bytes first, then place, then fields; never another exception."""
    assert why in refusal(damaged)


def test_the_chain_holds_lines_together() -> None:
    """A second line that chains on anything but the first is not the second."""
    assert "prev" in refusal(line(n=1), line())
    digest = hashlib.sha256(line()[:-1]).hexdigest()
    chain = Chain()
    chain.follow(line())
    chain.follow(line(n=1, prev=digest))
    assert chain.num_lines == 2


def _events_by_name() -> dict[str, Event]:
    return {event[0]: event for event in everything()}


@QUIET
@given(st.data())
def test_no_field_may_be_something_else(data: st.DataObject) -> None:
    """Whatever is in a field: its line is refused by name, or was right after all."""
    event, fields = _events_by_name()[data.draw(st.sampled_from(sorted(FIELDS)))]
    name = data.draw(st.sampled_from(sorted(fields)))
    junk = data.draw(JUNK)
    lines = chained([(event, {**fields, name: junk})])
    what, check = FIELDS[event][name]

    try:
        Chain().follow(lines[0])
    except CertificateError as error:
        assert f"{name} must be {what}" in error.why  # noqa: PT017 - either way is right
        assert not check(junk)
    else:
        assert check(junk)


@pytest.mark.parametrize(
    ("event", "name", "junk"),
    [
        ("begin", "format", "kvfabric-certificates/2"),
        ("begin", "arena", "0123456789ABCDEF" * 2),
        ("begin", "arena", "ab" * 15),
        ("begin", "plan", ""),
        ("begin", "plan", "ab" * 65),
        ("begin", "classes", [1]),
        ("commit", "domain", ""),
        ("commit", "domain", "x" * 201),
        ("commit", "domain", "a\nb"),
        ("commit", "live_from", [0, -1]),
        ("reserve", "pages", [[0, 0, 0]]),
        ("reserve", "pages", [[0, 0, 0, 1.5]]),
        ("pin", "page", [0, 0]),
        ("quarantine", "pages", [[0, 0, 0, 1]]),
        ("recover", "fences", {"a": -1}),
        ("recover", "fences", {"": 1}),
        ("reuse", "why", "because"),
        ("reuse", "why", ["window"]),
        ("reuse", "tokens", [4]),
        ("reuse", "done", [["a", 1]]),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused(event: str, name: str, junk: Any) -> None:
    """Each check of a field can fail."""
    fields = _events_by_name()[event][1]

    assert f"{event}: {name} must be" in refusal(chained([(event, {**fields, name: junk})])[0])


def test_a_value_is_shown_short_and_in_ascii() -> None:
    """Whatever a file holds, a message is one short line."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]

    assert shown("a\nb\ud800") == r"'a\nb\ud800'"
    assert len(shown("x" * 1000)) == 60
    assert "deep" in shown(deep)


def test_the_first_line_of_the_sample_is_well_formed() -> None:
    """The tests above spoil lines that are right before."""
    assert Chain().follow(chained([begin()])[0])[0] == "begin"
