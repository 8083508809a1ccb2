"""`BookedDriver`: waiting, and what it asks of the system it is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.arena.driver import Handle
from actors.arena.driver_booked import BookedDriver
from actors.arena.syscalls import PAGE_BYTES
from actors.arena.system_host import HostSystem
from codec.errors import VmmBusy, VmmError


class SlowSystem(HostSystem):
    """Ordinary memory on which work takes a number of questions."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=8 * PAGE_BYTES, granule_bytes=PAGE_BYTES)
        #: Questions that are still answered with no, by ticket; none means 0.
        self.questions: dict[int, int] = {}
        #: Calls, in order.
        self.calls: list[str] = []

    def is_done(self, serial: int) -> bool:
        """See `System.is_done`."""
        self.calls.append(f"is_done {serial}")
        self.questions[serial] = self.questions.get(serial, 0) - 1
        return self.questions[serial] < 0

    def commit(self, nbytes: int) -> int:
        """See `System.commit`."""
        self.calls.append("commit")
        return super().commit(nbytes)


class Clock:
    """Time that passes only when it is spent."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses_s: list[float] = []

    def __call__(self) -> float:
        """Seconds since any moment."""
        return self.now_s

    def pause(self, seconds: float) -> None:
        """Spend some."""
        self.pauses_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def system() -> SlowSystem:
    """The system below the driver."""
    return SlowSystem()


@pytest.fixture
def clock() -> Clock:
    """The driver's time."""
    return Clock()


@pytest.fixture
def driver(system: SlowSystem, clock: Clock) -> Iterator[BookedDriver]:
    """A driver that closes when all work is done."""
    driver = BookedDriver(system, clock=clock, pause=clock.pause)
    yield driver
    system.questions.clear()
    driver.close()


def test_waiting_ends_with_the_work(driver: BookedDriver, system: SlowSystem, clock: Clock) -> None:
    """It asks, pauses a little longer each time, and asks no more once it is done."""
    ticket = driver.record()
    system.questions[1] = 3

    assert driver.wait(ticket, timeout_s=10)

    assert len(system.calls) == 4
    assert clock.pauses_s == sorted(clock.pauses_s)
    assert len(set(clock.pauses_s)) == 3
    assert driver.done(ticket)
    assert len(system.calls) == 4


def test_waiting_ends_with_the_time(driver: BookedDriver, system: SlowSystem, clock: Clock) -> None:
    """To the moment, with one last question; the ticket can be asked for again."""
    ticket = driver.record()
    system.questions[1] = 10**9

    assert not driver.wait(ticket, timeout_s=0.25)

    assert clock.now_s == pytest.approx(100.25)
    assert max(clock.pauses_s) < 0.01
    system.questions[1] = 0
    assert driver.done(ticket)


def test_without_time_there_is_one_question(
    driver: BookedDriver, system: SlowSystem, clock: Clock
) -> None:
    """And no pause."""
    ticket = driver.record()
    system.questions[1] = 1

    assert not driver.wait(ticket, timeout_s=0)

    assert (len(system.calls), clock.pauses_s) == (1, [])


def test_tickets_end_in_any_order(driver: BookedDriver, system: SlowSystem) -> None:
    """The later one may be done first: they can be of two streams."""
    first, second = driver.record(), driver.record()
    system.questions[1] = 1

    assert (driver.done(second), driver.done(first)) == (True, False)


def test_closing_asks_for_tickets_that_nobody_asked_for(
    driver: BookedDriver, system: SlowSystem
) -> None:
    """Done by then is done; one that is not keeps everything as it is."""
    handle = driver.create(PAGE_BYTES)
    driver.record()
    driver.record()
    system.questions[2] = 1

    with pytest.raises(VmmBusy, match="1 tickets"):
        driver.close()

    driver.release(handle)


def test_what_the_books_refuse_the_system_never_hears(
    driver: BookedDriver, system: SlowSystem
) -> None:
    """There it might be undefined behaviour."""
    for nbytes in (0, -PAGE_BYTES, PAGE_BYTES + 1):
        with pytest.raises(VmmError):
            driver.create(nbytes)
    with pytest.raises(VmmError):
        driver.release(Handle(7))

    assert system.calls == []
