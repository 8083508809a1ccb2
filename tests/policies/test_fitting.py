"""`NonNegativeFit`: finds the law, keeps its terms sane, and follows it when it moves."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.fitting import MAX_SURPRISE, SHAPE_WEIGHT, NonNegativeFit

observations = st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e3)), min_size=1, max_size=15)


def fitted(law: Callable[[float], float], sizes: list[float], prior: list[float]) -> NonNegativeFit:
    """A fit that saw ``law`` at ``sizes``."""
    fit = NonNegativeFit(prior)
    for size in sizes:
        fit.observe([1.0, size], law(size))
    return fit


def test_before_any_observation_the_prior_speaks() -> None:
    """There is nothing better to say."""
    fit = NonNegativeFit([0.5, 2.0])

    assert (fit.predict([1.0, 10.0]), fit.count) == (20.5, 0)
    assert fit.coefficients == (0.5, 2.0)


def test_the_first_observation_sets_the_level() -> None:
    """A prior a thousand times off is off once; its shape stays until more is seen."""
    fit = NonNegativeFit([1.0, 1.0])

    fit.observe([1.0, 9.0], 0.01)

    assert fit.predict([1.0, 9.0]) == pytest.approx(0.01)
    assert fit.coefficients == pytest.approx((0.001, 0.001))


@settings(max_examples=60, deadline=None)
@given(
    t0=st.floats(1e-4, 1e-1),
    rate=st.floats(1e7, 1e11),
    prior_t0=st.floats(1e-5, 1e-1),
    prior_rate=st.floats(1e7, 1e11),
)
def test_an_affine_law_is_found(t0: float, rate: float, prior_t0: float, prior_rate: float) -> None:
    """Whatever the prior, exact observations of many sizes lead to the law."""
    rng = random.Random(0)
    sizes = [2 ** rng.uniform(14, 28) for _ in range(150)]

    fit = fitted(lambda size: t0 + size / rate, sizes, [prior_t0, 1 / prior_rate])

    for size in (2.0**16, 2.0**20, 2.0**26):
        assert fit.predict([1.0, size]) == pytest.approx(t0 + size / rate, rel=1e-6)


@settings(deadline=None)
@given(observations)
def test_no_term_is_ever_negative(pairs: list[tuple[float, float]]) -> None:
    """Also where larger was faster, or everything took no time at all."""
    fit = NonNegativeFit([1e-3, 1e-9])

    for size, seconds in pairs:
        fit.observe([1.0, size], seconds)

        assert min(fit.coefficients) >= 0


def test_where_larger_is_faster_the_slope_is_nothing() -> None:
    """Unconstrained least squares would promise negative times for large sizes."""
    fit = fitted(lambda size: 2.0 - size / 10, [1.0, 5.0, 9.0] * 5, [1.0, 0.1])

    t0_s, slope = fit.coefficients

    assert slope == 0
    assert t0_s == pytest.approx(1.5, rel=0.2)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 30), st.floats(0, 30), st.floats(0, 3)), min_size=1, max_size=6)
)
def test_the_solution_is_the_best_one(rows: list[tuple[float, float, float]]) -> None:
    """No term could be changed for the better without turning negative.

    Those are the conditions of Karush, Kuhn and Tucker; in a convex problem they are enough.
    """
    fit = NonNegativeFit([1.0, 1.0, 1.0], forgetting=0.9)
    before = np.ones(3)
    for first, second, ratio in rows:
        before = np.array(fit.coefficients)
        fit.observe([1.0, first, second], ratio * (1.0 + first + second))
    state = fit.to_dict()
    information, moment = np.array(state["information"]), np.array(state["moment"])
    explained = information.sum(axis=0) @ before
    anchor = before * state["level"] / explained if explained else state["level"] / state["weight"]
    pull = SHAPE_WEIGHT * np.diag(information)

    found = np.array(fit.coefficients)
    gradient = (information + np.diag(pull)) @ found - moment - pull * anchor

    assert np.all(gradient >= -1e-6)
    assert np.all(np.abs(gradient[found > 0]) <= 1e-6)


def test_old_observations_are_forgotten() -> None:
    """When a link gets four times slower, so does the prediction."""
    fit = fitted(lambda size: 0.01 + size * 1e-9, [1e6, 1e7, 1e8] * 30, [0.01, 1e-9])

    for size in [1e6, 1e7, 1e8] * 60:
        fit.observe([1.0, size], 4 * (0.01 + size * 1e-9))

    assert fit.predict([1.0, 1e7]) == pytest.approx(0.08, rel=0.1)


def test_one_stall_moves_little() -> None:
    """A thousandfold outlier enters as `MAX_SURPRISE`, one among many."""
    fit = fitted(lambda size: 0.01 + size * 1e-9, [1e6, 1e7, 1e8] * 30, [0.01, 1e-9])
    before = fit.predict([1.0, 1e7])

    fit.observe([1.0, 1e7], 1000 * before)

    assert before < fit.predict([1.0, 1e7]) < before * (1 + 3 * MAX_SURPRISE / 50)


def test_times_of_nothing_can_be_left_behind() -> None:
    """After only zeros, a real time is learned: it is not clipped to zero for ever."""
    fit = fitted(lambda _: 0.0, [10.0] * 20, [1.0, 1.0])
    assert fit.predict([1.0, 10.0]) == 0

    for _ in range(200):
        fit.observe([1.0, 10.0], 5.0)

    assert fit.predict([1.0, 10.0]) == pytest.approx(5.0, rel=0.1)


def test_small_and_large_sizes_count_alike() -> None:
    """A tenth more noise on a second does not drown a millisecond: errors are relative."""
    rng = random.Random(1)
    fit = NonNegativeFit([1e-3, 1e-9])
    for _ in range(300):
        size = rng.choice([0.0, 1e9])
        fit.observe([1.0, size], (0.001 + size * 1e-9) * rng.uniform(0.9, 1.1))

    assert fit.predict([1.0, 0.0]) == pytest.approx(0.001, rel=0.05)
    assert fit.predict([1.0, 1e9]) == pytest.approx(1.001, rel=0.05)


def test_state_survives_json() -> None:
    """A fit that is read back predicts and learns exactly as the one that was written."""
    fit = fitted(lambda size: 3 + 2 * size, [1.0, 4.0, 9.0], [1.0, 1.0])

    copy = NonNegativeFit.from_dict(json.loads(json.dumps(fit.to_dict())))

    assert copy.to_dict() == fit.to_dict()
    for each in (fit, copy):
        each.observe([1.0, 2.0], 6.5)
    assert copy.coefficients == fit.coefficients
    assert NonNegativeFit.from_dict(NonNegativeFit([2.0]).to_dict()).predict([3.0]) == 6


@pytest.mark.parametrize(
    "damage",
    [
        {"prior": [1.0, -1.0]},
        {"prior": "no"},
        {"information": [[1.0]]},
        {"moment": [1.0]},
        {"moment": [1.0, float("nan")]},
        {"multiples": [1.0, -0.5]},
        {"multiples": [1.0]},
        {"level": -1.0},
        {"weight": 0.0},
        {"count": 0},
        {"count": None},
        {"forgetting": 0.0},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    """Nothing is predicted from sums that no observations could have left."""
    state = fitted(lambda size: 3 + 2 * size, [1.0, 4.0], [1.0, 1.0]).to_dict()

    with pytest.raises(ValueError, match=r".+"):
        NonNegativeFit.from_dict(state | damage)
    with pytest.raises(ValueError, match="not the state of a fit"):
        NonNegativeFit.from_dict({"prior": [1.0]})


@pytest.mark.parametrize("prior", [[], [0.0], [-1.0, 1.0], [float("inf")]], ids=str)
def test_a_prior_must_be_positive(prior: list[float]) -> None:
    """A term that starts at nothing has no scale to learn in."""
    with pytest.raises(ValueError, match="positive and finite"):
        NonNegativeFit(prior)


@pytest.mark.parametrize(
    ("features", "seconds"),
    [
        ([1.0, -1.0], 1.0),
        ([1.0], 1.0),
        ([1.0, float("nan")], 1.0),
        ([0.0, 0.0], 1.0),
        ([1.0, 1.0], -1.0),
        ([1.0, 1.0], float("inf")),
    ],
    ids=str,
)
def test_a_bad_observation_changes_nothing(features: list[float], seconds: float) -> None:
    """A broken clock must not spoil what was learned."""
    fit = fitted(lambda size: 3 + 2 * size, [1.0, 4.0], [1.0, 1.0])
    before = fit.to_dict()

    with pytest.raises(ValueError, match=r"^need "):
        fit.observe(features, seconds)

    assert fit.to_dict() == before
