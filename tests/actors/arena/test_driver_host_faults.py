"""`HostVmmDriver` when the kernel refuses: each call fails by itself, and nothing is lost."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import pytest

from actors.arena import syscalls
from actors.arena.driver import Access, Span
from actors.arena.driver_host import HostVmmDriver
from actors.arena.syscalls import PAGE_BYTES
from codec.errors import VmmDriverError, VmmNotMapped, VmmOutOfMemory
from tests.suites.driver_contract import Rig, set_open
from tests.suites.probes import fail_call, is_readable


@pytest.fixture
def driver() -> Iterator[HostVmmDriver]:
    """A driver of 8 pages whose invariants are checked after the test."""
    driver = HostVmmDriver(8 * PAGE_BYTES, PAGE_BYTES)
    yield driver
    driver.check()
    driver.close()


@pytest.fixture
def rig(driver: HostVmmDriver) -> Iterator[Rig]:
    """The driver at work."""
    rig = Rig.build(driver)
    yield rig
    rig.undo()
    assert driver.physical().measured_bytes == 0


@pytest.mark.parametrize(
    ("call", "verb", "limit"),
    [
        ("commit", lambda r: r.driver.create(r.granule), "system memory"),
        ("mmap_file_at", lambda r: r.driver.map(r.at(4), r.loose), "mapping limit"),
        ("mmap_nothing", lambda r: r.driver.reserve(r.granule), "address space"),
        ("mprotect", lambda r: set_open(r, r.span(2, 1)), "mapping limit"),
    ],
)
def test_each_limit_is_told_by_its_name(
    monkeypatch: pytest.MonkeyPatch, call: str, verb: Callable[[Rig], None], limit: str
) -> None:
    """Out of mappings is not out of bytes: the remedy is another."""
    rig = Rig.build(HostVmmDriver(8 * PAGE_BYTES, PAGE_BYTES))
    before = rig.state()
    with monkeypatch.context() as patch:
        fail_call(patch, call, errno.ENOMEM)

        with pytest.raises(VmmOutOfMemory, match=limit):
            verb(rig)

    assert rig.state() == before
    verb(rig)
    rig.driver.close()


@pytest.mark.parametrize(
    ("call", "verb"),
    [
        ("mmap_file_at", lambda r: r.driver.map(r.at(4), r.loose)),
        ("mprotect", lambda r: set_open(r, r.span(2, 1))),
        ("mmap_nothing_at", lambda r: r.driver.unmap(r.base)),
        ("punch", lambda r: r.driver.release(r.loose)),
        ("munmap", lambda r: r.driver.free_va(*r.freed)),
    ],
)
def test_a_failing_call_is_named_and_changes_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str, verb: Callable[[Rig], None]
) -> None:
    """The kernel's other refusals come with the call and its code."""
    rig.freed = Span(rig.driver.reserve(rig.granule), rig.granule)
    before = rig.state()
    with monkeypatch.context() as patch:
        fail_call(patch, call, errno.EPERM)

        with pytest.raises(VmmDriverError) as caught:
            verb(rig)

    assert caught.value.code == errno.EPERM
    assert rig.state() == before
    rig.driver.copy_in(rig.base, b"kept")
    rig.driver.release(rig.driver.create(rig.granule))
    rig.driver.free_va(*rig.freed)


@pytest.mark.parametrize("number", [0, 1])
def test_access_is_rolled_back_when_a_span_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """All spans of one call change, or none; the processor is asked, not the books."""
    real, calls = syscalls.mprotect, []

    def failing_once(va: int, nbytes: int, prot: int) -> None:
        calls.append(va)
        if len(calls) == number + 1:
            raise OSError(errno.ENOMEM, "no more", "mprotect")
        real(va, nbytes, prot)

    with monkeypatch.context() as patch:
        patch.setattr(syscalls, "mprotect", failing_once)
        with pytest.raises(VmmOutOfMemory):
            rig.driver.set_access([rig.span(2, 1), rig.span(0, 2)], Access.NONE)

    assert is_readable(rig.base)
    assert rig.driver.copy_out(rig.base, 4) == b"kept"
    assert not is_readable(rig.at(2))


def test_access_that_cannot_be_rolled_back_is_not_promised(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books may know less than is open, never more."""
    with monkeypatch.context() as patch:
        fail_call(patch, "mprotect", errno.EPERM, number=1)
        with pytest.raises(VmmDriverError):
            rig.driver.set_access([rig.span(0, 2), rig.span(2, 1)], Access.READ)

    with pytest.raises(VmmNotMapped):
        rig.driver.copy_out(rig.base, 4)
    set_open(rig, rig.span(0, 2))
    assert rig.driver.copy_out(rig.base, 4) == b"kept"


def test_memory_that_cannot_be_punched_stays_booked(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unmap that worked is not undone for it; a later verb gives the bytes back."""
    rig.driver.map(rig.at(4), rig.loose)
    rig.driver.release(rig.loose)
    with monkeypatch.context() as patch:
        fail_call(patch, "punch", errno.EPERM)
        rig.driver.unmap(rig.at(4))
    assert rig.driver.physical().booked_bytes == 5 * rig.granule
    assert not is_readable(rig.at(4))

    rig.loose = rig.driver.create(rig.granule)

    assert rig.driver.physical().booked_bytes == 4 * rig.granule
    assert rig.driver.physical().measured_bytes == 4 * rig.granule
