"""Reasons of errors: the cause that Ray wraps, in one line."""

from __future__ import annotations

import pytest

from codec.errors import CorruptBlobError
from fabric.outcome import error_name, first_line


class WrappedError(Exception):
    """As Ray wraps an error of an actor."""

    def __init__(self, cause: object) -> None:
        super().__init__("a long\ntraceback")
        self.cause = cause


@pytest.mark.parametrize(
    ("error", "name", "line"),
    [
        (ValueError("bad\nthings"), "ValueError", "bad"),
        (ValueError(), "ValueError", "ValueError"),
        (
            WrappedError(CorruptBlobError("header", "cut")),
            "CorruptBlobError",
            "corrupt blob, header: cut",
        ),
        (WrappedError("only text"), "WrappedError", "a long"),
    ],
)
def test_the_cause_is_named_in_one_line(error: Exception, name: str, line: str) -> None:
    """Receipts carry both."""
    assert error_name(error) == name
    assert first_line(error) == line
