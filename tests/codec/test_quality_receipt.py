"""Quality receipts: the same after a round trip, and nothing else than what was written is read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.errors import CodecError, CorruptBlobError, UnsupportedVersionError
from codec.identity import digest
from codec.quality_receipt import (
    MAX_RECEIPT_BYTES,
    NOT_JUDGED,
    Interval,
    QualityReceipt,
    SetResult,
    Verdict,
)
from tests.codec.quality_samples import a_receipt, a_set, flat

finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def intervals(draw: st.DrawFn, least: float, most: float) -> Interval:
    """Any interval within ``[least, most]``."""
    low, value, high = sorted(draw(st.lists(st.floats(least, most), min_size=3, max_size=3)))
    return Interval(value, low, high)


@st.composite
def set_results(draw: st.DrawFn, name: str) -> SetResult:
    """Any legal result."""
    has_keys = draw(st.booleans())
    share = intervals(0.0, 1.0)
    return SetResult(
        name=name,
        num_samples=draw(st.integers(1, 10**9)),
        num_tokens=draw(st.integers(1, 10**9)),
        mean_kl=draw(intervals(0.0, 1e300)),
        top1=draw(share),
        dppl_pct=draw(intervals(-100.0, 1e300)),
        greedy_match=draw(st.none() | share),
        retrieval=draw(share) if has_keys else None,
        retrieval_reference=draw(share) if has_keys else None,
    )


@st.composite
def receipts(draw: st.DrawFn) -> QualityReceipt:
    """Any legal receipt."""
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3, unique=True))
    reasons = draw(st.lists(st.text(), max_size=2))
    return a_receipt(
        sets=tuple(draw(set_results(name)) for name in names),
        pooled=draw(set_results("pooled")),
        target=draw(st.floats(1e-300, 1e300)),
        limits=tuple(draw(st.dictionaries(st.text(), finite, max_size=3)).items()),
        verdict=Verdict(not reasons, tuple(reasons)),
        date=draw(st.dates()).isoformat(),
        profile=draw(st.text(min_size=1)),
    )


@given(receipts())
@settings(deadline=None)
def test_a_receipt_comes_back_as_it_was(receipt: QualityReceipt) -> None:
    """Every field, and so the digest and the text."""
    copy = QualityReceipt.from_json(receipt.to_json())

    assert copy == receipt
    assert copy.digest() == receipt.digest()
    assert copy.to_json() == receipt.to_json()
    assert QualityReceipt.from_json(receipt.to_json().encode()) == receipt


def test_whole_numbers_are_written_as_the_fractions_they_stand_for() -> None:
    """A target of 8 and one of 8.0 are the same receipt, byte for byte."""
    assert a_receipt(target=8).to_json() == a_receipt(target=8.0).to_json()
    assert type(Interval(1, 0, 2).high) is float


def test_the_order_of_limits_does_not_count() -> None:
    """They are named."""
    one = a_receipt(limits=(("a", 1.0), ("b", 2.0)))

    assert one == a_receipt(limits=(("b", 2.0), ("a", 1.0)))


def test_every_field_is_in_the_digest() -> None:
    """Another figure, name, order of stages or verdict is another receipt."""
    receipt = a_receipt()
    changes: dict[str, Any] = {
        "codec_ids": receipt.codec_ids[::-1],
        "calibrations": ("", receipt.calibrations[1]),
        "namespace": "ab" * 16,
        "stages": receipt.stages[::-1],
        "profile": "another",
        "target": 9.0,
        "net_ratio": 9.0,
        "evaluation_set": "ab" * 16,
        "sets": receipt.sets[:1],
        "pooled": a_set("pooled", num_tokens=1),
        "tool_version": "9",
        "date": "2026-12-01",
        "limits": (),
        "verdict": NOT_JUDGED,
    }
    assert {field.name for field in dataclasses.fields(receipt)} == {*changes, "format_version"}

    digests = {
        dataclasses.replace(receipt, **{name: value}).digest() for name, value in changes.items()
    }

    assert len(digests | {receipt.digest()}) == len(changes) + 1


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [(1, 2, 3), (3, 1, 2), (math.nan, 0, 1), (0, -math.inf, 1), (0, 0, math.inf), (0, math.nan, 1)],
)
def test_an_interval_holds_its_value_and_is_finite(value: float, low: float, high: float) -> None:
    """Ends are in order."""
    with pytest.raises(ValueError, match="low <= value <= high"):
        Interval(value, low, high)


def test_an_interval_can_be_widened_by_what_rounding_took() -> None:
    """The mean of equal numbers may differ from them in the last digit."""
    assert Interval.spanning(0.1, 0.1000001, 0.2) == Interval(0.1, 0.1, 0.2)
    assert Interval.spanning(0.3, 0.1, 0.2999999) == Interval(0.3, 0.1, 0.3)


BAD_SETS: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "needs a name"),
    ({"num_samples": 0}, "at least one sample"),
    ({"num_tokens": 0}, "and one token"),
    ({"mean_kl": Interval(0.0, -0.1, 0.1)}, "mean_kl must be in"),
    ({"top1": Interval(1.0, 1.0, 1.1)}, "top1 must be in"),
    ({"dppl_pct": flat(-101)}, "dppl_pct must be in"),
    ({"greedy_match": flat(2)}, "greedy_match must be in"),
    ({"retrieval": flat(0.5)}, "come together"),
    ({"retrieval_reference": flat(0.5)}, "come together"),
    ({"retrieval": flat(2), "retrieval_reference": flat(0.5)}, "retrieval must be in"),
    ({"retrieval": flat(0.5), "retrieval_reference": flat(2)}, "retrieval_reference must be in"),
]


@pytest.mark.parametrize(("changes", "why"), BAD_SETS)
def test_figures_out_of_range_are_refused(changes: dict[str, Any], why: str) -> None:
    """A share over one, or a divergence under zero, is a mistake of whoever measured."""
    with pytest.raises(ValueError, match=why):
        a_set(**{"name": "a", "retrieval": None, "retrieval_reference": None} | changes)


BAD_RECEIPTS: list[tuple[dict[str, Any], str]] = [
    ({"codec_ids": ()}, "different codecs"),
    ({"codec_ids": ("0a" * 16, "0a" * 16)}, "different codecs"),
    ({"codec_ids": ("0A" * 16, "0b" * 16)}, "lower-case hex"),
    ({"codec_ids": ("0a" * 15, "0b" * 16)}, "32 lower-case hex"),
    ({"codec_ids": ("0a" * 16,)}, "calibration and a stage"),
    ({"calibrations": ("0a" * 16,)}, "calibration and a stage"),
    ({"calibrations": ("zz" * 16, "")}, "hex"),
    ({"stages": ("one",)}, "calibration and a stage"),
    ({"stages": ("one", "")}, "must not be empty"),
    ({"namespace": ""}, "hex"),
    ({"evaluation_set": "x"}, "hex"),
    ({"profile": ""}, "must not be empty"),
    ({"tool_version": ""}, "must not be empty"),
    ({"target": 0}, "target must be positive"),
    ({"target": math.inf}, "target must be positive"),
    ({"net_ratio": math.nan}, "net_ratio must be positive"),
    ({"net_ratio": -1}, "net_ratio must be positive"),
    ({"sets": ()}, "different names"),
    ({"sets": (a_set("a"), a_set("a"))}, "different names"),
    ({"date": "yesterday"}, "isoformat"),
    ({"date": "20261130"}, "YYYY-MM-DD"),
    ({"limits": (("a", math.nan),)}, "limits must be finite"),
    ({"limits": (("a", 1.0), ("a", 2.0))}, "named once"),
    ({"format_version": 2}, "format_version must be 1"),
]


@pytest.mark.parametrize(("changes", "why"), BAD_RECEIPTS)
def test_a_receipt_that_says_nothing_clear_cannot_be_made(
    changes: dict[str, Any], why: str
) -> None:
    """Whoever holds one can rely on it."""
    with pytest.raises(ValueError, match=why):
        a_receipt(**changes)


@pytest.mark.parametrize("verdict", [(True, ("why",)), (False, ())])
def test_a_verdict_has_reasons_exactly_where_it_does_not_pass(
    verdict: tuple[bool, tuple[str, ...]],
) -> None:
    """Neither a pass with objections nor a refusal without."""
    with pytest.raises(ValueError, match="reasons"):
        Verdict(*verdict)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value within ``value``, itself left out."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [found for key, item in items for found in ((*path, key), *places(item, (*path, key)))]


def changed(path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> str:
    """The file of `a_receipt` with ``change(parent, key)`` done at ``path``."""
    file = json.loads(a_receipt().to_json())
    parent = file
    for key in path[:-1]:
        parent = parent[key]
    change(parent, path[-1])
    return json.dumps(file)


PLACES = places(json.loads(a_receipt().to_json()))
FIELDS = [path for path in PLACES if isinstance(path[-1], str)]
NUMBERS = [path for path in PLACES if path[-1] in {"value", "low", "high", "target", "net_ratio"}]


def refused(text: str | bytes) -> None:
    """Reading it ends in a typed error."""
    with pytest.raises(CodecError):
        QualityReceipt.from_json(text)


@pytest.mark.parametrize("path", FIELDS, ids=str)
def test_a_missing_field_is_refused_wherever_it_is(path: tuple[Any, ...]) -> None:
    """There are no defaults in a file."""
    refused(changed(path, lambda parent, key: parent.pop(key)))


@pytest.mark.parametrize("path", PLACES, ids=str)
def test_another_type_is_refused_wherever_it_is(path: tuple[Any, ...]) -> None:
    """Text for numbers, lists for text, a whole number or a truth value for a fraction."""
    for wrong in ({}, [], "a", 7, True, 0.25, None):

        def put(parent: Any, key: Any, wrong: Any = wrong) -> None:
            parent[key] = wrong

        file = changed(path, put)
        if json.loads(file) != json.loads(a_receipt().to_json()):
            refused(file)


@pytest.mark.parametrize("path", [(), *PLACES], ids=str)
def test_an_unknown_field_is_refused_in_every_object(path: tuple[Any, ...]) -> None:
    """Whoever wrote it meant something that this version does not know."""
    file = json.loads(a_receipt().to_json())
    place = file
    for key in path:
        place = place[key]
    if not isinstance(place, dict):
        return
    place["more"] = 1.0

    refused(json.dumps(file))


@pytest.mark.parametrize("path", NUMBERS, ids=str)
@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_number_is_refused(path: tuple[Any, ...], word: str) -> None:
    """Python's JSON would read all of them."""
    mark = "@@"

    def put(parent: Any, key: Any) -> None:
        parent[key] = mark

    with pytest.raises(CorruptBlobError, match=r"no number|finite|positive"):
        QualityReceipt.from_json(changed(path, put).replace(f'"{mark}"', word))


