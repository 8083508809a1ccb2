"""`CudaVmmDriver` when any one call of the driver fails: nothing is lost, nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from actors.arena.calls_cuda import CudaCalls
from actors.arena.driver import Access
from actors.arena.driver_cuda import CudaVmmDriver
from codec.errors import VmmDriverError, VmmError, VmmNotShared
from tests.fakes.cuda_fake import FakeCuda, fake_cuda
from tests.suites.driver_contract import CAPACITY_GRANULES, Rig, hand_over

GRANULE = 1 << 16
OUT_OF_MEMORY, UNKNOWN = 2, 999


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """The stand-in, in which nothing lives before or after the test."""
    fake = fake_cuda()
    fake.size(GRANULE)
    assert not any(fake.live().values())
    yield fake
    fake.heal()
    assert not any(fake.live().values())


@pytest.fixture
def rig(fake: FakeCuda) -> Iterator[Rig]:
    """A driver at work, which can end all of it after the test."""
    driver = CudaVmmDriver(0, capacity_bytes=CAPACITY_GRANULES * GRANULE)
    rig = Rig.build(driver)
    yield rig
    fake.heal()
    rig.undo()
    assert driver.physical().booked_bytes == 0
    driver.check()
    driver.close()


def create(rig: Rig) -> Callable[[], object]:
    """Commit memory."""
    handle = rig.driver.create(2 * GRANULE)
    return lambda: rig.driver.release(handle)


def reserve(rig: Rig) -> Callable[[], object]:
    """Take addresses."""
    va = rig.driver.reserve(GRANULE)
    return lambda: rig.driver.free_va(va, GRANULE)


def map_(rig: Rig) -> Callable[[], object]:
    """Map memory."""
    rig.driver.map(rig.at(4), rig.loose)
    return lambda: rig.driver.unmap(rig.at(4))


def open_two(rig: Rig) -> Callable[[], object]:
    """Open two mappings for two devices."""
    rig.driver.set_access([rig.span(2, 1), rig.span(14, 1)], Access.READ, devices=(0, 1))
    close = [rig.span(2, 1), rig.span(14, 1)]
    return lambda: rig.driver.set_access(close, Access.NONE, devices=(0, 1))


def borrow(rig: Rig) -> Callable[[], object]:
    """Export and import."""
    lent = hand_over(rig.driver, rig.pair, rig.driver)
    return lambda: rig.driver.release(lent)


def record(rig: Rig) -> Callable[[], object]:
    """Have a ticket."""
    ticket = rig.driver.record()
    return lambda: rig.driver.done(ticket)


def copy_in(rig: Rig) -> Callable[[], object]:
    """Write what is there already."""
    rig.driver.copy_in(rig.base, b"kept")
    return lambda: None


def copy_out(rig: Rig) -> Callable[[], object]:
    """Read."""
    rig.driver.copy_out(rig.base, 4)
    return lambda: None


#: Verbs that take, and the calls that each of them makes.
TAKING = {
    create: (
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemsetD8Async",
        "cuStreamSynchronize",
        "cuMemUnmap",
        "cuMemAddressFree",
        "cuCtxGetCurrent",
    ),
    reserve: ("cuMemAddressReserve",),
    map_: ("cuMemMap",),
    open_two: ("cuMemSetAccess",),
    borrow: (
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemUnmap",
        "cuMemAddressFree",
    ),
    record: ("cuEventCreate", "cuEventRecord", "cuCtxGetCurrent"),
    copy_in: ("cuMemcpyHtoD", "cuStreamSynchronize", "cuCtxGetCurrent"),
    copy_out: ("cuMemcpyDtoH", "cuCtxGetCurrent"),
}
CASES = [(verb, function) for verb, functions in TAKING.items() for function in functions]


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, UNKNOWN])
@pytest.mark.parametrize(("verb", "function"), CASES)
def test_what_fails_leaves_nothing(
    rig: Rig, fake: FakeCuda, verb: Callable[[Rig], Callable[[], object]], function: str, code: int
) -> None:
    """Each call of each verb fails once: the next verb that commits finds all as it was."""
    state, live = rig.state(), fake.live()
    number = 0
    while True:
        number += 1
        fake.fail(function, number, code)
        undo = attempt(rig, verb)
        was_reached = not fake.has_fault
        fake.heal()
        undo()
        # What could not be undone is, before anything is committed.
        rig.driver.release(rig.driver.create(GRANULE))

        assert rig.state() == state
        assert fake.live() == live
        if not was_reached:
            break
    assert number > 1


def attempt(rig: Rig, verb: Callable[[Rig], Callable[[], object]]) -> Callable[[], object]:
    """Call ``verb``; how to undo it, which is nothing if it was refused."""
    try:
        return verb(rig)
    except VmmError:
        return lambda: None


@pytest.mark.parametrize(
    ("function", "verb"),
    [
        ("cuMemRelease", lambda r: r.driver.release(r.loose)),
        ("cuMemUnmap", lambda r: r.driver.unmap(r.base)),
        ("cuMemAddressFree", lambda r: r.driver.free_va(*r.freed)),
        ("cuMemMap", lambda r: r.driver.map(r.at(4), r.loose)),
        ("cuMemSetAccess", lambda r: r.driver.set_access([r.span(2, 1)], Access.READ)),
        ("cuEventRecord", lambda r: r.driver.record()),
        ("cuMemExportToShareableHandle", lambda r: r.driver.export(r.pair)),
    ],
)
def test_a_failing_call_is_named_and_changes_nothing(
    rig: Rig, fake: FakeCuda, function: str, verb: Callable[[Rig], object]
) -> None:
    """With the code that the driver answered."""
    rig.freed = rig.freed._replace(va=rig.driver.reserve(GRANULE))
    state, live = rig.state(), fake.live()
    fake.fail(function, 1, UNKNOWN)

    with pytest.raises(VmmDriverError) as caught:
        verb(rig)

    assert (caught.value.call, caught.value.code) == (function, UNKNOWN)
    assert rig.state() == state
    assert fake.live() == live
    rig.driver.free_va(*rig.freed)


@pytest.mark.parametrize(
    "function",
    [
        "cuDevicePrimaryCtxRetain",
        "cuCtxGetCurrent",
        "cuStreamCreate",
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemRelease",
    ],
)
def test_a_driver_that_cannot_be_made_leaves_nothing(fake: FakeCuda, function: str) -> None:
    """No context stays retained, which would keep the device from others."""
    number = 0
    while True:
        number += 1
        fake.fail(function, number, UNKNOWN)
        try:
            driver = CudaVmmDriver(0, capacity_bytes=GRANULE)
        except VmmError:
            assert not any(fake.live().values())
            continue
        was_reached = not fake.has_fault
        fake.heal()
        driver.close()
        if not was_reached:
            break
    assert number > 1


def test_memory_that_cannot_be_released_stays_booked(rig: Rig, fake: FakeCuda) -> None:
    """An unmap that worked is not undone for it; a later verb gives the bytes back."""
    rig.driver.map(rig.at(4), rig.loose)
    rig.driver.release(rig.loose)
    fake.fail("cuMemRelease", 1, UNKNOWN)
    rig.driver.unmap(rig.at(4))
    assert rig.driver.physical().booked_bytes == 5 * GRANULE

    rig.loose = rig.driver.create(GRANULE)

    assert rig.driver.physical().booked_bytes == 4 * GRANULE


def test_addresses_wait_for_the_mapping_in_them(rig: Rig, fake: FakeCuda) -> None:
    """Where the scratch mapping cannot be undone, its addresses are not given back either."""
    before = fake.calls("cuMemAddressFree")
    live = fake.live()
    fake.fail("cuMemUnmap", 1, UNKNOWN)

    handle = rig.driver.create(GRANULE)

    # Tried once more with the next debt, in order: unmapped first, then freed.
    assert fake.calls("cuMemAddressFree") == before + 1
    rig.driver.release(handle)
    assert fake.live() == live


def test_an_event_that_cannot_be_destroyed_does_not_undo_its_ticket(
    rig: Rig, fake: FakeCuda
) -> None:
    """The work is done; the event goes with the next verb that commits."""
    live = fake.live()
    ticket = rig.driver.record()
    fake.fail("cuEventDestroy", 1, UNKNOWN)

    assert rig.driver.done(ticket)

    assert fake.live() != live
    rig.driver.release(rig.driver.create(GRANULE))
    assert fake.live() == live


def test_what_cannot_be_mapped_was_not_what_it_said(rig: Rig, fake: FakeCuda) -> None:
    """A refusal of the trial mapping is the share's fault, in the importer's words."""
    fake.fail("cuMemMap", 1, 1)

    with pytest.raises(VmmNotShared, match="cuMemMap"):
        hand_over(rig.driver, rig.pair, rig.driver)


def test_what_cannot_be_given_back_on_closing_is_left_and_the_rest_is_not(
    fake: FakeCuda,
) -> None:
    """One refusal costs one thing; the mapping that stays keeps its memory and addresses."""
    driver = CudaVmmDriver(0, capacity_bytes=CAPACITY_GRANULES * GRANULE)
    rig = Rig.build(driver)
    fake.fail("cuMemUnmap", 1, UNKNOWN)

    driver.close()

    live = fake.live()
    assert (live["maps"], live["handles"], live["reservations"]) == (1, 0, 1)
    assert (live["contexts"], live["streams"]) == (0, 0)
    call = CudaCalls()
    call("cuMemUnmap", rig.base, 2 * GRANULE)
    call("cuMemAddressFree", rig.base, 16 * GRANULE)
