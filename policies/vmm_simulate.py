"""Policies for idle memory over workloads, in model time: what each costs, and who wins.

A policy is, for each life, how long its memory may be held after its death (`hold_s`):

- ``eager``: not at all.  Unmapped and released at death, committed anew at birth.
- ``lazy``: for ever.  A birth steals it.
- ``gated``: as long as `policies.vmm_gate` says, not knowing the next use.
- ``gated_learned``: the same, or shorter, as `policies.vmm_learned` has learned.
- ``gated_known``: the gate, told when the next use within the trace is.  No other
  choice of times to hold memory is cheaper, but for what is not used again.
- ``static``: one pool of fixed size, committed and mapped once; no verb afterwards.

Each birth has addresses of its own and takes the memory that is idle for the shortest
time.  The total is the driver's time plus the price of all memory held, used or not.

Not modelled: what contiguous views save, page faults, and verbs hidden behind other
work.  The static pool has its size from hindsight, unless it is given headroom: the
other policies get no such help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

import numpy as np

from policies.vmm_gate import MemoryPrice, UnitCosts, release_after_s, rent_us_per_s
from policies.vmm_learned import IdleLearner
from policies.vmm_workloads import Floats, Trace, spiteful, standard_traces

Policy = Literal["eager", "lazy", "gated", "gated_learned", "gated_known", "static"]

POLICIES: tuple[Policy, ...] = ("static", "lazy", "eager", "gated", "gated_learned", "gated_known")
"""All of them, the simpler first."""

COMPETITORS: tuple[Policy, ...] = POLICIES[:-1]
"""Those that do not look ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one policy did and cost on one trace."""

    policy: Policy
    driver_us: float
    byte_seconds: float
    """Memory held, used or not, over time."""

    mean_bytes: float
    peak_bytes: int
    num_creates: int
    num_releases: int
    num_steals: int

    def total_us(self, price: MemoryPrice) -> float:
        """Time of the driver, plus the price of the memory held."""
        return self.driver_us + price.us_per_byte_second * self.byte_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One workload at one price."""

    workload: str
    price: MemoryPrice
    outcomes: Mapping[Policy, Outcome]

    def total_us(self, policy: Policy) -> float:
        """What ``policy`` costs here."""
        return self.outcomes[policy].total_us(self.price)

    @property
    def winner(self) -> Policy:
        """The cheapest without foresight; of equals, the simplest."""
        return min(COMPETITORS, key=self.total_us)

    def loss(self, policy: Policy) -> float:
        """What ``policy`` costs over what the winner does; 1 if it is as good as any."""
        return _ratio(self.total_us(policy), self.total_us(self.winner))


def hold_s(trace: Trace, policy: Policy, costs: UnitCosts, price: MemoryPrice) -> Floats:
    """For each life, how long its memory is held after its death unless it is used again."""
    match policy:
        case "eager":
            return np.zeros(len(trace.lives))
        case "lazy" | "static":
            return np.full(len(trace.lives), inf)
        case "gated_learned":
            return _learned(trace, IdleLearner(costs, price))
    unknown_s = release_after_s(costs, price, reuse_us=costs.steal_us)
    holds = np.full(len(trace.lives), unknown_s)
    if policy == "gated_known":
        # `advise_known_idle`, for all lives at once.  What is never used again within
        # the trace is used some time after it: nothing is known of that.
        idle_s = trace.idle_periods()
        is_known = np.isfinite(idle_s)
        keep_us = rent_us_per_s(costs, price) * idle_s[is_known] + costs.steal_us
        holds[is_known] = np.where(keep_us > costs.cycle_us, 0.0, inf)
    return holds


