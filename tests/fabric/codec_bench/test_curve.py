"""Ratios at equal KL: what lies between points is read, what lies beyond is not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.codec_bench.curve import Gain, Point, gain_at, ratio_at, smallest

POSITIVE = st.floats(1e-6, 1e3)


def power_law(kl: float, scale: float, exponent: float) -> float:
    """A curve that is a straight line in logarithms."""
    return scale * kl**exponent


@given(st.lists(POSITIVE, min_size=2, max_size=6, unique=True), st.data())
def test_a_straight_line_in_logarithms_is_read_exactly(
    kls: list[float], data: st.DataObject
) -> None:
    """At any KL between the ends, wherever the points are."""
    scale, exponent = data.draw(st.floats(1, 100)), data.draw(st.floats(0.05, 2))
    curve = [Point(power_law(kl, scale, exponent), kl) for kl in kls]
    kl = data.draw(st.floats(min(kls), max(kls)))

    found = ratio_at(curve, kl)

    assert found is not None
    assert found == pytest.approx(power_law(kl, scale, exponent), rel=1e-6)


@given(st.lists(st.builds(Point, POSITIVE, POSITIVE), max_size=6), POSITIVE)
def test_nothing_is_read_beyond_the_ends(curve: list[Point], kl: float) -> None:
    """There is an answer exactly if points lie on both sides, and it is one between ratios."""
    kls = [point.kl for point in curve]
    is_inside = bool(kls) and min(kls) <= kl <= max(kls)

    found = ratio_at(curve, kl)

    assert (found is not None) == is_inside
    if found is not None:
        ratios = [point.ratio for point in curve]
        assert min(ratios) * (1 - 1e-9) <= found <= max(ratios) * (1 + 1e-9)


@given(st.permutations([Point(4, 0.001), Point(8, 0.01), Point(16, 0.1)]))
def test_the_order_of_points_does_not_matter(curve: list[Point]) -> None:
    """They are taken by rising ratio."""
    assert ratio_at(curve, 0.01) == pytest.approx(8)
    assert ratio_at(curve, math.sqrt(0.001)) == pytest.approx(math.sqrt(8 * 16))


def test_of_several_ratios_at_one_kl_the_least_counts() -> None:
    """A curve that goes back on itself must not gain by it."""
    curve = [Point(8, 0.01), Point(16, 0.04), Point(32, 0.02), Point(64, 0.08)]

    assert ratio_at(curve, 0.03) == pytest.approx(8 * 2 ** (math.log(3) / math.log(4)))


def test_equal_kl_of_neighbours_is_read_at_the_lower_ratio() -> None:
    """There is no line to follow between them."""
    assert ratio_at([Point(8, 0.01), Point(16, 0.01)], 0.01) == 8


@pytest.mark.parametrize(("ratio", "kl"), [(0, 1), (1, 0), (-1, 1), (math.inf, 1), (1, math.nan)])
def test_a_point_that_has_no_logarithm_cannot_be_made(ratio: float, kl: float) -> None:
    """Neither an arm that loses nothing nor a broken one."""
    with pytest.raises(ValueError, match="over 0"):
        Point(ratio, kl)


def test_a_gain_is_the_ratio_over_the_points_at_its_kl() -> None:
    """With what it was read from."""
    found = gain_at(8, Point(9, 0.01), [Point(9, 0.001), Point(36, 0.1)])

    assert (found.target, found.kl, found.ratio, found.why) == (8, 0.01, 9, "")
    assert found.ratio_at_kl == pytest.approx(18)
    assert found.gain == pytest.approx(2)


@pytest.mark.parametrize(("kl", "why"), [(0.2, "higher target"), (0.0001, "lower target")])
def test_a_gain_that_was_not_measured_says_what_to_measure(kl: float, why: str) -> None:
    """And has no number."""
    found = gain_at(8, Point(9, kl), [Point(9, 0.001), Point(36, 0.1)])

    assert found.gain is None
    assert why in found.why
    assert gain_at(8, Point(9, kl), []).why


def test_the_smallest_gain_needs_all_of_them() -> None:
    """Otherwise the worst could be the one that is missing."""
    gains = [
        Gain(target=8, kl=0.1, ratio=8, ratio_at_kl=ratio, why="") for ratio in (24.0, 16.0, None)
    ]

    assert smallest(gains[:2]) == 2
    assert smallest(gains) is None
    assert smallest([]) is None
