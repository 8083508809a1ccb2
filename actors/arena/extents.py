"""The extents of one reserved range, backed by memory one by one.

An extent is *bare* (addresses only) or *mapped*; a mapped one that nobody uses is
*idle*.  To back a bare extent, memory is taken from a handle that is mapped nowhere, is
moved from an idle extent (two calls, an order of magnitude cheaper than committing
anew), or is committed.  Only `trim` gives memory back to the system.

A verb of the driver that fails is undone before the error is raised.  Where the undoing
fails too, the memory stays committed for a later use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import ExitStack

from actors.arena.driver import Access, Driver, Handle, Span
from codec.errors import VmmError, VmmMisaligned


class ExtentPool:
    """Backs extents, and remembers which of them are in use; not thread-safe."""

    def __init__(self, driver: Driver, *, num_extents: int, extent_bytes: int) -> None:
        granule_bytes = driver.caps().granule_min_bytes
        if extent_bytes % granule_bytes:
            raise VmmMisaligned("extent_bytes", extent_bytes, granule_bytes)
        self.num_extents = num_extents
        self.extent_bytes = extent_bytes
        self._driver = driver
        #: ``{extent: handle}`` of what is mapped.
        self._mapped: dict[int, Handle] = {}
        #: Extents open for reading and writing: a subset of the mapped ones; all that
        #: are in use are here.
        self._open: set[int] = set()
        #: Mapped extents that nobody uses.
        self._idle: set[int] = set()
        #: Committed handles that are mapped nowhere; normally none.
        self._spare: list[Handle] = []
        self.base_va = driver.reserve(num_extents * extent_bytes)

    @property
    def idle(self) -> Collection[int]:
        """Mapped extents that nobody uses."""
        return self._idle

    @property
    def committed_bytes(self) -> int:
        """Memory held, in use or not."""
        return (len(self._mapped) + len(self._spare)) * self.extent_bytes

    @property
    def idle_bytes(self) -> int:
        """Memory held and not in use: what `trim` would give back."""
        return (len(self._idle) + len(self._spare)) * self.extent_bytes

    def use(self, extents: Iterable[int]) -> None:
        """Have ``extents`` mapped, open and in use; all of them, or none more than before.

        Raises
        ------
        VmmError
            If the driver refuses.
        """
        extents = list(extents)
        was_idle = self._idle.intersection(extents)
        with ExitStack() as undo:
            undo.callback(self._idle.update, was_idle)
            self._idle -= was_idle
            for extent in extents:
                if extent not in self._mapped:
                    self._map(extent, undo)
            closed = [extent for extent in extents if extent not in self._open]
            if closed:
                self._driver.set_access(map(self._span, closed), Access.READ_WRITE)
                self._open.update(closed)
            undo.pop_all()

    def rest(self, extents: Iterable[int]) -> None:
        """Take note that nobody uses ``extents`` any more; they stay as they are."""
        self._idle.update(extent for extent in extents if extent in self._mapped)

    def trim(self, keep_bytes: int = 0) -> int:
        """Give unused memory back to the system but for ``keep_bytes``; return how much.

        Raises
        ------
        VmmError
            If the driver refuses; what was given back before stays so.
        """
        before_bytes = self.committed_bytes
        while self.idle_bytes - keep_bytes >= self.extent_bytes:
            if not self._spare:
                self._spare.append(self._unmap(max(self._idle)))
            self._driver.release(self._spare[-1])
            self._spare.pop()
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

    def check(self, used: Collection[int]) -> None:
        """Assert every invariant, given the extents that are in use."""
        assert set(used) <= self._open <= self._mapped.keys()
        assert self._idle == self._mapped.keys() - set(used)
        handles = [*self._mapped.values(), *self._spare]
        assert len(set(handles)) == len(handles)

    def _map(self, extent: int, undo: ExitStack) -> None:
        handle, is_new = self._take_handle()
        undo.callback(self._unmap_again, extent, handle, is_new)
        self._driver.map(self._span(extent).va, handle)
        self._mapped[extent] = handle

    def _take_handle(self) -> tuple[Handle, bool]:
        """Memory of one extent, mapped nowhere, and whether it was committed for this."""
        if self._spare:
            return self._spare.pop(), False
        if self._idle:
            return self._unmap(max(self._idle)), False
        return self._driver.create(self.extent_bytes), True

    def _unmap_again(self, extent: int, handle: Handle, is_new: bool) -> None:
        """Undo `_map`, also halfway through, as far as the driver lets us."""
        try:
            if extent in self._mapped:
                self._unmap(extent)
            if is_new:
                self._driver.release(handle)
                return
        except VmmError:
            if extent in self._mapped:
                self._idle.add(extent)
                return
        self._spare.append(handle)

    def _unmap(self, extent: int) -> Handle:
        self._driver.unmap(self._span(extent).va)
        self._idle.discard(extent)
        self._open.discard(extent)
        return self._mapped.pop(extent)

    def _span(self, extent: int) -> Span:
        return Span(self.base_va + extent * self.extent_bytes, self.extent_bytes)
