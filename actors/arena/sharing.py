"""Memory handed to another process, for as long as that one holds on to a connection.

1. The owner exports a handle and calls `lend` on a Unix socket; the importer calls
   `borrow` on its end, imports what it gets, and keeps the socket.
2. The lease ends when the importer closes its end, or dies, and so has every process that
   it forked.  `Lent.is_live` says so; until then the owner must not use the memory for
   anything else.
3. Where the owner would rather not wait, a `GenerationPage` lies beside the memory: it is
   raised before the memory is used anew, so that an importer which reads it before and
   after a copy knows whether the copy is of one thing.

What is handed over is a message of one length with one descriptor, nothing that is
executed.  An importer that keeps its mapping after it closed its end breaks a promise that
the system does not enforce.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

from actors.arena.driver import Share
from actors.arena.memory_file import adopt, make_sealed_file, reopen
from codec.errors import VmmBusy, VmmNotShared

# What it is and its version, whether it may be written, offset, size, kind, identity.
_MESSAGE = struct.Struct("<8s?QQ16s96s")
_MAGIC = b"kvshare1"
_MOST_READS = 64
_ENTRY_BYTES = 8
T = TypeVar("T")


class Lent:
    """The owner's side of one lease; ends by itself with its socket."""

    def __init__(self, connection: socket.socket, identity: str) -> None:
        self.identity = identity
        #: None once the lease has ended.
        self._connection: socket.socket | None = connection

    def is_live(self) -> bool:
        """Whether the importer may still use the memory; never waits."""
        if self._connection is not None and _is_at_end(self._connection):
            self._connection.close()
            self._connection = None
        return self._connection is not None

    def close(self) -> None:
        """Forget a lease that has ended.

        Raises
        ------
        VmmBusy
            If it has not: the importer could not be told.
        """
        if self.is_live():
            raise VmmBusy(f"shared memory {self.identity}", "its lease has not ended")


