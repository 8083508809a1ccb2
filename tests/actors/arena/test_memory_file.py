"""`memory_file`: files that nobody can cut, and what is taken from outside."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest

from actors.arena.memory_file import adopt, make_sealed_file, reopen
from codec.errors import VmmDriverError, VmmNotShared


@pytest.fixture
def fd() -> Iterator[int]:
    """A sealed file of 100 bytes."""
    fd = make_sealed_file(100)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("length", [0, 99, 101])
def test_its_length_is_for_ever(fd: int, length: int) -> None:
    """Nor can the seals be broken."""
    with pytest.raises(PermissionError):
        os.ftruncate(fd, length)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    assert os.fstat(fd).st_size == 100


def test_a_file_opened_again_for_reading_reads_only(fd: int) -> None:
    """It is the same file, and the first descriptor still writes."""
    reader = reopen(fd, is_writable=False)
    os.pwrite(fd, b"seen", 10)

    assert os.pread(reader, 4, 10) == b"seen"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(reader, b"lost", 10)
    os.close(reader)


def test_a_file_opened_again_for_writing_writes(fd: int) -> None:
    """Whatever writes, the others see."""
    writer = reopen(fd, is_writable=True)
    os.pwrite(writer, b"seen", 10)

    assert os.pread(fd, 4, 10) == b"seen"
    os.close(writer)


def test_what_cannot_be_opened_again_is_told() -> None:
    """By the call and its code."""
    with pytest.raises(VmmDriverError, match="open"):
        reopen(10**6, is_writable=False)


@pytest.mark.parametrize("is_writable", [True, False])
def test_what_is_adopted_is_ones_own(fd: int, is_writable: bool) -> None:
    """The descriptor that came may be closed; the new one is inherited by no program."""
    came = reopen(fd, is_writable=is_writable)

    own, can_write = adopt(came, 100)

    os.close(came)
    assert can_write == is_writable
    assert not os.get_inheritable(own)
    assert os.fstat(own).st_ino == os.fstat(fd).st_ino
    os.close(own)


def test_what_ends_too_early_is_refused(fd: int) -> None:
    """By a single byte."""
    with pytest.raises(VmmNotShared, match="100 bytes, not 101"):
        adopt(fd, 101)


def test_what_cannot_be_read_is_refused(fd: int) -> None:
    """A mapping of it could not be opened at all."""
    writer = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)

    with pytest.raises(VmmNotShared, match="read"):
        adopt(writer, 100)

    os.close(writer)


@pytest.mark.parametrize("number", [-1, 10**6])
def test_what_is_no_descriptor_is_refused(number: int) -> None:
    """As what is no memory file."""
    with pytest.raises(VmmNotShared, match="no memory file"):
        adopt(number, 1)
