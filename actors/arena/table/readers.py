"""Who keeps pages beside the snapshots: readers, and whoever knows their addresses."""

from __future__ import annotations

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

    def pin(self, name: PageName) -> None:
        """Keep a page as it is for a reader.

        Raises
        ------
        StaleNameError
            If it is not live.
        VmmBusy
            If a prepared step will write into it, which a reader must not see.
        """
        page = self._live_page(name)
        if page.written_by is not None:
            raise VmmBusy(f"page {page.name}", f"prepared step {page.written_by} writes into it")
        self._journal.write([("pin", {"page": list(name)})])
        page.num_pins += 1

    def unpin(self, name: PageName) -> None:
        """Undo one `pin`.

        Raises
        ------
        StaleNameError
            If the page has no pin.
        """
        page = self._book.find(name)
        if not page.num_pins:
            raise StaleNameError("page", str(name), "has no pin")
        self._journal.write([("unpin", {"page": list(name)})])
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
        self._journal.write([("register", {"page": list(name)})])
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
        self._journal.write([("unregister", {"page": list(name)})])
        page.num_registrations -= 1
        self._reclaimer.notice(page)

    def _live_page(self, name: PageName) -> Page:
        page = self._book.find(name)
        if page.state is not PageState.LIVE:
            raise StaleNameError("page", str(name), f"is {page.state.value}")
        return page
