"""Traces of births and deaths: their order, their idle periods, their shapes."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given

from policies.vmm_workloads import Event, Life, Trace, spiteful, standard_traces
from tests.policies.vmm_samples import trace, traces
from tests.suites.quiet import QUIET


def naive_idle_s(sample: Trace) -> list[float]:
    """Idle periods with a stack: each birth takes the memory of the youngest death."""
    found = [inf] * len(sample.lives)
    stack: list[Event] = []
    for event in sample.events():
        if not event.is_birth:
            stack.append(event)
        elif stack:
            dead = stack.pop()
            found[dead.life] = event.time_s - dead.time_s
    return found


@given(sample=traces())
@QUIET
def test_idle_periods_are_those_of_a_stack(sample: Trace) -> None:
    """Counting depths finds what a stack of dead extents would."""
    assert sample.idle_periods().tolist() == naive_idle_s(sample)


@given(sample=traces())
@QUIET
def test_the_peak_is_the_most_that_live_at_once(sample: Trace) -> None:
    """Extents that meet at one instant do not overlap; nor does memory lie fallow."""
    most = max(
        sum(other.birth_s <= life.birth_s < other.death_s for other in sample.lives)
        for life in sample.lives
    )

    assert sample.peak == most
    assert sum(idle_s == inf for idle_s in sample.idle_periods()) == most


def test_deaths_come_before_births_of_the_same_time() -> None:
    """So that memory passes from one to the other without a moment of two."""
    sample = trace((2, 3), (0, 2), (1, 2))

    assert sample.events() == [
        (0, True, 1),
        (1, True, 2),
        (2, False, 1),
        (2, False, 2),
        (2, True, 0),
        (3, False, 0),
    ]
    assert sample.idle_periods().tolist() == [inf, inf, 0]
    assert sample.live_s == 4


@pytest.mark.parametrize(
    ("life", "horizon_s"),
    [((1, 1), 5), ((2, 1), 5), ((-1, 1), 5), ((1, 6), 5), ((1, float("nan")), 5), ((1, 2), inf)],
)
def test_a_life_outside_of_time_is_refused(life: tuple[float, float], horizon_s: float) -> None:
    """Or one that ends before it begins."""
    with pytest.raises(ValueError, match="need 0 <= birth < death"):
        Trace("bad", (Life(*life),), horizon_s)


def test_a_trace_of_nothing_is_refused() -> None:
    """It has no peak."""
    with pytest.raises(ValueError, match="at least one life"):
        Trace("empty", (), 1.0)


def test_a_seed_makes_the_same_traces_again_and_another_makes_others() -> None:
    """The names are part of the seed: no workload repeats another's numbers."""
    first, again, other = (standard_traces(seed, num_requests=20) for seed in (1, 1, 2))

    assert first == again
    for name in ("steady", "bursts", "diurnal"):
        assert first[name] != other[name]
    assert len({sample.lives for sample in first.values()}) == 3


def test_the_workloads_differ_in_how_long_memory_lies_idle() -> None:
    """A lull is longer than any pause of a steady load; by day there is no pause at all."""
    found = standard_traces(0, num_requests=200)

    use = {name: t.live_s / t.horizon_s / t.peak for name, t in found.items()}

    assert use["bursts"] < 0.75 * use["steady"]
    assert use["diurnal"] < use["steady"]


def test_the_spiteful_workload_comes_back_after_the_same_pause() -> None:
    """One extent, and nothing else."""
    sample = spiteful(2.5, num_lives=4)

    assert sample.peak == 1
    assert sample.idle_periods().tolist() == [2.5, 2.5, 2.5, inf]
