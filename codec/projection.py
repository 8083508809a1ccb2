"""Project each token on as many coefficients as it is coded with, and back.

A token's shift decides how far down the ladder its coefficients are coded at all
(`SymbolClasses.first_class`).  Coefficients lie by falling level, so those of a token are its
first ones, its *rank*.  With tokens in order of falling rank, every block of coefficients
concerns the first few tokens only: the product does no work on what is not coded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.step_quantizer import Ints

BLOCK = 256
"""Coefficients of one product: enough that adding up blocks costs little."""


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

    @classmethod
    def of(cls, rank_T: NDArray[np.int64]) -> TokenRanks:
        """Order tokens; those of one rank stay in their order."""
        order_T = np.argsort(-rank_T, kind="stable")
        return cls(rank_T, torch.from_numpy(order_T))

    def blocks(self) -> Iterator[tuple[slice, int]]:
        """Runs of coefficients, and how many tokens, in order, have any of them."""
        highest = int(self.rank_T.max(initial=0))
        for start in range(0, highest, BLOCK):
            yield slice(start, min(start + BLOCK, highest)), int((self.rank_T > start).sum())

    def project(self, rows_TW: Tensor, forward_WC: Tensor) -> Tensor:
        """Coefficients of centered rows, shape ``(T, C)``; zero where a token has none."""
        result = torch.zeros(len(rows_TW), forward_WC.shape[1])
        ordered = rows_TW[self.order_T]
        for block, num in self.blocks():
            result[self.order_T[:num], block] = ordered[:num] @ forward_WC[:, block]
        # A block reaches past the rank of some of its tokens.
        columns_C = torch.arange(forward_WC.shape[1])
        result[columns_C >= torch.from_numpy(self.rank_T)[:, None]] = 0
        return result

    def reconstruct(self, ordered_TC: Tensor, backward_CW: Tensor, mean_W: Tensor) -> Tensor:
        """Rows of coefficients, both *in order*: shape ``(T, W)``, in one order of additions."""
        rows = mean_W.repeat(len(ordered_TC), 1)
        for block, num in self.blocks():
            rows[:num].addmm_(ordered_TC[:num, block], backward_CW[block])
        return rows
