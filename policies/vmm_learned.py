"""How long to hold an idle extent, learned from how long extents have been idle before.

Ski rental (`policies.vmm_gate`) is the best answer to a future of which nothing is known,
and pays for that: up to twice the optimum, in every period.  Idle periods repeat, though.
So:

1. Births take the memory of the youngest death.  Then the ``n``-th piece of memory is
   idle whenever fewer than ``n`` are in use, and each *depth* ``n`` has its own past: the
   deeper, the longer.
2. The hold that would have been cheapest for the last periods at about this depth is
   what is wanted, if it is shorter than that of ski rental.
3. It is given only as far as the *slack* allows: twice the optimum of all periods that
   have ended, less what they cost, less the most that those still open can take from it.

By 3 the sum of all periods costs at most twice its optimum, whatever happens: the bound
of ski rental, over the sum in place of each single period.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from policies.vmm_gate import MemoryPrice, UnitCosts, release_after_s, rent_us_per_s

NEAR_DEPTHS = 3
"""Periods at depths up to so much less or more count as alike."""

PERIODS_PER_DEPTH = 8
"""How many of the last ones are remembered; fewer in all teach nothing."""

AFTERWARDS = 1.01
"""For how much longer than a past period to hold: none repeats to the instant."""


class _Idle(NamedTuple):
    """Memory of one depth, from a death on."""

    since_s: float
    hold_s: float
    reserve_us: float


class IdleLearner:
    """Follows deaths and births, and says of each death how long to hold its memory.

    It is true to what happens if births take the youngest memory that is still held.
    Holds are such that memory is released in the order of death, the oldest first.

    Parameters
    ----------
    costs, price
        Frozen: a plan with others has a learner of its own.
    """

    def __init__(self, costs: UnitCosts, price: MemoryPrice) -> None:
        self._rent = rent_us_per_s(costs, price)
        self._reuse_us = costs.steal_us
        self._cycle_us = costs.cycle_us
        #: Hold of ski rental; none is longer.
        self._longest_s = release_after_s(costs, price, reuse_us=costs.steal_us)
        #: Depths that are idle, the deepest first; released or not.
        self._idle: list[_Idle] = []
        self._num_in_use = 0
        #: ``{depth: last idle periods}``.
        self._past_s: dict[int, deque[float]] = {}
        #: Never negative.
        self._slack_us = 0.0
        self._now_s = -inf

    def born(self, now_s: float) -> None:
        """Take note that an extent is born: the youngest idle period ends.

        Raises
        ------
        ValueError
            If time goes back.
        """
        self._move_to(now_s)
        self._num_in_use += 1
        if not self._idle:
            return
        entry = self._idle.pop()
        idle_s = now_s - entry.since_s
        past_s = self._past_s.setdefault(self._num_in_use, deque(maxlen=PERIODS_PER_DEPTH))
        past_s.append(idle_s)
        optimum_us = min(self._rent * idle_s + self._reuse_us, self._cycle_us)
        self._slack_us += entry.reserve_us + 2 * optimum_us - self._paid_us(idle_s, entry.hold_s)

    def died(self, now_s: float) -> float:
        """Take note that an extent died; return for how long to hold its memory.

        Raises
        ------
        ValueError
            If time goes back, or nothing lives.
        """
        if not self._num_in_use:
            raise ValueError(f"need a birth before each death, got one more at {now_s}")
        self._move_to(now_s)
        hold_s = self._hold_s(now_s)
        reserve_us = self._reserve_us(hold_s)
        self._slack_us -= reserve_us
        self._idle.append(_Idle(now_s, hold_s, reserve_us))
        self._num_in_use -= 1
        return hold_s

    def check(self) -> None:
        """Assert every invariant."""
        assert self._num_in_use >= 0
        # Up to the rounding of sums.
        assert self._slack_us >= -1e-6 * self._cycle_us
        ends_s = [entry.since_s + entry.hold_s for entry in self._idle]
        assert all(first <= second * (1 + 1e-12) for first, second in pairwise(ends_s))
        assert all(0 <= entry.hold_s <= self._longest_s for entry in self._idle)

    def _move_to(self, now_s: float) -> None:
        if not self._now_s <= now_s < inf:
            raise ValueError(f"need a time from {self._now_s} on, got {now_s}")
        self._now_s = now_s

    def _hold_s(self, now_s: float) -> float:
        longest_s = self._longest_s
        if longest_s == inf:
            return inf
        # What the slack does not pay for is not had.
        least_s = (self._cycle_us - 2 * self._reuse_us - self._slack_us) / self._rent
        if self._idle:
            deeper = self._idle[-1]
            least_s = max(least_s, deeper.hold_s - (now_s - deeper.since_s))
        return min(longest_s, max(least_s, self._wanted_s()))

    def _wanted_s(self) -> float:
        """The hold that would have been the cheapest; that of ski rental if little is known."""
        longest_s = self._longest_s
        depths = range(self._num_in_use - NEAR_DEPTHS, self._num_in_use + NEAR_DEPTHS + 1)
        past_s = [idle_s for depth in depths for idle_s in self._past_s.get(depth, ())]
        if len(past_s) < PERIODS_PER_DEPTH:
            return longest_s
        # Hold nothing, or until just after one of the periods, or as long as may be.
        ends_s = np.sort([0.0, *(idle_s for idle_s in past_s if idle_s < longest_s), longest_s])
        num_longer = len(past_s) - np.arange(len(ends_s))
        num_longer[-1] = len(past_s) - (len(ends_s) - 2)
        held_s = np.cumsum(ends_s)
        held_s[-1] = held_s[-2]
        release_us = self._cycle_us - self._reuse_us
        costs_us = self._rent * held_s + num_longer * (self._rent * ends_s + release_us)
        best = int(costs_us.argmin())
        if costs_us[best] >= costs_us[-1]:
            return longest_s
        return min(longest_s, AFTERWARDS * float(ends_s[best]))

    def _paid_us(self, idle_s: float, hold_s: float) -> float:
        if idle_s >= hold_s:
            return self._rent * hold_s + self._cycle_us
        return self._rent * idle_s + self._reuse_us

    def _reserve_us(self, hold_s: float) -> float:
        """The most by which a period can cost more than twice its optimum: if it ends then."""
        if hold_s == inf:
            return 0.0
        optimum_us = self._rent * hold_s + self._reuse_us
        return max(0.0, self._rent * hold_s + self._cycle_us - 2 * optimum_us)
