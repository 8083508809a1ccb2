"""The rules of a certificate log, one by one: each has a story that only it refuses.

Every story is a log that holds up to its last event, which does not follow.  The digests are
right throughout, so what refuses is the rule, and not the chain.
"""

from __future__ import annotations

from typing import Any

import pytest

from codec.errors import CertificateError
from policies import certificate_rules
from policies.certificate_claims import MAX_POSITION
from policies.certificate_rules import MAX_STEP_TOKENS
from policies.certificates import verify
from tests.suites.certificate_logs import (
    Event,
    begin,
    chained,
    claim,
    commit,
    complete,
    described,
    reserve,
    reuse,
    window,
)

FOREVER = [described("full", claim("forever"))]
WINDOW = [described("window", claim(window(6)))]
STATE = [described("state", kind="recurrent", page_tokens=1, stop_page=1)]
ENCODER = [described("encoder", claim("forever", 0, 8), kind="cross", stop_page=2)]
A1, A2, A3, B1 = ("a", 1), ("a", 2), ("a", 3), ("b", 1)


def opened(classes: list[dict[str, Any]], *pages: list[int], after: int = 6) -> list[Event]:
    """Request 1 has gone from 0 to ``after`` with these pages; the work has ended."""
    return [
        begin(classes),
        ("open", {"request": 1}),
        reserve(1, 1, *pages),
        commit(1, 1, A1, (0, after), 0),
        complete("a", 1),
    ]


def on(name: str, request: int = 1, **fields: Any) -> Event:
    """An event about a request."""
    return name, {"request": request, **fields}


def about(name: str, slot: int, generation: int = 1) -> Event:
    """An event about a page of class 0."""
    return name, {"page": [0, slot, generation]}


def certified(slot: int, ordinal: int, why: str, generation: int = 1, **done: int) -> Event:
    """The certificate of a page of class 0."""
    return reuse([0, slot, generation], ordinal, why, **done or {"a": 1})


def but(event: Event, **changes: Any) -> Event:
    """An event with other fields."""
    return event[0], {**event[1], **changes}


FULL = opened(FOREVER, [0, 0, 0, 1], [0, 1, 1, 1])
RELEASED = [*FULL, on("release")]
IN_WINDOW = opened(WINDOW, [0, 0, 0, 1], [0, 1, 1, 1])
IN_STATE = opened(STATE, [0, 0, 0, 1])
#: Request 1 has a step of three more pages reserved, from 6 to 14.
ON_ITS_WAY = [*IN_WINDOW, reserve(2, 1, [0, 2, 2, 1], [0, 3, 3, 1])]
#: The window has left pages 0 and 1 behind, in work that is still running.
RUNNING = [*ON_ITS_WAY, commit(2, 1, A2, (6, 14), 2)]
SPENT = [*FULL, reserve(2, 1, [0, 2, 2, 1]), ("abort", {"step": 2})]
BROKEN = [
    *FULL,
    reserve(2, 1, [0, 2, 2, 1]),
    on("quarantine", step=2, pages=[[0, 1, 1], [0, 2, 1]]),
]
SHARED = [*FULL, on("fork", 2, source=1)]
KEPT = [*FULL, on("keep", snapshot=9)]
RECOVERED = ("recover", {"epoch": 2, "fences": {"a": 1}})
THEN_6_TO_8 = commit(2, 1, A2, (6, 8), 0)

