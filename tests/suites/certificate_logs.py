"""A certificate log in which everything happens once, and ways to spoil one.

The log is of two requests and what comes of them, over four classes with pages of 4 tokens:
full attention, a window of 6, recurrent state, and an encoder's output of 8 tokens.  Lines
are built here on their own, from the format and not from the writer.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable
from typing import Any

Event = tuple[str, dict[str, Any]]

PAGE_TOKENS = 4
WINDOW = 6


def claim(rule: Any, start: int = 0, stop: int | None = None, **keys: Any) -> dict[str, Any]:
    """One claim of a class; dense, if nothing else is said."""
    return {"start": start, "stop": stop, "modulus": 1, "residues": [0], "rule": rule, **keys}


def window(tokens: int) -> dict[str, int]:
    """The rule of a window."""
    return {"step": 1, "slope": 1, "offset": tokens - 1, "shift": 0}


def described(name: str, *claims: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A class as the first line has it."""
    return {
        "name": name,
        "kind": "attention",
        "page_tokens": PAGE_TOKENS,
        "first_page": 0,
        "stop_page": None,
        "ranked": False,
        "claims": list(claims),
        **fields,
    }


CLASSES = [
    described("full", claim("forever")),
    described("window", claim(window(WINDOW))),
    described("state", kind="recurrent", page_tokens=1, stop_page=1),
    described("encoder", claim("forever", 0, 8), kind="cross", stop_page=2),
]


def begin(classes: list[dict[str, Any]] = CLASSES) -> Event:
    """The first event of a log."""
    return (
        "begin",
        {
            "format": "kvfabric-certificates/1",
            "arena": "0123456789abcdef" * 2,
            "epoch": 1,
            "plan": "ab" * 32,
            "classes": classes,
        },
    )


def reserve(step: int, request: int, *pages: list[int]) -> Event:
    """Pages are ``[class, ordinal, slot, generation]``."""
    return "reserve", {"step": step, "request": request, "pages": list(pages)}


def commit(
    step: int, request: int, work: tuple[str, int], span: tuple[int, int], *live_from: int
) -> Event:
    """Work is domain and number."""
    fields = {
        "step": step,
        "request": request,
        "domain": work[0],
        "seq": work[1],
        "before": span[0],
        "after": span[1],
        "live_from": list(live_from),
    }
    return "commit", fields


def reuse(page: list[int], ordinal: int, why: str, **done: int) -> Event:
    """A certificate for ``[class, slot, generation]`` of one of the classes above."""
    width = 1 if page[0] == 2 else PAGE_TOKENS
    fields = {
        "page": page,
        "ordinal": ordinal,
        "tokens": [ordinal * width, (ordinal + 1) * width],
        "why": why,
        "done": done,
        "refs": 0,
        "pins": 0,
        "registrations": 0,
    }
    return "reuse", fields


def complete(domain: str, *seqs: int) -> Event:
    """Work of one domain ends."""
    return "complete", {"domain": domain, "seqs": list(seqs)}


def everything() -> list[Event]:
    """Every event, and every reason for reuse; at its end nothing is held."""
    return copy.deepcopy([*_two_requests(), *_quarantined(), *_resumed(), *_given_back()])