class GenerationPage:
    """One rising number for each of some names, that other processes can read.

    Stores and loads are of whole numbers.  That a number is seen before what is written
    after it holds as the processor has it: on x86-64 always, elsewhere only by what the
    owner does in between (any verb of a driver will do).
    """

    def __init__(self, fd: int, num_names: int, *, is_owner: bool) -> None:
        """Take over ``fd``; `create` and `open` are the ways to have one."""
        self.num_names = num_names
        self._fd = fd
        access = mmap.ACCESS_WRITE if is_owner else mmap.ACCESS_READ
        self._map = mmap.mmap(fd, num_names * _ENTRY_BYTES, access=access)
        # 0 is no process: an importer never writes, nor does a child that the owner forked.
        self._writer_pid = os.getpid() if is_owner else 0
        #: Never fall, each by itself.
        self._numbers = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls, num_names: int) -> GenerationPage:
        """A page of zeros of this process's own."""
        if num_names < 1:
            raise ValueError(f"num_names must be positive, got {num_names}")
        return cls(make_sealed_file(num_names * _ENTRY_BYTES), num_names, is_owner=True)

    @classmethod
    def open(cls, share: Share) -> GenerationPage:
        """The page that another process shared, to be read.

        Raises
        ------
        VmmNotShared
            If it is none.
        """
        if share.offset_bytes or share.nbytes < 1 or share.nbytes % _ENTRY_BYTES:
            raise VmmNotShared(share.identity, f"{share.nbytes} bytes are no page of generations")
        fd, _ = adopt(share.fd, share.nbytes)
        return cls(fd, share.nbytes // _ENTRY_BYTES, is_owner=False)

    def share(self, identity: str) -> Share:
        """The page in the form that `lend` takes; the caller closes it."""
        nbytes = self.num_names * _ENTRY_BYTES
        fd = reopen(self._fd, is_writable=False)
        return Share(
            kind="fd", fd=fd, offset_bytes=0, nbytes=nbytes, identity=identity, is_writable=False
        )

    def generation(self, name: int) -> int:
        """The number of ``name`` now."""
        if not 0 <= name < self.num_names:
            raise IndexError(f"need 0 <= name < {self.num_names}, got {name}")
        return self._numbers[name]

    def copy_of(self, name: int, generation: int, copy: Callable[[], T]) -> T | None:
        """What ``copy`` returns, if ``name`` was of that generation all the while."""
        if self.generation(name) != generation:
            return None
        copied = copy()
        return copied if self.generation(name) == generation else None

    def advance(self, name: int, generation: int) -> None:
        """Set the number of ``name``, before its memory is used anew."""
        if self._writer_pid != os.getpid():
            raise VmmNotShared("a page of generations", "only its owner writes it")
        if generation <= (now := self.generation(name)):
            raise ValueError(f"the generation of {name} must rise from {now}, got {generation}")
        self._numbers[name] = generation

    def close(self) -> None:
        """Let go of the page; a second call does nothing."""
        if self._fd >= 0:
            self._numbers.release()
            self._map.close()
            os.close(self._fd)
            self._fd = -1


def lend(connection: socket.socket, share: Share) -> Lent:
    """Hand ``share`` to the process at the other end, and return the lease.

    The lease takes ``connection`` over, unless this raises; the share stays the caller's to
    close.

    Raises
    ------
    VmmNotShared
        If it does not fit a message, or the other end is gone.
    """
    kind, identity = share.kind.encode(), share.identity.encode()
    if not 0 < len(kind) <= 16 or not 0 < len(identity) <= 96 or share.fd < 0:
        raise VmmNotShared(share.identity, "its names are too long, or it is closed")
    message = _MESSAGE.pack(
        _MAGIC, share.is_writable, share.offset_bytes, share.nbytes, kind, identity
    )
    try:
        sent = socket.send_fds(connection, [message], [share.fd])
    except OSError as error:
        raise VmmNotShared(share.identity, f"the other end is gone ({error})") from error
    if sent != len(message):
        # No lease comes of it: the receiver finds an end, or runs out of time.
        raise VmmNotShared(share.identity, f"only {sent} bytes of its message could be sent")
    return Lent(connection, share.identity)


def borrow(connection: socket.socket, timeout_s: float) -> Share:
    """Receive what the other end lends; the lease lasts while ``connection`` is open.

    Raises
    ------
    VmmNotShared
        If anything else comes, or nothing whole in time.
    """
    connection.settimeout(timeout_s)
    fds: list[int] = []
    try:
        message = _receive(connection, fds)
        share = _read(message, fds)
    except (OSError, VmmNotShared) as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, VmmNotShared):
            raise
        raise VmmNotShared("what was to come", str(error) or type(error).__name__) from error
    return share


def _receive(connection: socket.socket, fds: list[int]) -> bytes:
    """One message, or what there is of it; descriptors go to ``fds`` as they come."""
    message = b""
    while left := _MESSAGE.size - len(message):
        # Room for a second descriptor, since one too many must be seen.
        room = socket.CMSG_SPACE(2 * array.array("i").itemsize)
        data, extras, flags, _ = connection.recvmsg(left, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(content[: len(content) - len(content) % found.itemsize])
                fds.extend(found)
        if flags & socket.MSG_CTRUNC:
            raise VmmNotShared("what came", "it has too many descriptors")
        if not data:
            break
        message += data
    return message


def _read(message: bytes, fds: list[int]) -> Share:
    if len(message) != _MESSAGE.size:
        raise VmmNotShared("what came", f"it ended after {len(message)} bytes")
    magic, is_writable, offset_bytes, nbytes, kind, identity = _MESSAGE.unpack(message)
    if magic != _MAGIC or len(fds) != 1:
        raise VmmNotShared("what came", f"it starts with {magic!r} and has {len(fds)} descriptors")
    try:
        names = [field.rstrip(b"\0").decode("utf-8") for field in (kind, identity)]
    except UnicodeDecodeError as error:
        raise VmmNotShared("what came", f"its names are no text ({error})") from error
    return Share(
        kind=names[0],
        fd=fds[0],
        offset_bytes=offset_bytes,
        nbytes=nbytes,
        identity=names[1],
        is_writable=is_writable,
    )


def _is_at_end(connection: socket.socket) -> bool:
    """Whether the other end is closed; what it may have sent is thrown away."""
    for _ in range(_MOST_READS):
        try:
            if not connection.recv(4096, socket.MSG_DONTWAIT):
                return True
        except BlockingIOError:
            return False
        except OSError:
            return True
    return False
