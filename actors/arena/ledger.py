"""A driver's books: reservations, handles and mappings, and every refusal they imply.

It makes no system call.  A driver asks it first, then acts, then records what it did,
so that all drivers refuse the same calls in the same way.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from actors.arena.driver import Access, Handle, Span
from codec.errors import (
    VmmAlreadyMapped,
    VmmBadHandle,
    VmmBusy,
    VmmMisaligned,
    VmmNotMapped,
    VmmNotReserved,
    VmmNotShared,
)

OWN_DEVICE = -1
"""The device that the memory is on, whatever its number."""


@dataclass(frozen=True, slots=True)
class Loan:
    """What makes memory another process's."""

    fd: int
    """Its file, open until the block is given back; -1 where the system needs none."""

    is_writable: bool


@dataclass(slots=True, eq=False)
class Block:
    """Memory behind one handle."""

    nbytes: int
    backing: int
    """What the driver knows it by: an offset, or a number of the system's own."""

    loan: Loan | None = None
    """Set if another process committed it."""

    num_maps: int = 0
    #: Once set, it stays; with no maps left the memory is garbage.
    is_released: bool = False


@dataclass(slots=True, eq=False)
class Mapping:
    """One block at one address."""

    va: int
    block: Block
    access: Access = Access.NONE
    """That of the device that the memory is on."""

    #: What other devices may do.
    peers: dict[int, Access] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """One past its last address."""
        return self.va + self.block.nbytes

    def access_of(self, device: int) -> Access:
        """What ``device`` may do."""
        return self.access if device == OWN_DEVICE else self.peers.get(device, Access.NONE)

    def grant(self, devices: Iterable[int], access: Access) -> None:
        """Record what ``devices`` may do from now on."""
        for device in devices:
            if device == OWN_DEVICE:
                self.access = access
            else:
                self.peers[device] = access


def need_aligned(what: str, found: int, granule_bytes: int) -> None:
    """Refuse what is not a positive multiple of the granule.

    Raises
    ------
    VmmMisaligned
        Naming ``what`` it was.
    """
    if found <= 0 or found % granule_bytes:
        raise VmmMisaligned(what, found, granule_bytes)


