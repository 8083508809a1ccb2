"""Intervals: against every possible draw, against theory, and honest about what they are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.quality_receipt import Interval
from fabric.evaluate.bootstrap import mean_interval


def test_three_samples_agree_with_every_possible_draw() -> None:
    """27 draws, equally likely: their quantiles are the interval."""
    values = (0.0, 1.0, 5.0)
    means = [np.mean(draw) for draw in product(values, repeat=3)]
    # All zeros, and all fives, are 1 draw of 27 each: more than the 2.5 % of a tail.
    ends = np.quantile(means, [0.025, 0.975], method="inverted_cdf")

    found = mean_interval(values)

    assert (found.low, found.high) == tuple(ends) == (0.0, 5.0)
    assert found.value == 2.0


def test_many_samples_agree_with_the_normal_interval() -> None:
    """1.96 standard errors to each side, within what 2,000 draws can tell."""
    values = np.random.default_rng(7).normal(3.0, 2.0, size=400)
    error = values.std() / np.sqrt(len(values))

    found = mean_interval(values)

    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def test_weights_are_drawn_with_their_values() -> None:
    """A sample of ten tokens counts ten times in the mean and in each draw of it."""
    found = mean_interval([0.0, 1.0], [1.0, 9.0])

    assert found == Interval(0.9, 0.0, 1.0)


def test_one_sample_has_an_interval_without_width() -> None:
    """There is nothing to draw; the count beside it says so."""
    assert mean_interval([0.25]) == Interval(0.25, 0.25, 0.25)


def test_the_same_seed_gives_the_same_interval() -> None:
    """And another seed another one."""
    values = list(range(20))

    assert mean_interval(values) == mean_interval(values)
    assert mean_interval(values) != mean_interval(values, seed=1)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12))
def test_an_interval_spans_its_mean_within_the_samples(values: list[float]) -> None:
    """However they are spread."""
    found = mean_interval(values, num_resamples=50)

    slack = 1e-9 * (1 + max(map(abs, values)))
    assert min(values) - slack <= found.low <= found.value <= found.high <= max(values) + slack


@pytest.mark.parametrize(
    ("values", "weights"), [([], None), ([1.0], [0.0]), ([1.0, 2.0], [1.0]), ([1.0], [-1.0])]
)
def test_samples_without_a_positive_weight_each_are_refused(
    values: list[float], weights: list[float] | None
) -> None:
    """None at all, no weight, too few weights, a negative one."""
    with pytest.raises(ValueError, match="positive weight"):
        mean_interval(values, weights)
