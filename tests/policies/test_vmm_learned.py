"""Learned holds: never worse than twice the optimum, and better where the past repeats."""

from __future__ import annotations

from math import inf, nan, nextafter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.vmm_gate import MemoryPrice, UnitCosts, release_after_s
from policies.vmm_learned import PERIODS_PER_DEPTH, IdleLearner
from policies.vmm_workloads import Life, Trace, bursts, spiteful
from tests.policies.vmm_samples import COSTS, MIB, rent, traces, unit_costs
from tests.suites.quiet import QUIET

#: At this rent ski rental holds for 20 s when the next use is a steal.
RENT_US_PER_S = 7.0

FREE_STEALS = UnitCosts(
    kind="host",
    extent_bytes=MIB,
    create_us=100,
    release_us=40,
    map_us=0,
    unmap_us=0,
    access_us=0,
)


def walk(learner: IdleLearner, sample: Trace) -> list[float]:
    """The hold of each life."""
    holds = [nan] * len(sample.lives)
    for time_s, is_birth, life in sample.events():
        if is_birth:
            learner.born(time_s)
        else:
            holds[life] = learner.died(time_s)
        learner.check()
    return holds


def paid_us(costs: UnitCosts, rent_us: float, idle_s: float, hold_s: float) -> float:
    """What a period costs that ends in a use."""
    if idle_s >= hold_s:
        return rent_us * hold_s + costs.cycle_us
    return rent_us * idle_s + costs.steal_us


def repeated(pauses_s: list[float]) -> Trace:
    """One extent and those pauses between its lives."""
    lives: list[Life] = []
    start_s = 0.0
    for pause_s in [*pauses_s, 0.0]:
        lives.append(Life(start_s, start_s + 1))
        start_s += 1 + pause_s
    return Trace("repeated", tuple(lives), start_s)


@given(
    sample=traces() | st.lists(st.sampled_from([0.5, 1.0, 3.0, 90.0]), max_size=60).map(repeated),
    costs=unit_costs(),
    rent_us=st.sampled_from([0.5, 20.0, 70.0, 3000.0]),
)
@settings(QUIET, max_examples=200)
def test_all_periods_together_cost_at_most_twice_their_optimum(
    sample: Trace, costs: UnitCosts, rent_us: float
) -> None:
    """After each of them, and none is held longer than ski rental would."""
    price = rent(rent_us)
    holds = walk(IdleLearner(costs, price), sample)

    spent = least = 0.0
    for idle_s, hold_s in zip(sample.idle_periods(), holds, strict=True):
        assert 0 <= hold_s <= release_after_s(costs, price, reuse_us=costs.steal_us)
        if idle_s < inf:
            spent += paid_us(costs, rent_us, idle_s, hold_s)
            least += min(costs.cycle_us, rent_us * idle_s + costs.steal_us)
    assert spent <= 2 * least * (1 + 1e-12)


@given(pauses_s=st.lists(st.sampled_from([0.5, 19.0, 20.0, 21.0, 500.0]), min_size=1, max_size=80))
@QUIET
def test_an_adversary_who_sees_each_hold_cannot_break_the_bound(pauses_s: list[float]) -> None:
    """Whenever it likes, memory comes back in the very moment of its release."""
    learner = IdleLearner(COSTS, rent(RENT_US_PER_S))
    now_s = spent = least = 0.0
    for pause_s in pauses_s:
        learner.born(now_s)
        now_s += 1
        hold_s = learner.died(now_s)
        # As the learner sees it: a difference of times.
        idle_s = now_s + (hold_s if pause_s == 20 else pause_s) - now_s
        spent += paid_us(COSTS, RENT_US_PER_S, idle_s, hold_s)
        least += min(COSTS.cycle_us, RENT_US_PER_S * idle_s + COSTS.steal_us)
        now_s += idle_s
        learner.check()
        assert spent <= 2 * least * (1 + 1e-12)