def _two_requests() -> list[Event]:
    first = ([0, 0, 0, 1], [0, 1, 1, 1], [1, 0, 0, 1], [1, 1, 1, 1], [2, 0, 0, 1])
    encoder = ([3, 0, 0, 1], [3, 1, 1, 1])
    copies = ([0, 1, 3, 1], [1, 1, 3, 1], [2, 0, 2, 1])
    fresh = ([0, 2, 4, 1], [0, 3, 5, 1], [1, 2, 4, 1], [1, 3, 5, 1])
    return [
        begin(),
        ("open", {"request": 1}),
        reserve(1, 1, *first, *encoder),
        commit(1, 1, ("a", 1), (0, 6), 0, 0, 0, 0),
        ("keep", {"request": 1, "snapshot": 10}),
        ("fork", {"source": 1, "request": 2}),
        # Both go on from a shared tail, so both copy it; in the second, two window pages
        # die, one of them a copy that was made by the same step.
        reserve(2, 2, [0, 1, 2, 1], [1, 1, 2, 1], [2, 0, 1, 1]),
        commit(2, 2, ("b", 1), (6, 7), 0, 0, 0, 0),
        reserve(3, 1, *copies, *fresh),
        commit(3, 1, ("a", 2), (6, 14), 0, 2, 0, 0),
        complete("b", 1),
        complete("a", 2),
        ("pin", {"page": [1, 3, 1]}),
        ("register", {"page": [1, 3, 1]}),
        complete("a", 1),
        ("unpin", {"page": [1, 3, 1]}),
        ("unregister", {"page": [1, 3, 1]}),
        reuse([1, 3, 1], 1, "window", a=2, b=1),
        ("drop", {"snapshot": 10}),
        reuse([0, 1, 1], 1, "replaced", a=2, b=1),
        reuse([1, 1, 1], 1, "dropped", a=2, b=1),
        reuse([2, 0, 1], 0, "replaced", a=2, b=1),
    ]


def _quarantined() -> list[Event]:
    tails = ([0, 2, 1], [1, 2, 1])
    return [
        reserve(4, 2, [0, 2, 1, 2], [1, 2, 1, 2]),
        ("abort", {"step": 4}),
        reserve(5, 2, [0, 2, 1, 3], [1, 2, 1, 3]),
        ("quarantine", {"step": 5, "request": 2, "pages": [[0, 1, 3], [1, 1, 3], *tails]}),
        ("release", {"request": 2}),
        ("recover", {"epoch": 2, "fences": {"a": 2, "b": 1}}),
        reuse([0, 1, 3], 2, "recovered", a=2, b=1),
        reuse([1, 1, 3], 2, "recovered", a=2, b=1),
        reuse([0, 2, 1], 1, "released", a=2, b=1),
        reuse([1, 2, 1], 1, "recovered", a=2, b=1),
        reuse([2, 1, 1], 0, "released", a=2, b=1),
        reuse([1, 0, 1], 0, "window", a=2, b=1),
    ]


def _resumed() -> list[Event]:
    return [
        ("keep", {"request": 1, "snapshot": 11}),
        ("resume", {"snapshot": 11, "request": 3}),
        reserve(6, 3, [0, 3, 1, 4], [1, 3, 0, 2], [2, 0, 0, 2]),
        commit(6, 3, ("b", 2), (14, 15), 0, 2, 0, 0),
        reserve(7, 3),
        commit(7, 3, ("b", 3), (15, 16), 0, 2, 0, 0),
        complete("b", 3, 2),
        ("release", {"request": 3}),
        reuse([0, 1, 4], 3, "released", a=2, b=3),
        reuse([1, 0, 2], 3, "released", a=2, b=3),
        reuse([2, 0, 2], 0, "released", a=2, b=3),
        ("drop", {"snapshot": 11}),
    ]


def _given_back() -> list[Event]:
    full = [([0, 0, 1], 0), ([0, 3, 1], 1), ([0, 4, 1], 2), ([0, 5, 1], 3)]
    others = [([1, 4, 1], 2), ([1, 5, 1], 3), ([2, 2, 1], 0), ([3, 0, 1], 0), ([3, 1, 1], 1)]
    return [
        ("release", {"request": 1}),
        *(reuse(page, ordinal, "released", a=2, b=3) for page, ordinal in [*full, *others]),
    ]


def chained(events: Iterable[Event]) -> list[bytes]:
    """The lines of a log: numbered, and chained on each other."""
    lines: list[bytes] = []
    prev = "0" * 64
    for number, (event, fields) in enumerate(events):
        record = {**fields, "event": event, "n": number, "prev": prev}
        body = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
        prev = hashlib.sha256(body).hexdigest()
        lines.append(body + b"\n")
    return lines
