"""One arena with everything in it, used at random; after every step its invariants hold.

The same machine walks two subjects: ordinary memory, and a CUDA device's over the stand-in
for ``libcuda``, whose memory the kernel shows as well.  What is asked is the kernel
(`/proc/self/maps`, a byte that can be read or not), the stand-in's own counts, and the bytes.

====  =========================================================  ===========================
no.   invariant                                                  checked
====  =========================================================  ===========================
1     bytes measured = booked = committed                        here
2     no two extents have one granule, mirrors apart             here
3     the base stays, and what has no memory cannot be read      here
4     stale names raise, and generations rise                    here
5     reclaim is refused iff something keeps a page              here; tickets are the steps
                                                                 in flight
6     unmap and release end alike in either order                suites/driver_suite, and
                                                                 suites/driver_machine
7     a failure leaves handles, maps and bytes as before         here, the lease verbs in
                                                                 full; a prepared batch
                                                                 leaves all that is in use
                                                                 as before, but what it
                                                                 took may stay, idle
8     windows of rings are what concatenation gives              test_ring, test_ring_region;
                                                                 here that mirrors agree
9     exported memory is the same, and leased                    test_sharing
10    a forked child touches nothing                             test_driver_host,
                                                                 test_driver_cuda,
                                                                 test_hazards
11    the gate's decisions are the least dear                    policies/test_vmm_gate
12    close leaves no bytes, maps or descriptors                 here
13    host and stand-in (and device) answer alike                test_driver_cuda
====  =========================================================  ===========================
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from actors.arena.arena import Arena, Lease
from actors.arena.driver import Span
from actors.arena.driver_booked import BookedDriver
from actors.arena.driver_cuda import CudaVmmDriver
from actors.arena.hot_pages import HotPages
from actors.arena.layout import RingSpec, plan_hot_layout
from actors.arena.ring_region import RingRegion
from actors.arena.syscalls import PAGE_BYTES
from actors.arena.table.pages import PageName
from actors.arena.table.steps import Receipt, Step, StepItem
from codec.errors import (
    ArenaFullError,
    StaleLeaseError,
    StaleNameError,
    VmmBusy,
    VmmDriverError,
    VmmNotMapped,
    VmmOutOfMemory,
)
from policies.retention.plan import Plan, compile_program
from policies.retention.program import AttentionState, KvShape, Program, RecurrentState
from policies.retention.text import parse_relation
from tests.fakes.cuda_fake import FakeCuda, fake_cuda
from tests.suites.driver_suite import count_open_files
from tests.suites.faulty_driver import FaultyDriver
from tests.suites.probes import is_readable
from tests.suites.quiet import QUIET_STATEFUL

EXTENT = PAGE_BYTES
HEAP_EXTENTS = 5
BUDGET_EXTENTS = 15
CONTEXT_TOKENS = 48
MAX_REQUESTS = 5
STEP_TOKENS = 8
SHAPE = KvShape(num_kv_heads=2, key_dim=16, value_dim=16, dtype="bfloat16")
DOMAIN = "stream 0"
VERBS = ("create", "map", "set_access", "unmap", "release")
FAULTS = st.none() | st.tuples(st.sampled_from(VERBS), st.integers(0, 2))
NUM_BOOKS = 6
REFUSALS = (ArenaFullError, VmmDriverError, VmmOutOfMemory)


def hybrid() -> Plan:
    """A pool, rings, and a recurrent state."""
    states = [
        AttentionState(
            name=text,
            layers=layers,
            reads=parse_relation(text),
            bytes_per_token_layer=SHAPE.bytes_per_token_layer,
            shape=SHAPE,
        )
        for text, layers in [("true", (0, 2)), ("q - k < 10", (1, 3))]
    ]
    state = RecurrentState(name="state", layers=(4,), bytes_per_layer=1500)
    program = Program(page_tokens=4, states=(*states, state))
    return compile_program(program, step_tokens=STEP_TOKENS)


PLAN = hybrid()
LAYOUT = plan_hot_layout(
    PLAN, extent_bytes=EXTENT, num_requests=2, context_tokens=CONTEXT_TOKENS, spare_rings=2
)
NUM_EXTENTS = HEAP_EXTENTS + LAYOUT.num_extents
MIRRORS = LAYOUT.behind(HEAP_EXTENTS).mirrors


class HostSubject:
    """Ordinary memory, tensors included."""

    file_name = "memfd:kvfabric"
    can_view = True

    def __init__(self) -> None:
        self.driver = FaultyDriver(BUDGET_EXTENTS * EXTENT, EXTENT)

    def fail(self, verb: str, after: int) -> None:
        """Have a verb fail, after some calls of it."""
        self.driver.fail(verb, after)

    @property
    def has_fault(self) -> bool:
        """Whether it is still to come."""
        return self.driver.has_faults

    def heal(self) -> None:
        """Forget it."""
        self.driver.heal()

    def live(self) -> dict[str, int]:
        """What else there is to count; of ordinary memory, nothing."""
        return {}


class CudaSubject:
    """A device's memory, which torch cannot reach."""

    file_name = "memfd:fake-cuda"
    can_view = False
    calls: ClassVar[dict[str, str]] = {
        "create": "cuMemCreate",
        "map": "cuMemMap",
        "set_access": "cuMemSetAccess",
        "unmap": "cuMemUnmap",
        "release": "cuMemRelease",
    }

    def __init__(self) -> None:
        self._fake: FakeCuda = fake_cuda()
        self._fake.heal()
        self._fake.size(EXTENT)
        assert not any(self._fake.live().values())
        self.driver = CudaVmmDriver(0, capacity_bytes=BUDGET_EXTENTS * EXTENT)

    def fail(self, verb: str, after: int) -> None:
        """Have a call fail, after some: one verb may take several."""
        self._fake.fail(self.calls[verb], after + 1, 2 if after % 2 else 999)

    @property
    def has_fault(self) -> bool:
        """Whether it is still to come."""
        return self._fake.has_fault

    def heal(self) -> None:
        """Forget it."""
        self._fake.heal()

    def live(self) -> dict[str, int]:
        """What lives on the device."""
        return self._fake.live()


