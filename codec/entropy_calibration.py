"""The calibration of the entropy profile: what turns one stage's rows into blobs and back.

Where the published profile allots bits to blocks, this one has a single step for all
coefficients of keys and values, in the space of the model's own sensitivity
(`codec.sensitivity`), and static symbol models for whatever symbols result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from codec.calibration_file import CalibrationFile, Filed
from codec.entropy.models import SymbolModels
from codec.errors import ConfigError
from codec.geometry import KVGeometry, Stage
from codec.importance import Importance
from codec.projection import TokenRanks, ranks_of
from codec.rope import RotarySpec
from codec.sensitivity import Metric, check_finite, times_blocks
from codec.step_quantizer import Ints, Layout
from codec.symbol_classes import LAST_LEVEL, SymbolClasses, split_levels

PROFILE = "entropy"
"""Name of this profile."""

NUM_BANDS = 3
"""Runs of coefficients of falling importance, each a section of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyConfig:
    """What shapes a calibration of this profile, apart from the rows themselves."""

    target: float = 16.0
    """Compression against 16 bits of held-out tokens, everything in a blob counted."""

    sink_tokens: int = 4
    """First positions of a sequence, stored exactly and never fitted."""

    holdout_every: int = 4
    """Every such window is kept from the basis, for levels, models and error limits."""

    time_price: float = 1.0
    """What coding a coefficient of a token must save beyond its bits, in squared steps.

    It is the price of its share of the projection: 0 codes all that pay for their bits.
    """

    exact_factor: float = 4.0
    """A token whose error is over this times the held-out 99.9 % quantile is stored exactly."""

    chunk_tokens: int = 256
    """Tokens of a blob, over which its header and tables are spread when bits are counted."""

    def __post_init__(self) -> None:
        if not 1 <= self.target <= 256:
            raise ConfigError(f"target must be between 1 and 256, got {self.target}")
        if self.sink_tokens < 0:
            raise ConfigError(f"sink_tokens must not be negative, got {self.sink_tokens}")
        if self.holdout_every < 2:
            raise ConfigError(f"holdout_every must be at least 2, got {self.holdout_every}")
        if not 0 <= self.time_price < float("inf"):
            raise ConfigError(f"time_price must not be negative, got {self.time_price}")
        if not self.exact_factor > 0:
            raise ConfigError(f"exact_factor must be positive, got {self.exact_factor}")
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")