def test_words_for_numbers_are_refused_before_they_are_looked_at() -> None:
    """Wherever they are; JSON has none."""
    for word in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(CorruptBlobError, match=f"{word} is no number"):
            QualityReceipt.from_json(f'{{"digest": "", "receipt": {{"more": {word}}}}}')


def test_a_changed_figure_is_found_by_the_digest() -> None:
    """One that is still a legal figure, and a verdict turned round."""
    text = a_receipt(verdict=Verdict(False, ("too much",))).to_json()
    assert '"value": 0.01\n' in text

    for better in (
        text.replace('"value": 0.01\n', '"value": 0.009\n', 1),
        text.replace('"passes": false', '"passes": true').replace('"too much"', ""),
        text.replace("2026-11-30", "2026-11-29"),
    ):
        assert better != text
        with pytest.raises(CorruptBlobError, match="digest is not that of its content"):
            QualityReceipt.from_json(better)


@given(st.integers(0, len(a_receipt().to_json()) - 1), st.integers(1, 127))
@settings(deadline=None)
def test_a_changed_byte_never_gives_another_receipt(position: int, mask: int) -> None:
    """Refused, or it was a space between words."""
    text = bytearray(a_receipt().to_json().encode())
    text[position] ^= mask

    try:
        found = QualityReceipt.from_json(bytes(text))
    except CodecError:
        return
    assert found == a_receipt()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '"receipt"',
        b"\xff\xfe\x00",
        "[" * 100_000,
        '{"digest": "", "digest": "", "receipt": {}}',
        "9" * 10_000,
        " " * (MAX_RECEIPT_BYTES + 1),
    ],
    ids=lambda text: str(text)[:12],
)
def test_what_is_no_receipt_is_refused(text: str | bytes) -> None:
    """Whatever is in the file: one kind of error."""
    with pytest.raises(CorruptBlobError):
        QualityReceipt.from_json(text)


