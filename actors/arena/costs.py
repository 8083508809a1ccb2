"""Measure what a driver's verbs cost, for `policies.vmm_gate` to decide by.

One extent is taken, touched and given back a few times; each verb's cost is its median.
Memory is touched since unmapping and releasing pages that were never there is cheap, and
tells nothing.  What the touching itself costs (page faults, on ordinary memory) is not a
verb's and is not counted.  Waiting is measured on a device that does nothing: an idle
device's answer, not the time that work in flight will take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import ParamSpec, TypeVar

from actors.arena.driver import Access, Driver, Handle, Span
from codec.errors import VmmBusy
from policies.vmm_gate import UnitCosts

SYNC_TIMEOUT_S = 10.0
"""How long to wait for an idle device; far longer than it takes."""

P = ParamSpec("P")
R = TypeVar("R")


def measure(
    driver: Driver,
    extent_bytes: int,
    *,
    repeats: int = 8,
    devices: Sequence[int] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> UnitCosts:
    """Measure every verb on ``driver``, and leave nothing behind, even if a verb fails.

    A first round that is not counted warms up what is made once.

    Parameters
    ----------
    devices
        Devices to give access to, if not only the driver's own.
    clock
        Seconds, from any start.

    Raises
    ------
    ValueError
        If ``repeats`` is less than 1.
    VmmError
        If the driver refuses.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    va = driver.reserve(extent_bytes)
    try:
        probe = _Probe(driver, Span(va, extent_bytes), devices, clock)
        probe.cycle()
        probe.samples_us.clear()
        for _ in range(repeats):
            probe.cycle()
    finally:
        driver.free_va(va, extent_bytes)
    costs = {f"{verb}_us": median(samples) for verb, samples in probe.samples_us.items()}
    num_devices = max(1, len(devices))
    costs["access_us"] /= num_devices
    return UnitCosts(
        kind=driver.caps().kind, extent_bytes=extent_bytes, num_devices=num_devices, **costs
    )


class _Probe:
    """Times every verb on one span, which is bare between cycles."""

    def __init__(
        self, driver: Driver, span: Span, devices: Sequence[int], clock: Callable[[], float]
    ) -> None:
        self._driver = driver
        self._span = span
        self._devices = devices
        self._clock = clock
        self._filling = bytes(span.nbytes)
        #: Of each verb, as many as there were whole cycles.
        self.samples_us: dict[str, list[float]] = {}

    def cycle(self) -> None:
        """Take, use and give back one extent; what fails to be given back is tried once more."""
        handle = self._time("create", self._driver.create, self._span.nbytes)
        with ExitStack() as undo:
            undo.callback(self._driver.release, handle)
            self._use(handle)
            self._time("release", self._driver.release, handle)
            undo.pop_all()

    def _use(self, handle: Handle) -> None:
        """Map, touch and unmap it."""
        driver, span = self._driver, self._span
        self._time("map", driver.map, span.va, handle)
        with ExitStack() as undo:
            undo.callback(driver.unmap, span.va)
            self._time("access", driver.set_access, [span], Access.READ_WRITE, self._devices)
            driver.copy_in(span.va, self._filling)
            self._time("sync", self._sync)
            self._time("unmap", driver.unmap, span.va)
            undo.pop_all()

    def _sync(self) -> None:
        if not self._driver.wait(self._driver.record(), SYNC_TIMEOUT_S):
            raise VmmBusy("the device", f"its work did not end within {SYNC_TIMEOUT_S} s")

    def _time(self, verb: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        start_s = self._clock()
        result = call(*args, **kwargs)
        self.samples_us.setdefault(verb, []).append((self._clock() - start_s) * 1e6)
        return result
