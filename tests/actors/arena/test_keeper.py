"""Idle memory stays as long as the gate says, by a clock that the test turns."""

from __future__ import annotations

import pytest

from actors.arena.arena import Arena
from actors.arena.driver_host import HostVmmDriver
from actors.arena.keeper import Keeper
from policies.vmm_gate import MemoryPrice, UnitCosts

EXTENT = 4096
COSTS = UnitCosts(
    kind="host",
    extent_bytes=EXTENT,
    create_us=500,
    release_us=300,
    map_us=100,
    unmap_us=60,
    access_us=40,
)


class Clock:
    """Says what it was set to."""

    now_s = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


@pytest.mark.parametrize("idle_s", [1.9, 2.0])
def test_memory_is_kept_until_its_rent_is_its_price(idle_s: float) -> None:
    """A cycle costs 800 us more than a steal, and an extent 400 us a second: two seconds."""
    clock = Clock()
    driver = HostVmmDriver(8 * EXTENT, EXTENT)
    arena = Arena(driver, capacity_bytes=8 * EXTENT, extent_bytes=EXTENT, clock=clock)
    keeper = Keeper(arena, COSTS, MemoryPrice(400 / EXTENT))
    arena.release(arena.reserve(2 * EXTENT))
    held = arena.reserve(EXTENT)

    clock.now_s = idle_s

    assert keeper.hold_s == pytest.approx(2.0)
    assert keeper.tidy() == (0 if idle_s < 2 else EXTENT)
    assert driver.physical().measured_bytes == (2 if idle_s < 2 else 1) * EXTENT
    arena.release(held)
    arena.close()
    driver.close()


def test_without_a_price_memory_is_kept_for_ever() -> None:
    """Nobody else wants it."""
    clock = Clock()
    driver = HostVmmDriver(8 * EXTENT, EXTENT)
    arena = Arena(driver, capacity_bytes=8 * EXTENT, extent_bytes=EXTENT, clock=clock)
    keeper = Keeper(arena, COSTS, MemoryPrice(0))
    arena.release(arena.reserve(EXTENT))

    clock.now_s = 1e9

    assert keeper.tidy() == 0
    assert driver.physical().measured_bytes == EXTENT
    arena.close()
    driver.close()