def signed_anew(path: tuple[Any, ...], value: Any) -> str:
    """The file of `a_receipt` with another value, and the digest that belongs to it."""

    def put(parent: Any, key: Any) -> None:
        parent[key] = value

    file = json.loads(changed(("receipt", *path), put))
    body = json.dumps(file["receipt"], sort_keys=True, separators=(",", ":")).encode()
    file["digest"] = digest("kvfabric.quality_receipt.1", body).hex()
    return json.dumps(file)


def test_a_receipt_can_be_written_by_others_who_keep_to_the_format() -> None:
    """What the digest is over is no secret, and shows what it is worth: no signature."""
    found = QualityReceipt.from_json(signed_anew(("net_ratio",), 9.25))

    assert found == a_receipt(net_ratio=9.25)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("target",), 8),
        (("pooled", "num_samples"), True),
        (("pooled", "num_tokens"), 1024.0),
        (("pooled", "top1", "value"), 1),
        (("verdict", "passes"), 1),
        (("codec_ids", 0), None),
        (("limits", "max_mean_kl"), 1),
        (("format_version",), True),
    ],
)
def test_a_wrong_type_is_refused_even_where_the_digest_fits(
    path: tuple[Any, ...], value: Any
) -> None:
    """Python would take a truth value for a number; a reader in another language would not."""
    with pytest.raises(CorruptBlobError, match="must be"):
        QualityReceipt.from_json(signed_anew(path, value))


def test_a_name_that_comes_twice_is_refused() -> None:
    """Readers differ in which of the two they take."""
    text = a_receipt().to_json()

    with pytest.raises(CorruptBlobError, match="twice"):
        QualityReceipt.from_json(text.replace('"target"', '"target": 32.0, "target"'))


def test_a_file_that_is_too_long_is_refused_unread() -> None:
    """Even where all that is too much are spaces."""
    text = a_receipt().to_json()
    assert QualityReceipt.from_json(text + " ") == a_receipt()

    with pytest.raises(CorruptBlobError, match="over 1048576 bytes"):
        QualityReceipt.from_json(text + " " * MAX_RECEIPT_BYTES)


def test_another_version_is_named() -> None:
    """Its fields may be others: the version is looked at first."""
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        QualityReceipt.from_json('{"digest": "", "receipt": {"format_version": 2, "new": 1}}')
