"""Memory files that can be handed to other processes: sealed, so that nobody can cut one.

To cut a file kills whoever touches a mapping of the part that went.  A file that comes
from outside is therefore asked for its seals before it is mapped.
"""

from __future__ import annotations

import fcntl
import os

from codec.errors import BackendUnavailable, VmmDriverError, VmmNotShared

#: By these names `/proc/<pid>/maps` shows what is ours.
FILE_NAME = "kvfabric"


def make_sealed_file(nbytes: int) -> int:
    """Return a descriptor of a new memory file of that length, of zeros and uncommitted.

    Raises
    ------
    BackendUnavailable
        If the system has no memory files.
    VmmDriverError
        If it may not be that long.
    """
    if not hasattr(os, "memfd_create"):
        raise BackendUnavailable("the host memory driver", "it needs Linux")
    fd = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        os.close(fd)
        raise VmmDriverError("ftruncate or fcntl(F_ADD_SEALS)", error.errno or 0) from error
    return fd


def reopen(fd: int, *, is_writable: bool) -> int:
    """Return a new descriptor of the same file, for reading or for both.

    Not a duplicate, which would always write if the first one does.

    Raises
    ------
    VmmDriverError
        If the system refuses.
    """
    mode = os.O_RDWR if is_writable else os.O_RDONLY
    try:
        return os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC)
    except OSError as error:
        raise VmmDriverError("open(/proc/self/fd)", error.errno or 0) from error


def adopt(fd: int, stop_bytes: int) -> tuple[int, bool]:
    """Duplicate a file that came from outside; say also whether it can be written.

    Raises
    ------
    VmmNotShared
        If it is no memory file, could be cut, ends before ``stop_bytes``, or cannot be
        read.
    """
    what = f"descriptor {fd}"
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size_bytes = os.fstat(fd).st_size
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, ValueError) as error:
        raise VmmNotShared(what, f"it is no memory file ({error})") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise VmmNotShared(what, "it is not sealed against shrinking")
    if size_bytes < stop_bytes:
        raise VmmNotShared(what, f"it has {size_bytes} bytes, not {stop_bytes}")
    if mode == os.O_WRONLY:
        raise VmmNotShared(what, "it cannot be read")
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), mode == os.O_RDWR
