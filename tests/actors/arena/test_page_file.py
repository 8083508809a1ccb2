"""`PageFile`: bytes are committed, counted and given back exactly."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from actors.arena.page_file import PageFile
from actors.arena.syscalls import PAGE_BYTES
from codec.errors import BackendUnavailable, VmmDriverError, VmmOutOfMemory
from tests.suites.probes import fail_call


@pytest.fixture
def file() -> Iterator[PageFile]:
    """A budget of 8 pages, checked and closed after the test."""
    file = PageFile(capacity_bytes=8 * PAGE_BYTES, granule_bytes=PAGE_BYTES)
    yield file
    file.check()
    file.close()
    file.close()


def test_the_kernel_counts_what_is_booked(file: PageFile) -> None:
    """After each step."""
    first, second = file.take(3 * PAGE_BYTES), file.take(PAGE_BYTES)
    file.check()
    assert file.measured_bytes == 4 * PAGE_BYTES

    file.give(first, 3 * PAGE_BYTES)

    file.check()
    assert file.measured_bytes == PAGE_BYTES
    file.give(second, PAGE_BYTES)


def test_what_is_taken_again_is_zero(file: PageFile) -> None:
    """Punched bytes do not come back."""
    offset = file.take(PAGE_BYTES)
    os.pwrite(file.fd, b"secret", offset)
    file.give(offset, PAGE_BYTES)

    assert file.take(PAGE_BYTES) == offset
    assert os.pread(file.fd, 6, offset) == bytes(6)


def test_the_budget_is_the_only_bound(file: PageFile) -> None:
    """With every other page taken, four pages that touch are still to be had."""
    offsets = [file.take(PAGE_BYTES) for _ in range(8)]
    for offset in offsets[::2]:
        file.give(offset, PAGE_BYTES)

    large = file.take(4 * PAGE_BYTES)

    assert large > max(offsets)
    with pytest.raises(VmmOutOfMemory) as caught:
        file.take(PAGE_BYTES)
    assert (caught.value.limit, caught.value.free_bytes) == ("driver budget", 0)


def test_a_refused_commit_takes_no_offsets(file: PageFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one gets the same place."""
    with monkeypatch.context() as patch:
        fail_call(patch, "commit", errno.ENOSPC)
        with pytest.raises(VmmOutOfMemory, match="system memory") as caught:
            file.take(PAGE_BYTES)
    assert caught.value.free_bytes == 8 * PAGE_BYTES

    assert file.take(PAGE_BYTES) == 0


def test_a_refused_punch_stays_booked(file: PageFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be tried again."""
    offset = file.take(PAGE_BYTES)
    with monkeypatch.context() as patch:
        fail_call(patch, "punch", errno.EPERM)
        with pytest.raises(VmmDriverError, match="PUNCH_HOLE"):
            file.give(offset, PAGE_BYTES)
    assert file.booked_bytes == PAGE_BYTES

    file.give(offset, PAGE_BYTES)

    assert file.measured_bytes == 0


def test_without_memory_files_there_is_no_host_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said by a typed error that names the need, not by an AttributeError."""
    monkeypatch.delattr(os, "memfd_create")

    with pytest.raises(BackendUnavailable, match="Linux"):
        PageFile(capacity_bytes=PAGE_BYTES, granule_bytes=PAGE_BYTES)


def test_a_file_that_may_not_be_so_long_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is typed, and no descriptor leaks."""
    opened: list[int] = []
    real = os.memfd_create

    def remembering(name: str, flags: int) -> int:
        opened.append(real(name, flags))
        return opened[-1]

    def refusing(fd: int, length: int) -> None:
        raise OSError(errno.EFBIG, "too long")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", remembering)
        patch.setattr(os, "ftruncate", refusing)
        with pytest.raises(VmmDriverError) as caught:
            PageFile(capacity_bytes=PAGE_BYTES, granule_bytes=PAGE_BYTES)

    assert caught.value.code == errno.EFBIG
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
