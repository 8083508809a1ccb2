"""Project each token on as many coefficients as it is coded with, and back.

Layers may be split into groups with directions of their own: a coefficient is then of one
group, and costs no arithmetic in the others.

A token's shift decides how far down the ladder its coefficients are coded at all
(`SymbolClasses.first_class`).  Coefficients lie by falling level, so those of a token are its
first ones, its *rank*.  There are no more ranks than shifts.  With tokens in order of falling
rank, the coefficients between one rank and the next concern the first few tokens alone: the
products do no work on what is not coded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.step_quantizer import Ints

LAYERS_AT_ONCE = 4
"""Layers whose rows are 32-bit floats at a time while decoding: bounds the memory."""


def ranks_of(level_C: Ints, first_class: int, shift_T: Ints) -> NDArray[np.int64]:
    """How many coefficients each token is coded with; ``level_C`` must not rise.

    Examples
    --------
    >>> ranks_of(np.array([9, 7, 7, 2]), 5, np.array([0, -3, 3])).tolist()
    [3, 1, 4]
    """
    return np.searchsorted(-level_C, shift_T - first_class, side="right")


@dataclass(frozen=True)
class TokenRanks:
    """Tokens in order of falling rank, and which of them each block of coefficients concerns."""

    rank_T: NDArray[np.int64]
    order_T: Tensor
    """Token numbers, int64."""

    stops: tuple[int, ...]
    """All ranks that any token may have, rising."""

    @classmethod
    def of(cls, rank_T: NDArray[np.int64], stops: Sequence[int]) -> TokenRanks:
        """Order tokens; those of one rank stay in their order."""
        order_T = np.argsort(-rank_T, kind="stable")
        return cls(rank_T, torch.from_numpy(order_T), tuple(stops))

    def blocks(self) -> Iterator[tuple[slice, int]]:
        """Runs of coefficients, and how many tokens, in order, have all of them: others none."""
        for start, stop in pairwise((0, *self.stops)):
            num = int((self.rank_T >= stop).sum())
            if num and start < stop:
                yield slice(start, stop), num

    def project(self, rows_TW: Tensor, forward_CW: Tensor) -> Tensor:
        """Coefficients of centered rows, shape ``(C, T)``; zero where a token has none."""
        ordered_WT = rows_TW[self.order_T].T
        ordered_CT = torch.zeros(len(forward_CW), len(rows_TW))
        for block, num in self.blocks():
            ordered_CT[block, :num] = forward_CW[block] @ ordered_WT[:, :num]
        return ordered_CT[:, self.order_T.argsort()]

    def reconstruct(self, ordered_TC: Tensor, backward_CW: Tensor, mean_W: Tensor) -> Tensor:
        """Rows of coefficients, both *in order*: shape ``(T, W)``, in one order of additions."""
        rows = mean_W.repeat(len(ordered_TC), 1)
        for block, num in self.blocks():
            rows[:num].addmm_(ordered_TC[:num, block], backward_CW[block])
        return rows


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers whose rows have directions of their own: a block of the projection."""

    coordinates: slice
    """Of rows, which this group's coefficients stand for."""

    columns_C: Tensor
    """Numbers of its coefficients among all of the kind, int64, rising."""

    level_C: Ints
    """Of its coefficients."""

    forward_CG: Tensor
    """What its coordinates, less their mean, are multiplied by, float32."""

    backward_CG: Tensor
    """What its coefficients are multiplied by to be coordinates less their mean, float32."""

    def runs(self, layer_width: int, wanted: range) -> list[range]:
        """Those of the wanted layers that are here, a few at a time."""
        first, end = (at // layer_width for at in (self.coordinates.start, self.coordinates.stop))
        start, stop = max(wanted.start, first), min(wanted.stop, end)
        return [
            range(layer, min(layer + LAYERS_AT_ONCE, stop))
            for layer in range(start, stop, LAYERS_AT_ONCE)
        ]

    def backward(self, coordinates: slice) -> Tensor:
        """What its coefficients are multiplied by to be some of its coordinates."""
        start = self.coordinates.start
        return self.backward_CG[:, coordinates.start - start : coordinates.stop - start]
