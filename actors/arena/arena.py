"""An arena: leases of bytes in one address range that never moves.

1. `reserve` finds a place in the heap and has the extents there backed by memory.
2. A lease that ends leaves its extents idle once they are empty: mapped and ready for
   the next.  Only `trim` gives memory back to the system.
3. Bytes that a reader uses outlive their lease.  `release` of a pinned lease ends it for
   everybody at once (it is *dead but pinned*), and the last unpin frees its bytes.  A
   view pins as long as it, or anything made from it, lives; so no view ever dangles.

An address still names no bytes for long: what is sent elsewhere carries the lease's
generation.  Contents are not zeroed between leases.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from actors.arena.driver import Driver
from actors.arena.extents import ExtentPool
from actors.arena.heap import CompressedHeap, Lease
from codec.errors import (
    ArenaFullError,
    StaleLeaseError,
    VmmBusy,
    VmmClosed,
    VmmForked,
    VmmOutOfMemory,
)

__all__ = ["Arena", "ArenaStat", "Lease"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStat:
    """One arena at one moment."""

    reserved_bytes: int
    """Addresses, and so the most that can ever be in use."""

    committed_bytes: int
    """Memory held, in use or not."""

    idle_bytes: int
    """Committed but empty: what `Arena.trim` would give back."""

    used_bytes: int
    """Asked for by leases, dead but pinned ones included."""

    free_bytes: int
    """Reserved bytes that no lease has, committed or not."""

    num_leases: int
    """Live leases."""

    num_dead_leases: int
    """Leases that have ended but are pinned."""

    num_pins: int
    """Pins and views."""


@dataclass(slots=True, eq=False)
class _Grant:
    """What the arena knows of one lease."""

    lease: Lease
    #: Pins that `Arena.unpin` may drop, and views that live; neither ever below 0.
    num_pins: int = 0
    num_views: int = 0
    #: Once set, it stays; the grant goes with its last pin or view.
    is_dead: bool = False

    @property
    def is_used(self) -> bool:
        """Whether somebody may still look at the bytes."""
        return self.num_pins + self.num_views > 0


class _ViewOwner:
    """Dies with the last object made from one `Arena.view`."""

    __slots__ = ("__weakref__",)


class Arena:
    """Variable-sized leases over a `Driver` whose memory the processor can address.

    Thread-safe.  It does not own its driver, which may serve others too.

    Parameters
    ----------
    capacity_bytes
        Addresses to reserve, a multiple of ``extent_bytes``.  The driver's budget may
        be smaller.
    extent_bytes
        What is committed at a time: a multiple of the driver's granule, and best of
        several blobs.
    first_generation
        Generations start here: above all that an earlier life of the arena granted.
    """

    def __init__(
        self, driver: Driver, *, capacity_bytes: int, extent_bytes: int, first_generation: int = 1
    ) -> None:
        if extent_bytes < 1 or capacity_bytes < 1 or capacity_bytes % extent_bytes:
            raise ValueError(
                f"capacity_bytes must be a multiple of extent_bytes, both positive, "
                f"got {capacity_bytes} and {extent_bytes}"
            )
        num_extents = capacity_bytes // extent_bytes
        self._driver = driver
        self._heap = CompressedHeap(
            num_extents=num_extents, extent_bytes=extent_bytes, first_generation=first_generation
        )
        #: Uses exactly the extents that the heap's leases touch.
        self._extents = ExtentPool(driver, num_extents=num_extents, extent_bytes=extent_bytes)
        #: ``{generation: grant}`` of exactly the heap's leases.
        self._grants: dict[int, _Grant] = {}
        #: Sums over the grants: of their pins and views, and of the dead.
        self._num_pins = 0
        self._num_dead = 0
        #: What finalisers asked for and nobody has done yet.
        self._chores: deque[Callable[[], None]] = deque()
        self._is_closed = False
        self._owner_pid = os.getpid()
        # Not re-entrant: a finaliser may run in the middle of any verb of its own thread,
        # and must find the lock taken then.
        self._lock = threading.Lock()

    @property
    def base_va(self) -> int:
        """The arena's first address; never changes."""
        return self._extents.base_va

    def reserve(self, nbytes: int) -> Lease:
        """Lease ``nbytes`` of committed memory, whose content is undefined.

        Raises
        ------
        ArenaFullError
            If no free run is that long, or the driver has no more memory; the latter
            has the driver's error as its cause.
        """
        with self._entered():
            try:
                return self._grant(nbytes)
            except VmmOutOfMemory as error:
                raise ArenaFullError(nbytes, self._committed_room_bytes()) from error

    def release(self, lease: Lease) -> None:
        """End ``lease``; its bytes are free now, or when nothing pins them any more.

        Raises
        ------
        StaleLeaseError
            If it has ended already, or another arena granted it.
        """
        with self._entered():
            self._end(self._live(lease))

    def abandon(self, lease: Lease) -> None:
        """Release ``lease`` unless it has ended; callable from a finaliser.

        It never waits: where the arena is busy, its next verb does the work.
        """
        self._do_soon(lambda: self._abandon(lease))

    def view(self, lease: Lease) -> memoryview:
        """The bytes of ``lease``, writable and without a copy; pins them while it lives.

        Raises
        ------
        StaleLeaseError
            If the lease is not live.
        """
        with self._entered():
            grant = self._live(lease)
            owner = _ViewOwner()
            # Every slice, array or tensor made from the view keeps the owner alive.
            va = self.base_va + lease.offset_bytes
            view = self._driver.tensor(va, lease.nbytes, owner).numpy().data
            grant.num_views += 1
            self._num_pins += 1
            finalizer = weakref.finalize(owner, self._do_soon, lambda: self._drop_view(grant))
            finalizer.atexit = False
            return view

    def pin(self, lease: Lease) -> None:
        """Keep the bytes of ``lease`` until `unpin`, even if it is released meanwhile.

        Raises
        ------
        StaleLeaseError
            If the lease is not live.
        """
        with self._entered():
            self._live(lease).num_pins += 1
            self._num_pins += 1

    def unpin(self, lease: Lease) -> None:
        """Undo one `pin`.

        Raises
        ------
        StaleLeaseError
            If the lease, dead or not, has no pin left.
        """
        with self._entered():
            grant = self._grants.get(lease.generation)
            if grant is None or grant.lease != lease or not grant.num_pins:
                raise StaleLeaseError(lease.generation)
            grant.num_pins -= 1
            self._num_pins -= 1
            self._free_unless_used(grant)

    def trim(self, keep_bytes: int = 0) -> int:
        """Give committed but empty memory back to the system; return how many bytes.

        Parameters
        ----------
        keep_bytes
            At least this much of it stays, ready for the next blobs.

        Raises
        ------
        VmmError
            If the driver refuses; what was given back before stays so.
        """
        if keep_bytes < 0:
            raise ValueError(f"keep_bytes must be at least 0, got {keep_bytes}")
        with self._entered():
            return self._extents.trim(keep_bytes)

    def stat(self) -> ArenaStat:
        """How full the arena is."""
        with self._entered():
            return ArenaStat(
                reserved_bytes=self._heap.capacity_bytes,
                committed_bytes=self._extents.committed_bytes,
                idle_bytes=self._extents.idle_bytes,
                used_bytes=self._heap.used_bytes,
                free_bytes=self._heap.free_bytes,
                num_leases=len(self._grants) - self._num_dead,
                num_dead_leases=self._num_dead,
                num_pins=self._num_pins,
            )

    def close(self) -> None:
        """End every lease and give back all memory and addresses; twice does nothing more.

        Raises
        ------
        VmmBusy
            If anything is pinned or viewed; nothing has changed then.
        VmmError
            If the driver refuses; call again to go on from there.
        """
        self._check_process()
        if self._is_closed:
            return
        with self._entered():
            if self._num_pins:
                raise VmmBusy("the arena", f"{self._num_pins} pins and views")
            for grant in list(self._grants.values()):
                self._end(grant)
            self._extents.close()
            self._is_closed = True

    def check(self) -> None:
        """Assert every invariant.  For tests and validation, not for control flow."""
        with self._entered():
            self._heap.check()
            used: set[int] = set()
            for generation, grant in self._grants.items():
                assert generation == grant.lease.generation
                assert grant.num_pins >= 0
                assert grant.num_views >= 0
                assert grant.is_used or not grant.is_dead
                self._heap.need_live(grant.lease)
                used.update(self._heap.extents_of(grant.lease))
            grants = self._grants.values()
            assert len(grants) == self._heap.num_leases
            assert self._num_pins == sum(grant.num_pins + grant.num_views for grant in grants)
            assert self._num_dead == sum(grant.is_dead for grant in grants)
            self._extents.check(used)

    def _check_process(self) -> None:
        # Before the lock: another thread of the parent may have held it at the fork.
        if (pid := os.getpid()) != self._owner_pid:
            raise VmmForked(self._owner_pid, pid)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self._check_process()
        with self._lock:
            if self._is_closed:
                raise VmmClosed("arena")
            self._do_chores()
            yield

    def _do_soon(self, chore: Callable[[], None]) -> None:
        """Do ``chore`` now if nobody is inside, else leave it to the next verb."""
        if os.getpid() != self._owner_pid:
            return
        self._chores.append(chore)
        if self._lock.acquire(blocking=False):
            try:
                self._do_chores()
            finally:
                self._lock.release()

    def _do_chores(self) -> None:
        while self._chores:
            self._chores.popleft()()

    def _grant(self, nbytes: int) -> Lease:
        with ExitStack() as undo:
            lease = self._heap.alloc(nbytes, warm=self._extents.idle)
            undo.callback(self._free, lease)
            self._extents.use(self._heap.extents_of(lease))
            undo.pop_all()
        self._grants[lease.generation] = _Grant(lease)
        return lease

    def _live(self, lease: Lease) -> _Grant:
        grant = self._grants.get(lease.generation)
        if grant is None or grant.lease != lease or grant.is_dead:
            raise StaleLeaseError(lease.generation)
        return grant

    def _abandon(self, lease: Lease) -> None:
        grant = self._grants.get(lease.generation)
        if grant is not None and grant.lease == lease and not grant.is_dead:
            self._end(grant)

    def _drop_view(self, grant: _Grant) -> None:
        grant.num_views -= 1
        self._num_pins -= 1
        self._free_unless_used(grant)

    def _end(self, grant: _Grant) -> None:
        grant.is_dead = True
        self._num_dead += 1
        self._free_unless_used(grant)

    def _free_unless_used(self, grant: _Grant) -> None:
        if grant.is_dead and not grant.is_used:
            del self._grants[grant.lease.generation]
            self._num_dead -= 1
            self._free(grant.lease)

    def _free(self, lease: Lease) -> None:
        self._extents.rest(self._heap.free(lease))

    def _committed_room_bytes(self) -> int:
        """The most that one lease could have without more memory from the driver."""
        one_extent = self._heap.extent_bytes if self._extents.idle_bytes else 0
        return max(one_extent, self._heap.largest_hole_bytes)
