"""What a memory driver asks of the system below it, once its books have no objection.

`actors.arena.driver_booked` has the verbs and the refusals; what implements `System` only
makes calls, and undoes its own where one of several fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from actors.arena.driver import Access, Physical, Share, Span
from actors.arena.ledger import Block, Ledger, Loan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class Exposure:
    """Memory as NumPy or torch are shown it; each array over it keeps this object alive."""

    __slots__ = ("__weakref__", "keeps", "nbytes", "va")

    def __init__(self, va: int, nbytes: int, keeps: object) -> None:
        self.va = va
        self.nbytes = nbytes
        self.keeps = keeps

    def interface(self) -> dict[str, Any]:
        """The memory as bytes, by version 3 of the array interfaces."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.va, False), "version": 3}


class System(Protocol):
    """One kind of memory; not thread-safe, and asked nothing that the books refuse."""

    kind: str
    torch_device: str
    granule_bytes: int
    granule_recommended_bytes: int
    capacity_bytes: int
    exports: frozenset[str]

    def reserve(self, nbytes: int, align_bytes: int) -> int:
        """Take addresses."""
        ...

    def free(self, va: int, nbytes: int) -> None:
        """Give one reservation back."""
        ...

    def commit(self, nbytes: int) -> int:
        """Commit zeroed memory, and return what it is known by."""
        ...

    def give(self, block: Block) -> None:
        """Give back memory that nothing maps, or end the use of another process's."""
        ...

    def map(self, va: int, block: Block) -> None:
        """Map all of ``block``, without access."""
        ...

    def unmap(self, va: int, nbytes: int) -> None:
        """Undo one mapping."""
        ...

    def targets(self, devices: Sequence[int]) -> tuple[int, ...]:
        """The devices meant, of which the memory's own is `ledger.OWN_DEVICE`."""
        ...

    def protect(self, span: Span, access: Access, devices: Sequence[int]) -> None:
        """Set the access to whole mappings; a failure may leave part of them changed."""
        ...

    def protect_back(self, span: Span, access: Access, device: int) -> None:
        """Undo `protect` on one mapping after it failed."""
        ...

    def record(self, serial: int, stream: int | None) -> None:
        """Note the work submitted so far under a new number."""
        ...

    def is_done(self, serial: int) -> bool:
        """Whether the work noted under that number has finished."""
        ...

    def expose(self, va: int, nbytes: int, keeps: object) -> Exposure:
        """Memory in the form that `tensor` takes."""
        ...

    def tensor(self, exposure: Exposure) -> torch.Tensor:
        """A uint8 tensor that keeps ``exposure`` alive."""
        ...

    def write(self, va: int, source: npt.NDArray[np.uint8]) -> None:
        """Copy from ordinary memory; done when it returns."""
        ...

    def read(self, va: int, nbytes: int) -> bytes:
        """Copy to ordinary memory."""
        ...

    def share(self, block: Block, *, is_writable: bool) -> tuple[int, int]:
        """A new descriptor for ``block``, and where in it the memory begins."""
        ...

    def borrow(self, share: Share) -> tuple[int, Loan]:
        """Another process's memory: what it is known by, and the terms."""
        ...

    def physical(self) -> Physical:
        """Memory committed now."""
        ...

    def check(self) -> None:
        """Assert every invariant."""
        ...

    def dispose(self, book: Ledger) -> None:
        """Give back everything that ``book`` lists, and what the system keeps for itself.

        What is refused is left to the end of the process.
        """
        ...
