"""The gate for idle extents: against argmins, brute force, and bad figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.vmm_gate import (
    MemoryPrice,
    UnitCosts,
    advise_known_idle,
    advise_source,
    advise_unknown_idle,
    release_after_s,
    rent_us_per_s,
)
from tests.policies.vmm_samples import AMOUNTS, COSTS, MIB, rent, unit_costs
from tests.suites.quiet import QUIET

RENTS = st.integers(0, 500).map(float)
PERIODS = st.integers(0, 400).map(lambda quarters: quarters / 4)
BAD_AMOUNTS = (-1.0, nan, inf, -inf)


# -- unit costs


def test_a_steal_is_a_cycle_without_committing() -> None:
    """Both wait and open for every device; only a cycle creates and releases."""
    assert COSTS.steal_us == 3 + 20 + 10 + 2 * 5
    assert COSTS.cycle_us == COSTS.steal_us + 100 + 40


@given(costs=unit_costs())
@QUIET
def test_a_steal_never_costs_more_than_a_cycle(costs: UnitCosts) -> None:
    """So that reuse by stealing is always a legal alternative."""
    assert 0 <= costs.steal_us <= costs.cycle_us


@pytest.mark.parametrize("bad", BAD_AMOUNTS)
@pytest.mark.parametrize(
    "name", ["create_us", "release_us", "map_us", "unmap_us", "access_us", "sync_us"]
)
def test_a_cost_that_is_no_amount_is_refused(name: str, bad: float) -> None:
    """By name, with the value."""
    with pytest.raises(ValueError, match=rf"{name} must be finite and at least 0, got {bad}"):
        replace(COSTS, **{name: bad})


@pytest.mark.parametrize("name", ["extent_bytes", "num_devices"])
@pytest.mark.parametrize("bad", [0, -1])
def test_no_extent_and_no_device_are_refused(name: str, bad: int) -> None:
    """Both divide."""
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {bad}"):
        replace(COSTS, **{name: bad})


def test_the_evidence_names_every_verb_and_both_sums() -> None:
    """What was decided by can be read."""
    text = COSTS.describe()

    for word in ("host", str(MIB), "create", "release", "unmap", "access (x2)", "sync"):
        assert word in text
    assert "43.0 us" in text
    assert "183.0 us" in text


# -- the price of memory


def test_without_waiters_and_tenants_memory_is_free() -> None:
    """Then nothing is ever given back."""
    price = MemoryPrice.of_waiters(0, 0)

    assert price.us_per_byte_second == 0
    assert release_after_s(COSTS, price) == inf


def test_the_price_is_lost_work_over_bytes_waited_for() -> None:
    """One request that waits for a MiB loses a second each second."""
    assert MemoryPrice.of_waiters(1e6, MIB) == MemoryPrice(1e6 / MIB)


@pytest.mark.parametrize(("tenants", "expected"), [(0.5, 1.0), (3.0, 3.0)])
def test_the_higher_bid_is_the_price(tenants: float, expected: float) -> None:
    """Memory goes to one of them, not to both."""
    price = MemoryPrice.of_waiters(8, 8, tenants_us_per_byte_second=tenants)

    assert price.us_per_byte_second == expected


def test_work_lost_for_want_of_nothing_is_refused() -> None:
    """It would be an infinite price."""
    with pytest.raises(ValueError, match="waited_bytes"):
        MemoryPrice.of_waiters(1, 0)


@pytest.mark.parametrize("bad", BAD_AMOUNTS)
def test_a_price_that_is_no_amount_is_refused(bad: float) -> None:
    """Wherever it comes from."""
    with pytest.raises(ValueError, match=f"us_per_byte_second .* got {bad}"):
        MemoryPrice(bad)
    with pytest.raises(ValueError, match=f"lost_us_per_s .* got {bad}"):
        MemoryPrice.of_waiters(bad, 1)
    with pytest.raises(ValueError, match=f"tenants_us_per_byte_second .* got {bad}"):
        MemoryPrice.of_waiters(1, 1, tenants_us_per_byte_second=bad)


# -- idle extents: known


@given(costs=unit_costs(), rent_us=RENTS, idle_s=PERIODS, is_stolen=st.booleans())
@QUIET
def test_a_known_period_gets_the_exact_argmin(
    costs: UnitCosts, rent_us: float, idle_s: float, is_stolen: bool
) -> None:
    """The two costs are summed here anew, from the verbs; of equals, memory is kept."""
    enter = costs.map_us + costs.num_devices * costs.access_us
    leave = costs.sync_us + costs.unmap_us
    keep = rent_us * idle_s + (leave + enter if is_stolen else 0)
    release = leave + costs.release_us + costs.create_us + enter

    advice = advise_known_idle(
        costs, rent(rent_us), idle_s=idle_s, reuse_us=costs.steal_us if is_stolen else 0
    )

    assert advice.action == ("release" if release < keep else "keep")
    assert (advice.keep_us, advice.release_us) == (keep, release)
    assert advice.release_after_s == (0 if release < keep else inf)


@given(costs=unit_costs(), rents=st.tuples(RENTS, RENTS), idle_s=PERIODS)
@QUIET
def test_a_higher_price_never_keeps_more(
    costs: UnitCosts, rents: tuple[float, float], idle_s: float
) -> None:
    """Neither with a known period nor with an unknown one."""
    low, high = map(rent, sorted(rents))

    for advise in (
        lambda price: advise_known_idle(costs, price, idle_s=idle_s),
        lambda price: advise_unknown_idle(costs, price, idle_so_far_s=idle_s),
    ):
        assert (advise(low).action, advise(high).action) != ("release", "keep")
    assert release_after_s(costs, high) <= release_after_s(costs, low)


# -- idle extents: unknown


def online_us(costs: UnitCosts, rent_us: float, idle_s: float, reuse_us: float) -> float:
    """What the gate pays in one idle period, asked every quarter of a second."""
    for quarter in range(int(idle_s * 4) + 1):
        advice = advise_unknown_idle(
            costs, rent(rent_us), idle_so_far_s=quarter / 4, reuse_us=reuse_us
        )
        if advice.action == "release":
            # A timer would not have waited for the question.
            return rent_us * min(quarter / 4, advice.release_after_s) + costs.cycle_us
    return rent_us * idle_s + reuse_us


def offline_us(costs: UnitCosts, rent_us: float, periods_s: list[float], reuse_us: float) -> float:
    """The least of all ways to keep, or to release at once, in each period."""
    return min(
        sum(
            costs.cycle_us if is_released else rent_us * idle_s + reuse_us
            for idle_s, is_released in zip(periods_s, releases, strict=True)
        )
        for releases in product([False, True], repeat=len(periods_s))
    )


@given(
    costs=unit_costs(),
    rent_us=RENTS,
    periods_s=st.lists(st.integers(0, 60).map(lambda quarters: quarters / 4), max_size=6),
    is_stolen=st.booleans(),
)
@QUIET
def test_an_unknown_future_costs_at_most_twice_the_optimum(
    costs: UnitCosts, rent_us: float, periods_s: list[float], is_stolen: bool
) -> None:
    """The optimum knows all periods, and is found by trying every sequence of choices."""
    reuse_us = costs.steal_us if is_stolen else 0.0

    paid = sum(online_us(costs, rent_us, idle_s, reuse_us) for idle_s in periods_s)

    assert paid <= 2 * offline_us(costs, rent_us, periods_s, reuse_us) * (1 + 1e-12)


def test_the_bound_of_two_is_reached() -> None:
    """A period that ends just when memory was released: the bound is not slack."""
    after_s = release_after_s(COSTS, rent(61))
    assert after_s == 3

    assert online_us(COSTS, 61, after_s, 0.0) == 2 * offline_us(COSTS, 61, [after_s], 0.0)


@pytest.mark.parametrize(
    ("idle_s", "action"), [(0, "keep"), (2.999, "keep"), (3, "release"), (9, "release")]
)
def test_memory_is_released_once_its_rent_is_a_cycle(idle_s: float, action: str) -> None:
    """183 us at 61 us a second."""
    advice = advise_unknown_idle(COSTS, rent(61), idle_so_far_s=idle_s)

    assert advice.action == action
    assert advice.release_after_s == 3
    assert advice.keep_us == pytest.approx(61 * idle_s)


def test_reuse_elsewhere_shortens_the_wait() -> None:
    """The steal is paid either way; only the rest of the cycle is at stake."""
    assert release_after_s(COSTS, rent(70), reuse_us=COSTS.steal_us) == 2


def test_free_memory_is_kept_for_ever() -> None:
    """Even where releasing is free."""
    free = replace(COSTS, create_us=0, release_us=0)

    advice = advise_unknown_idle(free, MemoryPrice(0), idle_so_far_s=1e9, reuse_us=free.steal_us)

    assert advice.action == "keep"
    assert advice.release_after_s == inf


@pytest.mark.parametrize("bad", BAD_AMOUNTS)
def test_a_time_that_is_no_amount_is_refused(bad: float) -> None:
    """NaN would compare as not yet due, for ever."""
    with pytest.raises(ValueError, match=f"idle_s .* got {bad}"):
        advise_known_idle(COSTS, rent(1), idle_s=bad)
    with pytest.raises(ValueError, match=f"idle_so_far_s .* got {bad}"):
        advise_unknown_idle(COSTS, rent(1), idle_so_far_s=bad)
    with pytest.raises(ValueError, match=f"reuse_us .* got {bad}"):
        release_after_s(COSTS, rent(1), reuse_us=bad)


def test_reuse_dearer_than_a_cycle_is_refused() -> None:
    """There would be nothing to weigh: who says that has mixed up his figures."""
    with pytest.raises(ValueError, match=r"need reuse_us <= cycle_us 183, got 184"):
        advise_known_idle(COSTS, rent(1), idle_s=1, reuse_us=184)


def test_the_reason_has_the_numbers() -> None:
    """A suggestion that can be argued with."""
    assert "5 s: keep 305.0 us > cycle 183.0 us" in (
        advise_known_idle(COSTS, rent(61), idle_s=5).reason
    )
    assert "idle 1 s < 3 s" in advise_unknown_idle(COSTS, rent(61), idle_so_far_s=1).reason


# -- where memory comes from


@pytest.mark.parametrize(
    ("num_spare", "idle_since_s", "source", "extent", "cost_us"),
    [
        (1, {4: 1.0}, "spare", None, 20),
        (0, {4: 1.0, 2: 3.0, 9: 2.0}, "steal", 2, 43),
        (0, {4: 3.0, 2: 3.0}, "steal", 4, 43),
        (0, {}, "create", None, 120),
    ],
)
def test_memory_comes_from_the_cheapest_place_that_needs_no_more_of_it(
    num_spare: int,
    idle_since_s: dict[int, float],
    source: str,
    extent: int | None,
    cost_us: float,
) -> None:
    """A spare handle, else the youngest idle extent, else new memory."""
    advice = advise_source(COSTS, num_spare=num_spare, idle_since_s=idle_since_s)

    assert (advice.source, advice.extent, advice.cost_us) == (source, extent, cost_us)
    assert advice.reason


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_death_at_no_time_is_refused(bad: float) -> None:
    """A NaN would make the youngest depend on the order of asking."""
    with pytest.raises(ValueError, match=f"idle_since_s of extent 7 must be finite, got {bad}"):
        advise_source(COSTS, num_spare=0, idle_since_s={1: 0.0, 7: bad})
    with pytest.raises(ValueError, match="num_spare"):
        advise_source(COSTS, num_spare=-1, idle_since_s={})


@given(costs=unit_costs(), price=AMOUNTS)
@QUIET
def test_rent_is_price_times_size(costs: UnitCosts, price: float) -> None:
    """Per extent, not per byte."""
    assert rent_us_per_s(costs, MemoryPrice(price)) == price * MIB
