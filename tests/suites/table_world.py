"""A page table with a memory and devices below it, run as late and as badly as allowed.

`World` keeps what every request ever wrote.  Memory is a list of rows per slot, spoiled the
moment a slot is granted.  Work is queued per domain and runs only when somebody says that
it has ended: in order within a domain, since that is what a stream is, and whatever was
reused too early in the meantime is read as it is then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from actors.arena.table.certificates import CertificateLog
from actors.arena.table.journal import Event
from actors.arena.table.page_table import PageTable
from actors.arena.table.pages import PageName
from actors.arena.table.steps import Receipt, Step, StepItem
from policies.certificates import verify
from policies.retention.plan import Plan, PlannedClass, compile_program
from policies.retention.program import AttentionState, CrossState, Program, RecurrentState
from policies.retention.text import parse_relation
from tests.suites.slots import PoolSlots, RingSlots

SPOILED = -1
PAGE = 4


def hybrid_plan(step_tokens: int = 6) -> Plan:
    """Every kind of class at once: full, window, sink, chunk, every 3rd key, and the rest."""
    reads = ("true", "q - k < 10", "q - k < 7 or k < 5", "q // 8 == k // 8")
    strided = "q - k < 5 or k % 3 == 0"
    states = [
        AttentionState(
            name=f"a{i}", layers=(i,), reads=parse_relation(text), bytes_per_token_layer=2
        )
        for i, text in enumerate((*reads, strided))
    ]
    return compile_program(
        Program(
            page_tokens=PAGE,
            states=(
                *states,
                RecurrentState(name="r", layers=(9,), bytes_per_layer=8),
                CrossState(name="c", layers=(10,), bytes_per_token_layer=2, source_tokens=6),
            ),
        ),
        step_tokens=step_tokens,
    )


class KeptEvents(CertificateLog):
    """A log in memory, that can be full."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.events: list[Event] = []
        self.is_full = False
        super().__init__(self._take)

    def write(self, events: Iterable[Event]) -> None:
        """See `Journal.write`."""
        events = list(events)
        super().write(events)
        self.events.extend(event for event in events if event[0] != "begin")

    def _take(self, data: bytes) -> None:
        if self.is_full:
            raise OSError(28, "no space left")
        self.lines += data.splitlines(keepends=True)


@dataclass
class Lineage:
    """What a request or a snapshot should find in its pages."""

    domain: str
    #: One value per token; and one for what is written once, and for what is replaced.
    tokens: list[int] = field(default_factory=list)
    once: int = SPOILED

    def copy(self) -> Lineage:
        """The same, to go another way."""
        return Lineage(self.domain, list(self.tokens), self.once)


@dataclass
class Queued:
    """Work of one step."""

    seq: int
    step: Step
    run: Callable[[], None]


