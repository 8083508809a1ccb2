"""How a worker lends its arena's bytes: to readers as pins, to senders as incoming room."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from actors.arena.arena import Arena, Lease
from codec.errors import StaleLeaseError
from policies.residency.events import Placement


class Pin:
    """Keeps a component's bytes as they are, until it is released or dropped.

    Arrays and tensors made from `view` keep them too, each for as long as it lives.
    """

    def __init__(self, arena: Arena, lease: Lease, placement: Placement) -> None:
        self.placement = placement
        self.generation = lease.generation
        """Names the bytes: the same key under another generation may hold others."""
        #: None once released.
        self._view: memoryview | None = arena.view(lease).toreadonly()

    @property
    def view(self) -> memoryview:
        """The whole blob, read-only.

        Raises
        ------
        StaleLeaseError
            If the pin is released.
        """
        if self._view is None:
            raise StaleLeaseError(self.generation)
        return self._view

    def release(self) -> None:
        """Let the bytes go; a second call does nothing."""
        view, self._view = self._view, None
        if view is not None:
            _release(view)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Incoming:
    """Room in the arena for one blob that is still to arrive.

    It ends once: by `commit`, by `abort`, or by being dropped.  As a context manager it
    aborts unless it was committed.

    Parameters
    ----------
    publish
        Verifies and publishes the bytes of a lease, or releases it and raises.
    """

    def __init__(self, arena: Arena, lease: Lease, publish: Callable[[Lease], Placement]) -> None:
        self._arena = arena
        self._lease = lease
        self._publish = publish
        self._view = arena.view(lease)
        #: Alive until the end; detaching it *is* the end, and only one thread can.
        self._guard = weakref.finalize(self, arena.abandon, lease)
        self._guard.atexit = False

    @property
    def view(self) -> memoryview:
        """Where the bytes go, writable.

        Raises
        ------
        StaleLeaseError
            If this has ended.
        """
        if not self._guard.alive:
            raise StaleLeaseError(self._lease.generation)
        return self._view

    def commit(self) -> Placement:
        """Verify the bytes and publish them.  The sender must have finished.

        Raises
        ------
        CodecError
            If they are not a sound blob; the room is given back.
        StaleLeaseError
            If this has ended.
        """
        if self._guard.detach() is None:
            raise StaleLeaseError(self._lease.generation)
        _release(self._view)
        return self._publish(self._lease)

    def abort(self) -> None:
        """Give the room back; does nothing after the end."""
        if self._guard.detach() is not None:
            _release(self._view)
            self._arena.release(self._lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


def _release(view: memoryview) -> None:
    """Make ``view`` unusable, unless an array over it lives; that keeps its bytes then."""
    with suppress(BufferError):
        view.release()
