"""`FieldReader`: takes what was packed, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.transport.fields import (
    FieldReader,
    need_exact,
    need_text,
    need_uint,
    pack_bytes,
    pack_text,
    pack_uint,
)


@given(st.integers(0, 2**32 - 1), st.binary(max_size=99), st.text(st.characters(codec="utf-8")))
def test_fields_come_back_in_order(number: int, data: bytes, text: str) -> None:
    """What follows a field is not disturbed by it."""
    reader = FieldReader(pack_uint(number, 4) + pack_bytes(data) + pack_text(text))

    assert reader.uint(4) == number
    assert reader.bytes(most=99) == data
    assert reader.text(most=4 * len(text)) == text
    reader.finish()


def test_a_body_that_ends_early_is_refused_and_keeps_its_place() -> None:
    """The refused read has taken nothing."""
    reader = FieldReader(b"abc")

    with pytest.raises(ValueError, match="1 bytes too early"):
        reader.exact(4)

    assert reader.exact(3) == b"abc"


def test_a_length_over_the_limit_is_refused_even_if_the_bytes_are_there() -> None:
    """The limit is the reader's, not the sender's."""
    with pytest.raises(ValueError, match="at most 3"):
        FieldReader(pack_bytes(b"abcd")).bytes(most=3)


def test_a_length_is_believed_only_as_far_as_the_body_goes() -> None:
    """Sixty thousand bytes are promised, two come."""
    with pytest.raises(ValueError, match="too early"):
        FieldReader(pack_uint(60_000, 2) + b"ab").bytes(most=60_000)


def test_leftovers_are_refused() -> None:
    """A frame cannot carry a stowaway."""
    with pytest.raises(ValueError, match="2 trailing"):
        FieldReader(b"ab").finish()


def test_a_flag_has_two_values() -> None:
    """Otherwise two encodings would mean the same."""
    assert FieldReader(b"\x01").flag() is True
    assert FieldReader(b"\x00").flag() is False
    with pytest.raises(ValueError, match="must be 0 or 1"):
        FieldReader(b"\x02").flag()


def test_text_must_be_utf8() -> None:
    """``UnicodeDecodeError`` is a ``ValueError``, which the frame parser catches."""
    with pytest.raises(ValueError, match="utf-8"):
        FieldReader(pack_bytes(b"\xff")).text(most=9)


@pytest.mark.parametrize("value", [-1, 256])
def test_an_integer_outside_its_field_is_refused(value: int) -> None:
    """Both ends."""
    need_uint("index", 255, 1)
    with pytest.raises(ValueError, match="index"):
        need_uint("index", value, 1)


def test_sizes_are_checked() -> None:
    """Exact byte strings and bounded text; a limit on text counts bytes."""
    need_exact("nonce", b"ab", 2)
    need_text("node", "é", most=2)
    with pytest.raises(ValueError, match="nonce must be 2 bytes"):
        need_exact("nonce", b"abc", 2)
    with pytest.raises(ValueError, match="node must be 1 to 1 bytes"):
        need_text("node", "é", most=1)
    with pytest.raises(ValueError, match="node"):
        need_text("node", "", most=9)
