"""`Deadlines` and `Countdown`: no wait without an end."""

from __future__ import annotations

from dataclasses import fields

import pytest

from actors.transport.deadlines import Countdown, Deadlines


@pytest.mark.parametrize("name", [field.name for field in fields(Deadlines)])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_every_deadline_is_above_zero(name: str, value: float) -> None:
    """The message names the one that is not."""
    with pytest.raises(ValueError, match=name):
        Deadlines(**{name: value})


def test_a_step_gets_its_own_time_until_the_total_runs_out() -> None:
    """Never below zero, however late it is."""
    now = 100.0
    countdown = Countdown(Deadlines(total_s=10.0), clock=lambda: now)
    assert countdown.left(4.0) == 4.0

    now = 108.0
    assert countdown.left(4.0) == 2.0

    now = 111.0
    assert countdown.left(4.0) == 0.0
