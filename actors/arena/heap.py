"""Where blobs of any size lie in an arena that is committed extent by extent.

1. A blob that fits into one extent never straddles two, so that one cold blob cannot
   keep two extents committed; a larger one starts at an extent and owns whole ones,
   except that small blobs may share the rest of its last.
2. A small blob takes the smallest hole it fits into, among extents that are in use
   (lowest address first among equals), and an empty extent only if there is none.
3. A large blob takes the lowest run of empty extents.

Book-keeping only: it has no memory, and does not know which extents are committed.
Blobs are never moved.  Reserving costs a binary search and the shift of a sorted list;
for large blobs, a walk over the empty extents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from codec.errors import ArenaFullError, StaleLeaseError

ALIGNMENT_BYTES = 64
"""Every blob starts at a multiple of it: a cache line, and any tensor's element."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use some bytes of one arena until it is released."""

    generation: int
    """Names this lease for ever: no later lease of its arena has it again."""

    offset_bytes: int
    """From the arena's base."""

    nbytes: int


class CompressedHeap:
    """Best-fit allocator over equal extents; `check` states what holds between calls."""

    def __init__(self, *, num_extents: int, extent_bytes: int, first_generation: int = 1) -> None:
        if num_extents < 1:
            raise ValueError(f"need at least one extent, got {num_extents}")
        if extent_bytes < 1 or extent_bytes % ALIGNMENT_BYTES:
            raise ValueError(
                f"extent_bytes must be a positive multiple of {ALIGNMENT_BYTES}, got {extent_bytes}"
            )
        self.num_extents = num_extents
        self.extent_bytes = extent_bytes
        #: ``{generation: lease}``; padded to the alignment, their bytes are disjoint.
        self._leases: dict[int, Lease] = {}
        #: Only ever rises.
        self._next_generation = first_generation
        #: Extents that no lease touches, sorted; they are in none of the hole tables.
        self._empty = list(range(num_extents))
        #: ``{start: stop}`` of every maximal free run within an extent that is in use.
        self._holes: dict[int, int] = {}
        #: The same as ``{stop: start}``, and as sorted ``(size, start)``.
        self._hole_before: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        #: Sums over the leases: as asked for, and padded.
        self._used_bytes = 0
        self._padded_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """All bytes, free or not."""
        return self.num_extents * self.extent_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes asked for by the live leases."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that no lease has, the padding of each counted as had."""
        return self.capacity_bytes - self._padded_bytes

    @property
    def num_leases(self) -> int:
        """Leases that are live."""
        return len(self._leases)

    @property
    def largest_hole_bytes(self) -> int:
        """The most that fits without touching another extent."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def largest_free_bytes(self) -> int:
        """The most that one lease could have now."""
        longest = run = 0
        previous = -2
        for extent in self._empty:
            run = run + 1 if extent == previous + 1 else 1
            longest, previous = max(longest, run), extent
        return max(longest * self.extent_bytes, self.largest_hole_bytes)

    def alloc(self, nbytes: int, *, warm: Iterable[int] = ()) -> Lease:
        """Lease ``nbytes``.

        Parameters
        ----------
        nbytes
            At least 1.
        warm
            Empty extents that are committed already: one of them is taken before any
            other empty one, where one is enough.

        Raises
        ------
        ArenaFullError
            If no hole or run of extents is that long, even where enough bytes are free.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1, got {nbytes}")
        size = _padded(nbytes)
        start = self._take(size, warm)
        if start is None:
            raise ArenaFullError(nbytes, self.largest_free_bytes)
        lease = Lease(self._next_generation, start, nbytes)
        self._next_generation += 1
        self._leases[lease.generation] = lease
        self._used_bytes += nbytes
        self._padded_bytes += size
        return lease

    def free(self, lease: Lease) -> list[int]:
        """End ``lease`` and return the extents that are empty now but were not before.

        Raises
        ------
        StaleLeaseError
            If it is not live.
        """
        self.need_live(lease)
        del self._leases[lease.generation]
        start, size = lease.offset_bytes, _padded(lease.nbytes)
        self._used_bytes -= lease.nbytes
        self._padded_bytes -= size
        return [
            extent
            for extent in self._extents(start, size)
            if self._give(
                max(start, extent * self.extent_bytes),
                min(start + size, (extent + 1) * self.extent_bytes),
            )
        ]

    def need_live(self, lease: Lease) -> None:
        """Refuse a lease that has ended, or that this heap did not grant.

        Raises
        ------
        StaleLeaseError
            If it is not live.
        """
        if self._leases.get(lease.generation) != lease:
            raise StaleLeaseError(lease.generation)

    def extents_of(self, lease: Lease) -> range:
        """The extents that ``lease`` touches."""
        return self._extents(lease.offset_bytes, lease.nbytes)

    def check(self) -> None:
        """Assert every invariant.  For tests and validation, not for control flow."""
        empties = [(e * self.extent_bytes, (e + 1) * self.extent_bytes) for e in self._empty]
        held = [
            (lease.offset_bytes, lease.offset_bytes + _padded(lease.nbytes))
            for lease in self._leases.values()
        ]
        at = 0
        for start, stop in sorted([*empties, *self._holes.items(), *held]):
            assert start == at < stop, (start, at, stop)
            at = stop
        assert at == self.capacity_bytes
        assert self._hole_before == {stop: start for start, stop in self._holes.items()}
        assert self._by_size == sorted((stop - at, at) for at, stop in self._holes.items())
        assert self._empty == sorted(self._empty)
        for start, stop in self._holes.items():
            first, last = start // self.extent_bytes, (stop - 1) // self.extent_bytes
            assert first == last, "a hole spans extents"
            assert stop - start < self.extent_bytes, "a hole is a whole extent"
            assert stop % self.extent_bytes == 0 or stop not in self._holes, "two holes meet"
        for lease in self._leases.values():
            spans = len(self.extents_of(lease))
            assert lease.offset_bytes % ALIGNMENT_BYTES == 0
            assert spans == 1 or lease.offset_bytes % self.extent_bytes == 0
            assert spans == -(-lease.nbytes // self.extent_bytes)
        assert self._used_bytes == sum(lease.nbytes for lease in self._leases.values())
        assert self._padded_bytes == sum(stop - start for start, stop in held)
        assert all(generation < self._next_generation for generation in self._leases)

    def _take(self, size: int, warm: Iterable[int]) -> int | None:
        """Take ``size`` bytes out of the tables and return their start."""
        if size > self.extent_bytes:
            return self._take_run(size)
        at = bisect_left(self._by_size, (size, 0))
        if at < len(self._by_size):
            start = self._by_size[at][1]
            stop = self._drop_hole(start)
        elif self._empty:
            extent = min(warm, default=self._empty[0])
            at = bisect_left(self._empty, extent)
            if self._empty[at : at + 1] != [extent]:
                raise ValueError(f"extent {extent} is not empty, so it cannot be warm")
            del self._empty[at]
            start, stop = extent * self.extent_bytes, (extent + 1) * self.extent_bytes
        else:
            return None
        self._add_hole(start + size, stop)
        return start

    def _take_run(self, size: int) -> int | None:
        length = -(-size // self.extent_bytes)
        for at in range(len(self._empty) - length + 1):
            first = self._empty[at]
            if self._empty[at + length - 1] == first + length - 1:
                del self._empty[at : at + length]
                start = first * self.extent_bytes
                self._add_hole(start + size, start + length * self.extent_bytes)
                return start
        return None

    def _give(self, start: int, stop: int) -> bool:
        """Put ``[start, stop)``, within one extent, back; whether that emptied the extent."""
        if stop % self.extent_bytes and stop in self._holes:
            stop = self._drop_hole(stop)
        if start % self.extent_bytes and start in self._hole_before:
            start = self._hole_before[start]
            self._drop_hole(start)
        if stop - start < self.extent_bytes:
            self._add_hole(start, stop)
            return False
        insort(self._empty, start // self.extent_bytes)
        return True

    def _add_hole(self, start: int, stop: int) -> None:
        if start < stop:
            self._holes[start] = stop
            self._hole_before[stop] = start
            insort(self._by_size, (stop - start, start))

    def _drop_hole(self, start: int) -> int:
        """Remove the hole at ``start`` and return where it stopped."""
        stop = self._holes.pop(start)
        del self._hole_before[stop]
        self._by_size.pop(bisect_left(self._by_size, (stop - start, start)))
        return stop

    def _extents(self, start: int, size: int) -> range:
        return range(start // self.extent_bytes, (start + size - 1) // self.extent_bytes + 1)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
