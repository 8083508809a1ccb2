"""A PCA basis of rows: fitted from streamed moments, it turns rows to coefficients and back.

1. `Moments` adds up the rows' sum and Gram matrix, window by window, around a fixed
   shift, so that a large mean does not eat the precision of small variances.
2. `fit_basis` eigendecomposes the covariance and orders directions by variance.
3. `Basis.project` and `Basis.reconstruct` are ``(X - mean) V`` and ``D V' + mean``.
   Both use the 16-bit directions that are stored, so writer and reader agree.

Source: KVTC (arXiv 2511.01815v2) section 3.1 and appendix B.1; the Gram route
replaces its randomized SVD and gives the same subspace without a random seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BATCH_ROWS = 4096
"""Rows per product: adding a Gram matrix in 64 bits costs as much as making it of 500 rows."""

PAPER_MAX_RANK = 10_000
"""Most directions kept before allocation, as published for 8-12 B models."""


@dataclass(frozen=True, kw_only=True)
class Basis:
    """Mean and orthonormal directions of one kind (keys or values) of one stage."""

    mean_W: Tensor
    """Shape ``(W,)``, float32."""

    directions_WC: Tensor
    """Shape ``(W, C)``, float16, columns by falling variance, orthonormal to 16 bits."""

    variance_C: Tensor
    """Shape ``(C',)``, float32, ``C' >= C``: variances of all directions found, falling."""

    def __post_init__(self) -> None:
        width, rank = self.directions_WC.shape
        if self.mean_W.shape != (width,) or len(self.variance_C) < rank:
            raise ValueError(
                f"shapes disagree: mean {tuple(self.mean_W.shape)}, directions {width, rank}, "
                f"variances {len(self.variance_C)}"
            )

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.directions_WC.shape[0]

    @property
    def rank(self) -> int:
        """Directions kept."""
        return self.directions_WC.shape[1]

    @cached_property
    def _float_directions_WC(self) -> Tensor:  # noqa: N802
        return self.directions_WC.float()

    def project(self, rows_TW: Tensor) -> Tensor:
        """Coefficients of rows: shape ``(T, C)``, float32."""
        return (rows_TW - self.mean_W) @ self._float_directions_WC

    def reconstruct(self, coefficients_TC: Tensor, columns: slice = slice(None)) -> Tensor:
        """Rows of coefficients: shape ``(T, W)``, float32, or only some columns of them.

        Parameters
        ----------
        columns
            Run of row elements wanted; a stage's layers are such runs.
        """
        directions = self._float_directions_WC[columns]
        return torch.addmm(self.mean_W[columns], coefficients_TC, directions.T)

    def truncated(self, rank: int) -> Basis:
        """The same basis with its first ``rank`` directions only."""
        return Basis(
            mean_W=self.mean_W,
            directions_WC=self.directions_WC[:, :rank].contiguous(),
            variance_C=self.variance_C,
        )


class Moments:
    """Count, sum and Gram matrix of the rows seen so far."""

    def __init__(self, width: int) -> None:
        self.num_rows = 0
        #: Subtracted from every row; the mean of the first batch, fixed from then on.
        self._shift_W: Tensor | None = None
        self._sum_W = torch.zeros(width, dtype=torch.float64)
        self._gram_WW = torch.zeros(width, width, dtype=torch.float64)
        #: Shifted rows that the sums do not hold yet; fewer than `BATCH_ROWS` after each add.
        self._pending: list[Tensor] = []

    def add(self, rows_TW: Tensor) -> None:
        """Count rows of shape ``(T, W)``, float32, finite.

        Raises
        ------
        ValueError
            If a value is not finite: one such row would spoil the whole basis.
        """
        if not torch.isfinite(rows_TW).all():
            raise ValueError("rows must be finite")
        if self._shift_W is None:
            self._shift_W = rows_TW.mean(dim=0)
        self.num_rows += len(rows_TW)
        self._pending.append(rows_TW - self._shift_W)
        if sum(map(len, self._pending)) >= BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        """Move pending rows into the sums."""
        if self._pending:
            shifted = torch.cat(self._pending)
            self._pending.clear()
            self._sum_W += shifted.sum(dim=0, dtype=torch.float64)
            self._gram_WW += shifted.T @ shifted

    @property
    def shift_W(self) -> Tensor:  # noqa: N802 - axis letters
        """A row in the middle of those seen: the mean of the first batch; zeros before it."""
        return torch.zeros(len(self._sum_W)) if self._shift_W is None else self._shift_W

    def state(self) -> dict[str, Tensor]:
        """Everything it knows, to go on later from exactly here: see `from_state`."""
        width = len(self._sum_W)
        return {
            "num_rows": torch.tensor([self.num_rows]),
            "shift": torch.zeros(0) if self._shift_W is None else self._shift_W,
            "sum": self._sum_W,
            "gram": self._gram_WW,
            "pending": torch.cat(self._pending) if self._pending else torch.zeros(0, width),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Moments:
        """Moments that go on from what `state` gave, to the same bits.

        Raises
        ------
        ValueError
            If its shapes disagree.
        """
        width, num_rows = len(state["sum"]), int(state["num_rows"])
        shift, pending = state["shift"], state["pending"]
        if (
            state["gram"].shape != (width, width)
            or len(shift) != (width if num_rows else 0)
            or pending.shape != (len(pending), width)
            or len(pending) > num_rows
        ):
            raise ValueError(
                f"shapes disagree: { ({n: tuple(t.shape) for n, t in state.items()}) }"
            )
        moments = cls(width)
        moments.num_rows = num_rows
        moments._sum_W, moments._gram_WW = state["sum"].clone(), state["gram"].clone()
        if num_rows:
            moments._shift_W = shift.clone()
        if len(pending):
            moments._pending.append(pending.clone())
        return moments

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """Mean ``(W,)`` and covariance ``(W, W)``, float32.

        Raises
        ------
        ValueError
            If fewer than two rows were seen.
        """
        if self._shift_W is None or self.num_rows < 2:
            raise ValueError(f"need at least 2 rows, got {self.num_rows}")
        self._flush()
        offset = self._sum_W / self.num_rows
        covariance = self._gram_WW / self.num_rows - torch.outer(offset, offset)
        return (self._shift_W + offset).float(), covariance.float()


def fit_basis(moments: Moments, *, max_rank: int = PAPER_MAX_RANK) -> Basis:
    """Principal directions of the rows seen, most variance first.

    The sign of each direction is fixed by making its largest element positive, so that
    equal moments give an equal basis.  There are at most ``num_rows - 1`` directions.
    """
    mean, covariance = moments.mean_and_covariance()
    variance, directions = torch.linalg.eigh(covariance)
    rank = min(len(mean), moments.num_rows - 1, max_rank)
    variance = variance.flip(0)[:rank].clamp_min(0)
    directions = directions.flip(1)[:, :rank]
    peak = directions.abs().argmax(dim=0)
    signs = directions[peak, torch.arange(rank)].sign()
    return Basis(
        mean_W=mean,
        directions_WC=(directions * signs).to(torch.float16).contiguous(),
        variance_C=variance.contiguous(),
    )
