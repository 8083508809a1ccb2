"""What a certificate log says exists: pages, heads of requests, snapshots, work in domains.

These are books without judgment; the rules are in `policies.certificates`.

A step that was committed holds the head it started from and the one it made until its work
has ended.  So when a page leaves a head it is a `Stay` that goes on the page's record: the
head, and the orders of the commits from the one that brought the page to the one that took
it.  A running step of that head whose order is among them still holds the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from policies.certificate_claims import ClassRecord

PageName = tuple[int, int, int]
"""Class, slot and generation."""


@dataclass(slots=True, eq=False)
class Page:
    """One generation of a slot, from its reservation until it is free again."""

    name: PageName
    ordinal: int
    step: int | None
    """The step that reserved it and is not committed yet."""

    pins: int = 0
    registrations: int = 0
    is_quarantined: bool = False
    #: The ways in which heads and snapshots let it go.
    let_go: set[str] = field(default_factory=set)
    #: Domains of the steps that held it in heads that let it go.
    domains: set[str] = field(default_factory=set)
    stays: list[Stay] = field(default_factory=list)

    def __str__(self) -> str:
        return f"page {list(self.name)}"

    def running(self) -> tuple[str, int] | None:
        """Domain and number of work that still holds the page, though no head has it."""
        for stay in self.stays:
            for order, work in stay.head.running.items():
                if stay.since <= order <= stay.until:
                    return work
        return None


@dataclass(slots=True, eq=False)
class Head:
    """What a request has: a boundary, and per class pages by ordinal."""

    pages: list[dict[int, tuple[Page, int]]]
    """With each page the order of the commit that brought it."""

    boundary: int = 0
    is_quarantined: bool = False
    #: The step that is reserved and not committed; nothing if there is none.
    prepared: int | None = None
    #: Domain and number of its steps that have not ended, by the order of their commits.
    running: dict[int, tuple[str, int]] = field(default_factory=dict)
    #: Order of its last commit in each domain.
    last_run: dict[str, int] = field(default_factory=dict)

    def copy(self) -> Head:
        """A head with the same pages and boundary, and no work of its own."""
        return Head([dict(pages) for pages in self.pages], self.boundary)

    def has(self, page: Page) -> bool:
        """Whether the page is in it."""
        found = self.pages[page.name[0]].get(page.ordinal)
        return found is not None and found[0] is page

    def let_go(self, index: int, ordinal: int, why: str, until: int) -> None:
        """Take a page of class ``index`` out of it."""
        page, since = self.pages[index].pop(ordinal)
        page.let_go.add(why)
        page.domains.update(name for name, last in self.last_run.items() if last >= since)
        # Without what has ended, so that a page that many share does not gather them for ever.
        page.stays = [stay for stay in page.stays if stay.head.running]
        if self.running:
            page.stays.append(Stay(self, since, until))

    def let_all_go(self, why: str, until: int) -> None:
        """Take every page out of it."""
        for index, pages in enumerate(self.pages):
            for ordinal in list(pages):
                self.let_go(index, ordinal, why, until)


@dataclass(frozen=True, slots=True)
class Stay:
    """A page was in ``head`` from the commit with order ``since`` to the one ``until``."""

    head: Head
    since: int
    until: int


@dataclass(slots=True)
class Step:
    """Pages that are reserved for a request."""

    request: int
    pages: list[Page]


@dataclass(slots=True)
class Domain:
    """Work that was submitted to one queue, and its end."""

    #: Number of the last work.
    submitted: int = 0
    #: All work up to here has ended.
    through: int = 0
    #: Ended too, in ``(through + 1, submitted]``.
    beyond: set[int] = field(default_factory=set)

    def end(self, seq: int) -> None:
        """Take note that work has ended."""
        self.beyond.add(seq)
        while self.through + 1 in self.beyond:
            self.through += 1
            self.beyond.remove(self.through)


class State:
    """Everything that is alive at one line of a log."""

    def __init__(self) -> None:
        self.arena = ""
        self.plan = ""
        self.epoch = 0
        self.classes: list[ClassRecord] = []
        #: By name; a page that is free again is not here.
        self.pages: dict[PageName, Page] = {}
        #: Last generation of every slot that was ever reserved, by class and slot.
        self.generations: dict[tuple[int, int], int] = {}
        self.heads: dict[int, Head] = {}
        self.snapshots: dict[int, Head] = {}
        self.steps: dict[int, Step] = {}
        self.domains: dict[str, Domain] = {}
        #: Head and order of the step whose work is running, by domain and number.
        self.running: dict[tuple[str, int], tuple[Head, int]] = {}
        #: Commits so far.
        self.order = 0
        #: Last work of each domain when something was last put in quarantine.
        self.fences: dict[str, int] = {}

    def holders(self, page: Page) -> Iterator[tuple[str, Head]]:
        """Requests and snapshots that have the page, each with its name."""
        requests = (("request", name, head) for name, head in self.heads.items())
        snapshots = (("snapshot", name, head) for name, head in self.snapshots.items())
        for kind, name, head in chain(requests, snapshots):
            if head.has(page):
                yield f"{kind} {name}", head

    def num_held(self) -> int:
        """Pages of all requests and snapshots; one that several have counts as often."""
        heads = chain(self.heads.values(), self.snapshots.values())
        return sum(len(pages) for head in heads for pages in head.pages)

    def submitted(self) -> dict[str, int]:
        """Number of the last work in each domain."""
        return {name: domain.submitted for name, domain in self.domains.items()}

    def through(self) -> dict[str, int]:
        """Up to where all work has ended, in each domain."""
        return {name: domain.through for name, domain in self.domains.items()}

    def census(self) -> dict[str, int]:
        """How much of each kind is there."""
        pages = self.pages.values()
        return {
            "requests": len(self.heads),
            "snapshots": len(self.snapshots),
            "steps reserved": len(self.steps),
            "work running": len(self.running),
            "pages": len(pages),
            "pages pinned": sum(page.pins > 0 for page in pages),
            "pages registered": sum(page.registrations > 0 for page in pages),
            "pages in quarantine": sum(page.is_quarantined for page in pages),
        }
