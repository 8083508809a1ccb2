"""The lines of a certificate log: canonical JSON, numbered and chained, with typed fields.

A line is what `json.dumps` makes of an object with sorted keys, no spaces and ASCII only,
and a newline.  It carries its number ``n``, ``prev``, which is the SHA-256 of the line before
it without the newline, and an ``event`` with that event's fields and no others.  So every
byte but those of the last line is covered by what follows, and those of the last one by
`Chain.digest`.

This module trusts nothing: what it returns has the fields and types of its event.  It does
not know what events mean.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, Final

from codec.errors import CertificateError

FORMAT: Final = "kvfabric-certificates/1"
FIRST_PREV: Final = "0" * 64
MAX_LINE_BYTES: Final = 2**24
"""No line is longer; one that is need not be read to its end."""

MAX_NUMBER: Final = 2**62
MAX_TEXT: Final = 200
REASONS: Final = ("window", "released", "replaced", "dropped", "recovered")

Check = Callable[[object], bool]
_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def is_count(value: object) -> bool:
    """Whether it is an integer from 0 up that fits 63 bits."""
    return type(value) is int and 0 <= value <= MAX_NUMBER


def is_name(value: object) -> bool:
    """Whether it is a printable text of sensible length."""
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


def _is_hex(num_digits: int | None) -> Check:
    def check(value: object) -> bool:
        if not isinstance(value, str) or not set(value) <= set("0123456789abcdef"):
            return False
        return 0 < len(value) <= 128 if num_digits is None else len(value) == num_digits

    return check


def _is_list(check: Check, num_items: int | None = None) -> Check:
    def check_all(value: object) -> bool:
        if not isinstance(value, list) or (num_items is not None and len(value) != num_items):
            return False
        return all(check(item) for item in value)

    return check_all


def _is_map(value: object) -> bool:
    return isinstance(value, dict) and all(is_name(k) and is_count(v) for k, v in value.items())


_ID: Final = ("a number", is_count)
_NAME: Final = ("a name", is_name)
_PAGE: Final = ("[class, slot, generation]", _is_list(is_count, 3))
_PAGES: Final = ("a list of [class, slot, generation]", _is_list(_is_list(is_count, 3)))
_RESERVED: Final = (
    "a list of [class, ordinal, slot, generation]",
    _is_list(_is_list(is_count, 4)),
)
_NUMBERS: Final = ("a list of numbers", _is_list(is_count))
_FRONTIER: Final = ("numbers by domain", _is_map)
_ONE_PAGE: Final = {"page": _PAGE}

FIELDS: Final[dict[str, dict[str, tuple[str, Check]]]] = {
    "begin": {
        "format": (FORMAT, lambda value: value == FORMAT),
        "arena": ("32 hexadecimal digits", _is_hex(32)),
        "epoch": _ID,
        "plan": ("hexadecimal digits", _is_hex(None)),
        "classes": ("a list of objects", _is_list(lambda value: isinstance(value, dict))),
    },
    "open": {"request": _ID},
    "reserve": {"step": _ID, "request": _ID, "pages": _RESERVED},
    "abort": {"step": _ID},
    "commit": {
        "step": _ID,
        "request": _ID,
        "domain": _NAME,
        "seq": _ID,
        "before": _ID,
        "after": _ID,
        "live_from": _NUMBERS,
    },
    "complete": {"domain": _NAME, "seqs": _NUMBERS},
    "fork": {"source": _ID, "request": _ID},
    "keep": {"request": _ID, "snapshot": _ID},
    "resume": {"snapshot": _ID, "request": _ID},
    "drop": {"snapshot": _ID},
    "release": {"request": _ID},
    "pin": _ONE_PAGE,
    "unpin": _ONE_PAGE,
    "register": _ONE_PAGE,
    "unregister": _ONE_PAGE,
    "quarantine": {"step": _ID, "request": _ID, "pages": _PAGES},
    "recover": {"epoch": _ID, "fences": _FRONTIER},
    "reuse": {
        "page": _PAGE,
        "ordinal": _ID,
        "tokens": ("[start, stop]", _is_list(is_count, 2)),
        "why": (f"one of {', '.join(REASONS)}", lambda value: value in REASONS),
        "done": _FRONTIER,
        "refs": _ID,
        "pins": _ID,
        "registrations": _ID,
    },
}
"""Per event its fields: what each has to be, in words and as a check."""


class Chain:
    """Follows a log line by line, as far as its lines follow from each other."""

    def __init__(self) -> None:
        #: Lines that followed.
        self.num_lines = 0
        #: SHA-256 of the last of them, in hexadecimal digits.
        self.digest = FIRST_PREV

    def follow(self, line: bytes) -> tuple[str, dict[str, Any]]:
        """Event and fields of the next line.

        Raises
        ------
        CertificateError
            If it is torn, not canonical, out of order, not chained on the one before, or has
            other fields than its event has.
        """
        try:
            fields = _parse(line)
            self._check_place(fields)
            event = _check_fields(fields)
        except ValueError as error:
            raise CertificateError(self.num_lines + 1, str(error)) from None
        self.digest = hashlib.sha256(line[:-1]).hexdigest()
        self.num_lines += 1
        return event, fields

    def _check_place(self, fields: dict[str, Any]) -> None:
        found = fields.pop("n", None)
        if type(found) is not int or found != self.num_lines:
            raise ValueError(f"need n={self.num_lines}, got {shown(found)}")
        found = fields.pop("prev", None)
        if found != self.digest:
            raise ValueError(f"prev is not the digest of the line before: {shown(found)}")


def shown(value: object) -> str:
    """A value as a message may have it, whatever it is."""
    try:
        text = ascii(value)
    except RecursionError:
        return "something nested too deep"
    return text if len(text) <= 60 else text[:57] + "..."


def _parse(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    if not line.endswith(b"\n"):
        raise ValueError("the line is torn: it does not end with a newline")
    body = line[:-1]
    try:
        found = json.loads(body)
        again = _CANONICAL.encode(found).encode("ascii")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {shown(str(error))}") from None
    if again != body:
        raise ValueError("not canonical JSON")
    if isinstance(found, dict):
        return found
    raise ValueError(f"need an object, got {shown(found)}")


def _check_fields(fields: dict[str, Any]) -> str:
    """Take the event out of the fields; the others are what it has to have."""
    event = fields.pop("event", None)
    wanted = FIELDS.get(event) if isinstance(event, str) else None
    if wanted is None:
        raise ValueError(f"no such event: {shown(event)}")
    if fields.keys() != wanted.keys():
        odd = sorted(fields.keys() ^ wanted.keys())
        raise ValueError(f"{event} has a field too many or too few: {shown(odd)}")
    for name, (what, check) in wanted.items():
        if not check(fields[name]):
            raise ValueError(f"{event}: {name} must be {what}, got {shown(fields[name])}")
    return str(event)
