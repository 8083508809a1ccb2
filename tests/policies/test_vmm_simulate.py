"""Policies over traces: against a simulation step by step, and an optimum by brute force."""

from __future__ import annotations

from itertools import product
from math import inf, nan

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from policies.vmm_gate import (
    MemoryPrice,
    UnitCosts,
    advise_known_idle,
    advise_unknown_idle,
    rent_us_per_s,
)
from policies.vmm_simulate import (
    POLICIES,
    Policy,
    compare,
    describe,
    hold_s,
    simulate,
)
from policies.vmm_workloads import Trace, spiteful
from tests.policies.vmm_samples import COSTS, MIB, rent, trace, traces, unit_costs
from tests.suites.quiet import QUIET

DYNAMIC: tuple[Policy, ...] = ("eager", "lazy", "gated", "gated_learned", "gated_known")
RENTS = st.sampled_from([0.0, 1.0, 20.0, 70.0, 300.0])


def step_by_step(
    sample: Trace, holds: list[float], costs: UnitCosts
) -> tuple[float, float, list[int]]:
    """Driver's time, extent-seconds, and counts of creates, releases and steals.

    A stack of idle memory, and a verb at a time: nothing is shared with `simulate`.
    """
    idle: list[tuple[float, float]] = []
    spent_us = held_s = 0.0
    creates = releases = steals = 0
    live = 0
    last_s = 0.0
    stops = [(event.time_s, event) for event in sample.events()]
    for time_s, event in [*stops, (sample.horizon_s, None)]:
        for since_s, may_s in list(idle):
            if time_s - since_s >= may_s:
                idle.remove((since_s, may_s))
                releases += 1
                spent_us += costs.sync_us + costs.unmap_us + costs.release_us
                held_s += may_s - max(0.0, last_s - since_s)
        held_s += (live + len(idle)) * (time_s - last_s)
        last_s = time_s
        if event is None:
            continue
        live += 1 if event.is_birth else -1
        if not event.is_birth:
            idle.append((time_s, holds[event.life]))
            continue
        if idle:
            idle.pop()
            steals += 1
            spent_us += costs.sync_us + costs.unmap_us
        else:
            creates += 1
            spent_us += costs.create_us
        spent_us += costs.map_us + costs.num_devices * costs.access_us
    return spent_us, held_s, [creates, releases, steals]


@given(sample=traces(), costs=unit_costs(), rent_us=RENTS, policy=st.sampled_from(DYNAMIC))
@settings(QUIET, max_examples=150)
def test_counting_agrees_with_going_step_by_step(
    sample: Trace, costs: UnitCosts, rent_us: float, policy: Policy
) -> None:
    """Verbs, their time, and memory over time."""
    holds = hold_s(sample, policy, costs, rent(rent_us)).tolist()
    spent_us, held_s, counts = step_by_step(sample, holds, costs)

    found = simulate(sample, policy, costs, rent(rent_us))

    assert [found.num_creates, found.num_releases, found.num_steals] == counts
    assert found.driver_us == pytest.approx(spent_us)
    assert found.byte_seconds == pytest.approx(held_s * MIB)
    assert found.mean_bytes == pytest.approx(held_s * MIB / sample.horizon_s)
    assert found.peak_bytes == sample.peak * MIB


@given(sample=traces(), costs=unit_costs(), rent_us=RENTS)
@QUIET
def test_holding_times_are_what_the_gate_advises(
    sample: Trace, costs: UnitCosts, rent_us: float
) -> None:
    """One by one, through the gate's own functions."""
    price = rent(rent_us)
    known = hold_s(sample, "gated_known", costs, price)
    unknown = hold_s(sample, "gated", costs, price)

    for idle_s, known_s, unknown_s in zip(sample.idle_periods(), known, unknown, strict=True):
        asked = advise_unknown_idle(costs, price, idle_so_far_s=0, reuse_us=costs.steal_us)
        assert unknown_s == asked.release_after_s
        if idle_s < inf:
            told = advise_known_idle(costs, price, idle_s=idle_s, reuse_us=costs.steal_us)
            assert known_s == told.release_after_s
        else:
            assert known_s == unknown_s


def closed(sample: Trace) -> Trace:
    """``sample``, and then all its memory in use once more: each idle period has an end."""
    last = (sample.horizon_s, sample.horizon_s + 1)
    return trace(*sample.lives, *[last] * sample.peak)


@given(sample=traces().map(closed), rent_us=RENTS)
@QUIET
def test_knowing_the_next_use_is_the_optimum(sample: Trace, rent_us: float) -> None:
    """Over every choice of holding or releasing what is used again, by brute force."""
    price = rent(rent_us)
    holds = hold_s(sample, "gated_known", COSTS, price).tolist()
    used_again = [i for i, idle_s in enumerate(sample.idle_periods()) if idle_s < inf]

    totals = []
    for choice in product([0.0, inf], repeat=min(8, len(used_again))):
        tried = list(holds)
        for life, may_s in zip(used_again, choice, strict=False):
            tried[life] = may_s
        spent_us, held_s, _ = step_by_step(sample, tried, COSTS)
        totals.append(spent_us + rent_us_per_s(COSTS, price) * held_s)

    found = simulate(sample, "gated_known", COSTS, price).total_us(price)
    assert found == pytest.approx(min(totals))


