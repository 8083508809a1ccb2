"""The page table against a world that keeps everything: random steps, forks and faults."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.arena.table.pages import PageName
from actors.arena.table.steps import Receipt
from codec.errors import ArenaFullError, QuarantinedError, ReceiptError, VmmBusy
from tests.suites.quiet import QUIET_STATEFUL
from tests.suites.table_world import SPOILED, World

DOMAINS = ("stream 0", "stream 1")


class TableMachine(RuleBasedStateMachine):
    """Whatever is drawn, nobody reads what is not theirs, and nothing is lost."""

    @initialize(with_rings=st.booleans())
    def start(self, with_rings: bool) -> None:
        """A small world, so that room runs out and slots come round."""
        self.world = World.small(with_rings=with_rings)
        self.faulty: set[int] = set()
        self.held: list[tuple[str, PageName, list[int]]] = []
        for domain in DOMAINS:
            self.world.step({self.world.open(domain): 4})

    def some_request(self, data: st.DataObject) -> int:
        """Any request that may go on."""
        return data.draw(st.sampled_from(sorted(self.idle())), "request")

    def idle(self) -> set[int]:
        """Requests without a prepared step or a fault."""
        prepared = {step.request for step in self.world.prepared.values()}
        return set(self.world.requests) - prepared - self.faulty

    @rule(domain=st.sampled_from(DOMAINS))
    def open(self, domain: str) -> None:
        """One request more."""
        if len(self.world.requests) < 6:
            self.world.open(domain)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), times=st.integers(1, 3))
    def step(self, data: st.DataObject, times: int) -> None:
        """Some steps of one request, all in flight at once."""
        number = self.some_request(data)
        for _ in range(times):
            with suppress(ArenaFullError):
                self.world.step({number: data.draw(st.integers(1, 6), "size")})

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        """A batch of steps, or a refusal that changes nothing."""
        numbers = data.draw(
            st.lists(st.sampled_from(sorted(self.idle())), min_size=1, max_size=3, unique=True)
        )
        sizes = {number: data.draw(st.integers(1, 6), "size") for number in numbers}
        self.world.table.reclaim()
        before = self.world.state()
        try:
            self.world.prepare(sizes)
        except ArenaFullError:
            assert self.world.state() == before

    @precondition(lambda self: self.world.prepared)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Any prepared steps that share a domain."""
        steps = list(self.world.prepared.values())
        first = data.draw(st.sampled_from(steps), "step")
        domain = self.world.requests[first.request].domain
        same = [s for s in steps if self.world.requests[s.request].domain == domain]
        self.world.commit(data.draw(st.lists(st.sampled_from(same), min_size=1, unique=True)))

    @precondition(lambda self: self.world.prepared)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Take a prepared step back."""
        number = data.draw(st.sampled_from(sorted(self.world.prepared)), "step")
        self.world.table.abort([number])
        del self.world.prepared[number]

    @precondition(lambda self: self.world.prepared)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A batch of which a backend reports a fault."""
        steps = list(self.world.prepared.values())
        batch = data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=2, unique=True))
        receipts = [Receipt.of(step) for step in batch[:-1]]
        bad = batch[-1]
        receipts.append(
            Receipt(
                step=bad.number,
                epoch=bad.epoch,
                bound=frozenset(),
                copied=frozenset(),
                fault="mapped elsewhere",
            )
        )
        with pytest.raises(ReceiptError, match="mapped elsewhere"):
            self.world.table.commit(receipts, "stream 0")
        for step in batch:
            del self.world.prepared[step.number]
            self.faulty.add(step.request)
            # What the failed batch may do to these pages is anyone's guess.
            for page in (*step.pages, *step.tails):
                self.world.memory[page.name[:2]][-1] = SPOILED
            with pytest.raises(QuarantinedError, match="mapped elsewhere"):
                self.world.table.fork(step.request)

    @precondition(lambda self: self.world.running())
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """Any work that runs, in any order."""
        domain, seq = data.draw(st.sampled_from(self.world.running()), "work")
        self.world.complete(domain, seq)

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Two requests from one, which goes on at once as far as there is room."""
        number = self.some_request(data)
        if len(self.world.requests) < 6:
            child = self.world.table.fork(number)
            self.world.requests[child] = self.world.requests[number].copy()
            with suppress(ArenaFullError):
                self.world.step({number: data.draw(st.integers(1, 6), "size")})

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """A snapshot."""
        number = self.some_request(data)
        if len(self.world.snapshots) < 3:
            kept = self.world.table.keep(number)
            self.world.snapshots[kept] = self.world.requests[number].copy()

    @precondition(lambda self: self.world.snapshots)
    @rule(data=st.data(), resumes=st.booleans())
    def use_snapshot(self, data: st.DataObject, resumes: bool) -> None:
        """Go on from a snapshot, or drop it."""
        number = data.draw(st.sampled_from(sorted(self.world.snapshots)), "snapshot")
        if not resumes:
            self.world.table.drop(number)
            del self.world.snapshots[number]
        elif len(self.world.requests) < 6:
            lineage = self.world.snapshots[number].copy()
            self.world.requests[self.world.table.resume(number)] = lineage

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """End any request, unless a step of it is prepared."""
        number = data.draw(st.sampled_from(sorted(self.world.requests)), "request")
        if any(step.request == number for step in self.world.prepared.values()):
            with pytest.raises(VmmBusy, match="is prepared"):
                self.world.table.release(number)
            return
        self.world.table.release(number)
        del self.world.requests[number]
        self.faulty.discard(number)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), verb=st.sampled_from(["pin", "register"]))
    def hold(self, data: st.DataObject, verb: str) -> None:
        """Keep a page for a reader that takes its time, while the request goes on."""
        number = self.some_request(data)
        names = [
            name
            for i in range(len(self.world.plan.classes))
            # State that is replaced in place changes where it is only registered.
            if verb == "pin" or self.world.plan.classes[i].kind == "attention"
            for name in self.world.table.pages(number, i).values()
        ]
        if names:
            name = data.draw(st.sampled_from(names), "page")
            self.world.drain()
            getattr(self.world.table, verb)(name)
            self.held.append((verb, name, list(self.world.memory[name[:2]])))
            with suppress(ArenaFullError):
                self.world.step({number: data.draw(st.integers(1, 6), "size")})
                self.world.table.release(number)
                del self.world.requests[number]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        """What was there is there."""
        verb, name, rows = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.compare(name, rows)
        getattr(self.world.table, f"un{verb}")(name)

    def compare(self, name: PageName, rows: list[int]) -> None:
        """A held page still has every row that was written."""
        found = self.world.memory[name[:2]]
        if not self.faulty:
            assert [b for a, b in zip(rows, found, strict=True) if a != SPOILED] == [
                a for a in rows if a != SPOILED
            ]

    @rule()
    def recover(self) -> None:
        """End the epoch, if it can end."""
        if self.world.prepared:
            with pytest.raises(VmmBusy, match="are prepared"):
                self.world.table.recover()
            return
        self.world.drain()
        self.world.table.recover()
        assert self.world.table.stat().quarantined_pages == 0

    @rule()
    def look(self) -> None:
        """Let all work run, and read everything."""
        self.world.drain()
        sound = {n: found for n, found in self.world.requests.items() if n not in self.faulty}
        self.world.requests, everyone = sound, self.world.requests
        self.world.look()
        self.world.requests = everyone

    @invariant()
    def books_are_true(self) -> None:
        """Slots are taken exactly by the pages in use."""
        if hasattr(self, "world"):
            self.world.table.check()
            taken = [set(slots.taken) for slots in self.world.slots]
            used: list[set[int]] = [set() for _ in taken]
            for page in self.world.table._book:
                used[page.name.class_index].add(page.name.slot)
            assert used == taken

    def teardown(self) -> None:
        """Everything comes back."""
        if hasattr(self, "world"):
            for verb, name, _ in self.held:
                getattr(self.world.table, f"un{verb}")(name)
            self.world.end()


TestTable = TableMachine.TestCase
TestTable.settings = settings(QUIET_STATEFUL, max_examples=60, stateful_step_count=40)
