"""Measuring a driver: medians on a clock that is given, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import pytest

from actors.arena.costs import measure
from actors.arena.driver import Access, Handle, Span, Ticket
from actors.arena.driver_host import HostVmmDriver
from codec.errors import VmmBusy, VmmDriverError, VmmError, VmmMisaligned, VmmOutOfMemory
from tests.suites.faulty_driver import FaultyDriver

GRANULE = 64 << 10


class SlowDriver(HostVmmDriver):
    """Each verb takes a time of its own on a clock of the driver's, and more every time."""

    def __init__(self) -> None:
        super().__init__(4 * GRANULE, GRANULE)
        self.now_s = 0.0
        self.devices: list[Sequence[int]] = []
        #: Calls of each verb, to make the first ones slow.
        self.calls: dict[str, Iterator[int]] = {}

    def clock(self) -> float:
        """Time as the verbs make it pass."""
        return self.now_s

    def take(self, verb: str, least_us: float) -> None:
        """Let time pass: long at the first call, then a little longer each time."""
        index = next(self.calls.setdefault(verb, count()))
        self.now_s += (1e6 if index == 0 else least_us + index) / 1e6

    def create(self, nbytes: int) -> Handle:
        """See `HostVmmDriver.create`."""
        self.take("create", 100)
        return super().create(nbytes)

    def release(self, handle: Handle) -> None:
        """See `HostVmmDriver.release`."""
        self.take("release", 200)
        super().release(handle)

    def map(self, va: int, handle: Handle) -> None:
        """See `HostVmmDriver.map`."""
        self.take("map", 300)
        super().map(va, handle)

    def unmap(self, va: int) -> None:
        """See `HostVmmDriver.unmap`."""
        self.take("unmap", 400)
        super().unmap(va)

    def set_access(
        self, spans: Sequence[Span], access: Access, devices: Sequence[int] = ()
    ) -> None:
        """See `HostVmmDriver.set_access`; any devices will do."""
        self.take("access", 500)
        self.devices.append(devices)
        super().set_access(spans, access)

    def copy_in(self, va: int, data: bytes | bytearray | memoryview) -> None:
        """See `HostVmmDriver.copy_in`; belongs to no verb."""
        self.take("copy_in", 9000)
        super().copy_in(va, data)

    def wait(self, ticket: Ticket, timeout_s: float) -> bool:
        """See `HostVmmDriver.wait`."""
        self.take("sync", 600)
        return super().wait(ticket, timeout_s)


def assert_bare(driver: HostVmmDriver) -> None:
    """Neither memory nor addresses are taken: the whole budget can be had again."""
    assert driver.physical().booked_bytes == driver.physical().measured_bytes == 0
    assert not list(driver._ledger.reservations)
    driver.check()


def test_costs_are_medians_of_rounds_after_the_first() -> None:
    """Five rounds after a slow one: the median is the third, 3 us above the least."""
    driver = SlowDriver()

    costs = measure(driver, 2 * GRANULE, repeats=5, clock=driver.clock)

    assert (costs.kind, costs.extent_bytes, costs.num_devices) == ("host", 2 * GRANULE, 1)
    assert costs.create_us == pytest.approx(103)
    assert costs.release_us == pytest.approx(203)
    assert costs.map_us == pytest.approx(303)
    assert costs.unmap_us == pytest.approx(403)
    assert costs.access_us == pytest.approx(503)
    assert costs.sync_us == pytest.approx(603)
    assert_bare(driver)
    driver.close()


def test_memory_is_touched_throughout_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that were never there are unmapped and released for nothing."""
    driver = HostVmmDriver(4 * GRANULE, GRANULE)
    touched: list[tuple[int, bool]] = []

    def touch(va: int, data: bytes) -> None:
        HostVmmDriver.copy_in(driver, va, data)
        touched.append((len(data), driver.physical().booked_bytes == len(data)))

    monkeypatch.setattr(driver, "copy_in", touch)

    measure(driver, 2 * GRANULE, repeats=3)

    assert touched == [(2 * GRANULE, True)] * 4
    driver.close()


def test_access_is_per_device() -> None:
    """Three devices get it in one call, a third of which is each one's."""
    driver = SlowDriver()

    costs = measure(driver, GRANULE, repeats=1, devices=(0, 1, 2), clock=driver.clock)

    assert costs.num_devices == 3
    assert costs.access_us == pytest.approx(501 / 3)
    assert costs.num_devices * costs.access_us == pytest.approx(501)
    assert driver.devices == [(0, 1, 2)] * 2
    driver.close()


def test_a_real_driver_is_measured_and_left_bare() -> None:
    """Each verb took some time, and was called once a round."""
    driver = HostVmmDriver(4 * GRANULE, GRANULE)

    costs = measure(driver, GRANULE, repeats=3)

    for verb in ("create", "release", "map", "unmap", "access", "sync"):
        assert getattr(costs, f"{verb}_us") > 0
    assert {driver.stats()[verb].num_calls for verb in ("create", "map", "unmap")} == {4}
    assert_bare(driver)
    driver.close()


@pytest.mark.parametrize("verb", ["create", "map", "set_access", "unmap", "release"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_verb_that_fails_leaves_nothing_behind(verb: str, after: int) -> None:
    """In the first round or a later one; the caller sees the driver's own error."""
    driver = FaultyDriver(4 * GRANULE, GRANULE)
    driver.fail(verb, after=after)

    with pytest.raises(VmmDriverError, match=verb):
        measure(driver, GRANULE, repeats=3)

    assert not driver.has_faults
    assert_bare(driver)
    driver.close()


def test_a_device_that_does_not_get_done_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of a hanging device would be fiction."""
    driver = HostVmmDriver(4 * GRANULE, GRANULE)
    monkeypatch.setattr(driver, "wait", lambda *_: False)

    with pytest.raises(VmmBusy, match="the device"):
        measure(driver, GRANULE)

    assert_bare(driver)
    driver.close()


@pytest.mark.parametrize(
    ("extent_bytes", "error"),
    [(GRANULE + 1, VmmMisaligned), (0, VmmMisaligned), (8 * GRANULE, VmmOutOfMemory)],
)
def test_an_extent_that_the_driver_cannot_make_is_refused(
    extent_bytes: int, error: type[VmmError]
) -> None:
    """By the driver, and nothing is left of it."""
    driver = HostVmmDriver(4 * GRANULE, GRANULE)

    with pytest.raises(error):
        measure(driver, extent_bytes)

    assert_bare(driver)
    driver.close()


@pytest.mark.parametrize("repeats", [0, -1])
def test_no_rounds_are_refused(repeats: int) -> None:
    """There is no median of nothing; the driver is not touched."""
    driver = HostVmmDriver(4 * GRANULE, GRANULE)

    with pytest.raises(ValueError, match=f"repeats must be at least 1, got {repeats}"):
        measure(driver, GRANULE, repeats=repeats)

    assert not driver.stats()
    driver.close()