class World:
    """One table and all that is around it."""

    def __init__(self, plan: Plan, slots: Sequence[PoolSlots]) -> None:
        self.plan = plan
        self.slots = slots
        self.journal = KeptEvents()
        self.table = PageTable(plan, slots, self.journal)
        self.memory: dict[tuple[int, int], list[int]] = {}
        self.requests: dict[int, Lineage] = {}
        self.snapshots: dict[int, Lineage] = {}
        self.prepared: dict[int, Step] = {}
        self.queues: dict[str, list[Queued]] = {}
        self.values = count(1)

    @classmethod
    def small(cls, *, with_rings: bool = True) -> World:
        """A world in which memory is short."""
        plan = hybrid_plan()
        slots = [
            RingSlots(5, found.address.cells)
            if with_rings and found.kind == "attention" and "periodic" in str(found.address)
            else PoolSlots(24)
            for found in plan.classes
        ]
        return cls(plan, slots)

    def open(self, domain: str) -> int:
        """A new request."""
        number = self.table.open()
        self.requests[number] = Lineage(domain)
        return number

    def prepare(self, sizes: dict[int, int]) -> list[Step]:
        """Prepare a batch; what was granted holds nothing any more."""
        items = []
        for number, size in sizes.items():
            before = self.table.boundary(number)
            items.append(StepItem(request=number, before=before, after=before + size))
        steps = self.table.prepare(items)
        for step in steps:
            self.prepared[step.number] = step
            for new in step.pages:
                self.memory[new.name[:2]] = [SPOILED] * PAGE
        return steps

    def commit(self, steps: Sequence[Step]) -> None:
        """Commit, and queue the work."""
        domain = self.requests[steps[0].request].domain
        pages = [self.pages_of(step) for step in steps]
        seqs = self.table.commit([Receipt.of(step) for step in steps], domain)
        for seq, step, known in zip(seqs, steps, pages, strict=True):
            del self.prepared[step.number]
            lineage = self.requests[step.request]
            once = lineage.once if step.before else next(self.values)
            fresh = [next(self.values) for _ in range(step.before, step.after)]
            lineage.tokens += fresh
            lineage.once = once
            work = self.work(step, known, lineage.copy())
            self.queues.setdefault(domain, []).append(Queued(seq, step, work))

    def pages_of(self, step: Step) -> list[dict[int, PageName]]:
        """The pages that a prepared step works with, by class and ordinal."""
        pages = [self.table.pages(step.request, i) for i in range(len(self.plan.classes))]
        for new in step.pages:
            pages[new.name.class_index][new.ordinal] = new.name
        return pages

    def work(
        self, step: Step, pages: list[dict[int, PageName]], lineage: Lineage
    ) -> Callable[[], None]:
        """What the device will do: copy, read what may be read, write what is new."""

        def run() -> None:
            for source, target in step.copies:
                self.memory[target[:2]] = list(self.memory[source[:2]])
            for i, found in enumerate(self.plan.classes):
                if step.before:
                    self.read(found, pages[i], lineage, step.before)
                self.write(found, pages[i], lineage, step)

        return run

    def step(self, sizes: dict[int, int]) -> list[Step]:
        """Prepare and commit."""
        steps = self.prepare(sizes)
        for step in steps:
            self.commit([step])
        return steps

    def run(self, domain: str, upto: int) -> None:
        """Run queued work of a domain through number ``upto``."""
        queue = self.queues.get(domain, [])
        while queue and queue[0].seq <= upto:
            queue.pop(0).run()

    def complete(self, domain: str, *seqs: int) -> None:
        """Run what must have run by then, and say so."""
        self.run(domain, max(seqs))
        self.table.complete({domain: seqs})

    def running(self) -> list[tuple[str, int]]:
        """Work that has not been completed."""
        return sorted(self.table._transactions._flights)

    def drain(self) -> None:
        """Run and complete everything."""
        for domain, seq in self.running():
            self.complete(domain, seq)

    def rows(self, found: PlannedClass, boundary: int) -> list[tuple[int, int, int]]:
        """Token, ordinal and row of all that is live at ``boundary``."""
        wanted = []
        for key in range(boundary):
            if any(key in keys for keys in found.live_claims(boundary)):
                ordinal = found.page_of(key)
                assert ordinal is not None
                wanted.append((key, ordinal, self.row(found, key)))
        return wanted

    def row(self, found: PlannedClass, key: int) -> int:
        """Row of a token in its page."""
        ranked = found.region.is_ranked
        return (found.region.claims[0].keys.below(key) if ranked else key) % PAGE

    def read(
        self, found: PlannedClass, pages: dict[int, PageName], lineage: Lineage, boundary: int
    ) -> None:
        """Find in ``pages`` all that is live at ``boundary``, as it was written."""
        if found.kind == "attention":
            for key, ordinal, row in self.rows(found, boundary):
                value = self.memory[pages[ordinal][:2]][row]
                assert value == lineage.tokens[key], (found.name, key, boundary)
        elif found.kind == "recurrent":
            assert self.memory[pages[0][:2]][0] == lineage.tokens[boundary - 1]
        else:
            for name in pages.values():
                assert self.memory[name[:2]][0] == lineage.once

    def write(
        self, found: PlannedClass, pages: dict[int, PageName], lineage: Lineage, step: Step
    ) -> None:
        """Write the step's tokens."""
        if found.kind == "attention":
            for key in range(step.before, step.after):
                ordinal = found.page_of(key)
                if ordinal is not None:
                    self.memory[pages[ordinal][:2]][self.row(found, key)] = lineage.tokens[key]
        elif found.kind == "recurrent":
            self.memory[pages[0][:2]][0] = lineage.tokens[step.after - 1]
        elif not step.before:
            for name in pages.values():
                self.memory[name[:2]][0] = lineage.once

    def look(self) -> None:
        """Every head and snapshot, when all work has run, holds what its lineage wrote."""
        assert not any(self.queues.values())
        for i, found in enumerate(self.plan.classes):
            for number, lineage in self.requests.items():
                if lineage.tokens:
                    pages = self.table.pages(number, i)
                    self.read(found, pages, lineage, len(lineage.tokens))
            for number, lineage in self.snapshots.items():
                if lineage.tokens:
                    pages = self.table.kept_pages(number, i)
                    self.read(found, pages, lineage, len(lineage.tokens))

    def state(self) -> tuple[Any, ...]:
        """What a refusal must not change."""
        return (
            self.table.stat(),
            tuple(frozenset(slots.taken) for slots in self.slots),
            [self.table.pages(n, i) for n in self.requests for i in range(len(self.slots))],
            [self.table.kept_pages(n, i) for n in self.snapshots for i in range(len(self.slots))],
        )

    def end(self) -> None:
        """Release everything: all slots are free, and each grant has its certificate."""
        self.table.abort(list(self.prepared))
        self.drain()
        for number in self.requests:
            self.table.release(number)
        for number in self.snapshots:
            self.table.drop(number)
        self.table.recover()
        self.table.reclaim()
        self.table.check()
        assert [slots.taken for slots in self.slots] == [set()] * len(self.slots)
        report = verify(self.journal.lines)
        assert report.is_at_rest
        aborted = {fields["step"] for event, fields in self.journal.events if event == "abort"}
        granted = sum(
            len(fields["pages"])
            for event, fields in self.journal.events
            if event == "reserve" and fields["step"] not in aborted
        )
        assert report.num_certified == granted