@dataclass(eq=False)
class HeldLease:
    """A lease of which something is left."""

    lease: Lease
    content: int
    num_pins: int = 0
    views: list[memoryview] = field(default_factory=list)
    is_dead: bool = False

    @property
    def is_used(self) -> bool:
        """Whether somebody looks at it."""
        return bool(self.num_pins or self.views)


@dataclass(frozen=True)
class Held:
    """One page as its request knows it: by what name, and what each of its rows should hold."""

    name: PageName
    #: A row is one token in all layers; 0 where nothing was written.
    rows: tuple[int, ...]


Head = dict[tuple[int, int], Held]


@dataclass
class Sight:
    """What the kernel shows of the arena's range."""

    #: ``{extent: (file, offset, what may be done)}`` of all that is mapped.
    places: dict[int, tuple[str, int, str]]
    #: Lines of the memory files, anywhere.
    num_lines: int


def look(base_va: int, file_name: str) -> Sight:
    """Ask the kernel."""
    places: dict[int, tuple[str, int, str]] = {}
    num_lines = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if file_name not in line:
            continue
        num_lines += 1
        addresses, access, offset, _, inode = line.split(maxsplit=5)[:5]
        start, stop = (int(number, 16) for number in addresses.split("-"))
        for va in range(start, stop, EXTENT):
            if 0 <= va - base_va < NUM_EXTENTS * EXTENT:
                places[(va - base_va) // EXTENT] = (inode, int(offset, 16) + va - start, access)
    return Sight(places, num_lines)


class InvariantsMachine(RuleBasedStateMachine):
    """Leases, steps, forks, moves, readers and faults; subclass with a ``subject_class``."""

    subject_class: type[HostSubject | CudaSubject]

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.num_files = count_open_files()
        self.num_lines = look(0, self.subject_class.file_name).num_lines
        self.subject = self.subject_class()
        self.driver: BookedDriver = self.subject.driver
        self.now_s = 100.0
        self.arena = Arena(
            self.driver,
            capacity_bytes=HEAP_EXTENTS * EXTENT,
            extent_bytes=EXTENT,
            hot=LAYOUT,
            clock=lambda: self.now_s,
        )
        self.base_va = self.arena.base_va
        self.hot = HotPages(self.arena, PLAN)
        self.table = self.hot.table
        self.marks = 0
        #: Whether the last fault hit what was to undo a refusal: the one case of traces.
        self.has_lost_undo = False
        #: Whether a fault may have left memory that is mapped nowhere, for a later use.
        self.may_have_spare = False
        self.leases: list[HeldLease] = []
        self.last_lease = 0
        self.requests: dict[int, tuple[int, Head]] = {}
        self.snapshots: dict[int, tuple[int, Head]] = {}
        self.prepared: dict[int, Step] = {}
        self.in_flight: dict[int, set[PageName]] = {}
        self.pins: Counter[PageName] = Counter()
        self.registrations: Counter[PageName] = Counter()
        #: Tensors over pages; each is a pin, whose content is that of the page at the time.
        self.tensors: list[tuple[PageName, Any, Any]] = []
        #: Names of the slots in use, and those that have ended.
        self.alive: set[PageName] = set()
        self.ended: list[PageName] = []
        self.generations: dict[tuple[int, int], int] = {}

    # What the model knows.

    def mark(self) -> int:
        """A content that nothing recent has."""
        self.marks = self.marks % 250 + 1
        return self.marks

    def referred(self) -> set[PageName]:
        """Pages of a request, a snapshot, or a step whose work goes on."""
        heads = [head for _, head in (*self.requests.values(), *self.snapshots.values())]
        names = {held.name for head in heads for held in head.values()}
        return names.union(*self.in_flight.values())

    def kept(self) -> set[PageName]:
        """Pages whose slots must not be used again now."""
        reserved = {page.name for step in self.prepared.values() for page in step.pages}
        return {
            *(self.referred() | reserved),
            *(+self.pins),
            *(+self.registrations),
            *(name for name, _, _ in self.tensors),
        }

    def to_be_written(self) -> set[PageName]:
        """Pages behind whose content a prepared step will write: nobody may begin to read."""
        return {page.name for step in self.prepared.values() for page in step.tails}

    def idle(self) -> list[int]:
        """Requests without a prepared step."""
        busy = {step.request for step in self.prepared.values()}
        return sorted(self.requests.keys() - busy)

    def spans(self, name: PageName) -> list[Span]:
        """Where a page lies."""
        region = self.arena.regions[name.class_index]
        if isinstance(region, RingRegion):
            planes = range(region.spec.layout.num_planes)
            return [region.span(name.slot, plane) for plane in planes]
        return [region.span(name.slot)]

    def row_spans(self, name: PageName, row: int) -> list[Span]:
        """Where one row of a page lies: a piece in each layer."""
        spec = self.arena.regions[name.class_index].spec
        spans = self.spans(name)
        if isinstance(spec, RingSpec):
            nbytes = spec.layout.row_bytes
            return [Span(span.va + row * nbytes, nbytes) for span in spans]
        (whole,) = spans
        rows = range(row, len(spec.layers) * spec.page_tokens, spec.page_tokens)
        return [Span(whole.va + at * spec.width_bytes, spec.width_bytes) for at in rows]

    def used_extents(self) -> set[int]:
        """Extents in use, as the arena's parts say."""
        found = {at for region in self.arena.regions for at in region.used_extents}
        for held in self.leases:
            start, stop = held.lease.offset_bytes, held.lease.offset_bytes + held.lease.nbytes
            found |= set(range(start // EXTENT, -(-stop // EXTENT)))
        return found

    def books(self) -> tuple[object, ...]:
        """What is in use, and by whom."""
        stat = self.arena.stat()
        used = self.used_extents()
        places = look(self.base_va, self.subject.file_name).places
        return (
            stat.used_bytes,
            stat.num_leases,
            stat.num_pins,
            stat.hot_bytes,
            self.table.stat(),
            {at: place for at, place in places.items() if {at, *mirrored(at)} & used},
        )

    def everything(self) -> tuple[object, ...]:
        """The books, and handles, maps and bytes to the last."""
        live = {k: v for k, v in self.subject.live().items() if k in {"handles", "bytes", "maps"}}
        places = look(self.base_va, self.subject.file_name).places
        return (*self.books(), places, live, self.driver.physical(), self.arena.stat().idle_bytes)

    @contextmanager
    def sabotaged(self, fault: tuple[str, int] | None) -> Iterator[None]:
        """Let one call fail, if it comes to it; what could not be undone then is undone."""
        self.has_lost_undo = False
        if fault is not None:
            self.subject.fail(*fault)
        try:
            yield
        except REFUSALS as error:
            # No room, and the fault was met in making that undone.
            is_spent = fault is not None and not self.subject.has_fault
            self.has_lost_undo = is_spent and not isinstance(error, VmmDriverError)
            self.may_have_spare |= is_spent
            raise
        finally:
            self.subject.heal()
            self.driver.free_va(self.driver.reserve(EXTENT), EXTENT)

    # Leases.

    @rule(nbytes=st.integers(1, 5 * EXTENT // 2), fault=FAULTS)
    def lease(self, nbytes: int, fault: tuple[str, int] | None) -> None:
        """Reserve and fill; or be refused without a trace (7)."""
        before = self.everything()
        try:
            with self.sabotaged(fault):
                lease = self.arena.reserve(nbytes)
        except REFUSALS:
            after = self.everything()
            assert after[:NUM_BOOKS] == before[:NUM_BOOKS]
            assert after == before or self.has_lost_undo
            return
        assert lease.generation > self.last_lease
        self.last_lease = lease.generation
        held = HeldLease(lease, self.mark())
        self.driver.copy_in(self.base_va + lease.offset_bytes, bytes([held.content]) * nbytes)
        self.leases.append(held)

    def some_lease(self, data: st.DataObject) -> HeldLease:
        """Any."""
        return data.draw(st.sampled_from(self.leases), "lease")

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End a lease, which only a live one can be (4)."""
        held = self.some_lease(data)
        if held.is_dead:
            with pytest.raises(StaleLeaseError):
                self.arena.release(held.lease)
            return
        self.arena.release(held.lease)
        held.is_dead = True
        self.forget(held)

    def forget(self, held: HeldLease) -> None:
        """Dead and not looked at: nothing is left, and its name is refused everywhere."""
        if not held.is_dead or held.is_used:
            return
        self.leases.remove(held)
        for verb in (self.arena.release, self.arena.pin, self.arena.view, self.arena.unpin):
            with pytest.raises(StaleLeaseError):
                verb(held.lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), is_view=st.booleans())
    def look_at_lease(self, data: st.DataObject, is_view: bool) -> None:
        """Pin a lease, or view it."""
        held = self.some_lease(data)
        if held.is_dead:
            with pytest.raises(StaleLeaseError):
                self.arena.pin(held.lease)
        elif is_view and self.subject.can_view:
            held.views.append(self.arena.view(held.lease))
        else:
            self.arena.pin(held.lease)
            held.num_pins += 1

    @precondition(lambda self: any(held.is_used for held in self.leases))
    @rule(data=st.data())
    def look_away_from_lease(self, data: st.DataObject) -> None:
        """Let go of it."""
        held = data.draw(st.sampled_from([held for held in self.leases if held.is_used]), "lease")
        if held.views:
            held.views.pop()
        else:
            self.arena.unpin(held.lease)
            held.num_pins -= 1
        self.forget(held)

    # Requests and their steps.

    @rule()
    def open(self) -> None:
        """A request more."""
        if len(self.requests) < MAX_REQUESTS:
            self.requests[self.table.open()] = (0, {})

    @initialize(size=st.integers(1, STEP_TOKENS))
    def begin(self, size: int) -> None:
        """Two requests that have been going on for a while, and a third with the same tokens."""
        for _ in range(2):
            self.open()
        first, second = self.requests
        for _ in range(2):
            for step in self.go_on([first, second], size, None):
                self.commit_one(step)
        self.finish(list(self.in_flight))
        self.requests[self.table.fork(first)] = self.requests[first]

    def go_on(self, numbers: list[int], size: int, fault: tuple[str, int] | None) -> list[Step]:
        """Prepare a batch: for all of it, or for none (7)."""
        items = [
            StepItem(request=number, before=before, after=min(before + size, CONTEXT_TOKENS))
            for number in numbers
            if (before := self.requests[number][0]) < CONTEXT_TOKENS
        ]
        self.reclaim()
        before_state = self.books()
        try:
            with self.sabotaged(fault):
                steps = self.table.prepare(items)
        except REFUSALS:
            assert self.books() == before_state
            return []
        for step in steps:
            self.note_grants(step)
        return steps

    @precondition(lambda self: self.idle())
    @rule(
        data=st.data(),
        size=st.integers(1, STEP_TOKENS),
        fault=FAULTS,
        times=st.integers(1, 4),
        ends=st.booleans(),
    )
    def step(
        self,
        data: st.DataObject,
        size: int,
        fault: tuple[str, int] | None,
        times: int,
        ends: bool,
    ) -> None:
        """Some steps of one request, or of two, whose work goes on or ends."""
        numbers = data.draw(
            st.lists(st.sampled_from(self.idle()), min_size=1, max_size=2, unique=True)
        )
        for nth in range(times):
            for step in self.go_on(numbers, size, fault if nth == times - 1 else None):
                self.commit_one(step)
            if ends:
                self.finish(list(self.in_flight))

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), size=st.integers(1, STEP_TOKENS), fault=FAULTS)
    def prepare(self, data: st.DataObject, size: int, fault: tuple[str, int] | None) -> None:
        """A batch that waits for its commit."""
        numbers = st.lists(st.sampled_from(self.idle()), min_size=1, max_size=2, unique=True)
        self.go_on(data.draw(numbers), size, fault)

    def note_grants(self, step: Step) -> None:
        """Generations rise by one, and a name is of a slot that nobody has (4)."""
        self.prepared[step.number] = step
        for page in step.pages:
            place = page.name[:2]
            assert page.name.generation == self.generations.get(place, 0) + 1
            assert place not in {name[:2] for name in self.alive}
            self.generations[place] = page.name.generation
            self.alive.add(page.name)

    @precondition(lambda self: self.prepared)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """A step that was only prepared."""
        number = data.draw(st.sampled_from(sorted(self.prepared)), "step")
        self.commit_one(self.prepared[number])

    def commit_one(self, step: Step) -> None:
        """Copy, commit and write; the request's head is what the step says."""
        if self.subject.can_view:
            receipt = self.hot.carry_out(step)
        else:
            for source, target in step.copies:
                for at, to in zip(self.spans(source), self.spans(target), strict=True):
                    self.driver.copy_in(to.va, self.driver.copy_out(*at))
            receipt = Receipt.of(step)
        (seq,) = self.table.commit([receipt], DOMAIN)
        _, before = self.requests[step.request]
        after = dict(before)
        for page in step.pages:
            place = (page.name.class_index, page.ordinal)
            if page.source is None:
                after[place] = Held(page.name, (0,) * PLAN.classes[place[0]].page_tokens)
            else:
                after[place] = replace(before[place], name=page.name)
        for place in list(after):
            after[place] = self.write_tokens(step, place, after[place])
        names = {held.name for held in (*before.values(), *after.values())}
        self.in_flight[seq] = names
        head = {
            (index, ordinal): held
            for (index, ordinal), held in after.items()
            if ordinal >= step.live_from[index]
        }
        self.requests[step.request] = (step.after, head)
        del self.prepared[step.number]

    def write_tokens(self, step: Step, place: tuple[int, int], held: Held) -> Held:
        """Write those of the step's tokens that are of the page at ``place``."""
        index, ordinal = place
        if ordinal not in step.written(index):
            return held
        tokens = PLAN.classes[index].page_tokens
        positions = range(ordinal * tokens, (ordinal + 1) * tokens)
        is_state = PLAN.classes[index].kind == "recurrent"
        rows = list(held.rows)
        for row, position in enumerate(positions):
            if is_state or step.before <= position < step.after:
                rows[row] = self.mark()
                for span in self.row_spans(held.name, row):
                    self.driver.copy_in(span.va, bytes([rows[row]]) * span.nbytes)
        return replace(held, rows=tuple(rows))

    @precondition(lambda self: self.prepared)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Take a prepared step back; its names are spent."""
        number = data.draw(st.sampled_from(sorted(self.prepared)), "step")
        step = self.prepared.pop(number)
        self.table.abort([number])
        for page in step.pages:
            self.alive.remove(page.name)
            self.ended.append(page.name)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """Some work ends, in any order."""
        running = st.sampled_from(sorted(self.in_flight))
        self.finish(data.draw(st.lists(running, min_size=1, unique=True), "work"))

    def finish(self, seqs: list[int]) -> None:
        """The work of these numbers ends."""
        self.table.complete({DOMAIN: seqs})
        for seq in seqs:
            del self.in_flight[seq]

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), is_kept=st.booleans())
    def fork(self, data: st.DataObject, is_kept: bool) -> None:
        """Share a head with another request, or a snapshot; later writes are not seen."""
        number = data.draw(st.sampled_from(self.idle()), "request")
        boundary, head = self.requests[number]
        if is_kept and len(self.snapshots) < 2:
            self.snapshots[self.table.keep(number)] = (boundary, head)
        elif not is_kept and len(self.requests) < MAX_REQUESTS:
            self.requests[self.table.fork(number)] = (boundary, head)

    @precondition(lambda self: self.idle() or self.snapshots)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """End a request or a snapshot."""
        number = data.draw(st.sampled_from([*self.idle(), *self.snapshots]), "whose")
        if number in self.snapshots:
            self.table.drop(number)
            del self.snapshots[number]
        else:
            self.table.release(number)
            del self.requests[number]

    # Readers.

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), is_pin=st.booleans())
    def keep_page(self, data: st.DataObject, is_pin: bool) -> None:
        """Pin or register a page: only one that is live (4)."""
        name = data.draw(st.sampled_from(sorted(self.alive)), "page")
        verb = self.table.pin if is_pin else self.table.register
        if name not in self.referred():
            with pytest.raises(StaleNameError):
                verb(name)
            return
        if is_pin and name in self.to_be_written():
            with pytest.raises(VmmBusy):
                verb(name)
            return
        verb(name)
        (self.pins if is_pin else self.registrations)[name] += 1

    @precondition(lambda self: +self.pins or +self.registrations)
    @rule(data=st.data())
    def let_page_go(self, data: st.DataObject) -> None:
        """Undo one of these."""
        kept = [(name, True) for name in +self.pins] + [(n, False) for n in +self.registrations]
        name, is_pin = data.draw(st.sampled_from(sorted(kept)), "page")
        (self.table.unpin if is_pin else self.table.unregister)(name)
        (self.pins if is_pin else self.registrations)[name] -= 1

    @precondition(lambda self: self.subject.can_view and self.requests)
    @rule(data=st.data())
    def view_page(self, data: st.DataObject) -> None:
        """Hold a tensor over what is written of a page: a step may only add to it."""
        heads = [head for _, head in self.requests.values()]
        held = {h.name: h for head in heads for h in head.values() if h.rows[0] and h.name[0] < 2}
        for name in self.to_be_written():
            held.pop(name, None)
        if not held:
            return
        name = data.draw(st.sampled_from(sorted(held)), "page")
        keys, _ = self.hot.kv(name, data.draw(st.sampled_from(PLAN.classes[name[0]].layers)))
        part = keys[[row for row, mark in enumerate(held[name].rows) if mark][-1] :][:1]
        self.tensors.append((name, part, part.clone()))

    @precondition(lambda self: self.tensors)
    @rule(data=st.data())
    def look_away_from_page(self, data: st.DataObject) -> None:
        """Let go of a tensor."""
        self.tensors.pop(data.draw(st.integers(0, len(self.tensors) - 1), "tensor"))

    @rule()
    def reclaim(self) -> None:
        """Exactly what nothing keeps is taken back (5)."""
        kept = self.kept()

        found = {certificate.page for certificate in self.table.reclaim()}

        assert found == self.alive - kept
        self.alive &= kept
        self.ended += sorted(found)

    # Memory.

    @rule(keep=st.integers(0, 3), older_than_s=st.integers(0, 30), fault=FAULTS)
    def give_back(self, keep: int, older_than_s: int, fault: tuple[str, int] | None) -> None:
        """Idle memory goes, used memory stays, and no address changes."""
        self.now_s += 10
        before = self.books()
        try:
            with self.sabotaged(fault):
                self.arena.release_idle(older_than_s)
                self.arena.trim(keep * EXTENT)
        except VmmDriverError:
            pass
        else:
            assert self.arena.stat().idle_bytes <= keep * EXTENT
        assert self.books() == before

    @precondition(lambda self: self.tensors or any(held.is_used for held in self.leases))
    @rule()
    def close_too_early(self) -> None:
        """Refused while anybody looks, without a trace (5, 7)."""
        before = self.everything()

        with pytest.raises(VmmBusy):
            self.arena.close()

        assert self.everything() == before

    # What holds after every step.

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        """1: the arena's books, the driver's and the system's say the same."""
        self.arena.check()
        self.table.check()
        self.driver.check()
        stat, physical = self.arena.stat(), self.driver.physical()
        assert stat.committed_bytes == physical.booked_bytes == physical.measured_bytes
        live = self.subject.live()
        places = look(self.base_va, self.subject.file_name).places
        runs = {place[:2] for place in places.values()}
        nowhere_bytes = stat.committed_bytes - len(runs) * EXTENT
        assert 0 <= nowhere_bytes <= (stat.idle_bytes if self.may_have_spare else 0)
        if live:
            assert live["bytes"] == physical.booked_bytes == live["handles"] * EXTENT
            assert live["maps"] == len(places)

    @invariant()
    def a_granule_is_of_one_extent(self) -> None:
        """2: each is seen at one extent, or there and at its mirror."""
        places = look(self.base_va, self.subject.file_name).places
        seen: dict[tuple[str, int], set[int]] = {}
        for at, place in places.items():
            seen.setdefault(place[:2], set()).add(at)
        for at, place in places.items():
            assert seen[place[:2]] <= {at, *mirrored(at)}
        used = self.used_extents()
        for at in used | {MIRRORS[at] for at in used if at in MIRRORS}:
            assert places[at][2].startswith("rw")

    @invariant()
    def what_has_no_memory_cannot_be_read(self) -> None:
        """3: neither through the driver nor by the processor; the base is where it was."""
        assert self.arena.base_va == self.base_va
        places = look(self.base_va, self.subject.file_name).places
        for at in range(NUM_EXTENTS):
            va = self.base_va + at * EXTENT
            is_open = at in places and places[at][2].startswith("rw")
            assert is_readable(va) == is_open
            if not is_open:
                with pytest.raises(VmmNotMapped):
                    self.driver.copy_out(va, 1)

    @invariant()
    def what_has_ended_is_refused(self) -> None:
        """4: by every verb that takes a name."""
        for name in self.ended[-4:]:
            for verb in (self.table.pin, self.table.unpin, self.table.register):
                with pytest.raises(StaleNameError):
                    verb(name)
            with pytest.raises(StaleNameError):
                self.hot.kv(name, PLAN.classes[name.class_index].layers[0])

    @invariant()
    def everybody_reads_what_is_theirs(self) -> None:
        """2, 5, 8: every lease and page, through mirrors too, and every tensor."""
        for held in self.leases:
            va, nbytes = self.base_va + held.lease.offset_bytes, held.lease.nbytes
            assert self.arena.is_held(held.lease)
            assert self.driver.copy_out(va, nbytes) == bytes([held.content]) * nbytes
        for boundary, head in (*self.requests.values(), *self.snapshots.values()):
            assert boundary <= CONTEXT_TOKENS
            for held in head.values():
                self.need_content(held)
        for _, tensor, wanted in self.tensors:
            assert tensor.equal(wanted)

    def need_content(self, held: Held) -> None:
        """The page holds what it should."""
        spec = self.arena.regions[held.name.class_index].spec
        for row, mark in enumerate(held.rows):
            for span in self.row_spans(held.name, row) if mark else ():
                wanted = bytes([mark]) * span.nbytes
                assert self.driver.copy_out(*span) == wanted
                if isinstance(spec, RingSpec):
                    again = span.va + spec.layout.plane_extents * EXTENT
                    assert self.driver.copy_out(again, span.nbytes) == wanted

    @invariant()
    def the_table_has_these_pages(self) -> None:
        """By the names that the steps gave them."""
        for number, (boundary, head) in self.requests.items():
            assert self.table.boundary(number) == boundary
            for index in range(len(PLAN.classes)):
                wanted = {o: held.name for (i, o), held in head.items() if i == index}
                assert self.table.pages(number, index) == wanted

    def teardown(self) -> None:
        """12: nothing is left, whatever was going on."""
        self.subject.heal()
        self.tensors.clear()
        for held in self.leases:
            held.views.clear()
            for _ in range(held.num_pins):
                self.arena.unpin(held.lease)
        self.arena.close()
        assert self.driver.physical().booked_bytes == self.driver.physical().measured_bytes == 0
        assert not look(self.base_va, self.subject.file_name).places
        self.driver.close()
        assert not any(self.subject.live().values())
        assert look(0, self.subject.file_name).num_lines == self.num_lines
        assert count_open_files() == self.num_files


def mirrored(extent: int) -> set[int]:
    """The other place where an extent's memory is seen, if there is one."""
    others = {to for at, to in MIRRORS.items() if at == extent}
    return others | {at for at, to in MIRRORS.items() if to == extent}


class HostInvariants(InvariantsMachine):
    """Over ordinary memory."""

    subject_class = HostSubject


class CudaInvariants(InvariantsMachine):
    """Over the stand-in."""

    subject_class = CudaSubject


LONG = settings(QUIET_STATEFUL, max_examples=30, stateful_step_count=40)
TestHostInvariants = HostInvariants.TestCase
TestHostInvariants.settings = LONG
TestCudaInvariants = CudaInvariants.TestCase
TestCudaInvariants.settings = LONG


def test_the_walk_is_long_and_the_sample_small() -> None:
    """So that it meets full pools, moved rings and stolen memory, and is walked each time."""
    rings = [region for region in LAYOUT.regions if region.mirrors]

    assert 2 * LONG.max_examples * LONG.stateful_step_count >= 2000
    assert rings
    assert len(rings) < len(LAYOUT.regions)
    assert sum(region.full_bytes for region in LAYOUT.regions) > BUDGET_EXTENTS * EXTENT
