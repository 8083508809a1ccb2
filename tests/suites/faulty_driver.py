"""A host driver that refuses on command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actors.arena.driver import Access, Handle, Span
from actors.arena.driver_host import HostVmmDriver
from codec.errors import VmmDriverError, VmmError


class FaultyDriver(HostVmmDriver):
    """Verbs fail before they do anything, according to `fail`."""

    def __init__(self, capacity_bytes: int, granule_bytes: int) -> None:
        super().__init__(capacity_bytes, granule_bytes)
        #: ``{verb: (calls that still work, error)}``; the call after those fails, once.
        self._faults: dict[str, tuple[int, VmmError]] = {}

    def fail(self, verb: str, after: int = 0, error: VmmError | None = None) -> None:
        """Let ``after`` more calls of ``verb`` work, and the next one fail."""
        self._faults[verb] = (after, error or VmmDriverError(verb, 5))

    @property
    def has_faults(self) -> bool:
        """Whether a fault is still to come."""
        return bool(self._faults)

    def heal(self) -> None:
        """Forget the faults still to come."""
        self._faults.clear()

    def create(self, nbytes: int) -> Handle:
        """See `HostVmmDriver.create`."""
        self._count_down("create")
        return super().create(nbytes)

    def release(self, handle: Handle) -> None:
        """See `HostVmmDriver.release`."""
        self._count_down("release")
        super().release(handle)

    def map(self, va: int, handle: Handle) -> None:
        """See `HostVmmDriver.map`."""
        self._count_down("map")
        super().map(va, handle)

    def unmap(self, va: int) -> None:
        """See `HostVmmDriver.unmap`."""
        self._count_down("unmap")
        super().unmap(va)

    def set_access(
        self, spans: Iterable[Span], access: Access, devices: Sequence[int] = ()
    ) -> None:
        """See `HostVmmDriver.set_access`."""
        self._count_down("set_access")
        super().set_access(spans, access, devices)

    def _count_down(self, verb: str) -> None:
        left, error = self._faults.get(verb, (1, None))
        if error is None:
            return
        self._faults[verb] = (left - 1, error)
        # A local name for what is raised would make a cycle that keeps the callers' views.
        del error
        if not left:
            raise self._faults.pop(verb)[1]
