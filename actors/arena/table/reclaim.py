"""From pages that nothing leads to, to slots that may hold others: only with a certificate.

A slot is used again when its page is *dead* and *committed* (no head or snapshot leads to
it), *done* (neither does a step in flight), *unpinned* and *unregistered*.  A page that a
failed batch may have written is in quarantine besides, until a *recovery*: the epoch ends
behind a fence, up to which all work has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from actors.arena.table.frontier import ExecutionFrontier
from actors.arena.table.journal import Journal
from actors.arena.table.pages import Page, PageBook, PageState
from actors.arena.table.slots import SlotSource
from actors.arena.table.steps import Certificate
from codec.errors import VmmBusy
from policies.retention.plan import Plan, PlannedClass


class Reclaimer:
    """Takes pages back; not thread-safe."""

    def __init__(
        self,
        plan: Plan,
        slots: Sequence[SlotSource],
        book: PageBook,
        frontier: ExecutionFrontier,
        *,
        journal: Journal,
    ) -> None:
        self._plan = plan
        self._slots = slots
        self._book = book
        self._frontier = frontier
        self._journal = journal
        #: Exactly the pages that are reusable, in the order in which they became so.
        self._ready: dict[Page, None] = {}
        #: Pages in quarantine.
        self._quarantined: dict[Page, None] = {}
        #: All work submitted when the last quarantine began.
        self._fences: dict[str, int] = {}
        #: Never falls.
        self.num_certified = 0
        #: Rises with every recovery.
        self.epoch = 1

    def retire(self, pages: Iterable[Page], why: str) -> None:
        """Take over pages that nothing leads to; ``why`` for those that did not say yet."""
        for page in pages:
            page.state = PageState.RETIRING
            page.why = page.why or why
            self.notice(page)

    def notice(self, page: Page) -> None:
        """Look again at a page that less keeps than before."""
        if page.is_reusable:
            self._ready[page] = None

    def quarantine(self, pages: Iterable[Page]) -> None:
        """Keep pages from being used again until `recover`."""
        for page in pages:
            page.is_quarantined = True
            self._quarantined[page] = None
        self._fences = self._frontier.submitted()

    def reclaim(self, most: int | None = None) -> list[Certificate]:
        """Certify pages, the first to become reusable first, and give their slots back."""
        pages = list(islice(self._ready, most))
        if not pages:
            return []
        done = tuple(sorted(self._frontier.through().items()))
        found = [self._certificate(page, done) for page in pages]
        # Before the slots are free: without its certificate none may be used again.
        self._journal.write(("reuse", _fields(certificate)) for certificate in found)
        for page in pages:
            del self._ready[page]
        self.num_certified += len(found)
        self.give_back(pages)
        return found

    def give_back(self, pages: Iterable[Page]) -> None:
        """End pages that nothing has, and let their slots be granted again."""
        slots: dict[int, list[int]] = {}
        for page in pages:
            self._book.remove(page)
            slots.setdefault(page.name.class_index, []).append(page.name.slot)
        for class_index, freed in slots.items():
            self._slots[class_index].free(freed)

    def recover(self) -> int:
        """End the quarantine and the epoch; the new epoch.

        Raises
        ------
        VmmBusy
            If work is running that was submitted before the last quarantine.
        """
        if not self._frontier.has_passed(self._fences):
            raise VmmBusy("the epoch", "work from before the quarantine is running")
        fields = {"epoch": self.epoch + 1, "fences": self._fences}
        self._journal.write([("recover", fields)])
        self.epoch += 1
        for page in self._quarantined:
            page.is_quarantined = False
            self.notice(page)
        self._quarantined.clear()
        return self.epoch

    def check(self) -> None:
        """Assert every invariant."""
        self._frontier.check()
        assert set(self._ready) == {page for page in self._book if page.is_reusable}
        assert set(self._quarantined) == {page for page in self._book if page.is_quarantined}

    def _certificate(self, page: Page, done: tuple[tuple[str, int], ...]) -> Certificate:
        found = self._plan.classes[page.name.class_index]
        return Certificate(
            page=page.name,
            ordinal=page.ordinal,
            tokens=tokens_of(found, page.ordinal),
            why=page.why or "",
            done=done,
        )


def tokens_of(found: PlannedClass, ordinal: int) -> tuple[int, int]:
    """Positions that a page spans; those of recurrent state are of its one page."""
    return (0, 1) if found.kind == "recurrent" else found.tokens_of(ordinal)


def _fields(certificate: Certificate) -> dict[str, object]:
    return {
        "page": list(certificate.page),
        "ordinal": certificate.ordinal,
        "tokens": list(certificate.tokens),
        "why": certificate.why,
        "done": dict(certificate.done),
        "refs": 0,
        "pins": 0,
        "registrations": 0,
    }
