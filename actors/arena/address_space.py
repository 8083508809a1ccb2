"""The host driver's addresses: reserved ranges of this process, and what is mapped in them.

The kernel bounds how many mappings a process has, and near that bound it refuses even
to *undo* one, since that too can pass through a moment with one more.  So a few
mappings of no use are kept as ballast: what gives back may throw them off, and what
takes must be able to lay them down again first.

Verbs that take raise ``OSError``, with ``ENOMEM`` where the process may have no more
mappings or addresses.  Verbs that give back raise `VmmDriverError`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from errno import ENOMEM

from actors.arena import syscalls
from actors.arena.driver import Access
from codec.errors import VmmDriverError

_PROT = {
    Access.NONE: syscalls.PROT_NONE,
    Access.READ: syscalls.PROT_READ,
    Access.READ_WRITE: syscalls.PROT_READ | syscalls.PROT_WRITE,
}
#: Odd, so that both ends of the ballast are pages that no neighbour merges with.
_BALLAST_PAGES = 33
_BALLAST_BYTES = _BALLAST_PAGES * syscalls.PAGE_BYTES


class AddressSpace:
    """Reserves, maps and protects addresses; it knows no handles and no bounds."""

    def __init__(self) -> None:
        #: Address of the ballast; 0 before its first use and while it is thrown off.
        self._ballast = 0

    def reserve(self, nbytes: int, align_bytes: int) -> int:
        """Take ``nbytes`` of inaccessible addresses, aligned."""
        self._lay_ballast()
        size = nbytes + align_bytes - syscalls.PAGE_BYTES
        found = syscalls.mmap_nothing(size)
        va = -(-found // align_bytes) * align_bytes
        for start, stop in ((found, va), (va + nbytes, found + size)):
            if stop > start:
                self.free(start, stop - start)
        return va

    def map(self, va: int, nbytes: int, fd: int, offset: int) -> None:
        """Put a piece of ``fd`` at ``va``, inaccessible."""
        self._lay_ballast()
        syscalls.mmap_file_at(va, nbytes, fd, offset)

    def protect(self, va: int, nbytes: int, access: Access) -> None:
        """Set the access to whole mappings; a failure may leave part of them changed."""
        self._lay_ballast()
        syscalls.mprotect(va, nbytes, _PROT[access])

    def protect_back(self, va: int, nbytes: int, access: Access) -> None:
        """Undo `protect` after it failed."""
        self._give("mprotect", syscalls.mprotect, va, nbytes, _PROT[access])

    def unmap(self, va: int, nbytes: int) -> None:
        """Make ``va`` bare reserved addresses again."""
        self._give("mmap", syscalls.mmap_nothing_at, va, nbytes)

    def free(self, va: int, nbytes: int) -> None:
        """Give reserved addresses back to the process."""
        self._give("munmap", syscalls.munmap, va, nbytes)

    def close(self) -> None:
        """Throw off the ballast, and need it no more."""
        self._drop_ballast()

    def _give(self, call: str, function: Callable[..., None], *args: int) -> None:
        """Call what ends with no more mappings than before, if need be without the ballast."""
        try:
            function(*args)
        except OSError as error:
            if error.errno != ENOMEM or not self._ballast:
                raise VmmDriverError(call, error.errno or 0) from error
            self._drop_ballast()
            self._give(call, function, *args)

    def _lay_ballast(self) -> None:
        if self._ballast:
            return
        va = syscalls.mmap_nothing(_BALLAST_BYTES)
        try:
            # Every other page is readable: no two neighbours are alike, so none merge.
            for offset in range(0, _BALLAST_BYTES, 2 * syscalls.PAGE_BYTES):
                syscalls.mprotect(va + offset, syscalls.PAGE_BYTES, syscalls.PROT_READ)
        except OSError:
            # At worst some addresses leak; the caller hears of the lack either way.
            with suppress(OSError):
                syscalls.munmap(va, _BALLAST_BYTES)
            raise
        self._ballast = va

    def _drop_ballast(self) -> None:
        if self._ballast:
            syscalls.munmap(self._ballast, _BALLAST_BYTES)
            self._ballast = 0
