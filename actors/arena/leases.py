"""Leases of a heap whose extents a pool backs, and who still looks at their bytes.

A lease that ends while somebody looks is *dead but pinned*: ended for everybody at once,
while its bytes stay until the last has looked away.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from actors.arena.extents import ExtentPool
from actors.arena.heap import CompressedHeap, Lease
from codec.errors import ArenaFullError, StaleLeaseError, VmmOutOfMemory


@dataclass(slots=True, eq=False)
class Grant:
    """What is known of one lease."""

    lease: Lease
    #: Pins that `LeaseTable.unpin` may drop, and views that live; neither ever below 0.
    num_pins: int = 0
    num_views: int = 0
    #: Once set, it stays; the grant goes with its last pin or view.
    is_dead: bool = False

    @property
    def is_used(self) -> bool:
        """Whether somebody may still look at the bytes."""
        return self.num_pins + self.num_views > 0


class LeaseTable:
    """Grants leases on the first extents of a pool; not thread-safe."""

    def __init__(self, heap: CompressedHeap, pool: ExtentPool) -> None:
        self.heap = heap
        #: Has in use exactly those of the heap's extents that its leases touch.
        self._pool = pool
        #: ``{generation: grant}`` of exactly the heap's leases.
        self._grants: dict[int, Grant] = {}
        #: Sums over the grants: of their pins and views, and of the dead.
        self.num_pins = 0
        self.num_dead = 0

    @property
    def num_live(self) -> int:
        """Leases that have not ended."""
        return len(self._grants) - self.num_dead

    @property
    def used_extents(self) -> set[int]:
        """Extents that a lease touches."""
        grants = self._grants.values()
        return {at for grant in grants for at in self.heap.extents_of(grant.lease)}

    def is_held(self, lease: Lease) -> bool:
        """Whether the bytes of ``lease`` are its own still: live, or dead but pinned."""
        grant = self._grants.get(lease.generation)
        return grant is not None and grant.lease == lease

    def grant(self, nbytes: int) -> Lease:
        """Lease ``nbytes`` with memory.

        Raises
        ------
        ArenaFullError
            If no free run is that long, or the driver has no more memory; the latter
            has the driver's error as its cause.
        VmmError
            If the driver refuses otherwise.
        """
        warm = (extent for extent in self._pool.idle if extent < self.heap.num_extents)
        try:
            with ExitStack() as undo:
                lease = self.heap.alloc(nbytes, warm=warm)
                undo.callback(self.heap.free, lease)
                self._pool.use(self.heap.extents_of(lease))
                undo.pop_all()
        except VmmOutOfMemory as error:
            raise ArenaFullError(nbytes, self._committed_room_bytes()) from error
        self._grants[lease.generation] = Grant(lease)
        return lease

    def live(self, lease: Lease) -> Grant:
        """The grant of a lease that has not ended.

        Raises
        ------
        StaleLeaseError
            If it has, or is not of this table.
        """
        grant = self._grants.get(lease.generation)
        if grant is None or grant.lease != lease or grant.is_dead:
            raise StaleLeaseError(lease.generation)
        return grant

    def end(self, lease: Lease) -> None:
        """End ``lease``; its bytes are free now, or when nothing pins them any more.

        Raises
        ------
        StaleLeaseError
            If it has ended already.
        """
        grant = self.live(lease)
        grant.is_dead = True
        self.num_dead += 1
        self._free_unless_used(grant)

    def end_if_live(self, lease: Lease) -> None:
        """End ``lease`` unless it has ended."""
        grant = self._grants.get(lease.generation)
        if grant is not None and grant.lease == lease and not grant.is_dead:
            self.end(lease)

    def end_all(self) -> None:
        """End every lease that has not ended."""
        for grant in list(self._grants.values()):
            self.end_if_live(grant.lease)

    def pin(self, lease: Lease) -> None:
        """Keep the bytes until `unpin`.

        Raises
        ------
        StaleLeaseError
            If the lease is not live.
        """
        self.live(lease).num_pins += 1
        self.num_pins += 1

    def unpin(self, lease: Lease) -> None:
        """Undo one `pin`.

        Raises
        ------
        StaleLeaseError
            If the lease, dead or not, has no pin left.
        """
        grant = self._grants.get(lease.generation)
        if grant is None or grant.lease != lease or not grant.num_pins:
            raise StaleLeaseError(lease.generation)
        grant.num_pins -= 1
        self.num_pins -= 1
        self._free_unless_used(grant)

    def add_view(self, grant: Grant) -> None:
        """Keep the bytes until `drop_view`."""
        grant.num_views += 1
        self.num_pins += 1

    def drop_view(self, grant: Grant) -> None:
        """Undo one `add_view`."""
        grant.num_views -= 1
        self.num_pins -= 1
        self._free_unless_used(grant)

    def check(self) -> None:
        """Assert every invariant."""
        self.heap.check()
        for generation, grant in self._grants.items():
            assert generation == grant.lease.generation
            assert grant.num_pins >= 0
            assert grant.num_views >= 0
            assert grant.is_used or not grant.is_dead
            self.heap.need_live(grant.lease)
        grants = self._grants.values()
        assert len(grants) == self.heap.num_leases
        assert self.num_pins == sum(grant.num_pins + grant.num_views for grant in grants)
        assert self.num_dead == sum(grant.is_dead for grant in grants)

    def _free_unless_used(self, grant: Grant) -> None:
        if grant.is_dead and not grant.is_used:
            del self._grants[grant.lease.generation]
            self.num_dead -= 1
            self._pool.rest(self.heap.free(grant.lease))

    def _committed_room_bytes(self) -> int:
        """The most that one lease could have without more memory from the driver."""
        one_extent = self.heap.extent_bytes if self._pool.idle_bytes else 0
        return max(one_extent, self.heap.largest_hole_bytes)
