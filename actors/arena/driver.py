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
4. A driver does not wait for work in flight.  Its caller does, with tickets.

Addresses (``va``) and sizes (``nbytes``) are in bytes, and multiples of the granule
except where a verb moves data.  Memory of another process is not shared here.
"""

from __future__ import annotations

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
        """Set the access to whole mappings; one span may cover several that touch."""
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

    def physical(self) -> Physical:
        """Memory committed now."""
        ...

    def stats(self) -> Mapping[str, VerbStats]:
        """Calls and cost of each verb that was used."""
        ...

    def close(self) -> None:
        """Give back everything; refused while a tensor lives.  A second call does nothing."""
        ...
