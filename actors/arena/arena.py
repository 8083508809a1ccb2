"""An arena: leases and pages in one address range that never moves.

1. The range begins with a heap, for leases of any size: `reserve` finds a place there and
   has its extents backed by memory.  Behind it lie the regions of a `HotLayout`, one per
   retention class, for pages that a model reads and writes.
2. All extents share one pool of memory.  What ends leaves its extents idle once they are
   empty: mapped and ready for the next, or to be moved under whatever needs memory, heap
   or region.  No address changes by that.  Only `trim` and `release_idle` give memory back
   to the system.
3. Bytes that a reader uses outlive their lease.  `release` of a pinned lease ends it for
   everybody at once (it is *dead but pinned*), and the last unpin frees its bytes.  A
   view pins as long as it, or anything made from it, lives; so no view ever dangles.
   For pages that is the work of whoever hands out slots: it must not free one while the
   owner that it gave to the region's tensors lives.

An address still names no bytes for long: what is sent elsewhere carries the lease's
generation.  Contents are not zeroed between leases, nor between pages.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from actors.arena.driver import Driver
from actors.arena.extents import ExtentPool, PoolWork
from actors.arena.heap import CompressedHeap, Lease
from actors.arena.layout import HotLayout, PoolSpec, RingSpec
from actors.arena.leases import LeaseTable
from actors.arena.page_region import PageRegion
from actors.arena.ring_region import RingRegion
from actors.arena.turns import Turns
from codec.errors import VmmBusy, VmmMisaligned

__all__ = ["Arena", "ArenaStat", "Lease"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStat:
    """One arena at one moment."""

    reserved_bytes: int
    """Addresses of the heap, and so the most that leases can ever use."""

    committed_bytes: int
    """Memory held, in use or not."""

    idle_bytes: int
    """Committed but empty, anywhere: what `Arena.trim` would give back."""

    used_bytes: int
    """Asked for by leases, dead but pinned ones included."""

    free_bytes: int
    """Reserved bytes that no lease has, committed or not."""

    num_leases: int
    """Live leases."""

    num_dead_leases: int
    """Leases that have ended but are pinned."""

    num_pins: int
    """Pins and views of leases."""

    heap_bytes: int = 0
    """Memory under the heap's addresses, in use or not."""

    hot_committed_bytes: int = 0
    """Memory under the regions' addresses, in use or not."""

    hot_bytes: int = 0
    """Memory that the regions' pages use: whole rings, or the bytes of the pages."""

    peak_committed_bytes: int = 0
    """The most memory that was ever held at once."""


class _ViewOwner:
    """Dies with the last object made from one `Arena.view`."""

    __slots__ = ("__weakref__",)


