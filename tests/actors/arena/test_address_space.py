"""`AddressSpace`: alignment, and the ballast that makes giving back possible."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from actors.arena import syscalls
from actors.arena.address_space import AddressSpace
from actors.arena.driver import Access
from actors.arena.syscalls import PAGE_BYTES
from codec.errors import VmmDriverError
from tests.suites.probes import fail_call


@pytest.fixture
def space() -> Iterator[AddressSpace]:
    """An address space that keeps no ballast after the test."""
    space = AddressSpace()
    yield space
    space.close()


def note_sizes(patch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The sizes, their last argument, of all coming calls of ``name``."""
    real, sizes = getattr(syscalls, name), []

    def noting(*args: int) -> object:
        sizes.append(args[-1])
        return real(*args)

    patch.setattr(syscalls, name, noting)
    return sizes


@pytest.mark.parametrize("align_pages", [1, 2, 64])
def test_addresses_are_aligned_and_nothing_more_is_kept(
    space: AddressSpace, monkeypatch: pytest.MonkeyPatch, align_pages: int
) -> None:
    """What was taken to find an aligned start is given back on both sides."""
    space.free(space.reserve(PAGE_BYTES, PAGE_BYTES), PAGE_BYTES)
    taken, given = note_sizes(monkeypatch, "mmap_nothing"), note_sizes(monkeypatch, "munmap")

    va = space.reserve(3 * PAGE_BYTES, align_pages * PAGE_BYTES)

    assert va % (align_pages * PAGE_BYTES) == 0
    assert sum(taken) - sum(given) == 3 * PAGE_BYTES
    space.free(va, 3 * PAGE_BYTES)


def fail_once(patch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Make the next call of ``name`` fail for want of mappings; returns its sizes."""
    real, sizes = getattr(syscalls, name), []

    def failing(va: int, nbytes: int, *args: int) -> object:
        sizes.append(nbytes)
        if len(sizes) == 1:
            raise OSError(errno.ENOMEM, "no more mappings", name)
        return real(va, nbytes, *args)

    patch.setattr(syscalls, name, failing)
    return sizes


def test_giving_back_throws_the_ballast_off(
    space: AddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undoing a mapping works where the kernel has no mapping to spare."""
    va = space.reserve(PAGE_BYTES, PAGE_BYTES)
    given = note_sizes(monkeypatch, "munmap")
    sizes = fail_once(monkeypatch, "mmap_nothing_at")

    space.unmap(va, PAGE_BYTES)

    assert sizes == [PAGE_BYTES] * 2
    assert given == [33 * PAGE_BYTES]
    space.free(va, PAGE_BYTES)


def test_taking_lays_the_ballast_down_first(
    space: AddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it there may be no way back, so a map is refused for want of ballast."""
    va = space.reserve(PAGE_BYTES, PAGE_BYTES)
    with monkeypatch.context() as patch:
        fail_once(patch, "mmap_nothing_at")
        space.unmap(va, PAGE_BYTES)

    with monkeypatch.context() as patch:
        calls = fail_call(patch, "mmap_nothing", errno.ENOMEM)
        with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
            space.map(va, PAGE_BYTES, -1, 0)
        assert calls() == 1
    with monkeypatch.context() as patch:
        fail_call(patch, "mprotect", errno.ENOMEM, number=3)
        with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
            space.protect(va, PAGE_BYTES, Access.READ)

    space.protect(va, PAGE_BYTES, Access.READ)
    space.free(va, PAGE_BYTES)


def test_giving_back_fails_only_when_the_ballast_is_gone_too(
    space: AddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the error names the call."""
    va = space.reserve(PAGE_BYTES, PAGE_BYTES)
    with monkeypatch.context() as patch:
        calls = fail_call(patch, "mmap_nothing_at", errno.ENOMEM)
        with pytest.raises(VmmDriverError) as caught:
            space.unmap(va, PAGE_BYTES)
        assert calls() == 2

    assert (caught.value.call, caught.value.code) == ("mmap", errno.ENOMEM)
    space.free(va, PAGE_BYTES)
