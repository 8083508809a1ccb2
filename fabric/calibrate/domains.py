"""What kinds of text went into a calibration, and which of their tokens are like no other.

A few tokens of a sequence, mostly the first, have keys and values many times larger than
the rest: sinks.  The codec stores the first positions as they are; positions beyond
them that are as large are counted here, so that they can be seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

OUTLIER_FACTOR: Final = 50.0
"""Times the median energy of its window at which a token counts as an outlier."""

KINDS: Final = ("keys", "values")


@dataclass(frozen=True, kw_only=True)
class Outliers:
    """Positions in windows of one domain at which one kind's energy was far above the rest."""

    kind: str
    """``keys`` or ``values``."""

    count_by_position: Mapping[int, int]
    """Windows in which the token there was one."""

    largest: float
    """Most times the median of its window."""


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One corpus file's share of a calibration."""

    name: str
    num_windows: int
    num_tokens: int
    """Tokens run through the model, those held out counted too."""

    num_held_out_tokens: int
    num_gradient_tokens: int
    """Tokens whose gradients were taken."""

    outliers: tuple[Outliers, ...]


class DomainTable:
    """Counts per domain; memory does not grow with tokens.

    Invariant: row ``d`` of each array belongs to the ``d``-th file.
    """

    def __init__(self, names: Sequence[str], window_tokens: int) -> None:
        self._names = tuple(names)
        #: Windows, tokens, held-out tokens, tokens with gradients of each domain.
        self._counts_D4 = torch.zeros(len(names), 4, dtype=torch.int64)
        self._outliers_2DP = torch.zeros(2, len(names), window_tokens, dtype=torch.int64)
        self._largest_2D = torch.zeros(2, len(names), dtype=torch.float64)

    def add_window(self, domain: int, energies_2T: Tensor, *, is_held_out: bool) -> None:
        """Count one window, with its tokens' energy in keys and in values."""
        num_tokens = energies_2T.shape[1]
        counts = (1, num_tokens, num_tokens * is_held_out, 0)
        self._counts_D4[domain] += torch.tensor(counts)
        median_21 = energies_2T.median(dim=1, keepdim=True).values.clamp_min(1e-30)
        times_2T = (energies_2T / median_21).double()
        self._outliers_2DP[:, domain, :num_tokens] += times_2T > OUTLIER_FACTOR
        largest_2 = torch.maximum(self._largest_2D[:, domain], times_2T.amax(dim=1))
        self._largest_2D[:, domain] = largest_2

    def add_gradients(self, domain: int, num_tokens: int) -> None:
        """Count tokens whose gradients were taken."""
        self._counts_D4[domain, 3] += num_tokens

    def result(self) -> tuple[Domain, ...]:
        """Everything counted so far."""
        return tuple(
            Domain(
                name=name,
                num_windows=counts[0],
                num_tokens=counts[1],
                num_held_out_tokens=counts[2],
                num_gradient_tokens=counts[3],
                outliers=tuple(self._outliers(kind, number) for kind in range(2)),
            )
            for number, (name, counts) in enumerate(
                zip(self._names, self._counts_D4.tolist(), strict=True)
            )
        )

    def state(self) -> dict[str, Tensor]:
        """Everything it knows; see `restore`."""
        return {
            "counts": self._counts_D4,
            "outliers": self._outliers_2DP,
            "largest": self._largest_2D,
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave.

        Raises
        ------
        ValueError
            If it is of other domains or windows.
        """
        for name, mine in self.state().items():
            if state[name].shape != mine.shape:
                raise ValueError(f"need {name} of {tuple(mine.shape)}")
            mine.copy_(state[name])

    def _outliers(self, kind: int, domain: int) -> Outliers:
        counts_P = self._outliers_2DP[kind, domain]
        positions = counts_P.nonzero()[:, 0].tolist()
        return Outliers(
            kind=KINDS[kind],
            count_by_position={at: int(counts_P[at]) for at in positions},
            largest=float(self._largest_2D[kind, domain]),
        )