class Arena:
    """Variable-sized leases, and pages, over one `Driver`.

    Thread-safe, its regions included.  It does not own its driver, which may serve others
    too.  `view` needs memory that the processor can address.

    Parameters
    ----------
    capacity_bytes
        Addresses of the heap, a multiple of ``extent_bytes``.  The driver's budget may
        be smaller.
    extent_bytes
        What is committed at a time: a multiple of the driver's granule, and best of
        several blobs.
    first_generation
        Generations start here: above all that an earlier life of the arena granted.
    hot
        Regions to have behind the heap, with the same ``extent_bytes``.
    clock
        Seconds that never fall; says how long memory has been idle.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        capacity_bytes: int,
        extent_bytes: int,
        first_generation: int = 1,
        hot: HotLayout | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if extent_bytes < 1 or capacity_bytes < 1 or capacity_bytes % extent_bytes:
            raise ValueError(
                f"capacity_bytes must be a multiple of extent_bytes, both positive, "
                f"got {capacity_bytes} and {extent_bytes}"
            )
        num_extents = capacity_bytes // extent_bytes
        heap = CompressedHeap(
            num_extents=num_extents, extent_bytes=extent_bytes, first_generation=first_generation
        )
        hot = (hot or HotLayout(extent_bytes=extent_bytes, regions=())).behind(num_extents)
        if hot.extent_bytes != extent_bytes:
            raise VmmMisaligned("extent_bytes of the hot layout", hot.extent_bytes, extent_bytes)
        self._driver = driver
        #: Uses exactly the extents that the leases and the regions use.
        self._extents = ExtentPool(
            driver,
            num_extents=num_extents + hot.num_extents,
            extent_bytes=extent_bytes,
            mirrors=hot.mirrors,
            clock=clock,
        )
        self._leases = LeaseTable(heap, self._extents)
        self._turns = Turns("arena")
        self.regions: tuple[PageRegion | RingRegion, ...] = tuple(map(self._region, hot.regions))
        """By class of the plan.  Their verbs enter the arena, as its own do."""

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
        with self._turns.entered():
            return self._leases.grant(nbytes)

    def release(self, lease: Lease) -> None:
        """End ``lease``; its bytes are free now, or when nothing pins them any more.

        Raises
        ------
        StaleLeaseError
            If it has ended already, or another arena granted it.
        """
        with self._turns.entered():
            self._leases.end(lease)

    def abandon(self, lease: Lease) -> None:
        """Release ``lease`` unless it has ended; callable from a finaliser.

        It never waits: where the arena is busy, its next verb does the work.
        """
        self._turns.do_soon(lambda: self._leases.end_if_live(lease))

    def view(self, lease: Lease) -> memoryview:
        """The bytes of ``lease``, writable and without a copy; pins them while it lives.

        Raises
        ------
        StaleLeaseError
            If the lease is not live.
        """
        with self._turns.entered():
            grant = self._leases.live(lease)
            owner = _ViewOwner()
            # Every slice, array or tensor made from the view keeps the owner alive.
            va = self.base_va + lease.offset_bytes
            view = self._driver.tensor(va, lease.nbytes, owner).numpy().data
            leases = self._leases
            leases.add_view(grant)
            finalizer = weakref.finalize(
                owner, self._turns.do_soon, lambda: leases.drop_view(grant)
            )
            finalizer.atexit = False
            return view

    def is_held(self, lease: Lease) -> bool:
        """Whether the bytes of ``lease`` are its own still: live, or dead but pinned."""
        with self._turns.entered():
            return self._leases.is_held(lease)

    def pin(self, lease: Lease) -> None:
        """Keep the bytes of ``lease`` until `unpin`, even if it is released meanwhile.

        Raises
        ------
        StaleLeaseError
            If the lease is not live.
        """
        with self._turns.entered():
            self._leases.pin(lease)

    def unpin(self, lease: Lease) -> None:
        """Undo one `pin`.

        Raises
        ------
        StaleLeaseError
            If the lease, dead or not, has no pin left.
        """
        with self._turns.entered():
            self._leases.unpin(lease)

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
        with self._turns.entered():
            return self._extents.trim(keep_bytes)

    def release_idle(self, older_than_s: float) -> int:
        """Give memory back that has been empty for at least that long; return how much.

        Raises
        ------
        VmmError
            If the driver refuses; what was given back before stays so.
        """
        if older_than_s < 0:
            raise ValueError(f"older_than_s must be at least 0, got {older_than_s}")
        with self._turns.entered():
            return self._extents.release_idle(older_than_s)

    @property
    def work(self) -> PoolWork:
        """What the driver has done for this arena so far."""
        return self._extents.work

    def stat(self) -> ArenaStat:
        """How full the arena is; with regions, a look at every extent that has memory."""
        with self._turns.entered():
            leases, extents = self._leases, self._extents
            heap = leases.heap
            mapped_bytes = len(extents.mapped) * heap.extent_bytes
            hot_extents = extents.count_mapped(heap.num_extents) if self.regions else 0
            hot_committed_bytes = hot_extents * heap.extent_bytes
            return ArenaStat(
                reserved_bytes=heap.capacity_bytes,
                committed_bytes=extents.committed_bytes,
                idle_bytes=extents.idle_bytes,
                used_bytes=heap.used_bytes,
                free_bytes=heap.free_bytes,
                num_leases=leases.num_live,
                num_dead_leases=leases.num_dead,
                num_pins=leases.num_pins,
                heap_bytes=mapped_bytes - hot_committed_bytes,
                hot_committed_bytes=hot_committed_bytes,
                hot_bytes=sum(region.hot_bytes for region in self.regions),
                peak_committed_bytes=extents.peak_committed_bytes,
            )

    def close(self) -> None:
        """End every lease and give back all memory and addresses; twice does nothing more.

        Pages are given up with it, whoever has their slots.

        Raises
        ------
        VmmBusy
            If anything is pinned or viewed, or a tensor over pages lives; nothing has
            changed then.
        VmmError
            If the driver refuses; call again to go on from there.
        """
        self._turns.check_process()
        if self._turns.is_closed:
            return
        with self._turns.entered():
            if self._leases.num_pins:
                raise VmmBusy("the arena", f"{self._leases.num_pins} pins and views")
            # The driver would notice only when their memory is gone.
            if num_views := sum(region.num_views for region in self.regions):
                raise VmmBusy("the arena", f"{num_views} tensors over its pages")
            self._leases.end_all()
            self._extents.close()
            self._turns.is_closed = True

    def check(self) -> None:
        """Assert every invariant.  For tests and validation, not for control flow."""
        with self._turns.entered():
            self._leases.check()
            used = self._leases.used_extents
            for region in self.regions:
                region.check()
                assert used.isdisjoint(region.used_extents)
                used |= region.used_extents
            self._extents.check(used)

    def _region(self, spec: PoolSpec | RingSpec) -> PageRegion | RingRegion:
        pool, driver = self._extents, self._driver
        if isinstance(spec, RingSpec):
            return RingRegion(
                spec,
                pool=pool,
                driver=driver,
                enter=self._turns.entered,
                do_soon=self._turns.do_soon,
            )
        return PageRegion(spec, pool=pool, driver=driver, enter=self._turns.entered)