def simulate(
    trace: Trace, policy: Policy, costs: UnitCosts, price: MemoryPrice, *, headroom: float = 1.0
) -> Outcome:
    """What ``policy`` costs on ``trace``.

    Parameters
    ----------
    headroom
        Size of the static pool over the peak of the trace; at least 1.

    Raises
    ------
    ValueError
        If the pool would be smaller than the peak.
    """
    if not 1 <= headroom < inf:
        raise ValueError(f"headroom must be finite and at least 1, got {headroom}")
    if policy == "static":
        return _static(trace, costs, num_extents=ceil(headroom * trace.peak))
    idle_s = trace.idle_periods()
    deaths_s = np.array([life.death_s for life in trace.lives])
    is_used_again = np.isfinite(idle_s)
    seen_s = np.where(is_used_again, idle_s, trace.horizon_s - deaths_s)
    holds = hold_s(trace, policy, costs, price)
    is_released = seen_s >= holds
    num_steals = int((is_used_again & ~is_released).sum())
    num_creates = len(trace.lives) - num_steals
    num_releases = int(is_released.sum())
    byte_seconds = costs.extent_bytes * (trace.live_s + float(np.minimum(seen_s, holds).sum()))
    return Outcome(
        policy=policy,
        driver_us=num_creates * (costs.create_us + costs.enter_us)
        + num_steals * costs.steal_us
        + num_releases * (costs.leave_us + costs.release_us),
        byte_seconds=byte_seconds,
        mean_bytes=byte_seconds / trace.horizon_s,
        peak_bytes=trace.peak * costs.extent_bytes,
        num_creates=num_creates,
        num_releases=num_releases,
        num_steals=num_steals,
    )


def compare(
    costs: UnitCosts,
    prices: Iterable[MemoryPrice],
    *,
    seed: int = 0,
    num_requests: int = 300,
    headroom: float = 1.0,
) -> list[Row]:
    """Every policy on the standard workloads, and on the gate's worst one, at each price."""
    traces = list(standard_traces(seed, num_requests=num_requests).values())
    rows = []
    for price in prices:
        after_s = release_after_s(costs, price, reuse_us=costs.steal_us)
        worst = [spiteful(1.01 * after_s, num_lives=num_requests)] if after_s < inf else []
        rows += [
            Row(
                workload=trace.name,
                price=price,
                outcomes={
                    policy: simulate(trace, policy, costs, price, headroom=headroom)
                    for policy in POLICIES
                },
            )
            for trace in [*traces, *worst]
        ]
    return rows


def describe(rows: Sequence[Row]) -> str:
    """A table of totals in ms, with the winner and what the gates cost over it."""
    head = f"{'workload':<10}{'us/(byte s)':>12}"
    head += "".join(f"{policy:>14}" for policy in POLICIES)
    head += f"  {'winner':<14}{'gated/winner':>13}{'learned/winner':>15}"
    lines = [head]
    for row in rows:
        totals = "".join(f"{row.total_us(policy) / 1e3:>14.1f}" for policy in POLICIES)
        label = f"{row.workload:<10}{row.price.us_per_byte_second:>12.1e}"
        losses = f"{row.loss('gated'):>13.2f}{row.loss('gated_learned'):>15.2f}"
        lines.append(f"{label}{totals}  {row.winner:<14}{losses}")
    return "\n".join(lines)


def _learned(trace: Trace, learner: IdleLearner) -> Floats:
    """What the learner advises at each death, knowing no more than came before it."""
    holds = np.empty(len(trace.lives))
    for time_s, is_birth, life in trace.events():
        if is_birth:
            learner.born(time_s)
        else:
            holds[life] = learner.died(time_s)
    return holds


def _static(trace: Trace, costs: UnitCosts, *, num_extents: int) -> Outcome:
    """One pool: committing costs by the byte, the one mapping as much as any."""
    pool_bytes = num_extents * costs.extent_bytes
    return Outcome(
        policy="static",
        driver_us=num_extents * costs.create_us + costs.enter_us,
        byte_seconds=pool_bytes * trace.horizon_s,
        mean_bytes=float(pool_bytes),
        peak_bytes=pool_bytes,
        num_creates=num_extents,
        num_releases=0,
        num_steals=0,
    )


def _ratio(cost: float, least: float) -> float:
    """A ratio of costs; 1 of nothing to nothing."""
    if least:
        return cost / least
    return inf if cost else 1.0
