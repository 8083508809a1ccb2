"""The Linux calls under the host driver that Python has no way to make.

``mmap`` of the standard library cannot take an address, and ``os`` cannot punch holes.
Each function raises ``OSError`` with the call's errno and keeps no state.
"""

from __future__ import annotations

import ctypes
import os
from errno import EINTR
from functools import cache

PAGE_BYTES = os.sysconf("SC_PAGESIZE")

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
# The same on every Linux that CUDA and Python run on (x86-64, aarch64).
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = 0x20, 0x4000
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 0x01, 0x02
_MAP_FAILED = ctypes.c_void_p(-1).value


def mmap_nothing(nbytes: int) -> int:
    """Take addresses that no access is allowed to, wherever there is room."""
    return _mmap(None, nbytes, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)


def mmap_nothing_at(va: int, nbytes: int) -> None:
    """Replace whatever is mapped at ``va`` by addresses without access, in one step.

    Not ``munmap``: another thread's mapping could land in the hole.
    """
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    _mmap(va, nbytes, flags, -1, 0)


def mmap_file_at(va: int, nbytes: int, fd: int, offset: int) -> None:
    """Replace whatever is mapped at ``va`` by a shared, inaccessible piece of ``fd``."""
    _mmap(va, nbytes, _MAP_SHARED | _MAP_FIXED, fd, offset)


def munmap(va: int, nbytes: int) -> None:
    """Give addresses back to the process."""
    _checked("munmap", _libc().munmap(va, nbytes))


def mprotect(va: int, nbytes: int, prot: int) -> None:
    """Change the access to mapped addresses."""
    _checked("mprotect", _libc().mprotect(va, nbytes, prot))


def commit(fd: int, offset: int, nbytes: int) -> None:
    """Back a piece of ``fd`` with memory now; all of it or none."""
    _fallocate(fd, _FALLOC_KEEP_SIZE, offset, nbytes)


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Give back the memory behind a piece of ``fd``, which then reads as zeros."""
    _fallocate(fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, offset, nbytes)


def _mmap(va: int | None, nbytes: int, flags: int, fd: int, offset: int) -> int:
    # Nothing is ever mapped open: access comes with `mprotect`, as CUDA has it.
    found = _libc().mmap(va, nbytes, PROT_NONE, flags, fd, offset)
    if found is None or found == _MAP_FAILED:
        raise _error("mmap")
    return int(found)


def _fallocate(fd: int, mode: int, offset: int, nbytes: int) -> None:
    while _libc().fallocate(fd, mode, offset, nbytes) != 0:
        # A signal stops it halfway, and it undoes its half itself.
        if ctypes.get_errno() != EINTR:
            raise _error("fallocate")


def _checked(call: str, code: int) -> None:
    if code != 0:
        raise _error(call)


def _error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), call)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
    libc.munmap.argtypes = [pointer, size]
    libc.mprotect.argtypes = [pointer, size, number]
    libc.fallocate.argtypes = [number, number, ctypes.c_int64, ctypes.c_int64]
    return libc
