"""`Arena` with a heap and regions: one memory under all, and every address stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.arena.arena import Arena, Lease
from actors.arena.layout import HotLayout, plan_hot_layout
from actors.arena.page_region import PageRegion
from actors.arena.ring_region import RingRegion
from actors.arena.syscalls import PAGE_BYTES
from codec.errors import ArenaFullError, VmmBusy, VmmClosed, VmmDriverError, VmmMisaligned
from policies.retention.plan import compile_program
from policies.retention.program import AttentionState, KvShape, Program, RecurrentState
from policies.retention.text import parse_relation
from tests.suites.faulty_driver import FaultyDriver
from tests.suites.probes import is_readable, run_in_threads
from tests.suites.quiet import QUIET_STATEFUL

EXTENT = PAGE_BYTES
HEAP_EXTENTS = 6
BUDGET_EXTENTS = 9
SHAPE = KvShape(num_kv_heads=2, key_dim=16, value_dim=16, dtype="bfloat16")
FULL, WINDOW, SSM = range(3)


def hot_layout() -> HotLayout:
    """Full and window layers, two each, and a recurrent one; two requests."""
    states = [
        AttentionState(
            name=text,
            layers=layers,
            reads=parse_relation(text),
            bytes_per_token_layer=SHAPE.bytes_per_token_layer,
            shape=SHAPE,
        )
        for text, layers in [("true", (0, 2)), ("q - k < 20", (1, 3))]
    ]
    ssm = RecurrentState(name="ssm", layers=(4,), bytes_per_layer=3000)
    plan = compile_program(Program(page_tokens=4, states=(*states, ssm)))
    return plan_hot_layout(plan, extent_bytes=EXTENT, num_requests=2, context_tokens=40)


LAYOUT = hot_layout()


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


def make_arena(driver: FaultyDriver, clock: Clock) -> Arena:
    """A heap of six extents, and the regions."""
    return Arena(
        driver,
        capacity_bytes=HEAP_EXTENTS * EXTENT,
        extent_bytes=EXTENT,
        hot=LAYOUT,
        clock=clock,
    )


@pytest.fixture
def driver() -> Iterator[FaultyDriver]:
    """A budget of nine extents, all of it free after the test."""
    driver = FaultyDriver(BUDGET_EXTENTS * EXTENT, PAGE_BYTES)
    yield driver
    driver.check()
    assert driver.physical().measured_bytes == 0
    driver.close()


@pytest.fixture
def clock() -> Clock:
    """A clock that stands."""
    return Clock()


@pytest.fixture
def arena(driver: FaultyDriver, clock: Clock) -> Iterator[Arena]:
    """An arena whose invariants are checked after the test."""
    arena = make_arena(driver, clock)
    yield arena
    driver.heal()
    arena.check()
    arena.close()


def planes_of(region: PageRegion | RingRegion) -> int:
    """How many runs of rows a page of it has."""
    if isinstance(region, RingRegion):
        return region.spec.layout.num_planes
    return len(region.spec.layers)


def readable(arena: Arena) -> set[int]:
    """Extents of the whole range that can be read, found out from the system."""
    total = HEAP_EXTENTS + LAYOUT.num_extents
    return {at for at in range(total) if is_readable(arena.base_va + at * EXTENT)}


@dataclass
class HeldPage:
    """A page that the machine has, and a byte that is all of its content."""

    class_index: int
    slot: int
    tenant: int
    ordinal: int
    content: int


class HotArenaMachine(RuleBasedStateMachine):
    """Leases, pages of three classes, moves, readers and faults at random."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = FaultyDriver(BUDGET_EXTENTS * EXTENT, PAGE_BYTES)
        self.clock = Clock()
        self.arena = make_arena(self.driver, self.clock)
        self.base_va = self.arena.base_va
        self.leases: list[tuple[Lease, int]] = []
        self.pages: list[HeldPage] = []
        self.next_ordinal = dict.fromkeys([(c, t) for c in range(3) for t in range(3)], 0)
        self.readers: list[tuple[HeldPage, torch.Tensor]] = []
        self.marks = 0

    def mark(self) -> int:
        """A content that no other recent page or lease has."""
        self.marks = self.marks % 250 + 1
        return self.marks

    def used(self) -> tuple[object, ...]:
        """What a refusal must not change."""
        stat = self.arena.stat()
        slots = [(region.used_slots, region.hot_bytes) for region in self.arena.regions]
        return (stat.used_bytes, stat.num_leases, stat.committed_bytes - stat.idle_bytes, slots)

    @rule(nbytes=st.integers(1, 5 * EXTENT // 2))
    def lease(self, nbytes: int) -> None:
        """Reserve and fill, or be refused without a trace."""
        before = self.used()
        try:
            lease = self.arena.reserve(nbytes)
        except (ArenaFullError, VmmDriverError):
            assert self.used() == before
            return
        content = self.mark()
        self.arena.view(lease)[:] = bytes([content]) * nbytes
        self.leases.append((lease, content))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """End any lease."""
        lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.arena.release(lease)

    @rule(class_index=st.integers(0, 2), tenant=st.integers(0, 2), count=st.integers(1, 3))
    def reserve(self, class_index: int, tenant: int, count: int) -> None:
        """The next pages of a tenant, moved if need be; or be refused without a trace."""
        region = self.arena.regions[class_index]
        first = self.next_ordinal[class_index, tenant]
        ordinals = list(range(first, first + count))
        mine = [it for it in self.pages if (it.class_index, it.tenant) == (class_index, tenant)]
        is_move = region.needs_move(tenant, ordinals)
        live = mine[-2:] if is_move else []
        before = self.used()
        try:
            wanted = [*(it.ordinal for it in live), *ordinals]
            slots = region.reserve(tenant, wanted, move=is_move)
        except (ArenaFullError, VmmDriverError):
            assert self.used() == before
            assert region.needs_move(tenant, ordinals) == is_move
            return
        self.next_ordinal[class_index, tenant] += count
        for page, slot in zip(live, slots, strict=False):
            region.copy(page.slot, slot)
            self.pages.append(replace(page, slot=slot))
        for ordinal, slot in zip(ordinals, slots[len(live) :], strict=True):
            page = HeldPage(class_index, slot, tenant, ordinal, self.mark())
            for plane in range(planes_of(region)):
                region.rows(slot, plane).fill_(page.content)
            self.pages.append(page)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Free a page that nobody reads."""
        page = self.pages[data.draw(st.integers(0, len(self.pages) - 1))]
        if all(page is not read for read, _ in self.readers):
            self.pages.remove(page)
            self.arena.regions[page.class_index].free([page.slot])

    @rule(class_index=st.integers(0, 2), tenant=st.integers(0, 2))
    def leave(self, class_index: int, tenant: int) -> None:
        """End a tenant; its pages stay."""
        self.arena.regions[class_index].leave(tenant)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """Hold on to a part of a page."""
        page = self.pages[data.draw(st.integers(0, len(self.pages) - 1))]
        rows = self.arena.regions[page.class_index].rows(page.slot, 0, page)
        self.readers.append((page, rows[-1:, 3:]))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def look_away(self, data: st.DataObject) -> None:
        """Let go of it."""
        self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))

    @rule(
        verb=st.sampled_from(["create", "map", "set_access", "unmap", "release"]),
        after=st.integers(0, 3),
    )
    def sabotage(self, verb: str, after: int) -> None:
        """Let a verb fail soon."""
        self.driver.fail(verb, after)

    @rule(keep_bytes=st.integers(0, 3 * EXTENT), older_than_s=st.integers(0, 30))
    def give_back(self, keep_bytes: int, older_than_s: int) -> None:
        """Release what is old, or what is too much."""
        self.clock.now_s += 10
        before = self.used()
        try:
            self.arena.release_idle(older_than_s)
            self.arena.trim(keep_bytes)
        except VmmDriverError:
            pass
        assert self.used() == before

    @rule()
    def close(self) -> None:
        """Refused while anybody reads."""
        if self.readers:
            with pytest.raises(VmmBusy):
                self.arena.close()

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        """The arena's books, the driver's and the kernel's say the same."""
        self.arena.check()
        stat, physical = self.arena.stat(), self.driver.physical()
        assert stat.committed_bytes == physical.booked_bytes == physical.measured_bytes
        nowhere = stat.committed_bytes - stat.heap_bytes - stat.hot_committed_bytes
        assert 0 <= nowhere <= stat.idle_bytes
        assert stat.hot_bytes <= stat.hot_committed_bytes
        assert stat.peak_committed_bytes >= stat.committed_bytes
        assert self.arena.base_va == self.base_va
        for index, region in enumerate(self.arena.regions):
            assert region.used_slots == sum(page.class_index == index for page in self.pages)

    @invariant()
    def everybody_has_memory_of_his_own(self) -> None:
        """Each lease and page reads what was written to it, and each reader its page."""
        for lease, content in self.leases:
            assert bytes(self.arena.view(lease)) == bytes([content]) * lease.nbytes
        for page in self.pages:
            region = self.arena.regions[page.class_index]
            for plane in range(planes_of(region)):
                assert region.rows(page.slot, plane).eq(page.content).all()
        assert all(part.eq(page.content).all() for page, part in self.readers)

    @invariant()
    def what_has_no_memory_cannot_be_read(self) -> None:
        """Nothing but what is mapped, and what is in use all the same."""
        extents = self.arena._extents
        used = set(extents.mapped) - set(extents.idle)
        mirrors = LAYOUT.behind(HEAP_EXTENTS).mirrors
        seen = readable(self.arena)
        assert used | {mirrors[at] for at in used if at in mirrors} <= seen
        assert seen <= {*extents.mapped, *(mirrors[at] for at in extents.mapped if at in mirrors)}

    def teardown(self) -> None:
        """Everything goes when nobody reads any more, whoever has slots."""
        self.driver.heal()
        self.readers.clear()
        self.arena.close()
        assert self.driver.physical().measured_bytes == 0
        self.driver.close()


TestHotArenaMachine = HotArenaMachine.TestCase
TestHotArenaMachine.settings = QUIET_STATEFUL


def test_one_class_one_region(arena: Arena) -> None:
    """In the plan's order; and an arena without a layout has none."""
    kinds = [type(region) for region in arena.regions]
    assert kinds == [PageRegion, RingRegion, PageRegion]
    assert arena.stat().reserved_bytes == HEAP_EXTENTS * EXTENT


def test_memory_moves_between_pages_and_leases(arena: Arena, driver: FaultyDriver) -> None:
    """Without a new commitment, and without an address changing."""
    base_va = arena.base_va
    leases = [arena.reserve(EXTENT) for _ in range(HEAP_EXTENTS)]
    for lease in leases:
        arena.release(lease)
    before = arena.stat()
    assert (before.heap_bytes, before.hot_committed_bytes) == (6 * EXTENT, 0)

    slots = arena.regions[FULL].reserve(1, range(12))
    arena.regions[WINDOW].reserve(1, [0], move=True)
    stat = arena.stat()
    assert arena.work.creates == HEAP_EXTENTS
    assert arena.work.steals > 0
    assert stat.committed_bytes == before.committed_bytes == driver.physical().measured_bytes
    assert stat.hot_committed_bytes + stat.heap_bytes == 6 * EXTENT
    assert stat.hot_bytes == (
        12 * LAYOUT.regions[FULL].page_bytes + arena.regions[WINDOW].hot_bytes
    )

    arena.regions[FULL].free(slots)
    arena.reserve(3 * EXTENT)
    assert arena.work.creates == HEAP_EXTENTS
    assert arena.stat().peak_committed_bytes == 6 * EXTENT
    assert arena.base_va == base_va


def test_the_youngest_idle_memory_moves_and_the_oldest_goes(arena: Arena, clock: Clock) -> None:
    """Wherever in the range it lies."""
    page = arena.regions[SSM].reserve(1, [0])
    lease = arena.reserve(2 * EXTENT)
    arena.regions[SSM].free(page)
    clock.now_s += 5
    arena.release(lease)
    clock.now_s += 5

    arena.regions[FULL].reserve(1, [0])
    assert arena.work.steals == 1
    assert arena.release_idle(10) == EXTENT
    assert arena.release_idle(6) == 0
    assert arena.release_idle(5) == EXTENT

    with pytest.raises(ValueError, match="older_than_s"):
        arena.release_idle(-1)


def test_closing_waits_for_readers_of_pages(driver: FaultyDriver, clock: Clock) -> None:
    """The driver would find their tensors only when the memory is gone."""
    arena = make_arena(driver, clock)
    slots = arena.regions[FULL].reserve(1, [0])
    keys, values = arena.regions[FULL].kv(slots[0], 2)
    keys.fill_(3)
    values.fill_(4)
    part = values[1:, 0]
    del keys, values

    for _ in range(2):
        with pytest.raises(VmmBusy, match="1 tensors"):
            arena.close()
    assert part.eq(4).all()
    assert arena.stat().hot_bytes == LAYOUT.regions[FULL].page_bytes
    del part

    arena.close()

    assert driver.physical().measured_bytes == 0
    for verb in (
        lambda: arena.regions[FULL].rows(slots[0], 0),
        lambda: arena.regions[WINDOW].needs_move(1, [0]),
        lambda: arena.release_idle(0),
    ):
        with pytest.raises(VmmClosed):
            verb()


def test_a_layout_has_the_extents_of_its_arena(driver: FaultyDriver) -> None:
    """Refused before addresses are taken."""
    with pytest.raises(VmmMisaligned, match="hot layout"):
        Arena(driver, capacity_bytes=2 * EXTENT, extent_bytes=2 * EXTENT, hot=LAYOUT)

    assert "reserve" not in driver.stats()


def test_threads_share_the_memory(arena: Arena) -> None:
    """Leases, pages and rings from four threads at once; nobody sees another's bytes."""
    outcomes: list[bool] = []

    def work(seed: int) -> None:
        region = arena.regions[FULL if seed % 2 else WINDOW]
        for step in range(40):
            content = 1 + (seed * 61 + step) % 250
            try:
                lease = arena.reserve(100)
                slots = region.reserve(seed, [step], move=region.needs_move(seed, [step]))
            except ArenaFullError:
                outcomes.append(False)
                continue
            view = arena.view(lease)
            view[:] = bytes([content]) * 100
            rows = region.rows(slots[0], 0).fill_(content)
            outcomes.append(bool(rows.eq(content).all()) and set(view) == {content})
            del rows, view
            region.free(slots)
            arena.release(lease)

    run_in_threads(work, 4)

    assert outcomes == [True] * 160
    assert arena.stat().hot_bytes == 0
