"""Replays on a driver do what the simulation says, and count what they did."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.arena.bench.gate_replay import replay
from actors.arena.driver import Driver
from actors.arena.driver_host import HostVmmDriver
from actors.arena.syscalls import PAGE_BYTES
from codec.errors import VmmDriverError
from policies.vmm_gate import MemoryPrice, UnitCosts
from policies.vmm_simulate import POLICIES, Policy, simulate
from policies.vmm_workloads import Trace
from tests.policies.vmm_samples import trace, traces
from tests.suites.faulty_driver import FaultyDriver
from tests.suites.quiet import QUIET

COSTS = UnitCosts(
    kind="host",
    extent_bytes=PAGE_BYTES,
    create_us=100,
    release_us=40,
    map_us=10,
    unmap_us=20,
    access_us=5,
)
"""A release is worth 140 us more than a steal."""


def ticks() -> Callable[[], float]:
    """A clock that goes on by a microsecond whenever it is looked at."""
    steps = count()
    return lambda: next(steps) / 1e6


def rent(us_per_s: float) -> MemoryPrice:
    """The price at which an extent costs that."""
    return MemoryPrice(us_per_s / PAGE_BYTES)


class Drivers:
    """Makes drivers and remembers them."""

    def __init__(self, make: Callable[[int, int], HostVmmDriver] = HostVmmDriver) -> None:
        self._make = make
        self.made: list[HostVmmDriver] = []

    def __call__(self, capacity_bytes: int, granule_bytes: int) -> Driver:
        """One more."""
        self.made.append(self._make(capacity_bytes, granule_bytes))
        return self.made[-1]


@given(
    sample=traces(),
    policy=st.sampled_from(POLICIES),
    rent_us=st.sampled_from([0.0, 20.0, 70.0, 300.0]),
)
@settings(QUIET, max_examples=100)
def test_a_replay_does_what_the_simulation_says(
    sample: Trace, policy: Policy, rent_us: float
) -> None:
    """Verb for verb and byte for byte; only the time is the driver's own."""
    price = rent(rent_us)
    expected = simulate(sample, policy, COSTS, price)

    found = replay(HostVmmDriver, sample, policy, COSTS, price, clock=ticks()).outcome

    assert found.num_creates == expected.num_creates
    assert found.num_releases == expected.num_releases
    assert found.num_steals == expected.num_steals
    assert found.byte_seconds == pytest.approx(expected.byte_seconds)
    assert found.mean_bytes == pytest.approx(expected.mean_bytes)
    assert found.peak_bytes == expected.peak_bytes


@pytest.mark.parametrize(
    ("policy", "driver_us", "touch_us"),
    [("eager", 5, 3), ("lazy", 3, 3), ("static", 1, 1)],
)
def test_a_step_takes_the_time_between_two_looks_at_the_clock(
    policy: Policy, driver_us: float, touch_us: float
) -> None:
    """Three lives one after the other: a birth or a death is a step, and so is a touch.

    The last death comes at the horizon, and the eager policy releases for that too.
    """
    sample = trace((0, 1), (2, 3), (4, 5), horizon_s=6)

    found = replay(HostVmmDriver, sample, policy, COSTS, rent(0), clock=ticks())

    assert found.workload == "sample"
    assert found.outcome.driver_us == pytest.approx(driver_us + (policy == "eager"))
    assert found.touch_us == pytest.approx(touch_us)


def test_the_total_has_time_and_memory_but_not_touching() -> None:
    """Touching is the host's own trouble."""
    sample = trace((0, 1), (2, 3))

    found = replay(HostVmmDriver, sample, "lazy", COSTS, rent(0), clock=ticks())

    assert found.total_us(rent(7)) == pytest.approx(2 + 7 * 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_driver_is_new_and_closed_afterwards(policy: Policy) -> None:
    """Its budget is what the policy may need: the peak, or the pool."""
    drivers = Drivers()

    replay(drivers, trace((0, 1), (0, 2), (3, 4)), policy, COSTS, rent(70), headroom=2.0)

    (driver,) = drivers.made
    assert driver._gate.is_closed


@pytest.mark.parametrize("verb", ["create", "map", "set_access", "unmap", "release"])
def test_the_driver_is_closed_also_if_it_fails(verb: str) -> None:
    """The error is the driver's, and its memory is given back."""

    def faulty(capacity_bytes: int, granule_bytes: int) -> HostVmmDriver:
        driver = FaultyDriver(capacity_bytes, granule_bytes)
        driver.fail(verb)
        return driver

    drivers = Drivers(faulty)

    with pytest.raises(VmmDriverError, match=verb):
        replay(drivers, trace((0, 1), (2, 3)), "eager", COSTS, rent(1))

    assert drivers.made[0]._gate.is_closed
