"""Static models of symbols: how likely each is, in whole parts of 4096.

A model is a row of frequencies that add up to 4096; a symbol of frequency ``f`` costs
``log2(4096 / f)`` bits, and one of frequency 0 cannot be coded.  `SymbolModels` holds a
few such rows over one alphabet, and the tables that coders look symbols up in.

`SymbolModels.fit` turns counts into the frequencies under which the counted symbols cost
least.  The cost is a sum of convex functions of one frequency each, so a row is best
when no single part moves with profit from one symbol to another; `fit_frequencies`
starts near the proportions and moves parts until that holds.

Axis letters: K models, A symbols of the alphabet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

PROB_BITS = 12
"""Frequencies are parts of ``2 ** PROB_BITS``."""
TOTAL = 1 << PROB_BITS
"""What every row of frequencies adds up to."""
MAX_ALPHABET = 256
"""Most symbols of an alphabet: a symbol is a byte."""


@dataclass(frozen=True, eq=False)
class SymbolModels:
    """Frequencies of symbols under each of some models."""

    freq_KA: NDArray[np.uint16]
    """Shape ``(K, A)``, read-only; rows add up to `TOTAL`.  Other integers are converted."""

    def __post_init__(self) -> None:
        freq_KA = np.asarray(self.freq_KA)
        if freq_KA.ndim != 2 or freq_KA.dtype.kind not in "iu":
            raise ValueError(f"need integers (K, A), got {freq_KA.dtype} {freq_KA.shape}")
        if not (len(freq_KA) and 1 <= freq_KA.shape[1] <= MAX_ALPHABET):
            raise ValueError(f"need K >= 1 and 1 <= A <= {MAX_ALPHABET}, got {freq_KA.shape}")
        if ((freq_KA < 0) | (freq_KA > TOTAL)).any():
            raise ValueError(f"frequencies must be in 0..{TOTAL}")
        sum_K = freq_KA.sum(axis=1, dtype=np.int64)
        if (sum_K != TOTAL).any():
            worst = int(np.argmax(sum_K != TOTAL))
            raise ValueError(f"rows must add up to {TOTAL}, row {worst} to {sum_K[worst]}")
        object.__setattr__(self, "freq_KA", _read_only(freq_KA, np.uint16))

    @classmethod
    def fit(cls, counts_KA: ArrayLike, floor: ArrayLike = True) -> SymbolModels:
        """The models under which symbols counted like this cost the fewest bits.

        Parameters
        ----------
        counts_KA
            Shape ``(K, A)``, finite and not negative, whole or not.  A row without any
            count is fitted as if each symbol of its floor had been seen once.
        floor
            Broadcasts to ``(K, A)``: symbols that must be codable even if never seen.
            Symbols outside it that were not seen get frequency 0.

        Raises
        ------
        ValueError
            If counts are not as said, or a row has neither counts nor a floor.
        """
        counts_KA = np.asarray(counts_KA, dtype=np.float64)
        if counts_KA.ndim != 2 or not (np.isfinite(counts_KA) & (counts_KA >= 0)).all():
            raise ValueError(f"need finite counts (K, A) >= 0, got shape {counts_KA.shape}")
        if counts_KA.shape[1] > MAX_ALPHABET:
            raise ValueError(f"need at most {MAX_ALPHABET} symbols, got {counts_KA.shape[1]}")
        floor_KA = np.broadcast_to(np.asarray(floor, dtype=np.bool_), counts_KA.shape)
        rows = [fit_frequencies(*row) for row in zip(counts_KA, floor_KA, strict=True)]
        return cls(np.array(rows, dtype=np.uint16).reshape(counts_KA.shape))

    @property
    def num_models(self) -> int:
        """Rows of the table."""
        return int(self.freq_KA.shape[0])

    @property
    def num_symbols(self) -> int:
        """Symbols of the alphabet."""
        return int(self.freq_KA.shape[1])

    @cached_property
    def cum_KA(self) -> NDArray[np.uint16]:  # noqa: N802 - axis letters
        """Shape ``(K, A)``: the first slot of each symbol, which is the sum of those before."""
        return _read_only(np.cumsum(self.freq_KA, axis=1) - self.freq_KA, np.uint16)

    @cached_property
    def share_KA(self) -> NDArray[np.uint32]:  # noqa: N802
        """Shape ``(K, 256)``: ``frequency << 16 | first slot``, 0 for what cannot be coded.

        It is as wide as a byte has values, so that no symbol points outside it.
        """
        share_KA = np.zeros((self.num_models, MAX_ALPHABET), np.uint32)
        share_KA[:, : self.num_symbols] = self.freq_KA.astype(np.uint32) << 16 | self.cum_KA
        share_KA[:, : self.num_symbols][self.freq_KA == 0] = 0
        return _read_only(share_KA, np.uint32)

    @cached_property
    def symbol_of_slot_KS(self) -> NDArray[np.uint8]:  # noqa: N802
        """Shape ``(K, 4096)``: the symbol that owns each slot."""
        symbol_A = np.arange(self.num_symbols)
        return _read_only([np.repeat(symbol_A, freq_A) for freq_A in self.freq_KA], np.uint8)

    @cached_property
    def bits_KA(self) -> NDArray[np.float64]:  # noqa: N802
        """Shape ``(K, A)``: bits that each symbol costs; infinite if it cannot be coded."""
        with np.errstate(divide="ignore"):
            return _read_only(PROB_BITS - np.log2(self.freq_KA.astype(np.float64)), np.float64)


def fit_frequencies(
    counts_A: NDArray[np.float64], floor_A: NDArray[np.bool_], total: int = TOTAL
) -> NDArray[np.int64]:
    """The frequencies that add up to ``total`` and minimize ``sum(-counts log2(frequency))``.

    Ties go to the symbol of lower number.  Moves end because each makes the same
    floating-point sum of gains greater, and there are finitely many frequencies.

    Parameters
    ----------
    counts_A
        Shape ``(A,)``, finite, not negative.
    floor_A
        Shape ``(A,)``: symbols that get 1 or more although they may have no count.

    Returns
    -------
    freq_A
        Shape ``(A,)``; 0 exactly where there is neither count nor floor.

    Raises
    ------
    ValueError
        If no symbol, or more symbols than ``total``, must be codable.
    """
    counted_A = counts_A > 0
    least_A = (counted_A | floor_A).astype(np.int64)
    if not 1 <= least_A.sum() <= total:
        raise ValueError(f"need 1 to {total} codable symbols, got {least_A.sum()}")
    # Scaled to 1, so that counts of any size have logarithms and sums that are finite.
    weight_A = counts_A / counts_A.max() if counted_A.any() else least_A.astype(np.float64)
    share_A = weight_A / weight_A.sum()
    freq_A: NDArray[np.int64] = np.maximum(least_A, (share_A * total).astype(np.int64))
    while freq_A.sum() < total:
        freq_A[_to_grow(weight_A, least_A, freq_A)[0]] += 1
    while freq_A.sum() > total:
        freq_A[_to_shrink(weight_A, least_A, freq_A)[0]] -= 1
    while True:
        grow, gain = _to_grow(weight_A, least_A, freq_A)
        shrink, loss = _to_shrink(weight_A, least_A, freq_A)
        if gain <= loss:
            return freq_A
        freq_A[grow] += 1
        freq_A[shrink] -= 1


def _to_grow(
    weight_A: NDArray[np.float64], least_A: NDArray[np.int64], freq_A: NDArray[np.int64]
) -> tuple[int, float]:
    """The symbol that gains most by one part more, and how many bits."""
    gain_A = np.where(least_A > 0, weight_A * _step_bits(np.maximum(freq_A, 1)), -np.inf)
    return int(np.argmax(gain_A)), float(gain_A.max())


def _to_shrink(
    weight_A: NDArray[np.float64], least_A: NDArray[np.int64], freq_A: NDArray[np.int64]
) -> tuple[int, float]:
    """The symbol that loses least by one part fewer, and how many bits."""
    loss_A = np.where(freq_A > least_A, weight_A * _step_bits(np.maximum(freq_A - 1, 1)), np.inf)
    return int(np.argmin(loss_A)), float(loss_A.min())


def _step_bits(freq_A: NDArray[np.int64]) -> NDArray[np.float64]:
    """Bits saved by each symbol that is coded with one part more than ``freq_A``."""
    return np.asarray(np.log2(freq_A + 1) - np.log2(freq_A))


def _read_only(values: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    """A C-ordered copy that cannot be written to."""
    array = np.array(values, dtype=dtype, order="C")
    array.setflags(write=False)
    return array
