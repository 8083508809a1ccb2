"""What an arena needs of the memory below it: CUDA's virtual memory verbs, one to one.

Address space and memory are had apart.  ``reserve`` takes addresses and no memory;
``create`` commits memory that has no address; ``map`` joins the two, and ``set_access``
opens what is mapped.  So memory can come, go and move under an address that stays.

Rules that hold for every driver:

1. A verb that raises has changed nothing.
2. Bad handles, holes and parts of mappings are refused by our own book-keeping, before
   the system below is asked: there they would be undefined behaviour.
3. Handle numbers are never used again.  Released memory stays until its last mapping
   is gone, in whichever order the two end.
4. A driver does not wait for its caller's work in flight.  Its caller does, with tickets.
5. Memory of another process can be mapped, but is not this driver's: it counts in no
   budget here, and only its owner may share it.

Addresses (``va``) and sizes (``nbytes``) are in bytes, and multiples of the granule
except where a verb moves data.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, NewType, Protocol

if TYPE_CHECKING:
    import torch

Handle = NewType("Handle", int)
"""Names one run of committed memory, for ever."""


class Access(Enum):
    """What may be done with mapped memory."""

    NONE = "none"
    READ = "read"
    READ_WRITE = "read_write"


class Span(NamedTuple):
    """The addresses ``[va, va + nbytes)``."""

    va: int
    nbytes: int

    @property
    def stop(self) -> int:
        """One past the last address."""
        return self.va + self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What a driver can do."""

    kind: str
    """``host`` or ``cuda``."""

    granule_min_bytes: int
    """Every size and address is a multiple of it."""

    granule_recommended_bytes: int
    capacity_bytes: int
    """Most bytes that may be committed at once."""

    exports: frozenset[str]
    """Ways to hand memory to another process; empty if there are none."""

    torch_device: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """Memory of one handle, on its way to another process.

    It owns its descriptor, which `close` gives back; who imports it keeps one of its own.
    """

    kind: str
    """How it travels, one of `Caps.exports`."""

    fd: int
    """The descriptor that stands for the memory; -1 once closed."""

    offset_bytes: int
    """Where in ``fd`` the memory begins."""

    nbytes: int
    identity: str
    """The owner and its handle.  What importers must key on: an address comes back."""

    is_writable: bool
    """Whether the importer may write, which binds an honest one only."""

    def close(self) -> None:
        """Give the descriptor back; a second call does nothing."""
        fd = self.fd
        object.__setattr__(self, "fd", -1)
        if fd >= 0:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Proof to come that all device work submitted before it has finished."""

    serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Physical:
    """Committed memory, as booked and as the system counts it."""

    booked_bytes: int
    measured_bytes: int
    source: str
    """Where the measure comes from."""

    is_exact: bool
    """Whether the measure counts this driver's memory and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbStats:
    """How often one verb was called, and what that cost."""

    num_calls: int
    num_refusals: int
    total_us: float


class Driver(Protocol):
    """The verbs; `codec.errors.VmmError` has the refusals."""

    def caps(self) -> Caps:
        """What this driver can do; never changes."""
        ...

    def reserve(self, nbytes: int, align_bytes: int = 0) -> int:
        """Take a range of addresses without memory; ``align_bytes`` of 0 means the granule."""
        ...

    def free_va(self, va: int, nbytes: int) -> None:
        """Give back exactly one whole reservation, in which nothing is mapped."""
        ...

    def create(self, nbytes: int) -> Handle:
        """Commit zeroed memory."""
        ...

    def release(self, handle: Handle) -> None:
        """End the handle; its memory goes when nothing maps it."""
        ...

    def map(self, va: int, handle: Handle) -> None:
        """Map the whole of ``handle`` at ``va``, without access."""
        ...

    def unmap(self, va: int) -> None:
        """Undo the one mapping that starts at ``va``; the addresses stay reserved."""
        ...

    def set_access(
        self, spans: Iterable[Span], access: Access, devices: Sequence[int] = ()
    ) -> None:
        """Set the access to whole mappings; one span may cover several that touch.

        It is that of the device which the memory is on, or else of those named; the
        access of all others stays.
        """
        ...

    def record(self, stream: int | None = None) -> Ticket:
        """A ticket for all work submitted so far."""
        ...

    def done(self, ticket: Ticket) -> bool:
        """Whether that work has finished."""
        ...

    def wait(self, ticket: Ticket, timeout_s: float) -> bool:
        """Wait for that work; whether it finished in time."""
        ...

    def tensor(self, va: int, nbytes: int, owner: object) -> torch.Tensor:
        """A uint8 tensor over reserved addresses, whose every view keeps ``owner`` alive.

        Only what is mapped with access may be touched through it.
        """
        ...

    def copy_in(self, va: int, data: bytes | bytearray | memoryview) -> None:
        """Write ``data`` at ``va``, all of it within mappings open for writing."""
        ...

    def copy_out(self, va: int, nbytes: int) -> bytes:
        """Read ``nbytes`` at ``va``, all of them within mappings open for reading."""
        ...

    def export(self, handle: Handle, *, writable: bool = False) -> Share:
        """A share of the memory of ``handle``, which the caller must close.

        The driver does not know who imports it: whoever hands it over knows from the
        lease whether the memory may be used again (`actors.arena.sharing`).
        """
        ...

    def import_(self, share: Share) -> Handle:
        """A handle for memory that another driver committed and shared."""
        ...

    def physical(self) -> Physical:
        """Memory committed now."""
        ...

    def stats(self) -> Mapping[str, VerbStats]:
        """Calls and cost of each verb that was used."""
        ...

    def close(self) -> None:
        """Give back everything; a second call does nothing.

        Refused while a tensor lives or work of a ticket has not finished.
        """
        ...