@given(sample=traces().map(closed), costs=unit_costs(), rent_us=RENTS)
@QUIET
def test_the_gates_cost_at_most_twice_what_foresight_does(
    sample: Trace, costs: UnitCosts, rent_us: float
) -> None:
    """On any trace whose idle periods end in a use; the others are no better than foresight."""
    assume(costs.create_us + costs.release_us > 0)
    price = rent(rent_us)
    totals = {policy: simulate(sample, policy, costs, price).total_us(price) for policy in DYNAMIC}

    least = totals["gated_known"]
    assert least <= min(totals.values()) * (1 + 1e-12)
    assert totals["gated"] <= 2 * least * (1 + 1e-12)
    assert totals["gated_learned"] <= 2 * least * (1 + 1e-12)


def test_without_a_price_the_gate_is_lazy() -> None:
    """Both of them, to the last byte."""
    sample = trace((0, 1), (3, 4), (3, 9), (20, 30))
    free = MemoryPrice(0)

    lazy = simulate(sample, "lazy", COSTS, free)

    for policy in ("gated", "gated_learned", "gated_known"):
        found = simulate(sample, policy, COSTS, free)
        assert found.driver_us == lazy.driver_us
        assert found.byte_seconds == lazy.byte_seconds
        assert found.num_releases == 0


def test_a_static_pool_pays_once_and_for_the_whole_time() -> None:
    """Two extents at peak, half as many again in the pool, for ten seconds."""
    sample = trace((0, 4), (1, 2), (3, 10))

    found = simulate(sample, "static", COSTS, rent(1), headroom=1.5)

    assert found.driver_us == 3 * 100 + 20
    assert found.byte_seconds == 3 * MIB * 10
    assert found.peak_bytes == found.mean_bytes == 3 * MIB
    assert (found.num_creates, found.num_releases, found.num_steals) == (3, 0, 0)
    assert found.total_us(rent(1)) == 320 + 30


@pytest.mark.parametrize("bad", [0.99, nan, inf])
def test_a_pool_below_the_peak_is_refused(bad: float) -> None:
    """It could not serve the trace."""
    with pytest.raises(ValueError, match=f"headroom .* got {bad}"):
        simulate(trace((0, 1)), "static", COSTS, rent(1), headroom=bad)


def test_the_gate_loses_where_memory_comes_back_just_after_its_release() -> None:
    """Rent and a cycle, each time: nearly twice what eager and lazy pay; it is reported."""
    rows = compare(COSTS, [rent(7)], num_requests=100)
    worst = next(row for row in rows if row.workload == "spiteful")

    excess = {p: o.driver_us + 7 * o.byte_seconds / MIB for p, o in worst.outcomes.items()}

    assert worst.winner != "gated"
    assert worst.loss("gated") > 1.2
    assert excess["gated"] > excess["eager"]
    assert excess["gated"] > excess["lazy"]


@pytest.mark.parametrize(
    ("pause_s", "ranking"),
    [
        (10.0, ["static", "gated", "gated_learned", "lazy", "eager"]),
        (21.0, ["static", "eager", "lazy", "gated_learned", "gated"]),
        (400.0, ["eager", "gated_learned", "gated", "static", "lazy"]),
    ],
)
def test_who_wins_depends_on_the_pause(pause_s: float, ranking: list[Policy]) -> None:
    """Memory is released after 20 s: before that the gate is lazy, long after nearly eager.

    A static pool of just that size is lazy without its verbs.  What has learned the pause
    loses less.
    """
    price = rent(7)
    sample = spiteful(pause_s, num_lives=50)

    totals = {p: simulate(sample, p, COSTS, price).total_us(price) for p in ranking}

    assert sorted(totals.values()) == list(totals.values())


def test_every_workload_meets_every_price_and_the_table_shows_all() -> None:
    """A price of nothing has no worst workload: the gate then never releases."""
    prices = [MemoryPrice(0), rent(10)]

    rows = compare(COSTS, prices, num_requests=20)
    text = describe(rows)

    standard = ["steady", "bursts", "diurnal"]
    assert [row.workload for row in rows] == [*standard, *standard, "spiteful"]
    assert len(text.splitlines()) == 8
    for policy in POLICIES:
        assert policy in text.splitlines()[0]
    for row, line in zip(rows, text.splitlines()[1:], strict=True):
        assert row.workload in line
        assert row.winner in line
        assert line.split()[-2:] == [f"{row.loss(p):.2f}" for p in ("gated", "gated_learned")]


def test_foresight_is_shown_but_cannot_win() -> None:
    """Nobody has it; it is the mark that the others are measured by."""
    row = compare(COSTS, [rent(40)], num_requests=40)[1]

    assert row.total_us("gated_known") < row.total_us(row.winner)
    assert row.winner != "gated_known"


def test_of_equals_the_simpler_policy_wins() -> None:
    """A gate that does as lazy does is not called the winner."""
    rows = compare(COSTS, [MemoryPrice(0)], num_requests=20)

    for row in rows:
        assert row.total_us("gated") == row.total_us("lazy")
        assert row.winner == "static"
        assert row.loss("gated") > 1
