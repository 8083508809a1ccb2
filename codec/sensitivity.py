"""How much the model's output reacts to an error in each cached coordinate.

At calibration, and only there, some windows of text are run with gradients: the cached
keys (unrotated) and values of a context are inputs, the model predicts the tokens that
follow, and targets are *sampled from its own prediction*.  The gradient ``g`` of their log
likelihood then has ``E[g g'] = F``, the Fisher information, and an error ``e`` in the cache
changes the predicted distribution by ``KL = e' F e / 2`` (to second order).

Two things are kept of it, for every kind of row:

* a *metric*: one block of ``F`` per layer and kv head, averaged over tokens, drawn a little
  towards a multiple of the identity, since it is estimated from few gradients;
* each token's *importance*: how large its gradients are in that metric.  A few tokens
  matter a hundred times more than most, and `codec.importance` learns to tell them by
  their keys.

Tokens of a window are weighted by one over their importance in the metric, so that it is
an average over all of them, not a picture of the few important ones.

Tokens near the end of a window matter more only because what follows is near.  Where the
next reader of a stored token will stand is not known, so that trend is taken out.

Source
------
The Fisher metric is that of natural gradients (Amari 1998); its use for caches, one block
per head and the sampled targets are ours; shared measurements in docs/codec.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from codec.geometry import KVGeometry

SHRINKAGE = 0.05
"""Share of the identity in each block of the metric."""
TREND_TOKENS = 64
"""Tokens over which the trend of the importance is averaged."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Square roots of one kind's metric: one block for each layer and head.

    Rows times ``root`` are measured by plain squares; times ``inverse`` they come back.
    """

    root_BDD: Tensor
    """Shape ``(L * H, D, D)``, float32, symmetric, positive definite."""

    def __post_init__(self) -> None:
        shape = self.root_BDD.shape
        if len(shape) != 3 or shape[1] != shape[2] or self.root_BDD.dtype != torch.float32:
            raise ValueError(f"need float32 blocks (B, D, D), got {tuple(shape)}")
        check_finite("metric", self.root_BDD)
        if torch.linalg.cholesky_ex(self.root_BDD.double()).info.any():
            raise ValueError("a block of the metric is not positive definite")

    @classmethod
    def of_blocks(cls, blocks_BDD: Tensor, *, shrinkage: float = SHRINKAGE) -> Metric:
        """The metric of blocks of Fisher information, each positive semidefinite.

        A block of zeros (a layer whose output nothing reads) counts a thousandth of the least
        of the others, so that its coordinates can still be coded.
        """
        blocks = blocks_BDD.double()
        mean_B = blocks.diagonal(dim1=1, dim2=2).mean(dim=1)
        least = mean_B[mean_B > 0].min() if (mean_B > 0).any() else torch.tensor(1.0).double()
        mean_B = mean_B.clamp_min(float(least) * 1e-3)
        identity = torch.eye(blocks.shape[1], dtype=torch.float64)
        blocks = (1 - shrinkage) * blocks + shrinkage * mean_B[:, None, None] * identity
        variance_BD, axes_BDD = torch.linalg.eigh(blocks)
        root = axes_BDD * variance_BD.clamp_min(1e-30).sqrt()[:, None, :]
        return cls(root_BDD=(root @ axes_BDD.transpose(1, 2)).float().contiguous())

    @classmethod
    def plain(cls, num_blocks: int, head_dim: int) -> Metric:
        """The metric under which all coordinates matter alike."""
        return cls(root_BDD=torch.eye(head_dim).repeat(num_blocks, 1, 1))

    @property
    def inverse_BDD(self) -> Tensor:  # noqa: N802 - axis letters
        """Inverse of each block of `root_BDD`, float32."""
        inverse_BDD: Tensor = torch.linalg.inv(self.root_BDD.double())
        return inverse_BDD.float()

    def scale(self, rows_TW: Tensor) -> Tensor:
        """Rows times the root: shape ``(T, W)``."""
        return times_blocks(rows_TW, self.root_BDD)

    def energy(self, rows_TW: Tensor) -> Tensor:
        """Squares of scaled rows, summed: shape ``(T,)``."""
        return _by_block(rows_TW, self.root_BDD).square_().sum(dim=(0, 2))

    def scale_covariance(self, covariance_WW: Tensor) -> Tensor:
        """Covariance of scaled rows, from that of plain ones."""
        half = times_blocks(covariance_WW, self.root_BDD)
        return times_blocks(half.T.contiguous(), self.root_BDD)


def times_blocks(rows_TW: Tensor, blocks_BDD: Tensor) -> Tensor:
    """Each row's run of ``D`` elements times its own block."""
    return _by_block(rows_TW, blocks_BDD).transpose(0, 1).reshape(rows_TW.shape)


def check_finite(what: str, values: Tensor) -> None:
    """Refuse numbers that would spoil whatever they touch.

    Raises
    ------
    ValueError
        Naming ``what`` they were to be.
    """
    if not torch.isfinite(values).all():
        raise ValueError(f"{what} must be finite")


