"""Who keeps pages beside the snapshots: readers, and whoever knows their addresses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from actors.arena.table.journal import Journal
from actors.arena.table.pages import Page, PageBook, PageName, PageState
from actors.arena.table.reclaim import Reclaimer
from codec.errors import StaleNameError, VmmBusy


class Readers:
    """Pins and registrations of a page table's pages; not thread-safe."""

    def __init__(self, book: PageBook, reclaimer: Reclaimer, journal: Journal) -> None:
        self._book = book
        self._reclaimer = reclaimer
        self._journal = journal

    def pin(self, *names: PageName) -> None:
        """Keep pages as they are for a reader: all of them, or none more than before.

        Raises
        ------
        StaleNameError
            If one is not live.
        VmmBusy
            If a prepared step will write into one, which a reader must not see.
        """
        pages = [self._live_page(name) for name in names]
        for page in pages:
            if page.written_by is not None:
                why = f"prepared step {page.written_by} writes into it"
                raise VmmBusy(f"page {page.name}", why)
        self._note("pin", names)
        for page in pages:
            page.num_pins += 1

    def unpin(self, *names: PageName) -> None:
        """Undo one `pin` of each.

        Raises
        ------
        StaleNameError
            If one has no pin; nothing has changed then.
        """
        pages = [self._book.find(name) for name in names]
        for page, times in Counter(pages).items():
            if page.num_pins < times:
                raise StaleNameError("page", str(page.name), "has no pin")
        self._note("unpin", names)
        for page in pages:
            page.num_pins -= 1
            self._reclaimer.notice(page)

    def register(self, name: PageName) -> None:
        """Take note that a network or a device knows the page's addresses.

        Raises
        ------
        StaleNameError
            If it is not live.
        """
        page = self._live_page(name)
        self._note("register", [name])
        page.num_registrations += 1

    def unregister(self, name: PageName) -> None:
        """Undo one `register`.

        Raises
        ------
        StaleNameError
            If the page has no registration.
        """
        page = self._book.find(name)
        if not page.num_registrations:
            raise StaleNameError("page", str(name), "has no registration")
        self._note("unregister", [name])
        page.num_registrations -= 1
        self._reclaimer.notice(page)

    def _note(self, event: str, names: Iterable[PageName]) -> None:
        self._journal.write((event, {"page": list(name)}) for name in names)

    def _live_page(self, name: PageName) -> Page:
        page = self._book.find(name)
        if page.state is not PageState.LIVE:
            raise StaleNameError("page", str(name), f"is {page.state.value}")
        return page
