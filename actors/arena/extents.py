"""The extents of one reserved range, backed by memory one by one.

An extent is *bare* (addresses only) or *mapped*; a mapped one that nobody uses is
*idle*.  To back a bare extent, memory is taken from a handle that is mapped nowhere, or
is moved from the extent that fell idle last (a few calls, some times cheaper than
committing anew), or is committed.  Which part of the range needs it makes no
difference.  Death unmaps nothing; only `trim` and `release_idle` give memory back.

An extent may have a *mirror*: a second place in the range that shows the same memory.
Both are mapped, opened and unmapped together, and count once.

A verb of the driver that fails is undone before the error is raised.  Where the undoing
fails too, the memory stays committed for a later use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import islice

from actors.arena.driver import Access, Driver, Handle, Span
from codec.errors import VmmError, VmmMisaligned


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWork:
    """What the driver has done for a pool so far, undone work included."""

    creates: int = 0
    steals: int = 0
    """Extents whose memory went to another."""

    maps: int = 0
    unmaps: int = 0
    releases: int = 0


class ExtentPool:
    """Backs extents, and remembers which of them are in use; not thread-safe.

    Parameters
    ----------
    num_extents
        Extents of the range, mirrors included.
    mirrors
        ``{extent: its mirror}``.  A mirror is named in no verb.
    clock
        Seconds that never fall; says since when an extent is idle.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        num_extents: int,
        extent_bytes: int,
        mirrors: Mapping[int, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        granule_bytes = driver.caps().granule_min_bytes
        if extent_bytes % granule_bytes:
            raise VmmMisaligned("extent_bytes", extent_bytes, granule_bytes)
        self.num_extents = num_extents
        self.extent_bytes = extent_bytes
        self.work = PoolWork()
        self._driver = driver
        self._clock = clock
        #: Two places are never the same, and no mirror has one.
        self._mirrors = dict(mirrors or {})
        _check_mirrors(self._mirrors, num_extents)
        #: ``{extent: handle}`` of what has memory; never a mirror.
        self._mapped: dict[int, Handle] = {}
        #: Places, mirrors included, where that memory is mapped: all of them, unless
        #: undoing a fault has failed, and then the extent is idle.
        self._places: set[int] = set()
        #: Places open for reading and writing: a subset of the mapped ones; all that
        #: are in use are here.
        self._open: set[int] = set()
        #: ``{extent: since when}`` of mapped extents that nobody uses, oldest first.
        self._idle: dict[int, float] = {}
        #: ``{handle: since when}`` of what is mapped nowhere; normally none.
        self._spare: dict[Handle, float] = {}
        #: The most that `committed_bytes` has been.
        self._peak_bytes = 0
        self.base_va = driver.reserve(num_extents * extent_bytes)

    @property
    def idle(self) -> Collection[int]:
        """Mapped extents that nobody uses, the longest idle first."""
        return self._idle.keys()

    def youngest_idle(self, most: int) -> list[int]:
        """Mapped extents that nobody uses, those that fell idle last first; so many at most."""
        return list(islice(reversed(self._idle), most))

    @property
    def mapped(self) -> Collection[int]:
        """Extents with memory, used or idle; not their mirrors."""
        return self._mapped.keys()

    @property
    def committed_bytes(self) -> int:
        """Memory held, in use or not."""
        return (len(self._mapped) + len(self._spare)) * self.extent_bytes

    @property
    def idle_bytes(self) -> int:
        """Memory held and not in use: what `trim` would give back."""
        return (len(self._idle) + len(self._spare)) * self.extent_bytes

    @property
    def peak_committed_bytes(self) -> int:
        """The most memory that was ever held at once."""
        return self._peak_bytes

    def use(self, extents: Iterable[int]) -> None:
        """Have ``extents`` mapped, open and in use; all of them, or none more than before.

        Raises
        ------
        VmmError
            If the driver refuses.
        """
        extents = list(extents)
        places = [place for extent in extents for place in self._places_of(extent)]
        if self._open.issuperset(places):
            for extent in extents:
                self._idle.pop(extent, None)
            return
        with ExitStack() as undo:
            undo.callback(self._idle_again, dict(self._idle))
            for extent in extents:
                self._idle.pop(extent, None)
            for extent in extents:
                self._map(extent, undo)
            self._open_up([place for place in places if place not in self._open])
            undo.pop_all()

    def rest(self, extents: Iterable[int]) -> None:
        """Take note that nobody uses ``extents`` any more; they stay as they are."""
        now = self._clock()
        self._idle.update((e, now) for e in extents if e in self._mapped and e not in self._idle)

    def trim(self, keep_bytes: int = 0) -> int:
        """Give unused memory back to the system but for ``keep_bytes``; return how much.

        What has been idle longest goes first.

        Raises
        ------
        VmmError
            If the driver refuses; what was given back before stays so.
        """
        before_bytes = self.committed_bytes
        while self.idle_bytes - keep_bytes >= self.extent_bytes:
            if self._spare:
                self._release_spare(next(iter(self._spare)))
            else:
                self._release_extent(next(iter(self._idle)))
        return before_bytes - self.committed_bytes

    def release_idle(self, older_than_s: float) -> int:
        """Give back what has been unused for at least that long; return how many bytes.

        Raises
        ------
        VmmError
            If the driver refuses; what was given back before stays so.
        """
        before_bytes = self.committed_bytes
        latest = self._clock() - older_than_s
        for handle in [spare for spare, since in self._spare.items() if since <= latest]:
            self._release_spare(handle)
        while self._idle and next(iter(self._idle.values())) <= latest:
            self._release_extent(next(iter(self._idle)))
        return before_bytes - self.committed_bytes

    def close(self) -> None:
        """Give back all memory and the addresses, whoever uses them.

        Raises
        ------
        VmmError
            If the driver refuses; call again to go on from there.
        """
        self.rest(self._mapped)
        self.trim()
        self._driver.free_va(self.base_va, self.num_extents * self.extent_bytes)

    def count_mapped(self, start: int) -> int:
        """Extents from ``start`` on that have memory."""
        return sum(extent >= start for extent in self._mapped)

    def va_of(self, extent: int) -> int:
        """Where a place begins."""
        return self.base_va + extent * self.extent_bytes

    def check(self, used: Collection[int]) -> None:
        """Assert every invariant, given the extents that are in use."""
        places = {place for extent in used for place in self._places_of(extent)}
        assert places <= self._open <= self._places
        every = {place for extent in self._mapped for place in self._places_of(extent)}
        assert self._places <= every
        assert self._idle.keys() == self._mapped.keys() - set(used)
        assert not self._mapped.keys() & set(self._mirrors.values())
        since = list(self._idle.values())
        assert since == sorted(since)
        handles = [*self._mapped.values(), *self._spare]
        assert len(set(handles)) == len(handles)
        assert self.committed_bytes <= self._peak_bytes

    def _places_of(self, extent: int) -> tuple[int, ...]:
        mirror = self._mirrors.get(extent)
        return (extent,) if mirror is None else (extent, mirror)

    def _map(self, extent: int, undo: ExitStack) -> None:
        """Back ``extent``, and map it wherever it is not yet."""
        if extent not in self._mapped:
            self._mapped[extent] = self._take_handle(extent, undo)
            undo.callback(self._unmap_again, extent)
        self._map_places(extent)

    def _map_places(self, extent: int) -> None:
        for place in self._places_of(extent):
            if place not in self._places:
                self._driver.map(self.va_of(place), self._mapped[extent])
                self._places.add(place)
                self._count(maps=1)

    def _open_up(self, places: Collection[int]) -> None:
        if places:
            self._driver.set_access(self._spans(places), Access.READ_WRITE)
            self._open.update(places)

    def _take_handle(self, extent: int, undo: ExitStack) -> Handle:
        """Memory for ``extent``, mapped nowhere.

        What undoes it goes to ``undo``, for the case that ``extent`` has lost it again.
        """
        if self._spare:
            spare, since = self._spare.popitem()
            undo.callback(self._hand_back, extent, lambda: self._keep_spare(spare, since))
            return spare
        if self._idle:
            victim = next(reversed(self._idle))
            opened = self._open.intersection(self._places_of(victim))
            stolen = self._unmap(victim)
            self._count(steals=1)
            undo.callback(self._hand_back, extent, lambda: self._back(victim, stolen, opened))
            return stolen
        created = self._driver.create(self.extent_bytes)
        self._count(creates=1)
        # The caller's next line puts it into the books.
        self._peak_bytes = max(self._peak_bytes, self.committed_bytes + self.extent_bytes)
        undo.callback(self._hand_back, extent, lambda: self._release_or_keep(created))
        return created

    def _unmap_again(self, extent: int) -> None:
        """Undo `_map` but for where the memory came from, as far as the driver lets us."""
        try:
            self._unmap(extent)
        except VmmError:
            self._idle[extent] = self._clock()

    def _hand_back(self, extent: int, give: Callable[[], None]) -> None:
        if extent not in self._mapped:
            give()

    def _keep_spare(self, handle: Handle, since: float) -> None:
        self._spare[handle] = since

    def _back(self, victim: int, handle: Handle, opened: set[int]) -> None:
        """Give an idle extent its memory back; `_idle_again` knows since when it is idle."""
        self._mapped[victim] = handle
        self._restore(victim, opened)

    def _release_or_keep(self, handle: Handle) -> None:
        try:
            self._release(handle)
        except VmmError:
            self._keep_spare(handle, self._clock())

    def _idle_again(self, before: Mapping[int, float]) -> None:
        """Undo what a failed `use` did to the idle extents, those that lost memory apart."""
        kept = {extent: since for extent, since in before.items() if extent in self._mapped}
        self._idle = kept | {e: since for e, since in self._idle.items() if e not in kept}

    def _release_extent(self, extent: int) -> None:
        since = self._idle[extent]
        handle = self._unmap(extent)
        self._keep_spare(handle, since)
        self._release_spare(handle)

    def _release_spare(self, handle: Handle) -> None:
        self._release(handle)
        del self._spare[handle]

    def _release(self, handle: Handle) -> None:
        self._driver.release(handle)
        self._count(releases=1)

    def _unmap(self, extent: int) -> Handle:
        """Take an extent's memory from it; if that fails halfway, map it as it was."""
        with ExitStack() as undo:
            undo.callback(self._restore, extent, self._open & set(self._places_of(extent)))
            for place in self._places_of(extent):
                if place in self._places:
                    self._driver.unmap(self.va_of(place))
                    self._places.discard(place)
                    self._open.discard(place)
                    self._count(unmaps=1)
            undo.pop_all()
        self._idle.pop(extent, None)
        return self._mapped.pop(extent)

    def _restore(self, extent: int, opened: set[int]) -> None:
        # What cannot be restored now is mapped by the next use.
        with suppress(VmmError):
            self._map_places(extent)
            self._open_up(opened - self._open)

    def _count(self, **more: int) -> None:
        counts = {name: getattr(self.work, name) + number for name, number in more.items()}
        self.work = replace(self.work, **counts)

    def _spans(self, places: Iterable[int]) -> list[Span]:
        """Spans over ``places``, those that touch joined."""
        spans: list[Span] = []
        for place in sorted(places):
            va = self.va_of(place)
            if spans and spans[-1].stop == va:
                spans[-1] = Span(spans[-1].va, spans[-1].nbytes + self.extent_bytes)
            else:
                spans.append(Span(va, self.extent_bytes))
        return spans


def _check_mirrors(mirrors: Mapping[int, int], num_extents: int) -> None:
    places = [*mirrors, *mirrors.values()]
    if len(set(places)) < len(places):
        raise ValueError(f"an extent and its mirror are two places of nobody else's: {mirrors}")
    if any(not 0 <= place < num_extents for place in places):
        raise ValueError(f"mirrors {mirrors} leave the range of {num_extents} extents")