def test_an_adversary_wins_only_what_was_saved_before() -> None:
    """It teaches to let go, and then comes back in the moment of release, for ever.

    With free steals ski rental saves nothing in long periods: all slack is of short ones.
    """
    learner = IdleLearner(FREE_STEALS, rent(RENT_US_PER_S))
    now_s = spent = least = 0.0
    holds = []
    for pause_s in [10.0] * 10 + [500.0] * 10 + [None] * 200:
        learner.born(now_s)
        now_s += 1
        hold_s = learner.died(now_s)
        holds.append(hold_s)
        end_s = now_s + (hold_s if pause_s is None else pause_s)
        if pause_s is None and end_s - now_s < hold_s:
            # The moment of release is between two numbers: take the later one.
            end_s = nextafter(end_s, inf)
        idle_s = end_s - now_s
        spent += paid_us(FREE_STEALS, RENT_US_PER_S, idle_s, hold_s)
        least += min(FREE_STEALS.cycle_us, RENT_US_PER_S * idle_s)
        now_s = end_s
        learner.check()
        assert spent <= 2 * least * (1 + 1e-12)

    assert min(holds[20:]) < 1, "nothing was dared: the adversary had no chance"
    assert holds[-1] > 19


def test_the_oldest_memory_is_released_first() -> None:
    """Else a birth would find another piece than the one that the learner thinks it takes.

    One piece has been idle for long again and again; of the deep ones nothing is known.
    """
    learner = IdleLearner(COSTS, rent(RENT_US_PER_S))
    assert walk(learner, spiteful(400.0, num_lives=30))[-1] == 0
    for _ in range(12):
        learner.born(20_000)

    holds = [learner.died(20_000) for _ in range(12)]
    learner.born(20_005)
    later_s = learner.died(20_005)
    learner.check()

    assert holds == [20.0] * 12
    assert later_s == 15


def test_long_lulls_teach_to_let_go_at_once() -> None:
    """Ski rental would hold for 20 s, every time."""
    holds = walk(IdleLearner(COSTS, rent(RENT_US_PER_S)), spiteful(400.0, num_lives=30))

    assert holds[:PERIODS_PER_DEPTH] == [20.0] * PERIODS_PER_DEPTH
    assert holds[-1] == 0


def test_short_pauses_teach_to_hold_until_just_after_them() -> None:
    """Now and then a lull: what has not come back after a second does not come back soon."""
    pauses_s = [1.0, 1.0, 1.0, 400.0] * 100

    holds = walk(IdleLearner(COSTS, rent(RENT_US_PER_S)), repeated(pauses_s))

    assert holds[-1] == pytest.approx(1.01)


def test_always_short_pauses_change_nothing() -> None:
    """The longest hold is free if it never ends in a release."""
    holds = walk(IdleLearner(COSTS, rent(RENT_US_PER_S)), spiteful(5.0, num_lives=30))

    assert set(holds) == {20.0}


def test_without_slack_nothing_is_dared() -> None:
    """Where a steal is free, periods at twice their optimum leave nothing to lose.

    The past says that letting go at once is best, and it may even be right.
    """
    holds = walk(IdleLearner(FREE_STEALS, rent(RENT_US_PER_S)), spiteful(20.0, num_lives=40))

    assert set(holds) == {20.0}


def test_depths_learn_apart() -> None:
    """Of the same workload, memory that is seldom needed is let go before the rest."""
    learner = IdleLearner(COSTS, rent(RENT_US_PER_S))
    for start_s in range(0, 40_000, 400):
        # Ten at once every 400 s, and one of them again and again in between.
        for _ in range(10):
            learner.born(start_s)
        deepest_s = learner.died(start_s + 1)
        for _ in range(8):
            learner.died(start_s + 1)
        for pause in range(1, 190):
            shallow_s = learner.died(start_s + 2 * pause)
            learner.born(start_s + 2 * pause + 1)
        learner.died(start_s + 390)
    learner.check()

    assert deepest_s == 0
    assert shallow_s > 1


def test_free_memory_is_held_for_ever() -> None:
    """Whatever the past says."""
    holds = walk(IdleLearner(COSTS, MemoryPrice(0)), bursts(0, num_requests=20))

    assert set(holds) == {inf}


def test_time_does_not_go_back() -> None:
    """Nor is it unknown; what was said before still holds after a refusal."""
    learner = IdleLearner(COSTS, rent(RENT_US_PER_S))
    learner.born(5)

    for bad in (4.9, nan, inf):
        with pytest.raises(ValueError, match=f"need a time from 5 on, got {bad}"):
            learner.born(bad)
        with pytest.raises(ValueError, match=f"need a time from 5 on, got {bad}"):
            learner.died(bad)

    assert learner.died(5) == 20.0
    learner.check()


def test_nothing_dies_that_was_not_born() -> None:
    """The count would be below none."""
    learner = IdleLearner(COSTS, rent(RENT_US_PER_S))

    with pytest.raises(ValueError, match="need a birth before each death, got one more at 3"):
        learner.died(3)

    learner.check()
    learner.born(1)
