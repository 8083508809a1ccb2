"""Which pages each request and snapshot has, changed in transactions.

1. ``prepare`` plans steps for a batch of requests and reserves their pages, which nobody
   sees; ``commit`` compares a backend's receipts, gives the requests their new heads and
   numbers the work; ``complete`` takes note that work has ended, in any order.  ``abort``
   undoes a prepared step of which nothing was begun.
2. A head is one immutable tree of pages per class.  A fork or a kept snapshot shares it;
   a request that goes on gets a copy of the paths that change.
3. A step in flight holds the head it started from and all that it writes, so what a queued
   kernel may touch stays, whatever becomes of requests meanwhile.  Several steps of one
   request may be in flight.
4. What nothing leads to any more goes to the `Reclaimer`, which lets a slot be used again
   only with a certificate.

A verb that raises has changed nothing, and may be tried again.  Only a receipt that says
something *wrong* was done puts its batch in quarantine (`ReceiptError`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from actors.arena.table.frontier import ExecutionFrontier
from actors.arena.table.heads import Heads, HeadStore
from actors.arena.table.journal import Journal
from actors.arena.table.page_tree import Work
from actors.arena.table.pages import PageBook, PageName, PageState
from actors.arena.table.readers import Readers
from actors.arena.table.reclaim import Reclaimer
from actors.arena.table.requests import Request, Requests, Snapshot
from actors.arena.table.slots import SlotSource
from actors.arena.table.steps import Certificate, Receipt, Step, StepItem
from actors.arena.table.transactions import Transactions
from actors.arena.turns import Turns
from codec.errors import VmmBusy
from policies.retention.plan import Plan
from policies.retention.steps import stop_ordinal


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStat:
    """A page table at one moment."""

    num_requests: int
    num_snapshots: int
    num_in_flight: int
    """Steps whose work has not ended."""

    live_pages: int
    reserved_pages: int
    retiring_pages: int
    quarantined_pages: int
    quarantined_bytes: int
    num_certified: int
    """Pages whose slots were given back, so far."""


class PageTable:
    """Requests, snapshots and steps over the slots of a compiled plan.  Thread-safe.

    Parameters
    ----------
    slots
        The memory of each class, in the plan's order; used by nobody else.
    journal
        Where every event goes before it happens.
    """

    def __init__(self, plan: Plan, slots: Sequence[SlotSource], journal: Journal) -> None:
        if len(slots) != len(plan.classes):
            raise ValueError(f"need slots for {len(plan.classes)} classes, got {len(slots)}")
        self.plan = plan
        self._slots = tuple(slots)
        self._journal = journal
        self._book = PageBook()
        self._store = HeadStore(len(slots))
        self._requests = Requests()
        frontier = ExecutionFrontier()
        self._reclaimer = Reclaimer(plan, self._slots, self._book, frontier, journal=journal)
        self._readers = Readers(self._book, self._reclaimer, journal)
        self._transactions = Transactions(
            plan,
            self._slots,
            book=self._book,
            store=self._store,
            requests=self._requests,
            reclaimer=self._reclaimer,
            frontier=frontier,
            journal=journal,
        )
        self._turns = Turns("page table")
        journal.begin(plan, self._reclaimer.epoch)

    def open(self) -> int:
        """Begin a request at boundary 0; its number, which is never used again."""
        with self._turns.entered():
            return self._begin("open", {}, Snapshot(0, self._store.empty))

    def fork(self, request: int) -> int:
        """Begin a request that has the head of another.

        Raises
        ------
        StaleNameError, QuarantinedError
            If there is no such request, or it stands still.
        VmmBusy
            If a step of it is prepared, which may write in place what would be shared.
        """
        with self._turns.entered():
            found = self._requests.shareable(request)
            return self._begin("fork", {"source": request}, found)

    def keep(self, request: int) -> int:
        """Keep a request's head as a snapshot; its number, which is never used again.

        Raises
        ------
        StaleNameError, QuarantinedError, VmmBusy
            As in `fork`.
        """
        with self._turns.entered():
            found = self._requests.shareable(request)
            number = self._requests.next_number()
            self._journal.write([("keep", {"request": request, "snapshot": number})])
            self._share(found)
            self._requests.kept[number] = Snapshot(found.boundary, found.heads)
            return number

    def resume(self, snapshot: int) -> int:
        """Begin a request that has the head of a snapshot.

        Raises
        ------
        StaleNameError
            If there is no such snapshot.
        """
        with self._turns.entered():
            found = self._requests.snapshot(snapshot)
            return self._begin("resume", {"snapshot": snapshot}, found)

    def drop(self, snapshot: int) -> None:
        """End a snapshot.

        Raises
        ------
        StaleNameError
            If there is no such snapshot.
        """
        with self._turns.entered():
            found = self._requests.snapshot(snapshot)
            self._journal.write([("drop", {"snapshot": snapshot})])
            del self._requests.kept[snapshot]
            self._let_go(found.heads, "dropped")

    def release(self, request: int) -> None:
        """End a request; what its steps in flight may touch stays until they are complete.

        Raises
        ------
        StaleNameError
            If there is no such request.
        VmmBusy
            If a step of it is prepared: commit or abort it first.
        """
        with self._turns.entered():
            found = self._requests.idle(request)
            # It may refuse, so it comes first: who has left a ring can have another.
            for slots in self._slots:
                slots.leave(request)
            self._journal.write([("release", {"request": request})])
            del self._requests.open[request]
            self._let_go(found.heads, "released")

    def prepare(self, items: Iterable[StepItem]) -> list[Step]:
        """See `Transactions.prepare`."""
        items = list(items)  # an iterator of the caller's could want a turn itself
        with self._turns.entered():
            return self._transactions.prepare(items)

    def commit(self, receipts: Iterable[Receipt], domain: str) -> list[int]:
        """See `Transactions.commit`."""
        receipts = list(receipts)
        with self._turns.entered():
            return self._transactions.commit(receipts, domain)

    def abort(self, steps: Iterable[int]) -> None:
        """See `Transactions.abort`."""
        numbers = list(steps)
        with self._turns.entered():
            self._transactions.abort(numbers)

    def complete(self, ended: Mapping[str, Sequence[int]]) -> None:
        """See `Transactions.complete`."""
        named = {domain: tuple(seqs) for domain, seqs in ended.items() if seqs}
        with self._turns.entered():
            self._transactions.complete(named)

    def pin(self, name: PageName) -> None:
        """See `Readers.pin`."""
        with self._turns.entered():
            self._readers.pin(name)

    def unpin(self, name: PageName) -> None:
        """See `Readers.unpin`."""
        with self._turns.entered():
            self._readers.unpin(name)

    def unpin_soon(self, *names: PageName) -> None:
        """Undo one `pin` of each from a finaliser: without waiting for anybody."""
        self._turns.do_soon(lambda: self._readers.unpin(*names))

    def register(self, name: PageName) -> None:
        """See `Readers.register`."""
        with self._turns.entered():
            self._readers.register(name)

    def unregister(self, name: PageName) -> None:
        """See `Readers.unregister`."""
        with self._turns.entered():
            self._readers.unregister(name)

    def need_prepared(self, step: Step) -> None:
        """See `Requests.need_prepared`."""
        with self._turns.entered():
            self._requests.need_prepared(step)

    def need_running(self, step: Step) -> None:
        """See `Transactions.need_running`."""
        with self._turns.entered():
            self._transactions.need_running(step)

    def reclaim(self, most: int | None = None) -> list[Certificate]:
        """Certify pages that are done with and let their slots be used again.

        Only this and `prepare` give slots back: call it when requests end, too, so that what
        they had can go to others.

        Parameters
        ----------
        most
            Pages to take back at once; all there are, if nothing.
        """
        with self._turns.entered():
            return self._reclaimer.reclaim(most)

    def recover(self) -> int:
        """Lift the quarantine of pages; returns the new epoch.

        The caller has first seen all device work of the failed batches end, by a ticket
        recorded after them.  Their requests stand still all the same: what their pages hold
        is in doubt, so they are to be released and computed again.

        Raises
        ------
        VmmBusy
            If steps are prepared, or work submitted before the last quarantine is running.
        """
        with self._turns.entered():
            if self._requests.steps:
                raise VmmBusy("the epoch", f"{len(self._requests.steps)} steps are prepared")
            return self._reclaimer.recover()

    def boundary(self, request: int) -> int:
        """Tokens that a request has stored.

        Raises
        ------
        StaleNameError
            If there is no such request.
        """
        with self._turns.entered():
            return self._requests.request(request).boundary

    def pages(self, request: int, class_index: int) -> dict[int, PageName]:
        """A request's pages of one class, by rising ordinal.

        Raises
        ------
        StaleNameError
            If there is no such request.
        """
        with self._turns.entered():
            return self._store.names(self._requests.request(request).heads, class_index)

    def pin_pages(self, request: int, class_index: int) -> tuple[int, dict[int, PageName]]:
        """A request's boundary, and its pages of one class by ordinal, pinned.

        All in one turn, so that they belong together.

        Raises
        ------
        StaleNameError
            If there is no such request.
        VmmBusy
            If a prepared step will write into one; none is pinned then.
        """
        with self._turns.entered():
            found = self._requests.request(request)
            names = self._store.names(found.heads, class_index)
            self._readers.pin(*names.values())
            return found.boundary, names

    def kept_pages(self, snapshot: int, class_index: int) -> dict[int, PageName]:
        """A snapshot's pages of one class, by rising ordinal.

        Raises
        ------
        StaleNameError
            If there is no such snapshot.
        """
        with self._turns.entered():
            return self._store.names(self._requests.snapshot(snapshot).heads, class_index)

    @property
    def work(self) -> Work:
        """What sharing and changing heads has cost so far."""
        return self._store.work

    def stat(self) -> TableStat:
        """How many of everything there are; costs a look at every page."""
        with self._turns.entered():
            states = Counter(page.state for page in self._book)
            sick = [page.name.class_index for page in self._book if page.is_quarantined]
            return TableStat(
                num_requests=len(self._requests.open),
                num_snapshots=len(self._requests.kept),
                num_in_flight=self._transactions.num_in_flight,
                live_pages=states[PageState.LIVE],
                reserved_pages=states[PageState.RESERVED],
                retiring_pages=states[PageState.RETIRING],
                quarantined_pages=len(sick),
                quarantined_bytes=sum(self.plan.classes[index].page_bytes for index in sick),
                num_certified=self._reclaimer.num_certified,
            )

    def check(self) -> None:
        """Assert every invariant.  For tests and validation, not for control flow."""
        with self._turns.entered():
            self._reclaimer.check()
            reserved = {new.name for step in self._requests.steps.values() for new in step.pages}
            for page in self._book:
                assert (page.refs > 0) == (page.state is PageState.LIVE), page
                assert (page.name in reserved) == (page.state is PageState.RESERVED), page
                assert page.num_pins >= 0 <= page.num_registrations, page
            for step in self._requests.steps.values():
                assert self._requests.open[step.request].prepared is step

    def _begin(self, event: str, fields: dict[str, int], source: Request | Snapshot) -> int:
        number = self._requests.next_number()
        self._journal.write([(event, {**fields, "request": number})])
        self._share(source)
        self._requests.open[number] = Request(number, source.boundary, source.heads)
        return number

    def _share(self, source: Request | Snapshot) -> None:
        ends = [stop_ordinal(found, source.boundary) for found in self.plan.classes]
        self._store.share(source.heads, ends)

    def _let_go(self, heads: Heads, why: str) -> None:
        self._reclaimer.retire(self._store.drop(heads), why)
