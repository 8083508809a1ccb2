"""`PullReport` adds up, and `fit_link` draws the right line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.transport.report import ComponentOutcome, LinkProbe, Outcome, PullReport, fit_link
from tests.actors.transport.samples import CODEC, key


def report(*lines: tuple[Outcome, int]) -> PullReport:
    """A report with these outcomes and sizes."""
    outcomes = tuple(
        ComponentOutcome(key(index), CODEC, outcome, size)
        for index, (outcome, size) in enumerate(lines)
    )
    return PullReport(outcomes=outcomes, wire_bytes=999, connect_s=1.0, transfer_s=1.0)


def test_bytes_moved_are_those_that_arrived() -> None:
    """Good or bad; what the sink had no room for did not arrive."""
    full = report(
        (Outcome.DELIVERED, 1),
        (Outcome.CORRUPT, 10),
        (Outcome.MISMATCH, 100),
        (Outcome.NO_ROOM, 1000),
        (Outcome.ABSENT, 0),
    )

    assert full.bytes_moved == 111
    assert full.delivered_bytes == 1
    assert not full.is_complete


def test_a_report_is_complete_when_everything_was_delivered() -> None:
    """One miss is enough."""
    assert report((Outcome.DELIVERED, 1), (Outcome.DELIVERED, 2)).is_complete
    assert not report((Outcome.DELIVERED, 1), (Outcome.OVER_LIMIT, 0)).is_complete


@given(st.floats(1e-6, 1.0), st.floats(1e5, 1e11))
def test_the_line_through_exact_times_is_found(t0_s: float, bytes_per_s: float) -> None:
    """Times that follow the model give its parameters back."""
    small, large = 64 << 10, 8 << 20
    found = fit_link(
        small_bytes=small,
        small_s=t0_s + small / bytes_per_s,
        large_bytes=large,
        large_s=t0_s + large / bytes_per_s,
    )

    assert found.t0_s + large / found.bytes_per_s == pytest.approx(t0_s + large / bytes_per_s)
    assert found.t0_s >= 0


@given(st.floats(1e-9, 10.0), st.floats(1e-9, 10.0))
def test_any_two_times_give_a_usable_link(small_s: float, large_s: float) -> None:
    """Noise may reverse them; the result never promises more than the large one showed."""
    found = fit_link(small_bytes=1000, small_s=small_s, large_bytes=9000, large_s=large_s)

    assert found.t0_s >= 0
    assert found.bytes_per_s > 0
    if large_s <= small_s:
        assert found == LinkProbe(0.0, 9000 / large_s)


@pytest.mark.parametrize(
    ("small_bytes", "small_s", "large_bytes", "large_s"),
    [(0, 1.0, 9, 2.0), (9, 1.0, 9, 2.0), (1, 0.0, 9, 2.0), (1, 1.0, 9, 0.0)],
)
def test_impossible_measurements_are_refused(
    small_bytes: int, small_s: float, large_bytes: int, large_s: float
) -> None:
    """No line goes through one point, or through no time."""
    with pytest.raises(ValueError, match="need 0 <"):
        fit_link(small_bytes=small_bytes, small_s=small_s, large_bytes=large_bytes, large_s=large_s)


@pytest.mark.parametrize(("t0_s", "bytes_per_s"), [(-0.1, 1.0), (0.0, 0.0)])
def test_an_impossible_link_cannot_be_built(t0_s: float, bytes_per_s: float) -> None:
    """Planners divide by it."""
    with pytest.raises(ValueError, match="t0_s"):
        LinkProbe(t0_s, bytes_per_s)
