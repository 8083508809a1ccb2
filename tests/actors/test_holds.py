"""`Pin` and `Incoming`: each ends once, and no way of losing one leaks."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from actors.arena.arena import Arena, Lease
from actors.arena.driver_host import HostVmmDriver
from actors.arena.syscalls import PAGE_BYTES
from actors.holds import Incoming, Pin
from codec.errors import StaleLeaseError
from policies.residency.events import Placement
from tests.suites.blobs import codec_of, key_of
from tests.suites.probes import run_in_threads

PLACEMENT = Placement(key_of(1), codec_of(), "node", "host", 10, 100, 1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    """A small arena that nothing pins after the test."""
    driver = HostVmmDriver(16 * PAGE_BYTES, PAGE_BYTES)
    arena = Arena(driver, capacity_bytes=16 * PAGE_BYTES, extent_bytes=4 * PAGE_BYTES)
    yield arena
    arena.check()
    arena.close()
    driver.close()


@pytest.fixture
def pin(arena: Arena) -> Iterator[Pin]:
    """A pin on ten bytes whose lease has ended."""
    lease = arena.reserve(10)
    arena.view(lease)[:] = b"0123456789"
    pin = Pin(arena, lease, PLACEMENT)
    arena.release(lease)
    yield pin
    pin.release()


class Publisher:
    """Notes what is published."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []

    def __call__(self, lease: Lease) -> Placement:
        """Publish ``lease``."""
        self.leases.append(lease)
        return PLACEMENT


def test_a_pin_reads_and_cannot_write(pin: Pin) -> None:
    """Others read the same bytes."""
    assert bytes(pin.view) == b"0123456789"
    with pytest.raises(TypeError, match="read-only"):
        pin.view[0] = 1
    assert pin.placement is PLACEMENT


def test_leaving_the_context_lets_go(arena: Arena, pin: Pin) -> None:
    """Also when it is left by an error; afterwards the view is refused."""
    with pytest.raises(KeyError), pin:
        raise KeyError("anything")

    with pytest.raises(StaleLeaseError):
        pin.view  # noqa: B018 - the access is the act
    assert arena.stat().used_bytes == 0
    pin.release()


def test_a_view_taken_from_a_pin_ends_with_it(pin: Pin) -> None:
    """Else a reader would not notice that it reads without a pin."""
    view = pin.view
    pin.release()

    with pytest.raises(ValueError, match="released"):
        bytes(view)


def test_an_array_made_from_a_pin_outlives_it(arena: Arena, pin: Pin) -> None:
    """A codec may return tensors over the arena itself."""
    array = np.frombuffer(pin.view, np.uint8)
    pin.release()

    assert array.tobytes() == b"0123456789"
    assert arena.stat().num_dead_leases == 1
    del array
    assert arena.stat().used_bytes == 0


def test_a_dropped_pin_lets_go(arena: Arena) -> None:
    """Forgetting to release costs nothing once it is garbage."""
    lease = arena.reserve(10)
    pin = Pin(arena, lease, PLACEMENT)
    arena.release(lease)
    assert arena.stat().num_pins == 1

    del pin

    assert arena.stat().used_bytes == 0


def test_commit_publishes_once(arena: Arena) -> None:
    """What ended cannot end again, nor be written by way of its view."""
    publish = Publisher()
    incoming = Incoming(arena, arena.reserve(10), publish)
    view = incoming.view
    view[:] = b"0123456789"

    assert incoming.commit() is PLACEMENT
    incoming.abort()

    with pytest.raises(StaleLeaseError):
        incoming.commit()
    with pytest.raises(StaleLeaseError):
        incoming.view  # noqa: B018 - the access is the act
    with pytest.raises(ValueError, match="released"):
        view[0] = 0
    assert len(publish.leases) == 1
    assert bytes(arena.view(publish.leases[0])) == b"0123456789"


def test_abort_gives_the_room_back(arena: Arena) -> None:
    """And publishes nothing, ever."""
    publish = Publisher()
    incoming = Incoming(arena, arena.reserve(10), publish)

    incoming.abort()
    incoming.abort()

    with pytest.raises(StaleLeaseError):
        incoming.commit()
    assert publish.leases == []
    assert arena.stat().used_bytes == 0


def test_a_context_aborts_unless_committed(arena: Arena) -> None:
    """Whatever goes wrong in a transfer, its room is not lost."""
    publish = Publisher()
    with pytest.raises(ConnectionError), Incoming(arena, arena.reserve(10), publish):
        raise ConnectionError
    assert arena.stat().used_bytes == 0

    with Incoming(arena, arena.reserve(10), publish) as incoming:
        incoming.commit()

    assert arena.stat().num_leases == len(publish.leases) == 1


def test_a_dropped_incoming_gives_the_room_back(arena: Arena) -> None:
    """A task that was cancelled without a word does not leak, also as cyclic garbage."""
    incoming = Incoming(arena, arena.reserve(10), Publisher())
    incoming.loop = incoming  # type: ignore[attr-defined]  # a cycle
    del incoming
    gc.collect()

    assert arena.stat().used_bytes == 0


def test_a_buffer_that_is_still_written_keeps_its_bytes(arena: Arena) -> None:
    """Nobody else gets them, so that a late write harms nobody."""
    incoming = Incoming(arena, arena.reserve(10), Publisher())
    late = np.frombuffer(incoming.view, np.uint8)
    incoming.abort()

    late[:] = 1

    assert arena.stat().num_dead_leases == 1
    assert arena.reserve(10).offset_bytes != 0


def test_only_one_of_many_commits_wins(arena: Arena) -> None:
    """Two threads that both think they finished the transfer do not publish twice."""
    publish = Publisher()
    incoming = Incoming(arena, arena.reserve(10), publish)
    refused: list[StaleLeaseError] = []

    def end(_: int) -> None:
        try:
            incoming.commit()
        except StaleLeaseError as error:
            refused.append(error)

    run_in_threads(end, 4)

    assert (len(publish.leases), len(refused)) == (1, 3)
