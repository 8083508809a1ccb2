"""A calibration: everything that turns one stage's rows into blobs and back, in one file.

It holds a basis and an allocation for keys and for values, the rotary parameters that
make keys position-free, and where it came from.  Its digest names it; codecs, blobs and
receipts refer to that.  This is the calibration of the published profile; that of ours is
in `codec.entropy_calibration`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from codec.allocation import Allocation, allocate, budget_bits
from codec.basis import PAPER_MAX_RANK, Basis, Moments, fit_basis
from codec.calibration_file import CalibrationFile, Filed
from codec.errors import ConfigError
from codec.geometry import KVGeometry, Stage
from codec.quantizer import dequantize, quantize
from codec.rope import RotarySpec

PROFILE = "paper"
"""Name of the published profile: types none/int2/int4/fp8, DEFLATE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationConfig:
    """What shapes a calibration, apart from the rows themselves."""

    target: float = 8.0
    """Compression before the entropy stage, against 16 bits."""

    sink_tokens: int = 4
    """First positions of a sequence, stored exactly and never fitted."""

    holdout_every: int = 4
    """Every such window is kept from the basis, for allocation and error limits."""

    allocation_rows: int = 512
    """Held-out rows that the dynamic program sees."""

    block_stride: int = 8
    """See `codec.allocation.allocate`."""

    max_rank: int = PAPER_MAX_RANK

    exact_factor: float = 4.0
    """A token whose error is over this times the held-out 99.9 % quantile is stored exactly."""

    def __post_init__(self) -> None:
        if not 1 <= self.target <= 256:
            raise ConfigError(f"target must be between 1 and 256, got {self.target}")
        if self.sink_tokens < 0:
            raise ConfigError(f"sink_tokens must not be negative, got {self.sink_tokens}")
        for name in ("allocation_rows", "block_stride", "max_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.holdout_every < 2:
            raise ConfigError(f"holdout_every must be at least 2, got {self.holdout_every}")
        if not self.exact_factor > 0:
            raise ConfigError(f"exact_factor must be positive, got {self.exact_factor}")


@dataclass(frozen=True, kw_only=True)
class KindCalibration:
    """The half of a calibration that serves keys, or values."""

    basis: Basis
    allocation: Allocation

    max_row_error: float
    """Squared error of one row above which the row is stored exactly."""

    held_out_error: float
    """Squared error over variance on held-out rows: what the allocation left."""

    def code_rows(self, rows_TW: Tensor) -> Tensor:
        """Rows as they come back from quantization: shape ``(T, W)``, float32."""
        return self.basis.reconstruct(quantized(self.basis.project(rows_TW), self.allocation))


@dataclass(frozen=True, kw_only=True)
class Calibration(Filed):
    """One stage's codec parameters; equal content has an equal digest."""

    stage: Stage
    geometry: KVGeometry
    """Of the stage."""

    rotary: RotarySpec
    """Of the stage's layers."""

    config: CalibrationConfig
    keys: KindCalibration
    values: KindCalibration
    provenance: Mapping[str, str | int] = field(default_factory=dict)
    """Model fingerprint, corpus digest, number of tokens: facts, not settings."""

    @classmethod
    def from_parts(cls, stated: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """The calibration of these fields."""
        if stated["profile"] != PROFILE:
            raise ValueError(f"need profile {PROFILE}, got {stated['profile']!r}")
        stage = Stage.parse(stated["stage"])
        kinds = [
            KindCalibration(
                basis=Basis(
                    mean_W=tensors[f"{kind}.mean"],
                    directions_WC=tensors[f"{kind}.directions"],
                    variance_C=tensors[f"{kind}.variance"],
                ),
                allocation=Allocation.from_table(tensors[f"{kind}.blocks"].numpy()),
                max_row_error=stated["max_row_error"][number],
                held_out_error=stated["held_out_error"][number],
            )
            for number, kind in enumerate(("keys", "values"))
        ]
        return cls(
            stage=stage,
            geometry=KVGeometry(
                num_layers=stage.num_layers,
                num_kv_heads=stage.num_heads,
                key_head_dim=stated["key_head_dim"],
                value_head_dim=stated["value_head_dim"],
            ),
            rotary=RotarySpec.from_dict(stated["rotary"]),
            config=CalibrationConfig(**stated["config"]),
            keys=kinds[0],
            values=kinds[1],
            provenance=stated["provenance"],
        )

    @cached_property
    def file(self) -> CalibrationFile:
        """All of it."""
        fields: dict[str, Any] = {
            "profile": PROFILE,
            "stage": str(self.stage),
            "key_head_dim": self.geometry.key_head_dim,
            "value_head_dim": self.geometry.value_head_dim,
            "rotary": self.rotary.to_dict(),
            "config": {name: getattr(self.config, name) for name in self.config.__slots__},
            "provenance": dict(self.provenance),
            "max_row_error": [self.keys.max_row_error, self.values.max_row_error],
            "held_out_error": [self.keys.held_out_error, self.values.held_out_error],
        }
        return CalibrationFile.of(fields, self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        return {
            f"{kind}.{name}": tensor
            for kind, part in (("keys", self.keys), ("values", self.values))
            for name, tensor in {
                "mean": part.basis.mean_W,
                "directions": part.basis.directions_WC,
                "variance": part.basis.variance_C,
                "blocks": torch.from_numpy(part.allocation.to_table()),
            }.items()
        }


class Calibrator:
    """Takes captured rows of one stage, window by window, and fits a `Calibration`."""

    def __init__(
        self, stage: Stage, geometry: KVGeometry, rotary: RotarySpec, config: CalibrationConfig
    ) -> None:
        self.stage = stage
        self.geometry = geometry
        self.rotary = rotary
        self.config = config
        self.num_windows = 0
        self._moments = {
            "keys": Moments(geometry.key_width),
            "values": Moments(geometry.value_width),
        }
        #: Windows kept from the moments: every `holdout_every`-th, from the second on.
        self._held_out: dict[str, list[Tensor]] = {"keys": [], "values": []}

    def add(self, keys_TLHD: Tensor, values_TLHD: Tensor, *, start_position: int = 0) -> None:
        """Count one window of the stage's cache; keys rotated, as the engine holds them."""
        positions = torch.arange(start_position, start_position + len(keys_TLHD))
        keep = positions >= self.config.sink_tokens
        keys = self.rotary.unrotate(keys_TLHD, positions)[keep].flatten(1)
        values = values_TLHD.float()[keep].flatten(1)
        held_out = self.num_windows % self.config.holdout_every == 1
        self.num_windows += 1
        for kind, rows in (("keys", keys), ("values", values)):
            if held_out:
                self._held_out[kind].append(rows)
            else:
                self._moments[kind].add(rows)

    def fit(
        self,
        provenance: Mapping[str, str | int],
        on_progress: Callable[[float], None] = lambda _fraction: None,
    ) -> Calibration:
        """Fit basis and allocation of keys and values.

        Raises
        ------
        ConfigError
            If too few windows were seen to hold one out.
        """
        if not self._held_out["keys"]:
            raise ConfigError(f"need at least 2 windows to calibrate, got {self.num_windows}")
        return fit_calibration(
            self.stage,
            self.geometry,
            self.rotary,
            self.config,
            moments=(self._moments["keys"], self._moments["values"]),
            held_out=(torch.cat(self._held_out["keys"]), torch.cat(self._held_out["values"])),
            provenance=provenance,
            on_progress=on_progress,
        )


def fit_calibration(
    stage: Stage,
    geometry: KVGeometry,
    rotary: RotarySpec,
    config: CalibrationConfig,
    *,
    moments: tuple[Moments, Moments],
    held_out: tuple[Tensor, Tensor],
    provenance: Mapping[str, str | int],
    on_progress: Callable[[float], None] = lambda _fraction: None,
) -> Calibration:
    """Fit basis and allocation to rows of keys (unrotated) and of values.

    Parameters
    ----------
    held_out
        Rows of both, shape ``(N, W)``, that the moments have not seen.
    """
    return Calibration(
        stage=stage,
        geometry=geometry,
        rotary=rotary,
        config=config,
        keys=_fit_kind(config, moments[0], held_out[0], lambda part: on_progress(part / 2)),
        values=_fit_kind(config, moments[1], held_out[1], lambda part: on_progress((1 + part) / 2)),
        provenance=provenance,
    )


def _fit_kind(
    config: CalibrationConfig,
    moments: Moments,
    held_out_NW: Tensor,
    on_progress: Callable[[float], None],
) -> KindCalibration:
    basis = fit_basis(moments, max_rank=config.max_rank)
    on_progress(0.4)
    num_rows = min(config.allocation_rows, len(held_out_NW))
    chosen = torch.linspace(0, len(held_out_NW) - 1, num_rows).long()
    rows = held_out_NW[chosen].float()
    allocation = allocate(
        basis.project(rows),
        budget=budget_bits(basis.width, config.target),
        stride=config.block_stride,
        on_progress=lambda part: on_progress(0.4 + 0.6 * part),
    )
    basis = basis.truncated(allocation.rank)
    coded = basis.reconstruct(quantized(basis.project(rows), allocation))
    errors = (rows - coded).square().sum(dim=1)
    energy = (rows - basis.mean_W).square().sum()
    return KindCalibration(
        basis=basis,
        allocation=allocation,
        max_row_error=float(config.exact_factor * errors.quantile(0.999)),
        held_out_error=float(errors.sum() / energy),
    )


def quantized(coefficients_TC: Tensor, allocation: Allocation) -> Tensor:
    """Coefficients after quantizing and back; zero where the allocation drops them."""
    result = torch.zeros(len(coefficients_TC), allocation.rank)
    for block in allocation.blocks:
        part = coefficients_TC[:, block.start : block.stop]
        coded = quantize(part, block.block_type)
        result[:, block.start : block.stop] = dequantize(coded, block.block_type)
    return result
