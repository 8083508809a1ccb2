"""Confidence intervals of means, by drawing samples again with replacement.

A sample is a whole window or look-up, never a token: tokens of one window are alike, and
drawing them apart would make every interval too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from codec.quality_receipt import Interval

CONFIDENCE: Final = 0.95
NUM_RESAMPLES: Final = 2_000


def mean_interval(
    values_N: Sequence[float],
    weights_N: Sequence[float] | None = None,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The weighted mean with its 95 % percentile-bootstrap interval.

    One sample, or samples that are all equal, give an interval without width: how many
    there were must be said beside it.

    Parameters
    ----------
    values_N
        One value per sample.
    weights_N
        Such as the sample's tokens; equal by default.  They are drawn with their values.

    Raises
    ------
    ValueError
        If there is no sample, or a weight is not positive.
    """
    values = np.asarray(values_N, dtype=np.float64)
    weights = np.ones_like(values) if weights_N is None else np.asarray(weights_N, np.float64)
    if not len(values) or values.shape != weights.shape or not (weights > 0).all():
        raise ValueError(f"need one positive weight for each sample, got {values}, {weights}")
    mean = float(weights @ values / weights.sum())
    drawn_RN = np.random.default_rng(seed).integers(len(values), size=(num_resamples, len(values)))
    means_R = (weights * values)[drawn_RN].sum(axis=1) / weights[drawn_RN].sum(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means_R, [tail, 1 - tail])
    return Interval.spanning(mean, float(low), float(high))