class Ledger:
    """What is reserved, created and mapped, and what may be done next."""

    def __init__(self, granule_bytes: int) -> None:
        self.granule_bytes = granule_bytes
        #: ``{va: nbytes}``, disjoint; ``_bases`` are its keys, sorted.
        self._reservations: dict[int, int] = {}
        self._bases: list[int] = []
        #: Disjoint, each within one reservation; ``_starts`` are its keys, sorted.
        self._mappings: dict[int, Mapping] = {}
        self._starts: list[int] = []
        #: The handles that may be mapped or released; numbers are never used again.
        self._blocks: dict[Handle, Block] = {}
        self._numbers = count(1)
        #: Released and nowhere mapped, but not yet given back by the driver.
        self.garbage: list[Block] = []

    def need_aligned(self, what: str, found: int) -> None:
        """Refuse what is not a positive multiple of the granule.

        Raises
        ------
        VmmMisaligned
            Naming ``what`` it was.
        """
        need_aligned(what, found, self.granule_bytes)

    @property
    def reservations(self) -> list[Span]:
        """Every reservation, lowest first."""
        return [Span(va, self._reservations[va]) for va in self._bases]

    @property
    def mapped(self) -> list[Mapping]:
        """Every mapping, lowest first."""
        return [self._mappings[va] for va in self._starts]

    def add_reservation(self, va: int, nbytes: int) -> None:
        """Record a reservation."""
        self._reservations[va] = nbytes
        insort(self._bases, va)

    def drop_reservation(self, va: int) -> None:
        """Record that a reservation is gone."""
        del self._reservations[va]
        self._bases.remove(va)

    def need_bare(self, va: int, nbytes: int) -> None:
        """Refuse what is not exactly one reservation with nothing mapped in it.

        Raises
        ------
        VmmNotReserved, VmmBusy
            As the first and the second part has it.
        """
        if self._reservations.get(va) != nbytes:
            raise VmmNotReserved(va, nbytes)
        if self._mappings_within(va, va + nbytes):
            raise VmmBusy(f"the reservation at {va:#x}", "something is mapped in it")

    def need_reserved(self, va: int, nbytes: int) -> None:
        """Refuse what does not lie within one reservation.

        Raises
        ------
        VmmMisaligned
            If it is not even one byte.
        VmmNotReserved
            If some of it is not reserved, or it spans two reservations.
        """
        if nbytes < 1:
            raise VmmMisaligned("nbytes", nbytes, 1)
        at = bisect_right(self._bases, va) - 1
        base = self._bases[at] if at >= 0 else 0
        if at < 0 or va + nbytes > base + self._reservations[base]:
            raise VmmNotReserved(va, nbytes)

    @property
    def held(self) -> list[Block]:
        """Every block that is not given back, once each."""
        mapped = (mapping.block for mapping in self.mapped)
        return list(dict.fromkeys([*self._blocks.values(), *mapped, *self.garbage]))

    def add_block(self, nbytes: int, backing: int, loan: Loan | None = None) -> Handle:
        """Record memory under a new handle."""
        handle = Handle(next(self._numbers))
        self._blocks[handle] = Block(nbytes, backing, loan)
        return handle

    def block(self, handle: Handle) -> Block:
        """What a live handle stands for.

        Raises
        ------
        VmmBadHandle
            If it was never given out, or is released.
        """
        found = self._blocks.get(handle)
        if found is None:
            raise VmmBadHandle(handle)
        return found

    def own_block(self, handle: Handle) -> Block:
        """What a live handle of memory committed here stands for.

        Raises
        ------
        VmmBadHandle, VmmNotShared
            If there is no such handle, or its memory is another process's.
        """
        block = self.block(handle)
        if block.loan is not None:
            raise VmmNotShared(f"handle {handle}", "its memory is not of this driver")
        return block

    def release(self, handle: Handle) -> Block:
        """Record that a handle ended; the block is garbage only when its last map goes."""
        block = self._blocks.pop(handle)
        block.is_released = True
        return block

    def need_mappable(self, va: int, handle: Handle) -> Block:
        """What would be mapped at ``va``, if it may be.

        Raises
        ------
        VmmMisaligned, VmmBadHandle, VmmNotReserved, VmmAlreadyMapped
            In this order.
        """
        self.need_aligned("va", va)
        block = self.block(handle)
        self.need_reserved(va, block.nbytes)
        if self._mappings_within(va, va + block.nbytes):
            raise VmmAlreadyMapped(va, block.nbytes)
        return block

    def add_mapping(self, va: int, block: Block) -> None:
        """Record a mapping, without access."""
        block.num_maps += 1
        self._mappings[va] = Mapping(va, block)
        insort(self._starts, va)

    def mapping(self, va: int) -> Mapping:
        """The mapping that starts at ``va``.

        Raises
        ------
        VmmNotMapped
            If none does, be it that another one covers ``va``.
        """
        found = self._mappings.get(va)
        if found is None:
            raise VmmNotMapped(va, self.granule_bytes, "no mapping starts there")
        return found

    def drop_mapping(self, mapping: Mapping) -> None:
        """Record that a mapping is gone; a released block without any becomes garbage."""
        del self._mappings[mapping.va]
        self._starts.remove(mapping.va)
        block = mapping.block
        block.num_maps -= 1
        if block.is_released and not block.num_maps:
            self.garbage.append(block)

    def whole_mappings(self, span: Span) -> list[Mapping]:
        """The mappings that make up ``span``.

        Raises
        ------
        VmmNotMapped
            If it has a hole, or ends inside a mapping.
        """
        found = self._mappings_within(*span._replace(nbytes=span.stop))
        joints = [span.va, *(mapping.stop for mapping in found)]
        starts = [mapping.va for mapping in found]
        if not found or joints != [*starts, span.stop]:
            raise VmmNotMapped(*span, "need whole mappings without holes")
        return found

    def need_grantable(self, mappings: Sequence[Mapping], access: Access) -> None:
        """Refuse to open for writing what was shared for reading.

        Raises
        ------
        VmmNotShared
            Naming the first such mapping.
        """
        for mapping in mappings:
            loan = mapping.block.loan
            if access is Access.READ_WRITE and loan is not None and not loan.is_writable:
                raise VmmNotShared(f"memory at {mapping.va:#x}", "its owner lent it for reading")

    def need_open(self, va: int, nbytes: int, *, writing: bool) -> None:
        """Refuse bytes that are not all mapped, or not open for reading or for writing.

        Raises
        ------
        VmmMisaligned, VmmNotMapped
            If there are none, or some may not be touched so.
        """
        if nbytes < 1:
            raise VmmMisaligned("nbytes", nbytes, 1)
        found = self._mappings_within(va, va + nbytes)
        covered = found and found[0].va <= va and va + nbytes <= found[-1].stop
        if not covered or any(a.stop != b.va for a, b in pairwise(found)):
            raise VmmNotMapped(va, nbytes, "not all of it is mapped")
        closed = {Access.NONE, Access.READ} if writing else {Access.NONE}
        if any(mapping.access in closed for mapping in found):
            why = "not all of it is open for " + ("writing" if writing else "reading")
            raise VmmNotMapped(va, nbytes, why)

    def check(self) -> None:
        """Assert that the books agree with each other."""
        assert self._bases == sorted(self._reservations)
        assert self._starts == sorted(self._mappings)
        assert all(a.stop <= b.va for a, b in pairwise(self.reservations))
        assert all(a.stop <= b.va for a, b in pairwise(self.mapped))
        for mapping in self.mapped:
            self.need_reserved(mapping.va, mapping.block.nbytes)
        held = [*self._blocks.values(), *(mapping.block for mapping in self.mapped)]
        for block in held:
            assert block.num_maps == sum(mapping.block is block for mapping in self.mapped)
        assert not any(block.is_released for block in self._blocks.values())
        assert all(block.is_released and not block.num_maps for block in self.garbage)

    def _mappings_within(self, start: int, stop: int) -> list[Mapping]:
        """Mappings that share an address with ``[start, stop)``, lowest first."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._mappings[self._starts[first]].stop <= start:
            first += 1
        last = bisect_left(self._starts, stop)
        return [self._mappings[va] for va in self._starts[first:last]]
