"""`Arena`: a live view reads its own bytes for ever, and every byte is accounted for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.arena.arena import Arena, ArenaStat, Lease
from actors.arena.driver_host import HostVmmDriver
from actors.arena.syscalls import PAGE_BYTES
from codec.errors import (
    ArenaFullError,
    CapacityError,
    StaleLeaseError,
    VmmBusy,
    VmmClosed,
    VmmDriverError,
    VmmError,
    VmmForked,
    VmmNotReserved,
    VmmOutOfMemory,
)
from tests.suites.faulty_driver import FaultyDriver
from tests.suites.probes import run_in_threads
from tests.suites.quiet import QUIET_STATEFUL

EXTENT = 2 * PAGE_BYTES
NUM_EXTENTS = 10
BUDGET_EXTENTS = 6


@pytest.fixture
def driver() -> Iterator[FaultyDriver]:
    """A budget of six extents, all of it free after the test."""
    driver = FaultyDriver(BUDGET_EXTENTS * EXTENT, PAGE_BYTES)
    yield driver
    driver.check()
    assert driver.physical().measured_bytes == 0
    driver.close()


@pytest.fixture
def arena(driver: FaultyDriver) -> Iterator[Arena]:
    """An arena of ten extents whose invariants are checked after the test."""
    arena = Arena(driver, capacity_bytes=NUM_EXTENTS * EXTENT, extent_bytes=EXTENT)
    yield arena
    driver.heal()
    arena.check()
    arena.close()


def fill(arena: Arena, lease: Lease) -> memoryview:
    """A view of ``lease``, all of whose bytes are made its own."""
    view = arena.view(lease)
    view[:] = bytes([lease.generation % 256]) * lease.nbytes
    return view


def reads_itself(view: memoryview, lease: Lease) -> bool:
    """Whether ``view`` holds what `fill` wrote."""
    return bytes(view) == bytes([lease.generation % 256]) * lease.nbytes


class ArenaMachine(RuleBasedStateMachine):
    """Leases, views, pins and faults at random.

    What must be alive is known from the views and pins held here, whatever has been
    released meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.driver = FaultyDriver(BUDGET_EXTENTS * EXTENT, PAGE_BYTES)
        self.arena = Arena(self.driver, capacity_bytes=NUM_EXTENTS * EXTENT, extent_bytes=EXTENT)
        self.base_va = self.arena.base_va
        self.live: list[Lease] = []
        self.ended: list[Lease] = []
        self.views: list[tuple[Lease, memoryview]] = []
        self.pins: list[Lease] = []

    def pick(self, data: st.DataObject, leases: list[Lease]) -> Lease:
        """Any of ``leases``."""
        return data.draw(st.sampled_from(leases))

    @rule(nbytes=st.integers(1, 5 * EXTENT // 2))
    def reserve(self, nbytes: int) -> None:
        """Reserve and fill, or be refused without a trace but what a failed undo may leave."""
        before = self.arena.stat()
        try:
            lease = self.arena.reserve(nbytes)
        except (ArenaFullError, VmmDriverError):
            after = self.arena.stat()
            leaked_bytes = after.committed_bytes - before.committed_bytes
            assert after == replace(
                before,
                committed_bytes=before.committed_bytes + leaked_bytes,
                idle_bytes=before.idle_bytes + leaked_bytes,
                # It may lie under the heap, or nowhere.
                heap_bytes=after.heap_bytes,
                peak_committed_bytes=after.peak_committed_bytes,
            )
            return
        self.views.append((lease, fill(self.arena, lease)))
        self.live.append(lease)

    @rule(
        verb=st.sampled_from(["create", "map", "set_access", "unmap", "release"]),
        after=st.integers(0, 2),
    )
    def sabotage(self, verb: str, after: int) -> None:
        """Let a verb fail soon."""
        self.driver.fail(verb, after)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """End a lease, whoever looks at it."""
        lease = self.pick(data, self.live)
        self.live.remove(lease)
        self.ended.append(lease)
        self.arena.release(lease)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def use_what_has_ended(self, data: st.DataObject) -> None:
        """Refused by every verb, for ever."""
        lease = self.pick(data, self.ended)
        for verb in (self.arena.release, self.arena.view, self.arena.pin):
            with pytest.raises(StaleLeaseError):
                verb(lease)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def view(self, data: st.DataObject) -> None:
        """Look at a part of a live lease."""
        lease = self.pick(data, self.live)
        self.views.append((lease, self.arena.view(lease)))

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def look_away(self, data: st.DataObject) -> None:
        """Drop a view."""
        self.views.pop(data.draw(st.integers(0, len(self.views) - 1)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """Pin a live lease."""
        lease = self.pick(data, self.live)
        self.arena.pin(lease)
        self.pins.append(lease)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """Unpin a lease, live or dead."""
        lease = self.pick(data, self.pins)
        self.pins.remove(lease)
        self.arena.unpin(lease)

    @rule(keep_bytes=st.integers(0, 3 * EXTENT))
    def trim(self, keep_bytes: int) -> None:
        """Give memory back."""
        idle_bytes = self.arena.stat().idle_bytes
        try:
            trimmed_bytes = self.arena.trim(keep_bytes)
        except VmmDriverError:
            return
        left_bytes = self.arena.stat().idle_bytes
        assert trimmed_bytes == idle_bytes - left_bytes
        assert left_bytes < keep_bytes + EXTENT

    @rule()
    def close(self) -> None:
        """Refused while anybody looks."""
        if self.views or self.pins:
            with pytest.raises(VmmBusy):
                self.arena.close()

    @invariant()
    def every_view_reads_its_own_bytes(self) -> None:
        """Nobody else has written there, and nothing was unmapped."""
        assert all(reads_itself(view, lease) for lease, view in self.views)

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        """The arena's books, the driver's and the kernel's say the same."""
        self.arena.check()
        stat, physical = self.arena.stat(), self.driver.physical()
        assert stat.committed_bytes == physical.booked_bytes == physical.measured_bytes
        held = {lease for lease, _ in self.views} | set(self.pins)
        alive = held.union(self.live)
        assert stat.used_bytes == sum(lease.nbytes for lease in alive)
        assert stat.num_leases == len(self.live)
        assert stat.num_dead_leases == len(alive) - len(self.live)
        assert stat.num_pins == len(self.views) + len(self.pins)
        assert self.arena.base_va == self.base_va

    def teardown(self) -> None:
        """Everything goes when nobody looks any more."""
        self.driver.heal()
        self.views.clear()
        for lease in self.pins:
            self.arena.unpin(lease)
        self.arena.close()
        assert self.driver.physical().measured_bytes == 0
        self.driver.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = QUIET_STATEFUL


def test_views_are_the_memory_itself(arena: Arena) -> None:
    """Writable, without a copy, and of exactly the lease's size."""
    lease = arena.reserve(100)
    first, second = arena.view(lease), arena.view(lease)

    first[99] = 7

    assert (len(second), second[99], second.readonly) == (100, 7, False)


def test_a_new_arena_holds_no_memory(arena: Arena, driver: HostVmmDriver) -> None:
    """Addresses are reserved, nothing is committed before it is needed."""
    assert driver.physical().measured_bytes == 0
    assert arena.stat() == ArenaStat(
        reserved_bytes=NUM_EXTENTS * EXTENT,
        committed_bytes=0,
        idle_bytes=0,
        used_bytes=0,
        free_bytes=NUM_EXTENTS * EXTENT,
        num_leases=0,
        num_dead_leases=0,
        num_pins=0,
    )


def bytes_of(made: object) -> bytes:
    """Content of whatever a reader has made from a view."""
    if isinstance(made, torch.Tensor):
        return made.view(torch.uint8).numpy().tobytes()
    assert isinstance(made, memoryview | np.ndarray)
    return made.tobytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda view: view[64:128],
        lambda view: np.frombuffer(view, np.float32),
        lambda view: torch.frombuffer(view, dtype=torch.bfloat16)[3:9],
        lambda view: view.toreadonly().cast("I"),
    ],
    ids=["slice", "array", "tensor", "cast"],
)
def test_what_is_made_from_a_view_pins_like_it(
    arena: Arena, make: Callable[[memoryview], object]
) -> None:
    """However a reader holds the bytes, they stay until it lets go."""
    lease = arena.reserve(EXTENT)
    made = make(fill(arena, lease))
    content = bytes_of(made)

    arena.release(lease)
    for _ in range(BUDGET_EXTENTS - 1):
        fill(arena, arena.reserve(EXTENT))

    assert bytes_of(made) == content
    assert arena.stat().num_dead_leases == 1
    del made
    assert arena.stat().num_dead_leases == 0
    assert arena.reserve(EXTENT).offset_bytes == lease.offset_bytes


def test_a_dead_but_pinned_lease_is_ended_for_everybody(arena: Arena) -> None:
    """Only its pins know it any more."""
    lease = arena.reserve(10)
    arena.pin(lease)
    arena.pin(lease)
    arena.release(lease)
    for verb in (arena.release, arena.view, arena.pin):
        with pytest.raises(StaleLeaseError):
            verb(lease)

    arena.unpin(lease)
    assert arena.stat().used_bytes == 10
    arena.unpin(lease)

    assert arena.stat().used_bytes == 0
    with pytest.raises(StaleLeaseError):
        arena.unpin(lease)


def test_a_view_is_not_undone_by_unpin(arena: Arena) -> None:
    """One unpin too many cannot take the bytes from a reader."""
    lease = arena.reserve(10)
    view = fill(arena, lease)

    with pytest.raises(StaleLeaseError):
        arena.unpin(lease)

    arena.release(lease)
    assert reads_itself(view, lease)


def test_memory_follows_use(arena: Arena, driver: HostVmmDriver) -> None:
    """Committed on demand, kept when empty, given back on request."""
    leases = [arena.reserve(EXTENT) for _ in range(3)]
    assert driver.physical().measured_bytes == 3 * EXTENT
    for lease in leases:
        arena.release(lease)
    assert driver.physical().measured_bytes == 3 * EXTENT

    assert arena.trim() == 3 * EXTENT

    assert driver.physical().measured_bytes == 0
    with pytest.raises(ValueError, match="keep_bytes"):
        arena.trim(-1)


def test_the_arena_being_full_is_told_from_the_driver_being_full(arena: Arena) -> None:
    """Both are `ArenaFullError`; the second names the driver's limit as its cause."""
    with pytest.raises(ArenaFullError) as caught:
        arena.reserve(NUM_EXTENTS * EXTENT + 1)
    assert caught.value.__cause__ is None
    assert caught.value.free_bytes == NUM_EXTENTS * EXTENT

    small = arena.reserve(64)
    with pytest.raises(CapacityError) as refused:
        arena.reserve(BUDGET_EXTENTS * EXTENT)

    assert isinstance(refused.value, ArenaFullError)
    assert isinstance(refused.value.__cause__, VmmOutOfMemory)
    assert refused.value.free_bytes == EXTENT - 64
    assert arena.stat().committed_bytes == EXTENT
    arena.release(small)


def test_eviction_makes_room_for_a_blob_elsewhere(arena: Arena) -> None:
    """With the budget used up, the memory of an idle extent moves to where it is needed."""
    leases = [arena.reserve(EXTENT) for _ in range(BUDGET_EXTENTS)]
    with pytest.raises(ArenaFullError):
        arena.reserve(2 * EXTENT)
    for lease in leases[::2]:
        arena.release(lease)

    large = arena.reserve(2 * EXTENT)

    assert large.offset_bytes == BUDGET_EXTENTS * EXTENT
    assert reads_itself(fill(arena, large), large)


@pytest.mark.parametrize("verb", ["create", "map", "set_access"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_driver_fault_changes_nothing(
    arena: Arena, driver: FaultyDriver, verb: str, number: int
) -> None:
    """The k-th call fails, and it is as if nothing had been asked."""
    lease = arena.reserve(EXTENT + 1)
    view = fill(arena, lease)
    before, booked = arena.stat(), driver.physical()
    driver.fail(verb, number)

    if verb == "set_access" and number:
        arena.release(arena.reserve(3 * EXTENT))
        assert driver.has_faults
        return
    with pytest.raises(VmmDriverError):
        arena.reserve(3 * EXTENT)

    after = replace(arena.stat(), peak_committed_bytes=before.peak_committed_bytes)
    assert (after, driver.physical()) == (before, booked)
    assert reads_itself(view, lease)
    arena.release(arena.reserve(3 * EXTENT))


def test_a_failed_reserve_leaves_no_way_to_its_place(arena: Arena, driver: FaultyDriver) -> None:
    """Its generation is not given to anybody, and the next one is higher."""
    first = arena.reserve(1)
    driver.fail("create", error=VmmOutOfMemory("driver budget", 1, 0))
    with pytest.raises(ArenaFullError):
        arena.reserve(EXTENT)

    second = arena.reserve(EXTENT)

    assert second.generation > first.generation


def test_generations_start_where_told(driver: HostVmmDriver) -> None:
    """An arena that was restarted refuses the leases of its earlier life."""
    old = Arena(driver, capacity_bytes=EXTENT, extent_bytes=EXTENT)
    stale = old.reserve(8)
    old.close()
    arena = Arena(driver, capacity_bytes=EXTENT, extent_bytes=EXTENT, first_generation=50)

    assert arena.reserve(8).generation == 50
    with pytest.raises(StaleLeaseError):
        arena.view(stale)
    arena.close()


def test_two_arenas_share_a_driver(arena: Arena, driver: HostVmmDriver) -> None:
    """What one gives back the other can have."""
    other = Arena(driver, capacity_bytes=EXTENT, extent_bytes=PAGE_BYTES)
    arena.reserve(BUDGET_EXTENTS // 2 * EXTENT)
    spare = arena.reserve(BUDGET_EXTENTS // 2 * EXTENT)
    with pytest.raises(ArenaFullError):
        other.reserve(1)
    arena.release(spare)
    arena.trim()

    other.reserve(1)

    assert driver.physical().booked_bytes == BUDGET_EXTENTS // 2 * EXTENT + PAGE_BYTES
    other.close()


def test_abandon_ends_a_lease_or_nothing(arena: Arena) -> None:
    """It runs where nobody could handle an error."""
    lease = arena.reserve(10)
    arena.abandon(lease)
    assert arena.stat().num_leases == 0

    arena.abandon(lease)
    arena.abandon(Lease(10**6, 0, 10))

    assert arena.reserve(10).offset_bytes == lease.offset_bytes


def test_finalisers_wait_their_turn(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that dies in the middle of a verb, as garbage does, must not change the books.

    Here it dies inside the driver, called under the arena's lock; done at once that would
    wait for itself for ever.  It takes effect with the next verb.
    """
    dead = arena.reserve(EXTENT)
    views = [arena.view(dead)]
    arena.release(dead)
    create = HostVmmDriver.create
    seen: list[int] = []

    def collecting(driver: HostVmmDriver, nbytes: int) -> object:
        views.clear()
        seen.append(len(arena._turns._chores))
        return create(driver, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(HostVmmDriver, "create", collecting)
        other = arena.reserve(EXTENT)

    assert seen == [1]
    assert other.offset_bytes != dead.offset_bytes
    assert arena.stat().num_dead_leases == 0


def test_threads_keep_to_their_own_bytes(arena: Arena) -> None:
    """Reserve, fill, read and release from four threads at once."""
    outcomes: list[bool] = []

    def work(seed: int) -> None:
        for step in range(60):
            lease = arena.reserve(1 + (seed * 977 + step * 131) % (EXTENT - 1))
            view = fill(arena, lease)
            if step % 2:
                arena.release(lease)
            outcomes.append(reads_itself(view, lease))
            if not step % 2:
                arena.release(lease)
            # One lease at a time: four extents are enough then, and there are six.
            del view

    run_in_threads(work, 4)

    assert outcomes == [True] * 240
    assert arena.stat().used_bytes == 0


def test_closing_waits_for_readers_and_then_leaves_nothing(driver: HostVmmDriver) -> None:
    """No bytes, no addresses, and every verb is refused."""
    arena = Arena(driver, capacity_bytes=2 * EXTENT, extent_bytes=EXTENT)
    lease, other = arena.reserve(10), arena.reserve(EXTENT)
    view = fill(arena, lease)
    arena.pin(other)
    for _ in range(2):
        with pytest.raises(VmmBusy, match="2 pins"):
            arena.close()
    assert reads_itself(view, lease)
    arena.unpin(other)
    del view

    arena.close()
    arena.close()

    assert driver.physical().booked_bytes == 0
    with pytest.raises(VmmNotReserved):
        driver.tensor(arena.base_va, 1, None)
    for verb in (arena.stat, arena.check, lambda: arena.reserve(1), lambda: arena.view(lease)):
        with pytest.raises(VmmClosed):
            verb()


def test_a_close_that_fails_can_be_called_again(driver: FaultyDriver) -> None:
    """It goes on where it stopped."""
    arena = Arena(driver, capacity_bytes=2 * EXTENT, extent_bytes=EXTENT)
    arena.reserve(2 * EXTENT)
    driver.fail("release", after=1)
    with pytest.raises(VmmError):
        arena.close()
    assert arena.stat().num_leases == 0

    arena.close()

    assert driver.physical().measured_bytes == 0


def test_another_process_is_refused(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child changes neither bytes nor books, its finalisers included."""
    lease = arena.reserve(10)
    view = fill(arena, lease)
    here = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: here + 1)
        for verb in (arena.stat, arena.trim, arena.close, lambda: arena.release(lease)):
            with pytest.raises(VmmForked):
                verb()
        arena.abandon(lease)

    assert reads_itself(view, lease)
    assert arena.stat().num_leases == 1


@pytest.mark.parametrize(
    ("capacity_bytes", "extent_bytes"), [(0, EXTENT), (EXTENT + 1, EXTENT), (EXTENT, 0)]
)
def test_shapes_are_checked(driver: HostVmmDriver, capacity_bytes: int, extent_bytes: int) -> None:
    """Whole extents, at least one."""
    with pytest.raises(ValueError, match="extent_bytes"):
        Arena(driver, capacity_bytes=capacity_bytes, extent_bytes=extent_bytes)
