"""The rules of a certificate log: one method per event.

Each refuses what does not follow from the books, by a `ValueError` that says why, or writes
the event into them.  After a refusal the books are of no more use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from policies.certificate_claims import MAX_POSITION, ClassRecord
from policies.certificate_state import Domain, Head, Page, PageName, State, Step

MAX_STEP_TOKENS: Final = 2**22
"""No step stores more, so that no line takes long to check."""

MAX_HELD_PAGES: Final = 2**23
"""All requests and snapshots together have no more, so that short lines cannot fill memory."""

Fields = dict[str, Any]


class Rules:
    """What may happen, given what has."""

    def __init__(self, state: State) -> None:
        self._state = state

    def apply(self, event: str, fields: Fields) -> None:
        """Check an event, which has the fields it should have, and write it down.

        Raises
        ------
        ValueError
            If it does not follow.
        """
        has_begun = bool(self._state.classes)
        _need((event == "begin") != has_begun, "begin is the first line, and no other")
        rule: Callable[[Fields], None] = getattr(self, event)
        rule(fields)

    def begin(self, fields: Fields) -> None:
        """A log is of one arena and one plan, of at least one class."""
        state = self._state
        state.classes = [ClassRecord.read(record) for record in fields["classes"]]
        _need(bool(state.classes), "need a class")
        state.arena, state.plan, state.epoch = fields["arena"], fields["plan"], fields["epoch"]

    # Requests and snapshots

    def open(self, fields: Fields) -> None:
        """A request begins empty, under a name that no living one has."""
        self._add_request(fields, Head([{} for _ in self._state.classes]))

    def fork(self, fields: Fields) -> None:
        """The source is there, and not in quarantine."""
        self._add_request(fields, self._copied(self._moving(fields["source"])))

    def resume(self, fields: Fields) -> None:
        """The snapshot is there."""
        self._add_request(fields, self._copied(self._snapshot(fields["snapshot"])))

    def keep(self, fields: Fields) -> None:
        """The request is there and not in quarantine; the snapshot's name is free."""
        name = fields["snapshot"]
        _need(name not in self._state.snapshots, f"snapshot {name} is there already")
        self._state.snapshots[name] = self._copied(self._moving(fields["request"]))

    def drop(self, fields: Fields) -> None:
        """The snapshot is there."""
        head = self._snapshot(fields["snapshot"])
        del self._state.snapshots[fields["snapshot"]]
        head.let_all_go("dropped", self._state.order)

    def release(self, fields: Fields) -> None:
        """The request is there and has no step reserved; quarantine is no hindrance."""
        name = fields["request"]
        head = self._head(name)
        _need(head.prepared is None, f"request {name} has step {head.prepared} reserved")
        del self._state.heads[name]
        head.let_all_go("released", self._state.order)

    def _add_request(self, fields: Fields, head: Head) -> None:
        name = fields["request"]
        _need(name not in self._state.heads, f"request {name} is there already")
        self._state.heads[name] = head

    def _copied(self, head: Head) -> Head:
        num_held = self._state.num_held() + sum(map(len, head.pages))
        _need(num_held <= MAX_HELD_PAGES, f"more than {MAX_HELD_PAGES} pages are held")
        return head.copy()

    # Steps

    def reserve(self, fields: Fields) -> None:
        """One step at a time per request; every slot is free, and its generation the next."""
        state, number, name = self._state, fields["step"], fields["request"]
        _need(number not in state.steps, f"step {number} is there already")
        head = self._moving(name)
        _need(head.prepared is None, f"request {name} has step {head.prepared} reserved")
        seen: set[tuple[int, int]] = set()
        step = Step(name, [])
        for index, ordinal, slot, generation in fields["pages"]:
            _need(index < len(state.classes), f"no class {index}")
            found = state.classes[index]
            _need(found.has_page(ordinal), f"class {found.name!r} has no page {ordinal}")
            _need((index, ordinal) not in seen, f"page {ordinal} of {found.name!r} comes twice")
            seen.add((index, ordinal))
            step.pages.append(self._granted(Page((index, slot, generation), ordinal, number)))
        state.steps[number] = step
        head.prepared = number

    def _granted(self, page: Page) -> Page:
        index, slot, generation = page.name
        last = self._state.generations.get((index, slot), 0)
        where = f"slot {slot} of class {index}"
        is_free = (index, slot, last) not in self._state.pages
        _need(is_free, f"{where} holds generation {last}, which was not certified")
        _need(generation == last + 1, f"{where} goes from generation {last} to {generation}")
        self._state.generations[index, slot] = generation
        self._state.pages[page.name] = page
        return page

    def abort(self, fields: Fields) -> None:
        """The step is reserved, and no network knows its pages, which are free at once."""
        for page in self._take_step(fields["step"]).pages:
            _need(page.registrations == 0, f"{page} has {page.registrations} registrations")
            del self._state.pages[page.name]

    def commit(self, fields: Fields) -> None:
        """The request goes on from where it is, and loses only what is dead.

        New pages are written by the step or replace pages of the head; nothing is written
        in place that anybody else has; whatever was written and is still read is there.
        """
        state, name = self._state, fields["request"]
        head = self._moving(name)
        step = self._take_step(fields["step"])
        _need(step.request == name, f"step {fields['step']} is of request {step.request}")
        before, after, live_from = fields["before"], fields["after"], fields["live_from"]
        _need(head.boundary == before, f"request {name} is at {head.boundary}, not {before}")
        _need(before < after <= MAX_POSITION, f"need a boundary after {before}, got {after}")
        _need(after - before <= MAX_STEP_TOKENS, f"more than {MAX_STEP_TOKENS} tokens in a step")
        _need(len(live_from) == len(state.classes), "need one live_from for each class")
        state.order += 1
        self._submit(head, fields["domain"], fields["seq"])
        for page in step.pages:
            self._arrive(head, page, before, after)
        for index, first in enumerate(live_from):
            self._check_writes(head, index, before, after)
            self._drop_dead(head, index, first, after)
            self._check_live(head, index, before, after)
        head.boundary = after

    def _submit(self, head: Head, name: str, seq: int) -> None:
        """Number the step's work in its domain."""
        domain = self._state.domains.setdefault(name, Domain())
        _need(seq == domain.submitted + 1, f"{name!r} goes from {domain.submitted} to {seq}")
        domain.submitted = seq
        head.running[self._state.order] = name, seq
        head.last_run[name] = self._state.order
        self._state.running[name, seq] = head, self._state.order

    def _arrive(self, head: Head, page: Page, before: int, after: int) -> None:
        """Give the head a page of the step: a copy of one that it has, or one to write."""
        index, order = page.name[0], self._state.order
        found = self._state.classes[index]
        if page.ordinal in head.pages[index]:
            head.let_go(index, page.ordinal, "replaced", order)
        elif found.kind == "attention":
            is_written = page.ordinal in found.written(before, after)
            _need(is_written, f"{page} is new, but holds no token of [{before}, {after})")
        page.step = None
        head.pages[index][page.ordinal] = page, order

    def _check_writes(self, head: Head, index: int, before: int, after: int) -> None:
        """Refuse to write in place what another request or a snapshot reads there.

        State is read as a whole.  Of other pages, a holder that is not ahead reads only what
        is before the place; it cannot write there itself after this, so one of them copies.
        """
        found = self._state.classes[index]
        if found.kind == "cross":
            return  # the first step writes it, into pages that are new
        is_state = found.kind == "recurrent"
        for ordinal in (0,) if is_state else found.written(before, after):
            if ordinal not in head.pages[index]:
                continue
            page, _ = head.pages[index][ordinal]
            _need(page.pins == 0, f"{page} is written in place, but a reader has it")
            for name, other in self._state.holders(page):
                if other is not head and (is_state or other.boundary > before):
                    raise ValueError(f"{page} is written in place, but {name} has it too")

    def _drop_dead(self, head: Head, index: int, live_from: int, after: int) -> None:
        """Take the pages before ``live_from`` out of the head: all of them are dead."""
        found = self._state.classes[index]
        if live_from <= found.first_page:
            return  # spares a look at every page of a class that keeps all
        for ordinal in [ordinal for ordinal in head.pages[index] if ordinal < live_from]:
            is_dead = found.is_dead(ordinal, after)
            _need(is_dead, f"page {ordinal} of {found.name!r} is dropped, but not dead at {after}")
            head.let_go(index, ordinal, "window", self._state.order)

    def _check_live(self, head: Head, index: int, before: int, after: int) -> None:
        """Refuse a head without a page that the step wrote and a later query reads."""
        found, pages = self._state.classes[index], head.pages[index]
        if found.kind == "recurrent":
            _need(0 in pages, f"the head has no state {found.name!r}")
        if found.kind != "attention":
            return
        for ordinal in found.written(before, after):
            if ordinal not in pages and found.has_page(ordinal):
                key = found.first_read(ordinal, before, after)
                _need(key is None, f"no page {ordinal} of {found.name!r}, but {key} is read")

    def complete(self, fields: Fields) -> None:
        """The work is running."""
        name = fields["domain"]
        for seq in fields["seqs"]:
            found = self._state.running.pop((name, seq), None)
            if found is None:
                raise ValueError(f"work {seq} of {name!r} is not running")
            head, order = found
            del head.running[order]
            self._state.domains[name].end(seq)

    # Readers and registrations

    def pin(self, fields: Fields) -> None:
        """The page was published and is not free."""
        self._published(fields["page"]).pins += 1

    def unpin(self, fields: Fields) -> None:
        """The page has a pin."""
        page = self._page(fields["page"])
        _need(page.pins > 0, f"{page} has no pin")
        page.pins -= 1

    def register(self, fields: Fields) -> None:
        """The page is not free."""
        self._page(fields["page"]).registrations += 1

    def unregister(self, fields: Fields) -> None:
        """The page has a registration."""
        page = self._page(fields["page"])
        _need(page.registrations > 0, f"{page} has no registration")
        page.registrations -= 1

    # Quarantine and reuse

    def quarantine(self, fields: Fields) -> None:
        """The step is reserved; what is named is its own, or its request's.

        It never commits.  All its pages stay, named or not, until a recovery.
        """
        number, name = fields["step"], fields["request"]
        head, step = self._head(name), self._take_step(number)
        _need(step.request == name, f"step {number} is of request {step.request}")
        named = [self._page(page) for page in fields["pages"]]
        _need(len(set(map(id, named))) == len(named), "a page is named twice")
        for page in named:
            is_theirs = page in step.pages or head.has(page)
            _need(is_theirs, f"{page} is neither of step {number} nor of request {name}")
        for page in step.pages:
            page.step = None
        for page in (*step.pages, *named):
            page.is_quarantined = True
        head.is_quarantined = True
        self._state.fences = self._state.submitted()

    def recover(self, fields: Fields) -> None:
        """All work up to the fences has ended; they reach what came before a quarantine."""
        state, epoch, fences = self._state, fields["epoch"], fields["fences"]
        _need(epoch == state.epoch + 1, f"epoch {state.epoch} goes to {epoch}")
        through = state.through()
        for name, fence in fences.items():
            ended = through.get(name, 0)
            _need(fence <= ended, f"{name!r} is fenced at {fence}, but has ended only {ended}")
        for name, submitted in state.fences.items():
            fence = fences.get(name, 0)
            _need(
                fence >= submitted,
                f"{name!r} is fenced at {fence}, but had {submitted} at a quarantine",
            )
        state.epoch, state.fences = epoch, {}
        for page in state.pages.values():
            if page.is_quarantined:
                page.is_quarantined = False
                page.let_go.add("recovered")
        for head in state.heads.values():
            head.is_quarantined = False

    def reuse(self, fields: Fields) -> None:
        """Nothing has the page or may touch it, and it is let go for the reason given."""
        page = self._published(fields["page"])
        found = self._state.classes[page.name[0]]
        _need(fields["ordinal"] == page.ordinal, f"{page} has ordinal {page.ordinal}")
        tokens = list(found.tokens_of(page.ordinal))
        _need(fields["tokens"] == tokens, f"{page} spans the tokens {tokens}")
        for name, _ in self._state.holders(page):
            raise ValueError(f"{page} is in {name}")
        work = page.running()
        _need(work is None, f"{page} is in use by running work, {work}")
        _need(page.pins == 0, f"{page} has {page.pins} pins")
        _need(page.registrations == 0, f"{page} has {page.registrations} registrations")
        _need(not page.is_quarantined, f"{page} is in quarantine")
        for name in ("refs", "pins", "registrations"):
            _need(fields[name] == 0, f"need {name} 0, got {fields[name]}")
        why = fields["why"]
        _need(why in page.let_go, f"{page} was not {why}, but {', '.join(sorted(page.let_go))}")
        self._check_done(page, fields["done"])
        del self._state.pages[page.name]

    def _check_done(self, page: Page, done: dict[str, int]) -> None:
        through = self._state.through()
        for name, seq in done.items():
            ended = through.get(name)
            _need(seq == ended, f"done is {seq} of {name!r}, which has ended {ended}")
        unnamed = min(page.domains - done.keys(), default=None)
        _need(unnamed is None, f"{page} was used by work of {unnamed!r}, which done leaves out")

    # Names

    def _page(self, name: list[int]) -> Page:
        index, slot, generation = name
        known: PageName = index, slot, generation
        page = self._state.pages.get(known)
        if page is None:
            raise ValueError(f"page {name} is not in use")
        return page

    def _published(self, name: list[int]) -> Page:
        page = self._page(name)
        _need(page.step is None, f"{page} is reserved for step {page.step}")
        return page

    def _head(self, request: int) -> Head:
        if request not in self._state.heads:
            raise ValueError(f"no request {request}")
        return self._state.heads[request]

    def _moving(self, request: int) -> Head:
        head = self._head(request)
        _need(not head.is_quarantined, f"request {request} is in quarantine")
        return head

    def _snapshot(self, number: int) -> Head:
        if number not in self._state.snapshots:
            raise ValueError(f"no snapshot {number}")
        return self._state.snapshots[number]

    def _take_step(self, number: int) -> Step:
        step = self._state.steps.pop(number, None)
        if step is None:
            raise ValueError(f"step {number} is not reserved")
        self._head(step.request).prepared = None
        return step


def _need(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)
