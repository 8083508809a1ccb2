"""The host driver's memory: one sealed memory file, cut into runs.

One file for all runs, not one each: one descriptor, one exact count of bytes, and
neighbouring runs that are mapped side by side merge into one mapping of the kernel.
"""

from __future__ import annotations

import os

from actors.arena import syscalls
from actors.arena.free_list import FreeList
from actors.arena.memory_file import make_sealed_file
from codec.errors import VmmDriverError, VmmOutOfMemory

_BLOCK_BYTES = 512


class PageFile:
    """Commits and gives back runs of a memory file, within a budget.

    Offsets cost nothing, bytes do: the file is made long enough that first-fit finds a
    run wherever the budget allows one (first-fit needs at most about ``log2(n)`` times
    the bytes in use when runs are of 1 to ``n`` granules), as CUDA would.
    """

    def __init__(self, *, capacity_bytes: int, granule_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        #: Bytes that are committed; never over ``capacity_bytes``.
        self.booked_bytes = 0
        #: The runs that ``booked_bytes`` counts are exactly those not free here.
        self._offsets = FreeList(
            capacity_bytes * (2 + (capacity_bytes // granule_bytes).bit_length())
        )
        self._fd = make_sealed_file(self._offsets.size)

    @property
    def fd(self) -> int:
        """The file's descriptor, to map from."""
        return self._fd

    @property
    def measured_bytes(self) -> int:
        """Bytes of memory that the kernel counts for the file, however often it is mapped."""
        return os.fstat(self._fd).st_blocks * _BLOCK_BYTES

    def take(self, nbytes: int) -> int:
        """Commit ``nbytes`` of zeros and return their offset.

        Raises
        ------
        VmmOutOfMemory
            If the budget, or the system, has no more.
        """
        free_bytes = self.capacity_bytes - self.booked_bytes
        # Before the kernel is asked: it would rather end a process than say no.
        if nbytes > free_bytes:
            raise VmmOutOfMemory("driver budget", nbytes, free_bytes)
        offset = self._offsets.take(nbytes)
        if offset is None:
            raise VmmOutOfMemory("file offset limit", nbytes, free_bytes)
        try:
            syscalls.commit(self._fd, offset, nbytes)
        except OSError as error:
            self._offsets.give(offset, nbytes)
            raise VmmOutOfMemory(f"system memory limit ({error})", nbytes, free_bytes) from error
        self.booked_bytes += nbytes
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Give the bytes of one run back to the system.

        Raises
        ------
        VmmDriverError
            If the kernel refuses; the run stays booked then.
        """
        try:
            syscalls.punch(self._fd, offset, nbytes)
        except OSError as error:
            raise VmmDriverError("fallocate(PUNCH_HOLE)", error.errno or 0) from error
        self._offsets.give(offset, nbytes)
        self.booked_bytes -= nbytes

    def close(self) -> None:
        """Drop the descriptor; mappings of the file keep its bytes until they go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def check(self) -> None:
        """Assert that book, offsets and kernel agree."""
        self._offsets.check()
        assert self.booked_bytes == self._offsets.size - self._offsets.free
        assert self.booked_bytes == self.measured_bytes
        assert 0 <= self.booked_bytes <= self.capacity_bytes