@dataclass(frozen=True, kw_only=True)
class EntropyKind:
    """The half of a calibration that serves keys, or values."""

    mean_W: Tensor
    """Shape ``(W,)``, float32."""

    metric: Metric

    directions_WC: Tensor
    """Shape ``(W, C)``, float16: orthonormal in the metric's space, by falling level."""

    level_C: Tensor
    """Shape ``(C,)``, int32: `codec.symbol_classes.levels_of` each coefficient."""

    outside_energy: float
    """Mean energy of a held-out token outside its coefficients, in squares of its step."""

    def __post_init__(self) -> None:
        width, rank = self.directions_WC.shape
        num_blocks, head_dim, _ = self.metric.root_BDD.shape
        if self.mean_W.shape != (width,) or self.level_C.shape != (rank,):
            raise ValueError(
                f"shapes disagree: mean {tuple(self.mean_W.shape)}, directions {width, rank}, "
                f"levels {tuple(self.level_C.shape)}"
            )
        if num_blocks * head_dim != width:
            raise ValueError(f"need {width} coordinates in the metric's blocks")
        if self.directions_WC.dtype != torch.float16 or self.level_C.dtype != torch.int32:
            raise ValueError("directions must be float16, levels int32")
        if (self.level_C.diff() > 0).any():
            raise ValueError("levels must not rise")
        if rank and not 0 <= int(self.level_C[-1]) <= int(self.level_C[0]) <= LAST_LEVEL:
            raise ValueError(f"levels must be in 0..{LAST_LEVEL}")
        check_finite("mean", self.mean_W)
        check_finite("directions", self.directions_WC)
        if not 0 <= self.outside_energy < math.inf:
            raise ValueError(f"outside_energy must be finite, got {self.outside_energy}")

    @property
    def rank(self) -> int:
        """Coefficients kept."""
        return self.directions_WC.shape[1]

    @cached_property
    def layout(self) -> Layout:
        """Levels and low bits of the coefficients, as the quantizer needs them."""
        low_bits_C, level_C = split_levels(self.level_C.numpy())
        return Layout(level_C, low_bits_C)

    @cached_property
    def forward_WC(self) -> Tensor:  # noqa: N802 - axis letters
        """What rows less their mean are multiplied by, float32."""
        columns_CW = self.directions_WC.float().T.contiguous()
        return times_blocks(columns_CW, self.metric.root_BDD).T.contiguous()

    @cached_property
    def backward_CW(self) -> Tensor:  # noqa: N802
        """What coefficients are multiplied by to be rows less their mean, float32."""
        columns_CW = self.directions_WC.float().T.contiguous()
        return times_blocks(columns_CW, self.metric.inverse_BDD)

    def energy(self, rows_TW: Tensor) -> Tensor:
        """Squared distance of rows from the mean in the metric, shape ``(T,)``."""
        return self.metric.energy(rows_TW - self.mean_W)

    @property
    def bands(self) -> Sequence[slice]:
        """Runs of coefficients: the first sixteenth, up to a quarter, the rest."""
        stops = (0, self.rank // 16, self.rank // 4, self.rank)
        return [slice(start, stop) for start, stop in pairwise(stops)]


@dataclass(frozen=True, kw_only=True)
class EntropyCalibration(Filed):
    """One stage's parameters of the entropy profile; equal content has an equal digest."""

    stage: Stage
    geometry: KVGeometry
    """Of the stage."""

    rotary: RotarySpec
    """Of the stage's layers."""

    config: EntropyConfig
    step: float
    """Step of every coefficient of a token whose shift is 0."""

    classes: SymbolClasses
    importance: Importance
    keys: EntropyKind
    values: EntropyKind
    max_token_error: float
    """Squared error of a token's row in its own squared steps, above which it is exact."""

    held_out_bits: float
    """Bits per token on held-out rows, everything counted."""

    held_out_rank: float
    """Coefficients of keys and values that a held-out token is coded with, in the mean."""

    provenance: Mapping[str, str | int] = field(default_factory=dict)
    """Model fingerprint, corpus digest, number of tokens: facts, not settings."""

    def __post_init__(self) -> None:
        widths = (self.geometry.key_width, self.geometry.value_width)
        if (len(self.keys.mean_W), len(self.values.mean_W)) != widths:
            raise ValueError(f"rows must be {widths} wide")
        if self.importance.direction_W.shape != (widths[0],):
            raise ValueError(f"importance must be of {widths[0]} coordinates")
        if self.rotary.num_layers != self.geometry.num_layers:
            raise ValueError(f"need rotations of {self.geometry.num_layers} layers")
        for name in ("step", "max_token_error", "held_out_bits", "held_out_rank"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        # Times and over a factor of 2**2.25, both of them squared, and still a number.
        if not 1e-15 < self.step < 1e15:
            raise ValueError(f"step must be a 32-bit number above 0, got {self.step}")

    @property
    def profile(self) -> str:
        """Name of the profile."""
        return PROFILE

    @property
    def held_out_ratio(self) -> float:
        """Compression of held-out rows against 16 bits."""
        return 8 * self.geometry.raw_bytes_per_token / self.held_out_bits

    def ranks(self, kind: EntropyKind, shift_T: Ints) -> TokenRanks:
        """How many of a kind's coefficients tokens of these shifts are coded with."""
        first = self.classes.first_class
        return TokenRanks.of(ranks_of(kind.level_C.numpy(), first, shift_T))

    @classmethod
    def from_parts(cls, stated: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """The calibration of these fields."""
        if stated["profile"] != PROFILE:
            raise ValueError(f"need profile {PROFILE}, got {stated['profile']!r}")
        stage = Stage.parse(stated["stage"])
        keys, values = (
            EntropyKind(
                mean_W=tensors[f"{kind}.mean"],
                metric=Metric(root_BDD=tensors[f"{kind}.metric"]),
                directions_WC=tensors[f"{kind}.directions"],
                level_C=tensors[f"{kind}.levels"],
                outside_energy=stated["outside_energy"][number],
            )
            for number, kind in enumerate(("keys", "values"))
        )
        return cls(
            stage=stage,
            geometry=KVGeometry(
                num_layers=stage.num_layers,
                num_kv_heads=stage.num_heads,
                key_head_dim=stated["key_head_dim"],
                value_head_dim=stated["value_head_dim"],
            ),
            rotary=RotarySpec.from_dict(stated["rotary"]),
            config=EntropyConfig(**stated["config"]),
            step=stated["step"],
            classes=SymbolClasses(
                models=SymbolModels(freq_KA=tensors["classes.frequencies"].numpy()),
                offset_K=tensors["classes.offset"].numpy(),
                bias1_K=tensors["classes.bias1"].numpy(),
                bias2_K=tensors["classes.bias2"].numpy(),
            ),
            importance=Importance(
                direction_W=tensors["importance.direction"], offset=stated["importance_offset"]
            ),
            keys=keys,
            values=values,
            max_token_error=stated["max_token_error"],
            held_out_bits=stated["held_out_bits"],
            held_out_rank=stated["held_out_rank"],
            provenance=stated["provenance"],
        )

    @cached_property
    def file(self) -> CalibrationFile:
        """All of it."""
        stated = {
            "profile": PROFILE,
            "stage": str(self.stage),
            "key_head_dim": self.geometry.key_head_dim,
            "value_head_dim": self.geometry.value_head_dim,
            "rotary": self.rotary.to_dict(),
            "config": {part.name: getattr(self.config, part.name) for part in fields(self.config)},
            "provenance": dict(self.provenance),
            "step": self.step,
            "importance_offset": self.importance.offset,
            "max_token_error": self.max_token_error,
            "held_out_bits": self.held_out_bits,
            "held_out_rank": self.held_out_rank,
            "outside_energy": [self.keys.outside_energy, self.values.outside_energy],
        }
        return CalibrationFile.of(stated, self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {
            "importance.direction": self.importance.direction_W,
            "classes.frequencies": torch.from_numpy(
                self.classes.models.freq_KA.astype(np.int32, copy=True)
            ),
        }
        for name in ("offset", "bias1", "bias2"):
            tensors[f"classes.{name}"] = torch.from_numpy(getattr(self.classes, f"{name}_K"))
        for kind, part in (("keys", self.keys), ("values", self.values)):
            tensors[f"{kind}.mean"] = part.mean_W
            tensors[f"{kind}.metric"] = part.metric.root_BDD
            tensors[f"{kind}.directions"] = part.directions_WC
            tensors[f"{kind}.levels"] = part.level_C
        return tensors
