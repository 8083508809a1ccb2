"""`CompressedHeap` against a map of units: where blobs may lie, and that none is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.arena.heap import ALIGNMENT_BYTES, CompressedHeap, Lease
from codec.errors import ArenaFullError, StaleLeaseError
from tests.suites.quiet import QUIET_STATEFUL

UNIT = ALIGNMENT_BYTES
UNITS_PER_EXTENT = 4
EXTENT = UNIT * UNITS_PER_EXTENT
NUM_EXTENTS = 6


@pytest.fixture
def heap() -> Iterator[CompressedHeap]:
    """Six extents of four units whose invariants are checked after the test."""
    heap = CompressedHeap(num_extents=NUM_EXTENTS, extent_bytes=EXTENT, first_generation=100)
    yield heap
    heap.check()


class HeapMachine(RuleBasedStateMachine):
    """The oracle is the set of free units, searched by brute force."""

    def __init__(self) -> None:
        super().__init__()
        self.heap = CompressedHeap(num_extents=NUM_EXTENTS, extent_bytes=EXTENT)
        self.free = set(range(NUM_EXTENTS * UNITS_PER_EXTENT))
        self.live: list[Lease] = []
        self.ended: list[Lease] = []

    def units(self, lease: Lease) -> range:
        """Units that a lease covers."""
        return range(lease.offset_bytes // UNIT, -(-(lease.offset_bytes + lease.nbytes) // UNIT))

    def is_empty(self, extent: int) -> bool:
        """Whether no lease touches an extent."""
        return self.free.issuperset(self.units_of(extent))

    def units_of(self, extent: int) -> range:
        """Units of an extent."""
        return range(extent * UNITS_PER_EXTENT, (extent + 1) * UNITS_PER_EXTENT)

    def holes(self) -> list[int]:
        """Lengths of the maximal free runs within used extents, in units."""
        lengths = []
        for extent in range(NUM_EXTENTS):
            text = "".join("f" if unit in self.free else " " for unit in self.units_of(extent))
            lengths += [len(run) for run in text.split() if len(run) < UNITS_PER_EXTENT]
        return lengths

    def longest_empty_run(self) -> int:
        """Most empty extents in a row."""
        text = "".join("e" if self.is_empty(extent) else " " for extent in range(NUM_EXTENTS))
        return max(map(len, text.split()), default=0)

    def room_units(self) -> int:
        """The largest blob that can be placed."""
        return max(self.longest_empty_run() * UNITS_PER_EXTENT, max(self.holes(), default=0))

    @rule(
        nbytes=st.integers(1, EXTENT) | st.integers(1, 3 * EXTENT),
        is_warm=st.booleans(),
        data=st.data(),
    )
    def alloc(self, nbytes: int, is_warm: bool, data: st.DataObject) -> None:
        """A lease, exactly when brute force finds a place."""
        empty = [extent for extent in range(NUM_EXTENTS) if self.is_empty(extent)]
        warm = {data.draw(st.sampled_from(empty))} if is_warm and empty else set()
        units = -(-nbytes // UNIT)
        fitting = [length for length in self.holes() if length >= units]
        if units > self.room_units():
            with pytest.raises(ArenaFullError) as caught:
                self.heap.alloc(nbytes, warm=warm)
            assert caught.value.free_bytes == self.room_units() * UNIT
            return
        lease = self.heap.alloc(nbytes, warm=warm)
        covered = self.units(lease)
        extents = self.heap.extents_of(lease)
        assert lease.nbytes == nbytes
        assert self.free.issuperset(covered)
        assert len(extents) == -(-nbytes // EXTENT), "it straddles"
        if units <= UNITS_PER_EXTENT and fitting:
            assert not self.is_empty(extents[0]), "an extent was opened without need"
        elif units <= UNITS_PER_EXTENT and warm:
            assert set(extents) == warm
        self.free -= set(covered)
        self.live.append(lease)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Frees exactly its units, and reports the extents it emptied."""
        lease = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        emptied = self.heap.free(lease)
        self.free |= set(self.units(lease))
        assert emptied == [e for e in self.heap.extents_of(lease) if self.is_empty(e)]
        self.ended.append(lease)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        """Refused for ever, even where a new lease has the same bytes."""
        lease = data.draw(st.sampled_from(self.ended))
        with pytest.raises(StaleLeaseError):
            self.heap.free(lease)

    @invariant()
    def nothing_is_lost(self) -> None:
        """Sums, tables and generations are right."""
        self.heap.check()
        assert self.heap.free_bytes == len(self.free) * UNIT
        assert self.heap.used_bytes == sum(lease.nbytes for lease in self.live)
        assert self.heap.num_leases == len(self.live)
        assert self.heap.largest_free_bytes == self.room_units() * UNIT
        generations = [lease.generation for lease in self.ended + self.live]
        assert len(set(generations)) == len(generations)