def _by_block(rows_TW: Tensor, blocks_BDD: Tensor) -> Tensor:
    """The same, shape ``(L * H, T, D)``."""
    num_blocks, head_dim, _ = blocks_BDD.shape
    parts_BTD = rows_TW.reshape(len(rows_TW), num_blocks, head_dim).transpose(0, 1)
    return torch.bmm(parts_BTD, blocks_BDD)


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What gradients said, ready for a fit."""

    key_metric: Metric
    value_metric: Metric
    keys_NW: Tensor
    """Rows of unrotated keys whose importance was measured, bfloat16."""

    importance_N: Tensor
    """Shape ``(N,)``, float32, positive: squared gradients in the metric, over their trend."""


class SensitivityMeter:
    """Adds up gradients of a fixed number of windows; memory grows with those alone."""

    def __init__(self, geometry: KVGeometry) -> None:
        self._geometry = geometry
        #: Per window: keys (T, W) and gradients of keys and values (T, W), bfloat16.
        self._windows: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def num_windows(self) -> int:
        """Windows added so far."""
        return len(self._windows)

    def add(self, keys_TW: Tensor, key_gradients_TW: Tensor, value_gradients_TW: Tensor) -> None:
        """Count the tokens of one window.

        Parameters
        ----------
        keys_TW
            Unrotated keys, sinks and the tokens right before the boundary left out.
        key_gradients_TW, value_gradients_TW
            Gradients of a sampled log likelihood with respect to the same tokens' unrotated
            keys, and values.

        Raises
        ------
        ValueError
            If a number is not finite.
        """
        window = (keys_TW, key_gradients_TW, value_gradients_TW)
        for rows in window:
            if not torch.isfinite(rows).all():
                raise ValueError("keys and gradients must be finite")
        self._windows.append(
            (keys_TW.bfloat16(), key_gradients_TW.bfloat16(), value_gradients_TW.bfloat16())
        )

    def result(self) -> Sensitivity:
        """Metrics and importances of everything added.

        Raises
        ------
        ValueError
            If nothing was added.
        """
        if not self._windows:
            raise ValueError("need at least one window of gradients")
        dims = (self._geometry.key_head_dim, self._geometry.value_head_dim)
        weights = [torch.ones(len(keys)) for keys, _, _ in self._windows]
        # The second round weighs tokens by what the first found of their importance.
        for _ in range(2):
            metrics = [
                self._metric(kind, dim, weights) for kind, dim in ((1, dims[0]), (2, dims[1]))
            ]
            importance = [self._importance(window, metrics) for window in self._windows]
            mean = torch.cat(importance).mean().clamp_min(1e-30)
            importance = [part / mean for part in importance]
            weights = [1 / part.clamp_min(1e-2) for part in importance]
        return Sensitivity(
            key_metric=metrics[0],
            value_metric=metrics[1],
            keys_NW=torch.cat([keys for keys, _, _ in self._windows]),
            importance_N=torch.cat(_without_trend(importance)),
        )

    def _metric(self, kind: int, head_dim: int, weights: list[Tensor]) -> Metric:
        num_blocks = self._geometry.num_layers * self._geometry.num_kv_heads
        total = torch.zeros(num_blocks, head_dim, head_dim)
        for window, weight_T in zip(self._windows, weights, strict=True):
            gradients = window[kind].float() * weight_T.sqrt()[:, None]
            parts_BTD = gradients.view(-1, num_blocks, head_dim).transpose(0, 1)
            total += torch.bmm(parts_BTD.transpose(1, 2), parts_BTD)
        return Metric.of_blocks(total / sum(map(len, weights)))

    @staticmethod
    def _importance(window: tuple[Tensor, Tensor, Tensor], metrics: list[Metric]) -> Tensor:
        """``g' W^-1 g`` of each token: what white noise in the metric's space would do."""
        return torch.stack(
            [
                times_blocks(gradients.float(), metric.inverse_BDD).square().sum(dim=1)
                for gradients, metric in zip(window[1:], metrics, strict=True)
            ]
        ).sum(dim=0)


def _without_trend(importance: list[Tensor]) -> list[Tensor]:
    """Importances over their geometric mean at the same distance from the window's end."""
    logs = [part.clamp_min(1e-9).log() for part in importance]
    num_bins = -(-max(map(len, logs)) // TREND_TOKENS)
    total, count = torch.zeros(num_bins), torch.zeros(num_bins)
    bins = [(len(part) - 1 - torch.arange(len(part))) // TREND_TOKENS for part in logs]
    for part, bin_T in zip(logs, bins, strict=True):
        total.index_add_(0, bin_T, part)
        count.index_add_(0, bin_T, torch.ones(len(part)))
    trend = total / count.clamp_min(1)
    return [(part - trend[bin_T]).exp() for part, bin_T in zip(logs, bins, strict=True)]
