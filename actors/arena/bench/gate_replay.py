"""Replay births and deaths on a driver, under a policy: what its verbs really take.

The verbs run as fast as they can and are timed; how long memory is *held* is
counted in the trace's own time, in which a lull of a minute passes at once.  Every extent
is touched throughout after it is mapped, as one that is used would be; that time (page
faults, on ordinary memory) is kept apart, since a device has none.

The policies are those of `policies.vmm_simulate`, where what is not modelled is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from actors.arena.driver import Access, Driver, Handle, Span
from policies.vmm_gate import MemoryPrice, UnitCosts
from policies.vmm_simulate import Outcome, Policy, hold_s
from policies.vmm_workloads import Trace

DriverFactory = Callable[[int, int], Driver]
"""Makes a driver of a capacity and a granule, both in bytes."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one replay took."""

    workload: str
    outcome: Outcome
    """With the driver's time as measured."""

    touch_us: float
    """Writing to extents just mapped."""

    def total_us(self, price: MemoryPrice) -> float:
        """Time of the driver, plus the price of the memory held."""
        return self.outcome.total_us(price)


def replay(
    driver_factory: DriverFactory,
    trace: Trace,
    policy: Policy,
    costs: UnitCosts,
    price: MemoryPrice,
    *,
    headroom: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> ReplayResult:
    """Run ``trace`` on a new driver under ``policy``, and close the driver.

    Parameters
    ----------
    costs
        What the gate decides by, and the size of an extent.
    headroom
        Size of the static pool over the peak of the trace.
    clock
        Seconds, from any start.

    Raises
    ------
    VmmError
        If the driver refuses.
    """
    extent_bytes = costs.extent_bytes
    num_extents = ceil(headroom * trace.peak)
    driver = driver_factory(num_extents * extent_bytes, extent_bytes)
    try:
        verbs = _TimedVerbs(driver, extent_bytes, clock)
        if policy == "static":
            held_s = _run_static(verbs, trace, num_extents)
        else:
            held_s = _run(verbs, trace, hold_s(trace, policy, costs, price).tolist())
    finally:
        driver.close()
    outcome = Outcome(
        policy=policy,
        driver_us=verbs.driver_us,
        byte_seconds=held_s * extent_bytes,
        mean_bytes=held_s * extent_bytes / trace.horizon_s,
        peak_bytes=verbs.peak_bytes,
        num_creates=verbs.num_creates,
        num_releases=verbs.num_releases,
        num_steals=verbs.num_steals,
    )
    return ReplayResult(trace.name, outcome, verbs.touch_us)


class _TimedVerbs:
    """The steps that policies are made of, on one driver."""

    def __init__(self, driver: Driver, extent_bytes: int, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._clock = clock
        self._filling = bytes([1]) * extent_bytes
        self.extent_bytes = extent_bytes
        #: None of these ever falls.
        self.driver_us = self.touch_us = 0.0
        self.num_creates = self.num_releases = self.num_steals = self.peak_bytes = 0
        #: Committed now.
        self._held_bytes = 0

    def reserve(self, num_extents: int) -> int:
        """Addresses for so many extents; not timed, since every policy needs some once."""
        return self._driver.reserve(num_extents * self.extent_bytes)

    def create(self, va: int, num_extents: int = 1) -> Handle:
        """Commit new memory, at ``va``."""
        span = Span(va, num_extents * self.extent_bytes)
        start_s = self._clock()
        handle = self._driver.create(span.nbytes)
        self._enter(span, handle)
        self._driver_took(start_s)
        self.num_creates += num_extents
        self._held_bytes += span.nbytes
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        for offset in range(0, span.nbytes, self.extent_bytes):
            self._touch(va + offset)
        return handle

    def steal(self, source_va: int, va: int, handle: Handle) -> None:
        """Move memory from ``source_va`` to ``va``."""
        start_s = self._clock()
        self._leave(source_va)
        self._enter(Span(va, self.extent_bytes), handle)
        self._driver_took(start_s)
        self.num_steals += 1
        self._touch(va)

    def release(self, va: int, handle: Handle) -> None:
        """Give memory back."""
        start_s = self._clock()
        self._leave(va)
        self._driver.release(handle)
        self._driver_took(start_s)
        self.num_releases += 1
        self._held_bytes -= self.extent_bytes

    def _enter(self, span: Span, handle: Handle) -> None:
        self._driver.map(span.va, handle)
        self._driver.set_access([span], Access.READ_WRITE)

    def _leave(self, va: int) -> None:
        # Work that still reads the memory must end before its addresses do.
        self._driver.wait(self._driver.record(), timeout_s=10.0)
        self._driver.unmap(va)

    def _touch(self, va: int) -> None:
        start_s = self._clock()
        self._driver.copy_in(va, self._filling)
        self.touch_us += (self._clock() - start_s) * 1e6

    def _driver_took(self, start_s: float) -> None:
        self.driver_us += (self._clock() - start_s) * 1e6


@dataclass(frozen=True, slots=True)
class _Idle:
    """Memory whose extent died, still mapped there."""

    va: int
    handle: Handle
    since_s: float
    hold_s: float


def _run(verbs: _TimedVerbs, trace: Trace, holds: list[float]) -> float:
    """Give each life addresses of its own; return the extent-seconds held."""
    base_va = verbs.reserve(len(trace.lives))
    handles: dict[int, Handle] = {}
    #: In the order of death.
    idle: list[_Idle] = []
    held_s = 0.0
    for time_s, is_birth, life in trace.events():
        held_s += _release_due(verbs, idle, time_s)
        va = base_va + life * verbs.extent_bytes
        if not is_birth:
            idle.append(_Idle(va, handles.pop(life), time_s, holds[life]))
            held_s += time_s - trace.lives[life].birth_s
        elif idle:
            youngest = idle.pop()
            held_s += time_s - youngest.since_s
            verbs.steal(youngest.va, va, youngest.handle)
            handles[life] = youngest.handle
        else:
            handles[life] = verbs.create(va)
    held_s += _release_due(verbs, idle, trace.horizon_s)
    return held_s + sum(trace.horizon_s - entry.since_s for entry in idle)


def _release_due(verbs: _TimedVerbs, idle: list[_Idle], now_s: float) -> float:
    """Release what has been idle for as long as it may; return the extent-seconds it was."""
    due = [entry for entry in idle if now_s - entry.since_s >= entry.hold_s]
    for entry in due:
        idle.remove(entry)
        verbs.release(entry.va, entry.handle)
    return sum(entry.hold_s for entry in due)


def _run_static(verbs: _TimedVerbs, trace: Trace, num_extents: int) -> float:
    """Commit and map one pool, from which lives are served without the driver."""
    verbs.create(verbs.reserve(num_extents), num_extents)
    return num_extents * trace.horizon_s
