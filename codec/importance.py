"""Tell from a token's keys how much an error in its cache would matter later.

The log of a token's importance (`codec.sensitivity`) is all but linear in its unrotated
keys: a delimiter or a name that later tokens attend to looks like one.  `Importance` holds
that linear form.  It gives each token a *shift* on the ladder of `codec.symbol_classes`: by
reverse water-filling, a token whose errors count ``w`` times as much deserves a step
``sqrt(w)`` times as fine.

The writer evaluates it once and stores the shift; a reader never needs it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.sensitivity import check_finite
from codec.symbol_classes import CLASSES_PER_OCTAVE, MAX_SHIFT

RIDGE = 50.0
"""Weight of the penalty on coefficients of unit variance: the fit sees few thousand tokens."""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Log importance of a token as a linear form of its unrotated keys."""

    direction_W: Tensor
    """Shape ``(W,)``, float32; zeros where all tokens count alike."""

    offset: float
    """Subtracted, so that a token of the mean shift has shift 0."""

    def __post_init__(self) -> None:
        check_finite("importance", self.direction_W)
        if not math.isfinite(self.offset):
            raise ValueError(f"importance offset must be finite, got {self.offset}")

    def log_of(self, keys_TW: Tensor) -> Tensor:
        """Predicted log importance, shape ``(T,)``, around 0."""
        return keys_TW @ self.direction_W - self.offset

    def shifts(self, keys_TW: Tensor) -> NDArray[np.int32]:
        """The shift of each token, shape ``(T,)``, within ``MAX_SHIFT`` either way."""
        octaves = self.log_of(keys_TW) / (2 * math.log(2))
        shift = (octaves * CLASSES_PER_OCTAVE).round().clamp(-MAX_SHIFT, MAX_SHIFT)
        # A key that overflows is an outlier, and stored as it is.
        return shift.nan_to_num(0).to(torch.int32).numpy()

    @classmethod
    def none(cls, width: int) -> Importance:
        """All tokens count alike."""
        return cls(direction_W=torch.zeros(width), offset=0.0)


def fit_importance(
    coefficients_NC: Tensor, importance_N: Tensor, back_CW: Tensor, mean_W: Tensor
) -> Importance:
    """Ridge regression of log importance on coefficients, as a form of the keys themselves.

    Parameters
    ----------
    coefficients_NC
        Leading coefficients of the tokens' keys, scaled to unit variance.
    importance_N
        Positive.
    back_CW
        What takes keys less their mean to those coefficients, transposed.
    """
    target = importance_N.log().double()
    rows = coefficients_NC.double()
    center_C = rows.mean(dim=0)
    rows = rows - center_C
    gram = rows.T @ rows + RIDGE * torch.eye(rows.shape[1], dtype=torch.float64)
    weight_C = torch.linalg.solve(gram, rows.T @ (target - target.mean()))
    direction = (weight_C.float() @ back_CW).contiguous()
    offset = float(weight_C @ center_C) + float(mean_W.double() @ direction.double())
    return Importance(direction_W=direction, offset=offset)
