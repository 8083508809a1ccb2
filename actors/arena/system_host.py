"""`System` of ordinary memory: a sealed memory file under reserved addresses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from ctypes import memmove, string_at
from errno import ENOMEM
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.arena.address_space import AddressSpace
from actors.arena.driver import Access, Physical, Share, Span
from actors.arena.ledger import OWN_DEVICE, Block, Ledger, Loan
from actors.arena.memory_file import adopt, reopen
from actors.arena.page_file import PageFile
from actors.arena.system import Exposure
from codec.errors import VmmDriverError, VmmError, VmmOutOfMemory


class HostExposure(Exposure):
    """Memory as NumPy is shown it."""

    __slots__ = ()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.interface()


class HostSystem:
    """Makes the calls of `HostVmmDriver`."""

    kind = "host"
    torch_device = "cpu"
    exports = frozenset({"fd"})

    def __init__(self, *, capacity_bytes: int, granule_bytes: int) -> None:
        self.granule_bytes = granule_bytes
        self.granule_recommended_bytes = granule_bytes
        self.capacity_bytes = capacity_bytes
        #: Commits exactly the blocks that were committed and not given back.
        self._file = PageFile(capacity_bytes=capacity_bytes, granule_bytes=granule_bytes)
        self._space = AddressSpace()

    def reserve(self, nbytes: int, align_bytes: int) -> int:
        """See `System.reserve`."""
        try:
            return self._space.reserve(nbytes, align_bytes)
        except OSError as error:
            raise self._lack("address space limit of the process", nbytes, error) from error

    def free(self, va: int, nbytes: int) -> None:
        """See `System.free`."""
        self._space.free(va, nbytes)

    def commit(self, nbytes: int) -> int:
        """See `System.commit`."""
        return self._file.take(nbytes)

    def give(self, block: Block) -> None:
        """See `System.give`."""
        if block.loan is None:
            self._file.give(block.backing, block.nbytes)
        else:
            os.close(block.loan.fd)

    def map(self, va: int, block: Block) -> None:
        """See `System.map`."""
        fd = self._file.fd if block.loan is None else block.loan.fd
        try:
            self._space.map(va, block.nbytes, fd, block.backing)
        except OSError as error:
            raise self._lack("mapping limit of the process", block.nbytes, error) from error

    def unmap(self, va: int, nbytes: int) -> None:
        """See `System.unmap`."""
        self._space.unmap(va, nbytes)

    def targets(self, devices: Sequence[int]) -> tuple[int, ...]:
        """See `System.targets`."""
        if devices:
            raise ValueError(f"ordinary memory is on no device, got devices {list(devices)}")
        return (OWN_DEVICE,)

    def protect(self, span: Span, access: Access, devices: Sequence[int]) -> None:
        """See `System.protect`."""
        assert tuple(devices) == (OWN_DEVICE,)
        try:
            self._space.protect(*span, access)
        except OSError as error:
            raise self._lack("mapping limit of the process", span.nbytes, error) from error

    def protect_back(self, span: Span, access: Access, device: int) -> None:
        """See `System.protect_back`."""
        assert device == OWN_DEVICE
        self._space.protect_back(*span, access)

    def record(self, serial: int, stream: int | None) -> None:
        """See `System.record`; there is nothing to note, of any number."""
        if stream is not None:
            raise ValueError(f"ordinary memory has no streams, got {stream} for ticket {serial}")

    def is_done(self, serial: int) -> bool:
        """See `System.is_done`; work on ordinary memory is done when its call returns."""
        return serial > 0

    def expose(self, va: int, nbytes: int, keeps: object) -> HostExposure:
        """See `System.expose`."""
        return HostExposure(va, nbytes, keeps)

    def tensor(self, exposure: Exposure) -> torch.Tensor:
        """See `System.tensor`."""
        return torch.from_numpy(np.asarray(exposure))

    def write(self, va: int, source: npt.NDArray[np.uint8]) -> None:
        """See `System.write`."""
        memmove(va, source.ctypes.data, source.size)

    def read(self, va: int, nbytes: int) -> bytes:
        """See `System.read`."""
        return string_at(va, nbytes)

    def share(self, block: Block, *, is_writable: bool) -> tuple[int, int]:
        """See `System.share`.

        The descriptor is of the whole file, so that an importer of the same user could
        look at the rest, or open it again for writing: a courtesy, and no border.
        """
        return reopen(self._file.fd, is_writable=is_writable), block.backing

    def borrow(self, share: Share) -> tuple[int, Loan]:
        """See `System.borrow`."""
        fd, can_write = adopt(share.fd, share.offset_bytes + share.nbytes)
        return share.offset_bytes, Loan(fd, share.is_writable and can_write)

    def physical(self) -> Physical:
        """See `System.physical`."""
        return Physical(
            booked_bytes=self._file.booked_bytes,
            measured_bytes=self._file.measured_bytes,
            source="st_blocks of the memory file",
            is_exact=True,
        )

    def check(self) -> None:
        """See `System.check`."""
        self._file.check()

    def dispose(self, book: Ledger) -> None:
        """See `System.dispose`."""
        for va, nbytes in book.reservations:
            with suppress(VmmDriverError):
                self._space.free(va, nbytes)
        for block in book.held:
            if block.loan is not None:
                os.close(block.loan.fd)
        self._space.close()
        self._file.close()

    def _lack(self, limit: str, wanted_bytes: int, error: OSError) -> VmmError:
        """What to raise for a system call that takes and was refused."""
        if error.errno != ENOMEM:
            return VmmDriverError(str(error.filename), error.errno or 0)
        free_bytes = self.capacity_bytes - self._file.booked_bytes
        return VmmOutOfMemory(limit, wanted_bytes, free_bytes)
