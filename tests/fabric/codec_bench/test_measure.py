"""Arms on natural text: shared samples, pooled figures, and gains drawn in pairs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from codec.errors import ConfigError
from fabric.codec_bench.measure import compare, measure
from fabric.evaluate import evaluate
from fabric.evaluate.arms import FullPrecision
from tests.fabric.codec_bench.small import BENCH, Made, figures, measured
from tests.fabric.evaluate.small import NoiseArm

CONFIG = BENCH.evaluation


def test_figures_are_those_of_the_evaluation_on_its_pooled_sets(made: Made) -> None:
    """The same samples, scored the same way."""
    arms = [FullPrecision(made.engine.geometry), NoiseArm(0.3, made.engine.geometry)]
    told: list[float] = []

    found = measure(
        made.engine, made.loaded, arms, CONFIG, on_progress=lambda _, part: told.append(part)
    )

    again = [arms[0], NoiseArm(0.3, made.engine.geometry)]
    whole = evaluate(made.engine, made.loaded, again, config=CONFIG)
    assert found[0].result.pooled.name == "prose+law+code"
    assert found[1].result.pooled.mean_kl == whole.arms[1].pooled.mean_kl
    assert found[0].point() is None
    assert [len(one.figures) for one in found] == [3 * CONFIG.windows] * 2
    assert told == sorted(told)
    assert told[-1] == 1


def test_one_set_can_be_asked_for(made: Made) -> None:
    """As for a curve of another domain."""
    arms = [FullPrecision(made.engine.geometry)]

    (found,) = measure(made.engine, made.loaded, arms, CONFIG, sets=["code"])

    assert {one.set_name for one in found.figures} == {"code"}
    for wrong in (["random"], []):
        with pytest.raises(ConfigError, match="need sets out of code, law, prose"):
            measure(made.engine, made.loaded, arms, CONFIG, sets=wrong)


def test_a_point_is_of_all_bytes_and_all_tokens() -> None:
    """Not a mean of ratios, nor of windows of different length."""
    one = measured("entropy@8", 8, [0.1, 0.2], 4)
    long = replace(one, figures=(figures(0.1, 4, num_tokens=30), figures(0.2, 12, num_tokens=10)))

    point = long.point()

    assert point is not None
    assert point.kl == pytest.approx((0.1 * 30 + 0.2 * 10) / 40)
    assert point.ratio == pytest.approx(2 / (1 / 4 + 1 / 12), rel=1e-5)
    drawn = long.point(np.array([1, 1]))
    assert drawn is not None
    assert (drawn.kl, drawn.ratio) == (pytest.approx(0.2), pytest.approx(12, rel=1e-4))


def test_within_keeps_the_samples_of_one_set() -> None:
    """And the arm's name and target."""
    one = replace(
        measured("a", 8, [], 4), figures=(figures(0.1, 4), figures(0.2, 4, set_name="code"))
    )

    assert one.within("code").figures == one.figures[1:]
    assert one.within("code").target == 8


def test_a_constant_gain_has_an_interval_without_width() -> None:
    """As samples are drawn in pairs: a hard window is hard for every arm."""
    hard = [0.01, 0.04, 0.02, 0.3]
    points = [measured("paper@8", 8, hard, 8)]
    curve = [
        measured(f"entropy@{ratio}", ratio, [kl * ratio / 16 for kl in hard], ratio)
        for ratio in (4.0, 16.0, 64.0)
    ]

    found = compare(points, curve, num_resamples=50)

    assert found.smallest == pytest.approx(2, rel=1e-4)
    (interval,) = found.intervals
    assert interval is not None
    assert (interval.low, interval.high) == (pytest.approx(2, rel=1e-4),) * 2
    assert found.smallest_interval == interval


def test_windows_that_differ_widen_the_interval() -> None:
    """Around the value."""
    points = [measured("paper@8", 8, [0.01, 0.02, 0.01, 0.05], 8)]
    curve = [
        measured("entropy@4", 4, [0.001] * 4, 4),
        measured("entropy@64", 64, [0.5, 0.2, 0.4, 0.6], 64),
    ]

    found = compare(points, curve, num_resamples=200)

    (interval,) = found.intervals
    assert interval is not None
    assert interval.low < interval.value < interval.high
    assert interval.value == found.gains[0].gain
    assert compare(points, curve, num_resamples=200) == found


def test_a_gain_that_most_draws_miss_has_no_interval() -> None:
    """Where the point is near the end of the curve, half of them are beyond it."""
    points = [measured("paper@8", 8, [0.01, 0.03, 0.02, 0.04], 8)]
    curve = [
        measured("entropy@4", 4, [0.001] * 4, 4),
        measured("entropy@8", 8, [0.04, 0.02, 0.03, 0.0101], 8),
    ]

    found = compare(points, curve, num_resamples=200)

    assert found.smallest is not None
    assert found.intervals == (None,)
    assert found.smallest_interval is None


def test_every_gain_has_an_interval_of_its_own() -> None:
    """The smallest is drawn as the smallest, whichever that is in a draw."""
    points = [
        measured("paper@8", 8, [0.01, 0.02, 0.01, 0.05], 8),
        measured("paper@32", 32, [0.03, 0.09, 0.05, 0.04], 32),
    ]
    curve = [
        measured("entropy@4", 4, [0.001] * 4, 4),
        measured("entropy@512", 512, [0.5, 0.2, 0.4, 0.6], 512),
    ]

    found = compare(points, curve, num_resamples=100)

    first, second = found.intervals
    assert first is not None
    assert second is not None
    assert found.smallest_interval is not None
    assert (first.value, second.value) == tuple(gain.gain for gain in found.gains)
    assert second.low < second.value
    assert second.high < first.high
    assert found.smallest_interval.value == second.value
    assert found.smallest_interval.low <= second.low


def test_what_is_beyond_the_curve_has_no_gain() -> None:
    """Of two points, one is out of reach, and so is the smallest gain."""
    curve = [measured("entropy@4", 4, [0.001] * 3, 4), measured("entropy@64", 64, [0.1] * 3, 64)]
    points = [measured("paper@8", 8, [0.01] * 3, 8), measured("paper@32", 32, [0.2] * 3, 32)]

    found = compare(points, curve, num_resamples=10)

    assert found.gains[0].gain is not None
    assert found.gains[1].gain is None
    assert found.smallest is None
    assert found.smallest_interval is None


def test_arms_that_cannot_be_compared_are_refused() -> None:
    """Those that lose nothing, or have no target, or are not there."""
    curve = [measured("entropy@4", 4, [0.1], 4)]

    with pytest.raises(ValueError, match="loses nothing"):
        compare([measured("paper@8", 8, [0.0], 8)], curve)
    for points in ([], [measured("fp8", None, [0.1], 2)]):
        with pytest.raises(ValueError, match="with targets"):
            compare(points, curve)


def test_an_arm_of_the_curve_that_loses_nothing_is_left_out() -> None:
    """It has no place in logarithms."""
    curve = [
        measured("entropy@2", 2, [0.0, 0.0], 2),
        measured("entropy@4", 4, [0.001] * 2, 4),
        measured("entropy@16", 16, [0.1] * 2, 16),
    ]

    found = compare([measured("paper@8", 8, [0.01] * 2, 8)], curve, num_resamples=10)

    assert found.gains[0].ratio_at_kl == pytest.approx(8, rel=1e-4)
    assert found.smallest is not None
    assert math.isclose(found.smallest, 1, rel_tol=1e-4)
