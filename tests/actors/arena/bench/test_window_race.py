"""The race of window appends: contenders agree before they are timed, by a clock of ours."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from actors.arena.bench.window_race import RING, ROLL, Append, hot_window_us, race, roll_append

WINDOW = 40


def test_ratios_are_medians_of_rounds() -> None:
    """Each contender's time over the ring's of the same round."""
    ticks = count()

    figures = race(WINDOW, {}, num_rounds=3, steps_per_round=2, clock=lambda: float(next(ticks)))

    assert figures == {f"{RING}.us": 5e5, f"{ROLL}.us": 5e5, f"{ROLL}.over_ring": 1.0}


def late_append(window_tokens: int) -> Append:
    """A contender that is one token behind."""
    roll = roll_append(window_tokens)
    held = [torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16)] * 2

    def append(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = roll(held[0], held[1])
        held[:] = [key, value]
        return window

    return append


def test_who_has_other_tokens_does_not_take_part() -> None:
    """A fast wrong window is no result."""
    with pytest.raises(AssertionError, match="late"):
        race(WINDOW, {"late": late_append}, num_rounds=1, steps_per_round=1)


def test_a_pinned_window_is_timed_by_itself() -> None:
    """Two ticks of the clock each, and everything is given back."""
    ticks = count()

    assert hot_window_us(WINDOW, num_windows=3, clock=lambda: float(next(ticks))) == 1e6