STORIES: dict[str, tuple[list[Event], Event, str]] = {
    "a log begins": ([], on("open"), "begin is the first"),
    "a log begins once": (FULL, begin(), "begin is the first"),
    "a log has a class": ([], begin([]), "need a class"),
    # Names
    "open a living name": (FULL, on("open"), "request 1 is there already"),
    "fork to a living name": (FULL, on("fork", source=1), "request 1 is there already"),
    "fork from nobody": (FULL, on("fork", 2, source=3), "no request 3"),
    "resume to a living name": (KEPT, on("resume", snapshot=9), "request 1 is there already"),
    "resume from nothing": (FULL, on("resume", 2, snapshot=9), "no snapshot 9"),
    "keep of nobody": (FULL, on("keep", 2, snapshot=9), "no request 2"),
    "keep under a living name": (KEPT, on("keep", snapshot=9), "snapshot 9 is there already"),
    "drop of nothing": (FULL, ("drop", {"snapshot": 9}), "no snapshot 9"),
    "drop twice": (
        [*KEPT, ("drop", {"snapshot": 9})],
        ("drop", {"snapshot": 9}),
        "no snapshot 9",
    ),
    "release of nobody": (RELEASED, on("release"), "no request 1"),
    "release under a step": (ON_ITS_WAY, on("release"), "has step 2 reserved"),
    # Reservations
    "reserve for nobody": (FULL, reserve(2, 2), "no request 2"),
    "reserve for a living step": (
        [*ON_ITS_WAY, on("open", 2)],
        reserve(2, 2),
        "step 2 is there already",
    ),
    "two steps at once": (ON_ITS_WAY, reserve(3, 1), "has step 2 reserved"),
    "no such class": (FULL, reserve(2, 1, [1, 2, 2, 1]), "no class 1"),
    "no such page": (IN_STATE, reserve(2, 1, [0, 1, 1, 1]), "has no page 1"),
    "a page comes twice": (
        FULL,
        reserve(2, 1, [0, 2, 2, 1], [0, 2, 3, 1]),
        "page 2 of 'full' comes twice",
    ),
    "a slot comes twice": (FULL, reserve(2, 1, [0, 2, 2, 1], [0, 3, 2, 2]), "not certified"),
    "a slot in use": (FULL, reserve(2, 1, [0, 2, 0, 2]), "holds generation 1"),
    "a slot without its certificate": (
        [*RELEASED, on("open", 2)],
        reserve(2, 2, [0, 0, 0, 2]),
        "holds generation 1",
    ),
    "a first generation skipped": (FULL, reserve(2, 1, [0, 2, 2, 2]), "from generation 0 to 2"),
    "a generation repeated": (SPENT, reserve(3, 1, [0, 2, 2, 1]), "from generation 1 to 1"),
    "a generation skipped": (SPENT, reserve(3, 1, [0, 2, 2, 3]), "from generation 1 to 3"),
    # Steps
    "abort of nothing": (SPENT, ("abort", {"step": 2}), "step 2 is not reserved"),
    "abort of a registered page": (
        [*FULL, reserve(2, 1, [0, 2, 2, 1]), about("register", 2)],
        ("abort", {"step": 2}),
        "1 registrations",
    ),
    "commit of nothing": (FULL, THEN_6_TO_8, "step 2 is not reserved"),
    "commit twice": (RUNNING, commit(2, 1, A3, (14, 15), 2), "step 2 is not reserved"),
    "commit for nobody": (ON_ITS_WAY, commit(2, 3, A2, (6, 14), 2), "no request 3"),
    "commit for another": (
        [*ON_ITS_WAY, on("open", 2)],
        commit(2, 2, A2, (0, 14), 2),
        "step 2 is of request 1",
    ),
    "commit from behind": (ON_ITS_WAY, commit(2, 1, A2, (5, 14), 2), "is at 6, not 5"),
    "commit to where it is": (
        [*FULL, reserve(2, 1)],
        commit(2, 1, A2, (6, 6), 0),
        "need a boundary after 6",
    ),
    "commit beyond the last position": (
        [*FULL, reserve(2, 1)],
        commit(2, 1, A2, (6, MAX_POSITION + 1), 0),
        "need a boundary after 6",
    ),
    "commit of too many tokens": (
        [*FULL, reserve(2, 1)],
        commit(2, 1, A2, (6, 7 + MAX_STEP_TOKENS), 0),
        "tokens in a step",
    ),
    "a live_from too few": (ON_ITS_WAY, commit(2, 1, A2, (6, 14)), "one live_from for each"),
    "a work's number again": (ON_ITS_WAY, commit(2, 1, A1, (6, 14), 2), "from 1 to 1"),
    "a work's number skipped": (ON_ITS_WAY, commit(2, 1, A3, (6, 14), 2), "from 1 to 3"),
    "a domain begins at 1": (ON_ITS_WAY, commit(2, 1, ("b", 0), (6, 14), 2), "from 0 to 0"),
    "a new page ahead": (
        [*FULL, reserve(2, 1, [0, 2, 2, 1])],
        THEN_6_TO_8,
        "holds no token of [6, 8)",
    ),
    "a new page behind": (
        [*RUNNING, reserve(3, 1, [0, 1, 4, 1])],
        commit(3, 1, A3, (14, 15), 1),
        "holds no token of [14, 15)",
    ),
    "a page dropped one token early": (
        [*IN_WINDOW, reserve(2, 1)],
        commit(2, 1, A2, (6, 8), 1),
        "page 0 of 'window' is dropped, but not dead at 8",
    ),
    "the last page dropped": (
        [*opened(WINDOW, [0, 0, 0, 1], after=4), reserve(2, 1, [0, 1, 1, 1])],
        commit(2, 1, A2, (4, 5), 2),
        "page 0 of 'window' is dropped",
    ),
    "state dropped": ([*IN_STATE, reserve(2, 1)], commit(2, 1, A2, (6, 7), 1), "is dropped"),
    "an encoder's output dropped": (
        [*opened(ENCODER, [0, 0, 0, 1], [0, 1, 1, 1]), reserve(2, 1)],
        commit(2, 1, A2, (6, 100), 1),
        "is dropped",
    ),
    "a page that is read is missing": (
        [*IN_WINDOW, reserve(2, 1, [0, 3, 3, 1])],
        commit(2, 1, A2, (6, 14), 0),
        "no page 2 of 'window', but 9 is read",
    ),
    "state is missing": (
        [begin(STATE), on("open"), reserve(1, 1)],
        commit(1, 1, A1, (0, 6), 0),
        "the head has no state",
    ),
    "written under a reader": (
        [*FULL, about("pin", 1), reserve(2, 1)],
        THEN_6_TO_8,
        "but a reader has it",
    ),
    "written under a fork that is ahead": (
        [*SHARED, reserve(2, 2), commit(2, 2, B1, (6, 7), 0), reserve(3, 1)],
        commit(3, 1, A2, (6, 8), 0),
        "but request 2 has it too",
    ),
    "written under a snapshot that is ahead": (
        [
            *SHARED,
            reserve(2, 2),
            commit(2, 2, B1, (6, 7), 0),
            on("keep", 2, snapshot=9),
            on("release", 2),
            reserve(3, 1),
        ],
        commit(3, 1, A2, (6, 8), 0),
        "but snapshot 9 has it too",
    ),
    "state written under a snapshot": (
        [*IN_STATE, on("keep", snapshot=9), reserve(2, 1)],
        THEN_6_TO_8,
        "but snapshot 9 has it",
    ),
    "complete twice": (FULL, complete("a", 1), "work 1 of 'a' is not running"),
    "complete twice in one": (RUNNING, complete("a", 2, 2), "work 2 of 'a' is not running"),
    "complete what is to come": (FULL, complete("a", 2), "work 2 of 'a' is not running"),
    "complete elsewhere": (RUNNING, complete("b", 2), "work 2 of 'b' is not running"),
    # Readers
    "pin of nothing": (FULL, about("pin", 7), "page [0, 7, 1] is not in use"),
    "pin of an old page": (SPENT, about("pin", 2), "page [0, 2, 1] is not in use"),
    "pin of an unseen page": (ON_ITS_WAY, about("pin", 2), "is reserved for step 2"),
    "unpin too often": (
        [*FULL, about("pin", 0), about("unpin", 0)],
        about("unpin", 0),
        "has no pin",
    ),
    "register of nothing": (FULL, about("register", 7), "is not in use"),
    "unregister too often": (FULL, about("unregister", 0), "has no registration"),
    # Quarantine
    "quarantine of nothing": (
        FULL,
        on("quarantine", step=2, pages=[]),
        "step 2 is not reserved",
    ),
    "quarantine of another's step": (
        [*ON_ITS_WAY, on("open", 2)],
        on("quarantine", 2, step=2, pages=[]),
        "step 2 is of request 1",
    ),
    "quarantine of another's page": (
        [*SHARED, reserve(2, 2, [0, 1, 2, 1]), commit(2, 2, B1, (6, 7), 0), reserve(3, 1)],
        on("quarantine", step=3, pages=[[0, 2, 1]]),
        "page [0, 2, 1] is neither",
    ),
    "quarantine of a page twice": (
        ON_ITS_WAY,
        on("quarantine", step=2, pages=[[0, 2, 1], [0, 2, 1]]),
        "named twice",
    ),
    "commit out of quarantine": (BROKEN, THEN_6_TO_8, "request 1 is in quarantine"),
    "abort out of quarantine": (BROKEN, ("abort", {"step": 2}), "step 2 is not reserved"),
    "go on in quarantine": (BROKEN, reserve(3, 1), "request 1 is in quarantine"),
    "fork in quarantine": (BROKEN, on("fork", 2, source=1), "request 1 is in quarantine"),
    "keep in quarantine": (BROKEN, on("keep", snapshot=9), "request 1 is in quarantine"),
    "recover into the same epoch": (BROKEN, but(RECOVERED, epoch=1), "epoch 1 goes to 1"),
    "recover into a later epoch": (BROKEN, but(RECOVERED, epoch=3), "epoch 1 goes to 3"),
    "recover ahead of the work": (RUNNING, but(RECOVERED, fences={"a": 2}), "ended only 1"),
    "recover in an unknown domain": (FULL, but(RECOVERED, fences={"z": 1}), "ended only 0"),
    "recover short of the work": (
        BROKEN,
        but(RECOVERED, fences={}),
        "'a' is fenced at 0, but had 1",
    ),
    # Certificates
    "reuse of nothing": (FULL, certified(7, 0, "released"), "is not in use"),
    "reuse of an unseen page": (ON_ITS_WAY, certified(2, 2, "released"), "reserved for step 2"),
    "reuse twice": (
        [*RELEASED, certified(0, 0, "released")],
        certified(0, 0, "released"),
        "is not in use",
    ),
    "reuse of another generation": (
        RELEASED,
        certified(0, 0, "released", generation=2),
        "page [0, 0, 2] is not in use",
    ),
    "another ordinal": (RELEASED, certified(0, 1, "released"), "has ordinal 0"),
    "other tokens": (
        RELEASED,
        but(certified(0, 0, "released"), tokens=[0, 5]),
        "spans the tokens [0, 4]",
    ),
    "reuse in a head": (FULL, certified(0, 0, "released"), "is in request 1"),
    "reuse in a fork": (
        [*SHARED, on("release")],
        certified(0, 0, "released"),
        "is in request 2",
    ),
    "reuse in a snapshot": (
        [*KEPT, on("release")],
        certified(0, 0, "released"),
        "is in snapshot 9",
    ),
    "reuse in flight": (RUNNING, certified(0, 0, "window"), "in use by running work, ('a', 2)"),
    "reuse in flight after a release": (
        [*RUNNING, on("release")],
        certified(2, 2, "released"),
        "in use by running work",
    ),
    "reuse under a pin": (
        [*FULL, about("pin", 0), on("release")],
        certified(0, 0, "released"),
        "has 1 pins",
    ),
    "reuse under a second pin": (
        [*FULL, about("pin", 0), about("pin", 0), about("unpin", 0), on("release")],
        certified(0, 0, "released"),
        "has 1 pins",
    ),
    "reuse under a registration": (
        [*FULL, about("register", 0), on("release")],
        certified(0, 0, "released"),
        "has 1 registrations",
    ),
    "reuse in quarantine": ([*BROKEN, on("release")], certified(1, 1, "released"), "quarantine"),
    "reuse of a step in quarantine": (BROKEN, certified(2, 2, "recovered"), "in quarantine"),
    "reuse of what a step in quarantine left out": (
        [*FULL, reserve(2, 1, [0, 2, 2, 1]), on("quarantine", step=2, pages=[])],
        certified(2, 2, "recovered"),
        "in quarantine",
    ),
    **{
        f"reuse with {name}": (
            RELEASED,
            but(certified(0, 0, "released"), **{name: 1}),
            f"need {name} 0, got 1",
        )
        for name in ("refs", "pins", "registrations")
    },
    "another reason": (RELEASED, certified(0, 0, "window"), "was not window, but released"),
    "done ahead": (RELEASED, certified(0, 0, "released", a=2), "done is 2 of 'a'"),
    "done behind": (RELEASED, certified(0, 0, "released", a=0), "done is 0 of 'a'"),
    "done elsewhere": (RELEASED, certified(0, 0, "released", a=1, z=0), "of 'z'"),
    "done says nothing": (
        RELEASED,
        but(certified(0, 0, "released"), done={}),
        "work of 'a', which done leaves out",
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_what_does_not_follow_is_refused(story: str) -> None:
    """At its line, and for the reason that it is."""
    before, last, why = STORIES[story]

    if before:
        verify(chained(before))
    with pytest.raises(CertificateError) as caught:
        verify(chained([*before, last]))

    assert caught.value.line == len(before) + 1
    assert why in caught.value.why


@pytest.mark.parametrize(
    "last",
    [on("fork", 2, source=1), on("resume", 2, snapshot=9), on("keep", snapshot=8)],
    ids=lambda event: event[0],
)
def test_short_lines_cannot_fill_memory(last: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Request and snapshot have two pages each: a third holder has room for two, not for one."""
    monkeypatch.setattr(certificate_rules, "MAX_HELD_PAGES", 6)
    verify(chained([*KEPT, last]))
    monkeypatch.setattr(certificate_rules, "MAX_HELD_PAGES", 5)

    with pytest.raises(CertificateError, match="more than 5 pages are held"):
        verify(chained([*KEPT, last]))


HELD: dict[str, list[Event]] = {
    "a dead page may stay": [*IN_WINDOW, reserve(2, 1), commit(2, 1, A2, (6, 8), 0)],
    "a page is dropped when it is dead": [
        *IN_WINDOW,
        reserve(2, 1, [0, 2, 2, 1]),
        commit(2, 1, A2, (6, 9), 1),
        complete("a", 2),
        certified(0, 0, "window", a=2),
    ],
    "a page that is dead at once need not be there": [
        *IN_WINDOW,
        reserve(2, 1, [0, 4, 2, 1], [0, 5, 3, 1]),
        commit(2, 1, A2, (6, 21), 4),
    ],
    "work may end in any order, and done says up to where all has": [
        *RUNNING,
        reserve(3, 1),
        commit(3, 1, A3, (14, 15), 2),
        on("release"),
        complete("a", 3, 2),
        certified(0, 0, "window", a=3),
    ],
    "work of a later step does not hold what left before": [
        *RUNNING,
        reserve(3, 1),
        commit(3, 1, A3, (14, 15), 2),
        complete("a", 2),
        certified(0, 0, "window", a=2),
    ],
    "work of an earlier step does not hold what came later": [
        *IN_WINDOW,
        reserve(2, 1, [0, 2, 2, 1]),
        commit(2, 1, A2, (6, 9), 0),
        reserve(3, 1, [0, 2, 3, 1]),
        commit(3, 1, B1, (9, 10), 0),
        reserve(4, 1, [0, 2, 4, 1]),
        commit(4, 1, ("b", 2), (10, 11), 0),
        complete("b", 1, 2),
        certified(3, 2, "replaced", a=1, b=2),
    ],
    "a fork goes on with copies, and the last to have a page may write": [
        *SHARED,
        reserve(2, 2, [0, 1, 2, 1]),
        commit(2, 2, B1, (6, 7), 0),
        reserve(3, 1),
        commit(3, 1, A2, (6, 8), 0),
    ],
    "of two that have a page one may write, behind what the other reads": [
        *SHARED,
        on("keep", snapshot=9),
        reserve(2, 2),
        commit(2, 2, B1, (6, 7), 0),
        reserve(3, 2),
        commit(3, 2, ("b", 2), (7, 8), 0),
        reserve(4, 1, [0, 1, 2, 1]),
        commit(4, 1, A2, (6, 7), 0),
    ],
    "state is replaced by a copy": [
        *IN_STATE,
        on("keep", snapshot=9),
        reserve(2, 1, [0, 0, 1, 1]),
        commit(2, 1, A2, (6, 7), 0),
    ],
    "an encoder's output is written once and stays": [
        *opened(ENCODER, [0, 0, 0, 1], [0, 1, 1, 1]),
        on("keep", snapshot=9),
        reserve(2, 1),
        commit(2, 1, A2, (6, 100), 0),
    ],
    "a page is moved with its head": [
        *FULL,
        reserve(2, 1, [0, 0, 2, 1], [0, 1, 3, 1]),
        THEN_6_TO_8,
    ],
    "a spent generation is followed by the next": [*SPENT, reserve(3, 1, [0, 2, 2, 2])],
    "a certified slot holds the next generation": [
        *RELEASED,
        certified(0, 0, "released"),
        on("open", 2),
        reserve(2, 2, [0, 0, 0, 2]),
    ],
    "names may come again": [*RELEASED, on("open"), reserve(1, 1)],
    "a registered page may still be reserved": [*ON_ITS_WAY, about("register", 2), RUNNING[-1]],
    "quarantine ends": [*BROKEN, on("release"), RECOVERED, certified(1, 1, "recovered")],
    "a recovered request goes on": [*BROKEN, RECOVERED, reserve(3, 1)],
    "a recovery needs no quarantine": [*FULL, but(RECOVERED, fences={})],
    "each way out of a head is a reason": [
        *KEPT,
        on("release"),
        ("drop", {"snapshot": 9}),
        certified(0, 0, "released"),
        certified(1, 1, "dropped"),
    ],
    "done need not name what the page never saw": [
        *RELEASED,
        on("open", 2),
        reserve(2, 2, [0, 0, 2, 1]),
        commit(2, 2, B1, (0, 4), 0),
        certified(0, 0, "released", a=1),
    ],
}


@pytest.mark.parametrize("story", HELD)
def test_what_follows_is_not_refused(story: str) -> None:
    """A checker that refuses everything proves as little as one that refuses nothing."""
    assert verify(chained(HELD[story])).num_lines == len(HELD[story])
