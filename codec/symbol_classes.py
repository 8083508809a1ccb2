"""Classes of coefficients: those of about one spread are rounded and coded alike.

The spread of a coefficient in steps decides everything about its codes.  So classes are a
fixed ladder of spreads, a quarter of an octave apart, and a calibration fits to each class
the symbol frequencies, the rounding offset and the centroids.  A coefficient has a *level*,
its place on the ladder; a token that deserves a finer step *shifts* all its coefficients up
the ladder, and a coarser one down: class = level + shift, held within the ladder.

Coefficients too wide for the ladder keep their lowest bits apart, as they are: these are
all but uniform, and no model can say anything about them.

Axis letters: K classes, A symbols, C coefficients, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from codec.entropy.models import SymbolModels

CLASSES_PER_OCTAVE = 4
"""Steps of the ladder per doubling of the spread; a shift of one is one of them too."""
NUM_CLASSES = 42
"""From a spread of 1/16 step, of which hardly any code is not 0, to 76 steps."""
ZERO_LEVEL = 16
"""The level of a coefficient whose standard deviation is one step."""
MAX_LEVEL = ZERO_LEVEL + 15
"""Widest coefficients coded whole: 13 steps, which leaves room for the greatest shift."""
MAX_SHIFT = 9
"""Most that a token's importance moves its classes, either way."""
MAX_FIRST_CLASS = MAX_LEVEL - (CLASSES_PER_OCTAVE - 1) - MAX_SHIFT
"""Widest class that may be left out: no coefficient that keeps low bits apart comes below."""
MAX_LOW_BITS = 16
"""Most bits of a code that are kept apart."""
LAST_LEVEL = MAX_LEVEL + CLASSES_PER_OCTAVE * MAX_LOW_BITS
"""Greatest level whose excess the low bits can take."""
LADDER = f"{CLASSES_PER_OCTAVE} {NUM_CLASSES} {ZERO_LEVEL} {MAX_LEVEL} {MAX_SHIFT} {MAX_LOW_BITS}"
"""All that decides what a code means besides a calibration: part of a codec's identity."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SymbolClasses:
    """What all coefficients of a class share."""

    models: SymbolModels
    """Frequencies of the zigzag symbols; the last codable symbol of a class is its escape.

    Classes too narrow to be worth coding have symbol 0 alone, and no escape.
    """

    offset_K: NDArray[np.float32]
    """In (0, 0.5]: a magnitude is rounded down after adding this; 0.5 rounds to nearest."""

    bias1_K: NDArray[np.float32]
    """How far below 1 the values of code 1 lie in the mean, in steps."""

    bias2_K: NDArray[np.float32]
    """The same below any greater magnitude."""

    def __post_init__(self) -> None:
        if self.models.num_models != NUM_CLASSES:
            raise ValueError(f"need {NUM_CLASSES} classes, got {self.models.num_models}")
        for name in ("offset_K", "bias1_K", "bias2_K"):
            values = getattr(self, name)
            if values.shape != (NUM_CLASSES,) or values.dtype != np.float32:
                raise ValueError(f"{name} must be float32 ({NUM_CLASSES},), got {values.shape}")
            if not np.isfinite(values).all():
                raise ValueError(f"{name} must be finite")
        if not ((self.offset_K > 0) & (self.offset_K <= 0.5)).all():
            raise ValueError("rounding offsets must be in (0, 0.5]")
        codable_KA = self.models.freq_KA > 0
        if (codable_KA[:, 1:] > codable_KA[:, :-1]).any():
            raise ValueError("the codable symbols of a class must be its first ones")
        if (np.diff((self.alphabet_K > 1).astype(np.int8)) < 0).any():
            raise ValueError("the classes that are not coded must be the narrowest ones")
        if self.first_class > MAX_FIRST_CLASS:
            raise ValueError(f"classes from {MAX_FIRST_CLASS} on must be coded")

    @cached_property
    def alphabet_K(self) -> NDArray[np.int32]:  # noqa: N802 - axis letters
        """Codable symbols of each class, its escape included."""
        return np.asarray((self.models.freq_KA > 0).sum(axis=1), np.int32)

    @cached_property
    def first_class(self) -> int:
        """The narrowest class that is coded."""
        return int((self.alphabet_K == 1).sum())


def levels_of(spread_C: NDArray[np.float64], step: float) -> NDArray[np.int32]:
    """Level of coefficients with these standard deviations: not below the ladder, maybe above.

    Examples
    --------
    >>> levels_of(np.array([1.0, 2.0, 0.5]), 1.0).tolist()
    [16, 20, 12]
    """
    with np.errstate(divide="ignore"):
        octaves_C = np.log2(np.maximum(spread_C, 1e-30) / step)
    level_C = np.rint(CLASSES_PER_OCTAVE * octaves_C) + ZERO_LEVEL
    return np.asarray(np.maximum(level_C, 0), np.int32)


def split_levels(level_C: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """How many low bits are kept apart, and the level of what is left of the code.

    Returns
    -------
    low_bits_C, level_C
        The least number of low bits that brings a level down to `MAX_LEVEL`, and the rest.
    """
    excess_C = np.maximum(level_C - MAX_LEVEL, 0)
    low_bits_C = np.minimum(-(-excess_C // CLASSES_PER_OCTAVE), MAX_LOW_BITS).astype(np.int32)
    return low_bits_C, (level_C - CLASSES_PER_OCTAVE * low_bits_C).astype(np.int32)


def class_of(level: NDArray[np.int32], shift: NDArray[np.int32]) -> NDArray[np.int32]:
    """The class of coefficients of ``level`` in tokens of ``shift``; both broadcast."""
    return np.asarray(np.clip(level + shift, 0, NUM_CLASSES - 1), np.int32)


def step_factor(shift_T: NDArray[np.int32]) -> NDArray[np.float32]:
    """What a token's shift multiplies its step by."""
    return np.asarray(np.exp2(-shift_T / CLASSES_PER_OCTAVE), np.float32)
