"""`Driver` over any `System`: the books refuse, the system acts, the books note it.

So every kind of memory refuses the same calls in the same way, before the system is
asked, and a forked child or a closed driver is refused before the books are.
"""

from __future__ import annotations

import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from actors.arena import ledger
from actors.arena.driver import Access, Caps, Handle, Physical, Share, Span, Ticket, VerbStats
from actors.arena.gate import Gate, verb
from actors.arena.system import Exposure, System
from codec.errors import VmmBusy, VmmDriverError, VmmError, VmmMisaligned, VmmNotShared

_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 1e-3


class BookedDriver:
    """The verbs, over one system that is this driver's alone.

    Parameters
    ----------
    clock, pause
        Seconds since any moment, and a way to spend some: what `wait` waits with.
    """

    def __init__(
        self,
        system: System,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._gate = Gate("driver")
        self._ledger = ledger.Ledger(system.granule_bytes)
        #: Has exactly the reservations, blocks and mappings that the ledger lists.
        self._system = system
        self._clock = clock
        self._pause = pause
        self._identity = uuid.uuid4().hex
        #: Tickets given out, numbered from 1.
        self._num_tickets = 0
        #: Tickets that were not done when last asked for.
        self._pending: set[int] = set()
        #: What live tensors are over; their addresses must not be given back.
        self._exposures: weakref.WeakSet[Exposure] = weakref.WeakSet()
        # No tensor lives when this runs, since each keeps the driver alive.
        finalizer = weakref.finalize(self, _dispose, self._gate, self._ledger, system)
        finalizer.atexit = False

    @verb
    def caps(self) -> Caps:
        """See `Driver.caps`."""
        return Caps(
            kind=self._system.kind,
            granule_min_bytes=self._system.granule_bytes,
            granule_recommended_bytes=self._system.granule_recommended_bytes,
            capacity_bytes=self._system.capacity_bytes,
            exports=self._system.exports,
            torch_device=self._system.torch_device,
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
            If there are no more addresses.
        """
        self._ledger.need_aligned("nbytes", nbytes)
        align_bytes = align_bytes or self._ledger.granule_bytes
        self._ledger.need_aligned("align_bytes", align_bytes)
        if align_bytes & (align_bytes - 1):
            raise VmmMisaligned("align_bytes (a power of two)", align_bytes, align_bytes)
        va = self._system.reserve(nbytes, align_bytes)
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
        if any(va <= exposure.va < va + nbytes for exposure in self._exposures):
            raise VmmBusy(f"the reservation at {va:#x}", "a tensor over it lives")
        self._system.free(va, nbytes)
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
        return self._ledger.add_block(nbytes, self._system.commit(nbytes))

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
            self._system.give(block)
        self._ledger.release(handle)

    @verb
    def map(self, va: int, handle: Handle) -> None:
        """See `Driver.map`.

        Raises
        ------
        VmmMisaligned, VmmBadHandle, VmmNotReserved, VmmAlreadyMapped
            If the handle cannot go there.
        VmmOutOfMemory
            If there may be no more mappings.
        """
        block = self._ledger.need_mappable(va, handle)
        self._system.map(va, block)
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
        self._system.unmap(va, mapping.block.nbytes)
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
        VmmNotShared
            If it would open for writing what was shared for reading.
        VmmOutOfMemory
            If there may be no more mappings.
        """
        targets = self._system.targets(devices)
        parts = [(span, self._ledger.whole_mappings(span)) for span in spans]
        for _, mappings in parts:
            self._ledger.need_grantable(mappings, access)
        with ExitStack() as undo:
            for span, mappings in parts:
                undo.callback(self._restore_access, mappings, targets)
                self._system.protect(span, access, targets)
            undo.pop_all()
        for _, mappings in parts:
            for mapping in mappings:
                mapping.grant(targets, access)

    @verb
    def record(self, stream: int | None = None) -> Ticket:
        """See `Driver.record`.

        Raises
        ------
        VmmDriverError
            If the system cannot note it.
        """
        self._system.record(self._num_tickets + 1, stream)
        self._num_tickets += 1
        self._pending.add(self._num_tickets)
        return Ticket(self._num_tickets)

    @verb
    def done(self, ticket: Ticket) -> bool:
        """See `Driver.done`.

        Raises
        ------
        VmmDriverError
            If the work failed.
        """
        if not 1 <= ticket.serial <= self._num_tickets:
            raise ValueError(f"ticket {ticket.serial} is not of this driver")
        return self._is_done(ticket.serial)

    def wait(self, ticket: Ticket, timeout_s: float) -> bool:
        """See `Driver.wait`; other threads get in while this one waits."""
        if timeout_s < 0:
            raise ValueError(f"timeout_s must be at least 0, got {timeout_s}")
        deadline_s = self._clock() + timeout_s
        pause_s = _PAUSE_S
        while not self.done(ticket):
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                return False
            self._pause(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    @verb
    def tensor(self, va: int, nbytes: int, owner: object) -> torch.Tensor:
        """See `Driver.tensor`.

        Raises
        ------
        VmmNotReserved
            If it does not lie within one reservation.
        """
        self._ledger.need_reserved(va, nbytes)
        exposure = self._system.expose(va, nbytes, (self, owner))
        tensor = self._system.tensor(exposure)
        self._exposures.add(exposure)
        return tensor

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
        self._system.write(va, source)

    @verb
    def copy_out(self, va: int, nbytes: int) -> bytes:
        """See `Driver.copy_out`.

        Raises
        ------
        VmmNotMapped
            If not all of it may be read.
        """
        self._ledger.need_open(va, nbytes, writing=False)
        return self._system.read(va, nbytes)

    @verb
    def export(self, handle: Handle, *, writable: bool = False) -> Share:
        """See `Driver.export`.

        Raises
        ------
        VmmBadHandle
            If it is not live.
        VmmNotShared
            If it is another process's memory, or this system shares none.
        """
        block = self._ledger.own_block(handle)
        fd, offset_bytes = self._system.share(block, is_writable=writable)
        return Share(
            kind="fd",
            fd=fd,
            offset_bytes=offset_bytes,
            nbytes=block.nbytes,
            identity=f"{self._identity}:{handle}",
            is_writable=writable,
        )

    @verb
    def import_(self, share: Share) -> Handle:
        """See `Driver.import_`.

        Raises
        ------
        VmmNotShared
            If what came is not what it says, or not memory of this kind.
        """
        if share.kind not in self._system.exports:
            raise VmmNotShared(share.identity, f"{share.kind!r} is not known here")
        if share.fd < 0:
            raise VmmNotShared(share.identity, "the share is closed")
        granule_bytes = self._ledger.granule_bytes
        is_aligned = share.nbytes % granule_bytes == share.offset_bytes % granule_bytes == 0
        if not is_aligned or share.nbytes <= 0 or share.offset_bytes < 0:
            where = f"{share.nbytes} bytes at {share.offset_bytes}"
            raise VmmNotShared(share.identity, f"{where} are no granules of {granule_bytes}")
        self._sweep()
        return self._ledger.add_block(share.nbytes, *self._system.borrow(share))

    @verb
    def physical(self) -> Physical:
        """See `Driver.physical`."""
        return self._system.physical()

    @verb
    def stats(self) -> Mapping[str, VerbStats]:
        """See `Driver.stats`."""
        return self._gate.stats()

    def close(self) -> None:
        """See `Driver.close`.

        Raises
        ------
        VmmBusy
            If a tensor over this driver's memory lives, or recorded work goes on.
        """
        self._gate.check_process()
        if not self._gate.is_closed:
            self._close()

    def check(self) -> None:
        """Assert every invariant."""
        self._ledger.check()
        self._system.check()

    @verb
    def _close(self) -> None:
        if len(self._exposures):
            raise VmmBusy("the driver", f"{len(self._exposures)} tensors live")
        running = [serial for serial in sorted(self._pending) if self._is_running(serial)]
        if running:
            raise VmmBusy("the driver", f"the work of {len(running)} tickets goes on")
        _dispose(self._gate, self._ledger, self._system)

    def _is_done(self, serial: int) -> bool:
        if serial in self._pending and self._system.is_done(serial):
            self._pending.remove(serial)
        return serial not in self._pending

    def _is_running(self, serial: int) -> bool:
        """Whether that work may still touch memory; what failed has ended too."""
        try:
            return not self._is_done(serial)
        except VmmDriverError:
            return False

    def _restore_access(self, mappings: Iterable[ledger.Mapping], devices: Sequence[int]) -> None:
        """Give each mapping the access that the books still say it has."""
        for mapping in mappings:
            span = Span(mapping.va, mapping.block.nbytes)
            for device in devices:
                try:
                    self._system.protect_back(span, mapping.access_of(device), device)
                except VmmError:
                    # Not known any more: the books must never promise more than there is.
                    mapping.grant([device], Access.NONE)

    def _sweep(self) -> None:
        """Give garbage back; what the system refuses stays booked until the next sweep."""
        kept = []
        for block in self._ledger.garbage:
            try:
                self._system.give(block)
            except VmmDriverError:
                kept.append(block)
        self._ledger.garbage[:] = kept


def _dispose(gate: Gate, book: ledger.Ledger, system: System) -> None:
    """Give everything back, once, and only in the process that took it."""
    if gate.is_closed or os.getpid() != gate.owner_pid:
        return
    gate.is_closed = True
    system.dispose(book)