TestHeapMachine = HeapMachine.TestCase
TestHeapMachine.settings = QUIET_STATEFUL


def test_a_small_blob_takes_the_smallest_hole(heap: CompressedHeap) -> None:
    """Larger holes are kept for larger blobs."""
    leases = [heap.alloc(n * UNIT) for n in (1, 2, 1, 1, 3)]
    heap.free(leases[1])
    heap.free(leases[3])

    assert heap.alloc(UNIT).offset_bytes == leases[3].offset_bytes


def test_a_blob_never_straddles_extents(heap: CompressedHeap) -> None:
    """Two free units at the end of one extent and two at the start of the next are no four."""
    heap.alloc(3 * UNIT)

    second = heap.alloc(2 * UNIT)

    assert second.offset_bytes == EXTENT
    assert heap.extents_of(second) == range(1, 2)


def test_a_large_blob_shares_only_its_last_extent(heap: CompressedHeap) -> None:
    """The rest of it is a hole like any other."""
    large = heap.alloc(EXTENT + UNIT)
    small = heap.alloc(2 * UNIT)
    assert list(heap.extents_of(large)) == [0, 1]
    assert small.offset_bytes == EXTENT + UNIT

    assert heap.free(large) == [0]
    assert heap.free(small) == [1]


def test_holes_of_two_extents_stay_apart(heap: CompressedHeap) -> None:
    """What is free on both sides of a border is two holes, for no blob may lie across."""
    first, second = heap.alloc(EXTENT - UNIT), heap.alloc(UNIT)
    third, _fourth = heap.alloc(UNIT), heap.alloc(EXTENT - UNIT)
    assert third.offset_bytes == EXTENT

    heap.free(third)
    heap.free(second)

    assert heap.largest_hole_bytes == UNIT
    assert heap.free(first) == [0]


def test_full_error_tells_fragmentation_from_exhaustion(heap: CompressedHeap) -> None:
    """Half the bytes are free, yet no two extents in a row."""
    leases = [heap.alloc(EXTENT) for _ in range(NUM_EXTENTS)]
    for lease in leases[::2]:
        heap.free(lease)

    with pytest.raises(ArenaFullError) as caught:
        heap.alloc(EXTENT + 1)

    assert (caught.value.wanted_bytes, caught.value.free_bytes) == (EXTENT + 1, EXTENT)
    assert heap.free_bytes == 3 * EXTENT


def test_blobs_start_aligned(heap: CompressedHeap) -> None:
    """A view of any element type can be made of their first byte."""
    assert [heap.alloc(1).offset_bytes % UNIT for _ in range(5)] == [0] * 5
    assert heap.used_bytes == 5


@pytest.mark.parametrize("change", ["generation", "offset_bytes", "nbytes"])
def test_a_lease_this_heap_did_not_grant_is_refused(heap: CompressedHeap, change: str) -> None:
    """Each field of a lease is part of its name."""
    ours = heap.alloc(UNIT)
    assert ours.generation == 100
    fields = {"generation": 100, "offset_bytes": 0, "nbytes": UNIT}
    theirs = Lease(**{**fields, change: fields[change] + UNIT})

    with pytest.raises(StaleLeaseError):
        heap.free(theirs)

    heap.need_live(ours)


def test_what_is_in_use_cannot_be_warm(heap: CompressedHeap) -> None:
    """A caller whose books are wrong is told, before anything is taken."""
    heap.alloc(EXTENT)

    with pytest.raises(ValueError, match="not empty"):
        heap.alloc(UNIT, warm={0})

    assert heap.num_leases == 1


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_cannot_be_leased(heap: CompressedHeap, nbytes: int) -> None:
    """A blob has bytes."""
    with pytest.raises(ValueError, match="at least 1"):
        heap.alloc(nbytes)


@pytest.mark.parametrize(("num_extents", "extent_bytes"), [(0, UNIT), (1, 0), (1, UNIT + 1)])
def test_shapes_are_checked(num_extents: int, extent_bytes: int) -> None:
    """At least one extent, of whole units."""
    with pytest.raises(ValueError, match="extent"):
        CompressedHeap(num_extents=num_extents, extent_bytes=extent_bytes)
