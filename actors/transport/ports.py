"""Where payloads come from and go to.  `actors.worker.Worker` is both."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from codec.identity import CodecId, ComponentKey
from policies.residency.events import Placement


class Pin(Protocol):
    """Bytes that stay where they are while the context is entered."""

    @property
    def view(self) -> memoryview:
        """The bytes, contiguous."""
        ...

    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None: ...


class Source(Protocol):
    """Holds components."""

    def get(self, key: ComponentKey, codec: CodecId, /) -> Pin:
        """Return the component, yet to be pinned; `UnknownComponentError` if it is not held."""
        ...


class Incoming(Protocol):
    """Room for one payload, not yet anyone's, until commit or abort ends it."""

    @property
    def view(self) -> memoryview:
        """Writable, contiguous, of the size reserved."""
        ...

    def commit(self) -> Placement:
        """Publish what ``view`` holds; after a `CodecError` nothing was published."""
        ...

    def abort(self) -> None:
        """Give the room back; must be harmless after a commit that raised."""
        ...


class Sink(Protocol):
    """Takes components in."""

    def reserve_incoming(self, nbytes: int, /) -> Incoming:
        """Reserve room; a `CapacityError` if there is none."""
        ...


def flat(view: memoryview) -> memoryview:
    """Return ``view`` as plain bytes without a copy.

    Raises
    ------
    ValueError
        If it is not contiguous.  UCX does not check that, and would send other bytes.
    """
    if not view.c_contiguous:
        raise ValueError("need a contiguous view")
    # Python refuses to cast a view of nothing.
    return view.cast("B") if view.nbytes else memoryview(b"")


def flat_target(view: memoryview, num_bytes: int) -> memoryview:
    """Return ``view`` as plain bytes that ``num_bytes`` may be received into.

    Raises
    ------
    ValueError
        If it is read-only, not contiguous or of another size.  UCX checks none of these.
    """
    if view.readonly or view.nbytes != num_bytes:
        raise ValueError(
            f"need a writable view of {num_bytes} bytes, got {view.nbytes},"
            f" {'read-only' if view.readonly else 'writable'}"
        )
    return flat(view)
