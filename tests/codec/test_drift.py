"""The measure of drift, and the sentence that a user reads."""

from __future__ import annotations

import pickle

import pytest
import torch

from codec.drift import DRIFT_BOUND, DriftWarning, drift_of


def test_drift_is_mean_energy_over_the_held_out_mean() -> None:
    """The calibration's own text has a drift of about 1."""
    assert drift_of(torch.tensor([1.0, 3.0]), 2.0) == pytest.approx(1.0)
    assert drift_of(torch.tensor([8.0, 8.0]), 2.0) == pytest.approx(4.0)


def test_no_tokens_do_not_drift() -> None:
    """A chunk of sinks alone says nothing."""
    assert drift_of(torch.zeros(0), 2.0) == 0


def test_a_calibration_that_left_nothing_outside_can_be_drifted_from() -> None:
    """No division by zero, and anything outside is far."""
    assert drift_of(torch.tensor([1.0]), 0.0) > DRIFT_BOUND
    assert drift_of(torch.tensor([0.0]), 0.0) == 0


def test_the_warning_says_how_far_and_what_to_do() -> None:
    """Also after a pickle, as workers send it."""
    warning = pickle.loads(pickle.dumps(DriftWarning(12.5)))

    assert "12.5 times" in str(warning)
    assert "kvfabric calibrate" in str(warning)
