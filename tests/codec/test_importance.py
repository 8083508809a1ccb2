"""Importance from keys: a planted linear relation is found, and shifts stay in bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.importance import RIDGE, Importance, fit_importance
from codec.symbol_classes import CLASSES_PER_OCTAVE, MAX_SHIFT
from tests.codec.entropy_samples import (
    GEOMETRY,
    calibrated,
    plain_rows,
    planted_log_importance,
)

WIDTH = 12


def planted(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, coefficients of unit variance, what takes one to the other, and the mean."""
    draw = torch.Generator().manual_seed(4)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=draw))[0]
    spread = torch.linspace(3, 0.5, WIDTH)
    mean = 5 * torch.randn(WIDTH, generator=draw)
    coefficients = torch.randn(num_rows, WIDTH, generator=draw)
    keys = (coefficients * spread) @ turn.T + mean
    return keys, coefficients, (turn / spread).T.contiguous(), mean


def test_a_planted_form_is_found() -> None:
    """Log importance that is linear in the keys is predicted for keys not seen."""
    keys, coefficients, back_CW, mean = planted(8000)
    log_N = coefficients @ torch.linspace(-1, 1, WIDTH) + 3

    made = fit_importance(coefficients[:6000], log_N[:6000].exp(), back_CW, mean)

    found = made.log_of(keys[6000:])
    torch.testing.assert_close(found, log_N[6000:] - 3, rtol=0.03, atol=0.08)
    assert float(made.log_of(keys[:6000]).mean()) == pytest.approx(0, abs=1e-3)


def test_the_fit_is_ridge_regression() -> None:
    """Against the closed form on centered coefficients."""
    keys, coefficients, back_CW, mean = planted(100)
    noise = torch.randn(100, generator=torch.Generator().manual_seed(5))

    made = fit_importance(coefficients, noise.exp(), back_CW, mean)

    rows = (coefficients - coefficients.mean(0)).double().numpy()
    target = (noise - noise.mean()).double().numpy()
    weight = np.linalg.solve(rows.T @ rows + RIDGE * np.eye(WIDTH), rows.T @ target)
    assert made.log_of(keys).numpy() == pytest.approx(rows @ weight, abs=1e-4)


def test_the_planted_importance_of_a_calibration_is_found() -> None:
    """Through the metric, the basis and the measured gradients."""
    keys, _ = plain_rows(300, seed=77)
    made = calibrated().importance

    pair = torch.stack([made.log_of(keys), planted_log_importance(keys)])

    assert float(torch.corrcoef(pair)[0, 1]) > 0.9
    assert abs(float(made.shifts(keys).mean())) < 1


@given(st.floats(-60, 60))
def test_a_shift_is_the_rounded_half_logarithm(log: float) -> None:
    """A token that counts w times as much has a step the square root of w times as fine."""
    made = Importance(direction_W=torch.tensor([1.0]), offset=0.0)

    (shift,) = made.shifts(torch.tensor([[log]]))

    wanted = CLASSES_PER_OCTAVE * log / 2 / math.log(2)
    assert abs(shift) <= MAX_SHIFT
    assert abs(shift - np.clip(wanted, -MAX_SHIFT, MAX_SHIFT)) <= 0.5 + 1e-4


def test_shifts_are_whole_numbers_at_both_bounds() -> None:
    """The bounds are reached, not passed."""
    made = Importance(direction_W=torch.tensor([1.0]), offset=2.0)

    shift_T = made.shifts(torch.tensor([[1e30], [-1e30], [2.0]]))

    assert shift_T.tolist() == [MAX_SHIFT, -MAX_SHIFT, 0]
    assert shift_T.dtype == np.int32


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_keys_that_overflow_have_a_legal_shift(bad: float) -> None:
    """Such rows are stored as they are; the shift of the others is what it was."""
    made = Importance(direction_W=torch.tensor([1.0, -1.0, 1e3]), offset=0.0)
    keys = torch.tensor([[1.0, 0.0, 0.0], [bad, bad, bad], [float("nan")] * 3])

    shift_T = made.shifts(keys)

    assert (np.abs(shift_T) <= MAX_SHIFT).all()
    assert shift_T[0] == round(CLASSES_PER_OCTAVE / 2 / math.log(2))
    assert shift_T[2] == 0


def test_without_importance_all_shifts_are_zero() -> None:
    """All tokens count alike."""
    keys, _ = plain_rows(20, seed=1)

    assert not Importance.none(GEOMETRY.key_width).shifts(keys).any()
