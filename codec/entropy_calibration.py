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
from numpy.typing import NDArray
from torch import Tensor

from codec.calibration_file import CalibrationFile, Filed
from codec.entropy.models import SymbolModels
from codec.errors import ConfigError
from codec.geometry import KVGeometry, Stage
from codec.importance import Importance
from codec.projection import LayerGroup, TokenRanks, ranks_of
from codec.rope import RotarySpec
from codec.sensitivity import Metric, check_finite, times_blocks
from codec.step_quantizer import Ints, Layout
from codec.symbol_classes import LAST_LEVEL, MAX_SHIFT, SymbolClasses, split_levels

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

    time_price: float = 0.3
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

    directions_GC: Tensor
    """Shape ``(G, C)``, float16: by falling level; of one group orthonormal in the metric's space.

    A coefficient is of one group of layers, G coordinates, and nothing to the others.  Where
    the last group is shorter, its directions end in zeros.
    """

    group_C: Tensor
    """Shape ``(C,)``, int32: which group each coefficient is of."""

    level_C: Tensor
    """Shape ``(C,)``, int32: `codec.symbol_classes.levels_of` each coefficient."""

    outside_energy: float
    """Mean energy of a held-out token outside its coefficients, in squares of its step."""

    def __post_init__(self) -> None:
        group_width, rank = self.directions_GC.shape
        (width,) = self.mean_W.shape
        num_blocks, head_dim, _ = self.metric.root_BDD.shape
        if self.group_C.shape != (rank,) or self.level_C.shape != (rank,):
            raise ValueError(
                f"shapes disagree: directions {group_width, rank}, groups "
                f"{tuple(self.group_C.shape)}, levels {tuple(self.level_C.shape)}"
            )
        if num_blocks * head_dim != width:
            raise ValueError(f"need {width} coordinates in the metric's blocks")
        if not 0 < group_width <= width or group_width % head_dim:
            raise ValueError(f"a group of {group_width} is not whole heads of {width} coordinates")
        num_groups = -(-width // group_width)
        kinds = (self.directions_GC.dtype, self.group_C.dtype, self.level_C.dtype)
        if kinds != (torch.float16, torch.int32, torch.int32):
            raise ValueError("directions must be float16, groups and levels int32")
        if not ((self.group_C >= 0) & (self.group_C < num_groups)).all():
            raise ValueError(f"groups must be in 0..{num_groups - 1}")
        num_last = width - (num_groups - 1) * group_width
        if self.directions_GC[num_last:, self.group_C == num_groups - 1].any():
            raise ValueError("directions of the last group reach past its end")
        if (self.level_C.diff() > 0).any():
            raise ValueError("levels must not rise")
        if rank and not 0 <= int(self.level_C[-1]) <= int(self.level_C[0]) <= LAST_LEVEL:
            raise ValueError(f"levels must be in 0..{LAST_LEVEL}")
        check_finite("mean", self.mean_W)
        check_finite("directions", self.directions_GC)
        if not 0 <= self.outside_energy < math.inf:
            raise ValueError(f"outside_energy must be finite, got {self.outside_energy}")

    @property
    def rank(self) -> int:
        """Coefficients kept."""
        return self.directions_GC.shape[1]

    @cached_property
    def layout(self) -> Layout:
        """Levels and low bits of the coefficients, as the quantizer needs them."""
        low_bits_C, level_C = split_levels(self.level_C.numpy())
        return Layout(level_C, low_bits_C)

    @cached_property
    def groups(self) -> Sequence[LayerGroup]:
        """The projection, group by group."""
        group_width = len(self.directions_GC)
        num_blocks, head_dim, _ = self.metric.root_BDD.shape
        per_group = group_width // head_dim
        inverse_BDD = self.metric.inverse_BDD
        found = []
        for number, first in enumerate(range(0, num_blocks, per_group)):
            blocks = slice(first, min(first + per_group, num_blocks))
            coordinates = slice(blocks.start * head_dim, blocks.stop * head_dim)
            columns_C = torch.nonzero(self.group_C == number).flatten()
            directions_GC = self.directions_GC[: coordinates.stop - coordinates.start, columns_C]
            rows_CG = directions_GC.float().T.contiguous()
            found.append(
                LayerGroup(
                    coordinates=coordinates,
                    columns_C=columns_C,
                    level_C=self.level_C[columns_C].numpy(),
                    forward_CG=times_blocks(rows_CG, self.metric.root_BDD[blocks]),
                    backward_CG=times_blocks(rows_CG, inverse_BDD[blocks]),
                )
            )
        return found

    def coefficients(self, rows_TW: Tensor) -> Tensor:
        """All coefficients of rows, shape ``(T, C)``, whether they are coded or not."""
        result = torch.empty(len(rows_TW), self.rank)
        centered = rows_TW - self.mean_W
        for group in self.groups:
            result[:, group.columns_C] = centered[:, group.coordinates] @ group.forward_CG.T
        return result

    def rows(self, coefficients_TC: Tensor) -> Tensor:
        """Rows that coefficients stand for, shape ``(T, W)``."""
        result = self.mean_W.repeat(len(coefficients_TC), 1)
        for group in self.groups:
            result[:, group.coordinates] += coefficients_TC[:, group.columns_C] @ group.backward_CG
        return result

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
        shape = self.geometry
        widths = (shape.key_width, shape.value_width)
        if (len(self.keys.mean_W), len(self.values.mean_W)) != widths:
            raise ValueError(f"rows must be {widths} wide")
        for part, width in zip((self.keys, self.values), widths, strict=True):
            if len(part.directions_GC) % (width // shape.num_layers):
                raise ValueError(f"a group of {len(part.directions_GC)} is not whole layers")
        if self.importance.direction_W.shape != (widths[0],):
            raise ValueError(f"importance must be of {widths[0]} coordinates")
        if self.rotary.num_layers != shape.num_layers:
            raise ValueError(f"need rotations of {shape.num_layers} layers")
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

    def ranks(self, part: EntropyKind, shift_T: Ints) -> NDArray[np.int64]:
        """How many of a kind's coefficients tokens of these shifts are coded with."""
        return ranks_of(part.level_C.numpy(), self.classes.first_class, shift_T)

    def token_ranks(self, group: LayerGroup, shift_T: Ints) -> TokenRanks:
        """The same within a group, in the order that its projection wants."""
        first = self.classes.first_class
        every_shift = np.arange(-MAX_SHIFT, MAX_SHIFT + 1, dtype=np.int32)
        possible = ranks_of(group.level_C, first, every_shift)
        return TokenRanks.of(ranks_of(group.level_C, first, shift_T), possible.tolist())

    def project(self, part: EntropyKind, rows_TW: Tensor, shift_T: Ints) -> Tensor:
        """Coefficients of rows less their mean, shape ``(C, T)``; 0 where a token is not coded."""
        result = torch.empty(part.rank, len(rows_TW))
        for group in part.groups:
            ranks = self.token_ranks(group, shift_T)
            rows_TG = rows_TW[:, group.coordinates]
            result[group.columns_C] = ranks.project(rows_TG, group.forward_CG)
        return result

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
                directions_GC=tensors[f"{kind}.directions"],
                group_C=tensors[f"{kind}.groups"],
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
            tensors[f"{kind}.directions"] = part.directions_GC
            tensors[f"{kind}.groups"] = part.group_C
            tensors[f"{kind}.levels"] = part.level_C
        return tensors
