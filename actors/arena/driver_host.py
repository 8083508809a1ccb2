"""`Driver` over ordinary memory: the same verbs and refusals as CUDA's, on any Linux.

``reserve`` is an inaccessible ``mmap``; ``create`` commits a run of one sealed memory
file; ``map`` maps that run over reserved addresses; ``set_access`` is ``mprotect``.
Committed bytes are exact, from the file's block count.

A child made by ``fork`` shares the memory file, so that a verb (or a finaliser) of its
copy of the driver would change its parent's memory: each compares process numbers first.

It does not export memory to other processes, and does not bind it to a NUMA node.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from ctypes import string_at
from errno import ENOMEM

import numpy as np
import torch

from actors.arena import ledger
from actors.arena.address_space import AddressSpace
from actors.arena.driver import Access, Caps, Handle, Physical, Span, Ticket, VerbStats
from actors.arena.gate import Gate, verb
from actors.arena.page_file import PageFile
from actors.arena.syscalls import PAGE_BYTES
from codec.errors import VmmBusy, VmmDriverError, VmmError, VmmMisaligned, VmmOutOfMemory

DEFAULT_GRANULE_BYTES = 2 << 20
"""What CUDA devices have."""


class HostVmmDriver:
    """Commits memory of a sealed file under reserved addresses of this process.

    Parameters
    ----------
    capacity_bytes
        Budget: most bytes committed at once.  A multiple of the granule.
    granule_bytes
        A power of two, at least the page size.  Each mapping costs the kernel one or
        two entries of a bounded table: prefer 256 KiB or more for large arenas.
    """

    def __init__(self, capacity_bytes: int, granule_bytes: int = DEFAULT_GRANULE_BYTES) -> None:
        if granule_bytes < PAGE_BYTES or granule_bytes & (granule_bytes - 1):
            raise ValueError(
                f"granule_bytes must be a power of two >= {PAGE_BYTES}, got {granule_bytes}"
            )
        self._gate = Gate("driver")
        self._ledger = ledger.Ledger(granule_bytes)
        self._ledger.need_aligned("capacity_bytes", capacity_bytes)
        #: Commits exactly the blocks that the ledger's handles, mappings and garbage name.
        self._file = PageFile(capacity_bytes=capacity_bytes, granule_bytes=granule_bytes)
        self._space = AddressSpace()
        #: Tickets given out; each was done at once.
        self._num_tickets = 0
        #: Live exporters of tensors; their addresses must not be given back.
        self._exporters: weakref.WeakSet[_Exporter] = weakref.WeakSet()
        # No tensor lives when this runs, since each keeps the driver alive.
        finalizer = weakref.finalize(
            self, _dispose, self._gate, self._ledger, self._space, self._file
        )
        finalizer.atexit = False

    @verb
    def caps(self) -> Caps:
        """See `Driver.caps`."""
        granule_bytes = self._ledger.granule_bytes
        return Caps(
            kind="host",
            granule_min_bytes=granule_bytes,
            granule_recommended_bytes=granule_bytes,
            capacity_bytes=self._file.capacity_bytes,
            exports=frozenset(),
            torch_device="cpu",
        )

    @verb
    def reserve(self, nbytes: int, align_bytes: int = 0) -> int:
        """See `Driver.reserve`.

        Raises
        ------
        VmmMisaligned
            If ``nbytes`` is no multiple of the granule, or ``align_bytes`` is none or no
            power of two.
        VmmOutOfMemory
            If the process may have no more addresses.
        """
        self._ledger.need_aligned("nbytes", nbytes)
        align_bytes = align_bytes or self._ledger.granule_bytes
        self._ledger.need_aligned("align_bytes", align_bytes)
        if align_bytes & (align_bytes - 1):
            raise VmmMisaligned("align_bytes (a power of two)", align_bytes, align_bytes)
        try:
            va = self._space.reserve(nbytes, align_bytes)
        except OSError as error:
            raise self._lack("address space limit of the process", nbytes, error) from error
        self._ledger.add_reservation(va, nbytes)
        return va

    @verb
    def free_va(self, va: int, nbytes: int) -> None:
        """See `Driver.free_va`.

        Raises
        ------
        VmmNotReserved
            If no reservation is exactly that.
        VmmBusy
            If something is mapped in it, or a tensor over it lives.
        """
        self._ledger.need_bare(va, nbytes)
        if any(va <= exporter.va < va + nbytes for exporter in self._exporters):
            raise VmmBusy(f"the reservation at {va:#x}", "a tensor over it lives")
        self._space.free(va, nbytes)
        self._ledger.drop_reservation(va)

    @verb
    def create(self, nbytes: int) -> Handle:
        """See `Driver.create`.

        Raises
        ------
        VmmMisaligned
            If ``nbytes`` is no positive multiple of the granule.
        VmmOutOfMemory
            If the budget or the system has no more.
        """
        self._ledger.need_aligned("nbytes", nbytes)
        self._sweep()
        return self._ledger.add_block(nbytes, self._file.take(nbytes))

    @verb
    def release(self, handle: Handle) -> None:
        """See `Driver.release`.

        Raises
        ------
        VmmBadHandle
            If it is not live.
        """
        block = self._ledger.block(handle)
        if not block.num_maps:
            self._file.give(block.backing, block.nbytes)
        self._ledger.release(handle)

    @verb
    def map(self, va: int, handle: Handle) -> None:
        """See `Driver.map`.

        Raises
        ------
        VmmMisaligned, VmmBadHandle, VmmNotReserved, VmmAlreadyMapped
            If the handle cannot go there.
        VmmOutOfMemory
            If the process may have no more mappings.
        """
        block = self._ledger.need_mappable(va, handle)
        try:
            self._space.map(va, block.nbytes, self._file.fd, block.backing)
        except OSError as error:
            raise self._lack("mapping limit of the process", block.nbytes, error) from error
        self._ledger.add_mapping(va, block)

    @verb
    def unmap(self, va: int) -> None:
        """See `Driver.unmap`.

        Raises
        ------
        VmmNotMapped
            If no mapping starts there.
        """
        mapping = self._ledger.mapping(va)
        self._space.unmap(va, mapping.block.nbytes)
        self._ledger.drop_mapping(mapping)
        self._sweep()

    @verb
    def set_access(
        self, spans: Iterable[Span], access: Access, devices: Sequence[int] = ()
    ) -> None:
        """See `Driver.set_access`.

        Raises
        ------
        VmmNotMapped
            If a span is not made of whole mappings.
        VmmOutOfMemory
            If the process may have no more mappings.
        """
        if devices:
            raise ValueError(f"ordinary memory is on no device, got devices {list(devices)}")
        parts = [(span, self._ledger.whole_mappings(span)) for span in spans]
        with ExitStack() as undo:
            for span, mappings in parts:
                undo.callback(self._restore_access, mappings)
                self._protect(span, access)
            undo.pop_all()
        for _, mappings in parts:
            for mapping in mappings:
                mapping.access = access

    @verb
    def record(self, stream: int | None = None) -> Ticket:
        """See `Driver.record`; work on ordinary memory is done when its call returns."""
        if stream is not None:
            raise ValueError(f"ordinary memory has no streams, got {stream}")
        self._num_tickets += 1
        return Ticket(self._num_tickets)

    @verb
    def done(self, ticket: Ticket) -> bool:
        """See `Driver.done`."""
        if not 1 <= ticket.serial <= self._num_tickets:
            raise ValueError(f"ticket {ticket.serial} is not of this driver")
        return True

    def wait(self, ticket: Ticket, timeout_s: float) -> bool:
        """See `Driver.wait`."""
        if timeout_s < 0:
            raise ValueError(f"timeout_s must be at least 0, got {timeout_s}")
        return self.done(ticket)

    @verb
    def tensor(self, va: int, nbytes: int, owner: object) -> torch.Tensor:
        """See `Driver.tensor`.

        Raises
        ------
        VmmNotReserved
            If it does not lie within one reservation.
        """
        self._ledger.need_reserved(va, nbytes)
        exporter = _Exporter(va, nbytes, (self, owner))
        self._exporters.add(exporter)
        return torch.from_numpy(np.asarray(exporter))

    @verb
    def copy_in(self, va: int, data: bytes | bytearray | memoryview) -> None:
        """See `Driver.copy_in`.

        Raises
        ------
        VmmNotMapped
            If not all of it may be written.
        """
        source = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        self._ledger.need_open(va, source.size, writing=True)
        np.asarray(_Exporter(va, source.size, None))[:] = source

    @verb
    def copy_out(self, va: int, nbytes: int) -> bytes:
        """See `Driver.copy_out`.

        Raises
        ------
        VmmNotMapped
            If not all of it may be read.
        """
        self._ledger.need_open(va, nbytes, writing=False)
        return string_at(va, nbytes)

    @verb
    def physical(self) -> Physical:
        """See `Driver.physical`."""
        return Physical(
            booked_bytes=self._file.booked_bytes,
            measured_bytes=self._file.measured_bytes,
            source="st_blocks of the memory file",
            is_exact=True,
        )

    @verb
    def stats(self) -> Mapping[str, VerbStats]:
        """See `Driver.stats`."""
        return self._gate.stats()

    def close(self) -> None:
        """See `Driver.close`.

        Raises
        ------
        VmmBusy
            If a tensor over this driver's memory lives.
        """
        self._gate.check_process()
        if not self._gate.is_closed:
            self._close()

    def check(self) -> None:
        """Assert every invariant."""
        self._ledger.check()
        self._file.check()

    @verb
    def _close(self) -> None:
        if len(self._exporters):
            raise VmmBusy("the driver", f"{len(self._exporters)} tensors live")
        _dispose(self._gate, self._ledger, self._space, self._file)

    def _protect(self, span: Span, access: Access) -> None:
        try:
            self._space.protect(*span, access)
        except OSError as error:
            raise self._lack("mapping limit of the process", span.nbytes, error) from error

    def _restore_access(self, mappings: Iterable[ledger.Mapping]) -> None:
        """Give each mapping the access that the books still say it has."""
        for mapping in mappings:
            try:
                self._space.protect_back(mapping.va, mapping.block.nbytes, mapping.access)
            except VmmDriverError:
                # Not known any more: the books must never promise more than there is.
                mapping.access = Access.NONE

    def _sweep(self) -> None:
        """Give garbage back; what the kernel refuses stays booked until the next sweep."""
        kept = []
        for block in self._ledger.garbage:
            try:
                self._file.give(block.backing, block.nbytes)
            except VmmDriverError:
                kept.append(block)
        self._ledger.garbage[:] = kept

    def _lack(self, limit: str, wanted_bytes: int, error: OSError) -> VmmError:
        """What to raise for a system call that takes and was refused."""
        if error.errno != ENOMEM:
            return VmmDriverError(str(error.filename), error.errno or 0)
        free_bytes = self._file.capacity_bytes - self._file.booked_bytes
        return VmmOutOfMemory(limit, wanted_bytes, free_bytes)


class _Exporter:
    """Shows NumPy some memory; every array and tensor over it keeps this object alive."""

    __slots__ = ("__array_interface__", "__weakref__", "keeps", "va")

    def __init__(self, va: int, nbytes: int, keeps: object) -> None:
        self.va = va
        self.keeps = keeps
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (va, False),
            "version": 3,
        }


def _dispose(gate: Gate, book: ledger.Ledger, space: AddressSpace, file: PageFile) -> None:
    """Give back every address and byte, once, and only in the process that took them."""
    if gate.is_closed or os.getpid() != gate.owner_pid:
        return
    gate.is_closed = True
    for va, nbytes in book.reservations:
        with suppress(VmmDriverError):
            space.free(va, nbytes)
    space.close()
    file.close()
