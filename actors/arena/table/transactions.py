"""Steps of requests, in batches: prepared, committed or aborted, and completed.

`actors.arena.table.page_table` tells how these work together, and lets threads take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from actors.arena.table.frontier import ExecutionFrontier
from actors.arena.table.heads import Heads, HeadStore
from actors.arena.table.journal import Journal
from actors.arena.table.pages import PageBook, PageName, PageState
from actors.arena.table.planning import demands, reserve_all
from actors.arena.table.reclaim import Reclaimer
from actors.arena.table.requests import Request, Requests
from actors.arena.table.slots import SlotSource
from actors.arena.table.steps import Receipt, Step, StepItem, StepPage, need_complete, wrongs
from codec.errors import ReceiptError, StaleNameError
from policies.retention.plan import Plan


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step whose work has not ended."""

    step: Step
    held: tuple[Heads, ...]


class Transactions:
    """Makes the steps of a page table, whose parts it is given; not thread-safe."""

    def __init__(
        self,
        plan: Plan,
        slots: Sequence[SlotSource],
        *,
        book: PageBook,
        store: HeadStore,
        requests: Requests,
        reclaimer: Reclaimer,
        frontier: ExecutionFrontier,
        journal: Journal,
    ) -> None:
        self._classes = plan.classes
        self._step_tokens = plan.step_tokens
        self._slots = slots
        self._book = book
        self._store = store
        self._requests = requests
        self._reclaimer = reclaimer
        self._frontier = frontier
        self._journal = journal
        #: Steps in flight, by domain and number of their work, and by their own number.
        self._flights: dict[tuple[str, int], _Flight] = {}
        self._running: dict[int, Step] = {}

    @property
    def num_in_flight(self) -> int:
        """Steps whose work has not ended."""
        return len(self._flights)

    def prepare(self, items: Sequence[StepItem]) -> list[Step]:
        """Plan one step for each item and reserve what they need: for all, or for none.

        Slots whose last pages are done with are taken back first.

        Raises
        ------
        StaleNameError
            If a request is gone, or its head is elsewhere.
        QuarantinedError
            If one stands still.
        VmmBusy
            If one has a step prepared already.
        ArenaFullError
            If there is no room.
        ValueError
            If a request is named twice, or a step is longer than the plan was compiled for.
        """
        for item in items:
            if item.after - item.before > self._step_tokens:
                most = self._step_tokens
                raise ValueError(f"the plan is for steps of at most {most} tokens, got {item}")
        found = [self._requests.at(item) for item in items]
        if len(set(map(id, found))) < len(found):
            raise ValueError("a request is named twice in one batch")
        self._reclaimer.reclaim()
        with ExitStack() as undo:
            steps = [
                self._planned(request, item.after, undo)
                for request, item in zip(found, items, strict=True)
            ]
            self._journal.write(("reserve", _reserve_fields(step)) for step in steps)
            undo.pop_all()
        for step in steps:
            for new in step.pages:
                self._book.add(new.name, new.ordinal)
            for tail in step.tails:
                self._book.find(tail.name).written_by = step.number
            self._requests.prepare(step)
        return steps

    def commit(self, receipts: Sequence[Receipt], domain: str) -> list[int]:
        """Publish prepared steps and count their work as submitted to ``domain``.

        Returns
        -------
        The numbers of their work in the domain, in the receipts' order.

        Raises
        ------
        StaleNameError
            If a step is not prepared, or a receipt is of another epoch.
        ValueError
            If a step is named twice, there are too many domains, or a receipt is incomplete:
            ask again later.
        TypeError
            If ``domain`` is no string.
        ReceiptError
            If a receipt says that something wrong was done.  The whole batch is in
            quarantine then: its steps are over, and its requests stand still.
        """
        self._frontier.need_domain(domain)
        steps = [self._requests.step_of(receipt) for receipt in receipts]
        if len(set(map(id, steps))) < len(steps):
            raise ValueError("a step is named twice in one batch")
        for step, receipt in zip(steps, receipts, strict=True):
            need_complete(step, receipt)
        for step, receipt in zip(steps, receipts, strict=True):
            if why := wrongs(step, receipt):
                self._quarantine(steps, why)
                raise ReceiptError(step.number, why)
        first = self._frontier.next_seq(domain)
        self._journal.write(
            ("commit", _commit_fields(step, domain, seq)) for seq, step in enumerate(steps, first)
        )
        return [self._publish(step, domain) for step in steps]

    def abort(self, steps: Sequence[int]) -> None:
        """Undo prepared steps.  The caller vouches that a backend has begun none of them.

        Raises
        ------
        StaleNameError
            If one is not prepared; nothing has changed then.
        """
        found = [self._requests.step(number) for number in dict.fromkeys(steps)]
        self._journal.write(("abort", {"step": step.number}) for step in found)
        for step in found:
            self._settle(step)
        self._reclaimer.give_back(self._book.find(new.name) for s in found for new in s.pages)

    def complete(self, ended: Mapping[str, tuple[int, ...]]) -> None:
        """Take note that work has ended, in whichever order.

        Raises
        ------
        StaleNameError
            If some of it was not running; nothing has changed then.
        """
        self._frontier.need_running(ended)
        self._journal.write(
            ("complete", {"domain": domain, "seqs": list(seqs)}) for domain, seqs in ended.items()
        )
        self._frontier.complete(ended)
        for domain, seqs in ended.items():
            for seq in seqs:
                flight = self._flights.pop((domain, seq))
                del self._running[flight.step.number]
                for heads in flight.held:
                    self._reclaimer.retire(self._store.drop(heads), "released")

    def need_running(self, step: Step) -> None:
        """Refuse what is not a step in flight, as it was given out.

        Raises
        ------
        StaleNameError
            If its work has ended, or was never committed.
        """
        if self._running.get(step.number) != step:
            raise StaleNameError("step", str(step.number), "is not in flight")

    def _settle(self, step: Step) -> Request:
        """End a prepared step; its request."""
        for tail in step.tails:
            self._book.find(tail.name).written_by = None
        return self._requests.settle(step)

    def _planned(self, request: Request, after: int, undo: ExitStack) -> Step:
        demanded = demands(
            self._classes,
            self._slots,
            self._store.views(request.heads),
            request=request.number,
            before=request.boundary,
            after=after,
        )
        taken = reserve_all(self._slots, demanded, request.number, undo)
        pages = [
            StepPage(
                self._book.next_name(index, slot),
                ordinal,
                demand.sources[ordinal].name if ordinal in demand.sources else None,
            )
            for index, (demand, slots) in enumerate(zip(demanded, taken, strict=True))
            for ordinal, slot in zip(demand.ordinals, slots, strict=True)
        ]
        return Step(
            number=self._requests.next_number(),
            epoch=self._reclaimer.epoch,
            request=request.number,
            before=request.boundary,
            after=after,
            pages=tuple(pages),
            tails=tuple(
                StepPage(demand.tail.name, demand.tail.ordinal)
                for demand in demanded
                if demand.tail is not None
            ),
            live_from=tuple(demand.live_from for demand in demanded),
        )

    def _publish(self, step: Step, domain: str) -> int:
        request = self._settle(step)
        pages = [self._book.find(new.name) for new in step.pages]
        for page in pages:
            page.state = PageState.LIVE
            page.writer = request.number
        advance = self._store.advance(request.heads, pages, step.live_from)
        for page in advance.left:
            page.why = "window"
        for page in advance.replaced:
            page.why = "replaced"
        seq = self._frontier.submit(domain)
        # The request's hold on its old head goes over to the flight.
        self._flights[domain, seq] = _Flight(step, (request.heads, advance.full))
        self._running[step.number] = step
        request.heads, request.boundary = advance.head, step.after
        return seq

    def _quarantine(self, steps: Sequence[Step], why: str) -> None:
        """End prepared steps, and shut away whatever they may have written."""
        doubted = [[page.name for page in (*step.pages, *step.tails)] for step in steps]
        self._journal.write(
            ("quarantine", {"step": s.number, "request": s.request, "pages": _listed(names)})
            for s, names in zip(steps, doubted, strict=True)
        )
        for step, names in zip(steps, doubted, strict=True):
            self._settle(step).fault = f"step {step.number} failed: {why}"
            self._reclaimer.quarantine(map(self._book.find, names))
            reserved = [self._book.find(new.name) for new in step.pages]
            self._reclaimer.retire(reserved, "recovered")


def _listed(names: Iterable[PageName]) -> list[list[int]]:
    return [list(name) for name in names]


def _reserve_fields(step: Step) -> dict[str, object]:
    pages = [[p.name.class_index, p.ordinal, p.name.slot, p.name.generation] for p in step.pages]
    return {"step": step.number, "request": step.request, "pages": pages}


def _commit_fields(step: Step, domain: str, seq: int) -> dict[str, object]:
    return {
        "step": step.number,
        "request": step.request,
        "domain": domain,
        "seq": seq,
        "before": step.before,
        "after": step.after,
        "live_from": list(step.live_from),
    }
