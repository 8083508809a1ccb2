"""Workloads of memory: when extents are born and when they die, seeded, in model time.

Requests arrive, grow by one extent after another, and end with all their extents at
once, as decoding does.  Each extent is born at addresses of its own.

`Trace.idle_periods` tells how long memory lies idle if each birth takes the memory of the
youngest death: then the ``n``-th piece of memory is idle from each moment at which fewer
than ``n`` extents live until there are ``n`` again, whatever their order of birth.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import cos, inf, pi
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Life(NamedTuple):
    """One extent, in use from birth to death."""

    birth_s: float
    death_s: float


class Event(NamedTuple):
    """A birth or a death; deaths come before births of the same time."""

    time_s: float
    is_birth: bool
    life: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Extents that are born and die between 0 and the horizon."""

    name: str
    lives: tuple[Life, ...]
    horizon_s: float

    def __post_init__(self) -> None:
        if not self.lives:
            raise ValueError("need at least one life, got none")
        for life in self.lives:
            if not 0 <= life.birth_s < life.death_s <= self.horizon_s < inf:
                raise ValueError(f"need 0 <= birth < death <= {self.horizon_s}, got {life}")

    @property
    def live_s(self) -> float:
        """Extent-seconds in use."""
        return sum(life.death_s - life.birth_s for life in self.lives)

    @property
    def peak(self) -> int:
        """Most extents in use at once."""
        return int(self._depths()[1].max())

    def events(self) -> list[Event]:
        """Births and deaths in the order of time."""
        births = [Event(life.birth_s, True, i) for i, life in enumerate(self.lives)]
        deaths = [Event(life.death_s, False, i) for i, life in enumerate(self.lives)]
        return sorted(births + deaths)

    def idle_periods(self) -> Floats:
        """For each life, how long its memory is idle afterwards; infinite if for ever.

        Of one moment's deaths the last to be taken note of is the first to be used again.
        """
        events, depths = self._depths()
        times = np.array([event.time_s for event in events])
        order = np.lexsort((np.arange(len(events)), depths))
        idle_s = np.full(len(self.lives), inf)
        # At one depth, births and deaths take turns, and the first is a birth.
        for here, after in zip(order[1::2], [*order[2::2], None], strict=False):
            if after is not None and depths[after] == depths[here]:
                idle_s[events[here].life] = times[after] - times[here]
        return idle_s

    def _depths(self) -> tuple[list[Event], npt.NDArray[np.int64]]:
        """Events, and how many extents live with each: its own counts."""
        events = self.events()
        steps = np.array([1 if event.is_birth else -1 for event in events])
        deaths = np.array([not event.is_birth for event in events])
        return events, np.cumsum(steps) + deaths


def steady(seed: int, *, num_requests: int) -> Trace:
    """Requests at a constant rate: two a second."""
    source = random.Random(f"steady {seed}")
    arrivals = accumulate(source.expovariate(2.0) for _ in range(num_requests))
    return _requests("steady", source, arrivals)


def bursts(seed: int, *, num_requests: int) -> Trace:
    """Sixteen requests within two seconds, then a lull of ten to thirty."""
    source = random.Random(f"bursts {seed}")
    arrivals: list[float] = []
    start_s = 0.0
    while len(arrivals) < num_requests:
        arrivals += [start_s + source.uniform(0, 2) for _ in range(16)]
        start_s += 2 + source.uniform(10, 30)
    return _requests("bursts", source, sorted(arrivals)[:num_requests])


def diurnal(seed: int, *, num_requests: int, period_s: float = 60.0) -> Trace:
    """A rate that swings between night and day; one request in eight is a long document."""
    source = random.Random(f"diurnal {seed}")
    arrivals: list[float] = []
    time_s = 0.0
    while len(arrivals) < num_requests:
        time_s += source.expovariate(4.0)
        day = 0.5 - 0.5 * cos(2 * pi * time_s / period_s)
        if source.random() < day**2:
            arrivals.append(time_s)
    return _requests("diurnal", source, arrivals, documents=0.125)


def spiteful(idle_s: float, *, num_lives: int) -> Trace:
    """One extent that always comes back after ``idle_s``: just when it was given back.

    With a period a little longer than that after which a gate releases, no workload is
    worse for it.
    """
    period_s = 1 + idle_s
    lives = tuple(Life(i * period_s, i * period_s + 1) for i in range(num_lives))
    return Trace("spiteful", lives, lives[-1].death_s)


def standard_traces(seed: int, *, num_requests: int) -> Mapping[str, Trace]:
    """The three seeded workloads, by name."""
    traces = [make(seed, num_requests=num_requests) for make in (steady, bursts, diurnal)]
    return {trace.name: trace for trace in traces}


def _requests(
    name: str, source: random.Random, arrivals: Iterable[float], *, documents: float = 0.0
) -> Trace:
    """Requests of about four extents in about three seconds; documents are four times both."""
    lives: list[Life] = []
    for time_s in arrivals:
        scale = 4 if source.random() < documents else 1
        num_extents = 1 + int(source.expovariate(1 / (3 * scale)))
        length_s = scale * (0.5 + source.expovariate(1 / 2.5))
        births = (time_s + length_s * i / num_extents for i in range(num_extents))
        lives += [Life(birth_s, time_s + length_s) for birth_s in births]
    return Trace(name, tuple(lives), max(life.death_s for life in lives))
