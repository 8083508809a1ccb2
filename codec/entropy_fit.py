"""Fit the entropy profile to captured rows and to the model's sensitivity.

1. Directions: eigenvectors of the covariance in the metric, most variance first.
2. Importance: a regression on the leading coefficients of keys (`codec.importance`).
3. Rows that the directions have not seen give each coefficient's level, and the symbol
   models of all classes, for any step.
4. A class is coded if coding a coefficient saves more than its bits and its share of the
   projection cost.  Both prices are in squared steps, so that one slope holds across keys,
   values, layers, coefficients and tokens (the Lagrangian of the allocation).  Coefficients
   that hardly any token would be coded with are dropped.
5. The step is bisected until the held-out rows take the bits of the target.

What does not depend on the target is done once, by `EntropyFitter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.basis import PAPER_MAX_RANK, Moments
from codec.entropy.models import MAX_ALPHABET, SymbolModels
from codec.entropy_calibration import NUM_BANDS, EntropyCalibration, EntropyConfig, EntropyKind
from codec.errors import ConfigError
from codec.geometry import KVGeometry, Stage
from codec.importance import Importance, fit_importance
from codec.rope import RotarySpec
from codec.sensitivity import Metric, Sensitivity
from codec.step_quantizer import (
    ClassCounts,
    Floats,
    Gains,
    Ints,
    Layout,
    coding_gains,
    count_classes,
    quantization_errors,
)
from codec.symbol_classes import (
    MAX_FIRST_CLASS,
    NUM_CLASSES,
    SymbolClasses,
    levels_of,
    split_levels,
    step_factor,
)

ROUNDING_OFFSET = 0.4
"""Below one half: a code nearer to zero is cheaper, and its value hardly worse."""
BIT_PRICE = 0.12
"""Squared steps that one bit must save: about the slope 2 ln 2 / 12 of a uniform quantizer."""
LAYERS_PER_BASIS = 20
"""Layers that share directions, at most; more are split evenly into groups of their own.

That halves the arithmetic of SmolLM2's 30 layers; 18 are better left together (docs/codec.md).
"""
IMPORTANCE_RANK = 600
"""Leading coefficients of keys that the importance is regressed on."""
FIT_ROWS = 2048
"""Held-out rows that levels and models are fitted on."""
JUDGE_ROWS = 1024
"""Held-out rows, others, that bits and errors are judged on."""
SEARCH_ROWS = 512
"""Rows used while the step is bisected."""
SECTION_BYTES = 176
"""What a section costs beyond its symbols: its row of the table, and 32 coder states."""
HEADER_BYTES = 192
"""Prelude, header and checksum of a blob."""

LEAST_SHARE = 1 / 16
"""Share of tokens that must be coded with a coefficient for it to be kept."""

_STEP_ROUNDS = 14


@dataclass(frozen=True)
class _Kind:
    """One kind's directions, and coefficients of held-out rows."""

    directions: EntropyKind
    fit_TC: Floats
    judge_TC: Floats
    judge_energy_T: NDArray[np.float64]
    spread_C: NDArray[np.float64]


@dataclass(frozen=True)
class _Choice:
    """What a step leads to: which classes are coded, and which coefficients kept."""

    step: float
    first_class: int
    kept: tuple[NDArray[np.intp], NDArray[np.intp]]
    bits: float


class EntropyFitter:
    """Fits calibrations of any target to one set of rows of one stage."""

    def __init__(
        self,
        stage: Stage,
        geometry: KVGeometry,
        rotary: RotarySpec,
        *,
        moments: tuple[Moments, Moments],
        held_out: tuple[Tensor, Tensor],
        sensitivity: Sensitivity,
        layers_per_basis: int | None = None,
        on_progress: Callable[[float], None] = lambda _fraction: None,
    ) -> None:
        """Find directions and importance.

        Parameters
        ----------
        moments
            Of unrotated keys, and values.
        held_out
            Rows of both, shape ``(N, W)``, that the moments have not seen.
        layers_per_basis
            Layers that share directions; by default as `LAYERS_PER_BASIS` has it.

        Raises
        ------
        ConfigError
            If there are too few held-out rows.
        """
        if len(held_out[0]) < 2:
            raise ConfigError(f"need at least 2 held-out rows, got {len(held_out[0])}")
        self.stage, self.geometry, self.rotary = stage, geometry, rotary
        metrics = (sensitivity.key_metric, sensitivity.value_metric)
        if layers_per_basis is None:
            num_groups = math.ceil(stage.num_layers / LAYERS_PER_BASIS)
            layers_per_basis = math.ceil(stage.num_layers / num_groups)
        directions = []
        for number, (part, metric) in enumerate(zip(moments, metrics, strict=True)):
            directions.append(_directions(part, metric, stage.num_layers, layers_per_basis))
            on_progress((number + 1) * 0.4)
        self._importance = _fit_importance(directions[0], sensitivity)
        num_fit = min(FIT_ROWS, len(held_out[0]) // 2)
        # Alternately, so that both come from all windows.
        last = len(held_out[0]) - 1
        fit = torch.linspace(0, last - 1, num_fit).long() // 2 * 2
        judge = torch.linspace(1, last, min(JUDGE_ROWS, num_fit)).long() // 2 * 2 + 1
        judge = judge.clamp_max(last)
        self._shift_fit_T = self._importance.shifts(held_out[0][fit].float())
        self._shift_judge_T = self._importance.shifts(held_out[0][judge].float())
        self._kinds = tuple(
            _kind(part, rows[fit].float(), rows[judge].float())
            for part, rows in zip(directions, held_out, strict=True)
        )
        on_progress(1.0)

    def fit(
        self,
        config: EntropyConfig,
        provenance: Mapping[str, str | int],
        on_progress: Callable[[float], None] = lambda _fraction: None,
    ) -> EntropyCalibration:
        """The calibration that brings held-out rows to ``config.target``."""
        spread = np.concatenate([kind.spread_C for kind in self._kinds])
        budget = 8 * self.geometry.raw_bytes_per_token / config.target
        low, high = float(spread.max()) * 2.0**-14, float(spread.max()) * 2.0**3
        for round_ in range(_STEP_ROUNDS):
            middle = math.sqrt(low * high)
            if self._choose(middle, config, SEARCH_ROWS).bits > budget:
                low = middle
            else:
                high = middle
            on_progress(round_ / _STEP_ROUNDS)
        choice = self._choose(high, config, FIT_ROWS)
        calibration = self._calibration(choice, config, provenance)
        on_progress(1.0)
        return calibration

    def _choose(self, step: float, config: EntropyConfig, num_rows: int) -> _Choice:
        every = max(1, len(self._shift_fit_T) // num_rows)
        shift_T = self._shift_fit_T[::every]
        rows = [np.ascontiguousarray(kind.fit_TC[::every]) for kind in self._kinds]
        layouts = [_layout(kind.spread_C, step) for kind in self._kinds]
        counts = _count(rows, step, shift_T, layouts)
        every_class = _classes(counts, 0)
        by_class = [
            coding_gains(part_TC, step, shift_T, layout, every_class)[1]
            for part_TC, layout in zip(rows, layouts, strict=True)
        ]
        first_class = _first_class(by_class, config.time_price)
        classes = _classes(counts, first_class)
        kept, bits = [], _fixed_bits(config) * len(shift_T)
        for kind, part_TC, layout in zip(self._kinds, rows, layouts, strict=True):
            gains, _ = coding_gains(part_TC, step, shift_T, layout, classes)
            is_kept = gains.coded >= LEAST_SHARE * len(shift_T)
            bits += float(gains.bits[is_kept].sum())
            level_C = levels_of(kind.spread_C, step)
            # By falling level; the sort is stable, and so equal everywhere.
            order = np.argsort(-level_C, kind="stable")
            kept.append(order[is_kept[order]])
        return _Choice(step, first_class, (kept[0], kept[1]), bits / len(shift_T))

    def _calibration(
        self, choice: _Choice, config: EntropyConfig, provenance: Mapping[str, str | int]
    ) -> EntropyCalibration:
        pairs = list(zip(self._kinds, choice.kept, strict=True))
        parts = [_kept_part(kind, kept, choice.step) for kind, kept in pairs]
        # Models once more, of the coefficients that are really coded.
        rows = [np.ascontiguousarray(kind.fit_TC[:, kept]) for kind, kept in pairs]
        layouts = [part.layout for part in parts]
        counts = _count(rows, choice.step, self._shift_fit_T, layouts)
        calibration = EntropyCalibration(
            stage=self.stage,
            geometry=self.geometry,
            rotary=self.rotary,
            config=config,
            step=choice.step,
            classes=_classes(counts, choice.first_class),
            importance=self._importance,
            keys=parts[0],
            values=parts[1],
            max_token_error=0.0,
            held_out_bits=0.0,
            held_out_rank=0.0,
            provenance=provenance,
        )
        return self._judged(calibration, choice.kept)

    def _judged(
        self, calibration: EntropyCalibration, kept: tuple[NDArray[np.intp], NDArray[np.intp]]
    ) -> EntropyCalibration:
        """The same with its error limit, bits and rank, from rows it was not fitted on."""
        shift_T = self._shift_judge_T
        num_tokens = len(shift_T)
        bits, rank = _fixed_bits(calibration.config) * num_tokens, 0
        errors_T = np.zeros(num_tokens)
        square_step_T = np.square(calibration.step * step_factor(shift_T), dtype=np.float64)
        parts = []
        both = (calibration.keys, calibration.values)
        for kind, part, columns in zip(self._kinds, both, kept, strict=True):
            rank_T = calibration.ranks(part, shift_T)
            is_coded_TC = np.arange(part.rank) < rank_T[:, None]
            judged_TC = np.where(is_coded_TC, kind.judge_TC[:, columns], np.float32(0))
            arguments = (calibration.step, shift_T, part.layout, calibration.classes)
            gains, _ = coding_gains(judged_TC, *arguments)
            bits += float(gains.bits.sum())
            rank += int(rank_T.sum())
            outside_T = kind.judge_energy_T - np.square(judged_TC, dtype=np.float64).sum(axis=1)
            outside_T = np.maximum(outside_T, 0)
            errors_T += outside_T / square_step_T + quantization_errors(judged_TC, *arguments)
            parts.append(replace(part, outside_energy=float((outside_T / square_step_T).mean())))
        limit = calibration.config.exact_factor * np.quantile(errors_T, 0.999)
        return replace(
            calibration,
            keys=parts[0],
            values=parts[1],
            max_token_error=float(limit),
            held_out_bits=bits / num_tokens,
            held_out_rank=rank / num_tokens,
        )


def _directions(
    moments: Moments, metric: Metric, num_layers: int, layers_per_basis: int
) -> EntropyKind:
    """Principal directions of each group of layers, all by falling variance, without levels.

    Signs are fixed as in `codec.basis`.
    """
    mean, covariance = moments.mean_and_covariance()
    covariance = metric.scale_covariance(covariance)
    group_width = min(layers_per_basis, num_layers) * (len(mean) // num_layers)
    found, groups, variances = [], [], []
    for number, start in enumerate(range(0, len(mean), group_width)):
        inside = slice(start, start + group_width)
        variance, directions = torch.linalg.eigh(covariance[inside, inside])
        rank = min(len(directions), moments.num_rows - 1, PAPER_MAX_RANK)
        directions = directions.flip(1)[:, :rank]
        peak = directions.abs().argmax(dim=0)
        directions = directions * directions[peak, torch.arange(rank)].sign()
        short = group_width - len(directions)
        found.append(torch.nn.functional.pad(directions, (0, 0, 0, short)))
        groups.append(torch.full((rank,), number, dtype=torch.int32))
        variances.append(variance.flip(0)[:rank])
    order = torch.cat(variances).argsort(descending=True, stable=True)
    return EntropyKind(
        mean_W=mean,
        metric=metric,
        # Rounded here, so that levels and models are those of the directions that are stored.
        directions_GC=torch.cat(found, dim=1)[:, order].to(torch.float16).contiguous(),
        group_C=torch.cat(groups)[order],
        level_C=torch.zeros(len(order), dtype=torch.int32),
        outside_energy=0.0,
    )


def _fit_importance(keys: EntropyKind, sensitivity: Sensitivity) -> Importance:
    leading = _columns(keys, np.arange(min(IMPORTANCE_RANK, keys.rank)))
    coefficients = leading.coefficients(sensitivity.keys_NW.float())
    spread_C = coefficients.std(dim=0).clamp_min(1e-12)
    back_CW = torch.zeros(leading.rank, len(keys.mean_W))
    for group in leading.groups:
        scaled_CG = group.forward_CG / spread_C[group.columns_C, None]
        back_CW[group.columns_C, group.coordinates] = scaled_CG
    return fit_importance(coefficients / spread_C, sensitivity.importance_N, back_CW, keys.mean_W)


def _columns(part: EntropyKind, chosen_C: NDArray[np.intp]) -> EntropyKind:
    """Some of the coefficients; those after the first have no higher level."""
    columns_C = torch.from_numpy(chosen_C)
    return replace(
        part,
        directions_GC=part.directions_GC[:, columns_C].contiguous(),
        group_C=part.group_C[columns_C],
        level_C=part.level_C[columns_C],
    )


def _kind(directions: EntropyKind, fit_TW: Tensor, judge_TW: Tensor) -> _Kind:
    fit_TC = directions.coefficients(fit_TW).numpy()
    return _Kind(
        directions=directions,
        fit_TC=fit_TC,
        judge_TC=directions.coefficients(judge_TW).numpy(),
        judge_energy_T=directions.energy(judge_TW).double().numpy(),
        spread_C=np.sqrt(np.square(fit_TC, dtype=np.float64).mean(axis=0)),
    )


def _layout(spread_C: NDArray[np.float64], step: float) -> Layout:
    low_bits_C, level_C = split_levels(levels_of(spread_C, step))
    return Layout(level_C, low_bits_C)


def _kept_part(kind: _Kind, kept: NDArray[np.intp], step: float) -> EntropyKind:
    level_C = torch.from_numpy(levels_of(kind.spread_C[kept], step))
    return replace(_columns(kind.directions, kept), level_C=level_C)


def _fixed_bits(config: EntropyConfig) -> float:
    """Bits per token that no coefficient is to blame for: shift, header, tables, states."""
    blob_bytes = HEADER_BYTES + SECTION_BYTES * 2 * NUM_BANDS
    return 8 + 8 * blob_bytes / config.chunk_tokens


def _count(rows: list[Floats], step: float, shift_T: Ints, layouts: list[Layout]) -> ClassCounts:
    """Symbols and centroids of both kinds' coefficients by class."""
    offset_K = np.full(NUM_CLASSES, ROUNDING_OFFSET, np.float32)
    parts = [
        count_classes(part_TC, step, shift_T, layout, offset_K=offset_K, num_symbols=MAX_ALPHABET)
        for part_TC, layout in zip(rows, layouts, strict=True)
    ]
    return ClassCounts(*(sum(arrays) for arrays in zip(*parts, strict=True)))


def _first_class(by_class: list[Gains], time_price: float) -> int:
    """The narrowest class whose coefficients pay for their bits and their time.

    Not beyond what the widest coefficients come to in the least important tokens, since
    these are always coded.
    """
    coded, bits, saved = (sum(arrays) for arrays in zip(*by_class, strict=True))
    pays_K = (saved > BIT_PRICE * bits + time_price * coded) | (coded == 0)
    first = int(np.flatnonzero(~pays_K).max(initial=-1)) + 1
    return min(first, MAX_FIRST_CLASS)


def _classes(counts: ClassCounts, first_class: int) -> SymbolClasses:
    """Models and centroids from counts; classes before ``first_class`` have zero alone."""
    bias_K2 = counts.bias_K4[:, 1::2] / np.maximum(counts.bias_K4[:, ::2], 1)
    return SymbolClasses(
        models=_models(counts.symbols_KA, first_class),
        offset_K=np.full(NUM_CLASSES, ROUNDING_OFFSET, np.float32),
        bias1_K=bias_K2[:, 0].astype(np.float32),
        bias2_K=bias_K2[:, 1].astype(np.float32),
    )


def _models(symbols_KA: NDArray[np.float64], first_class: int) -> SymbolModels:
    """Models in which a symbol and its negative are as likely, and an escape ends each class."""
    beyond_K = symbols_KA[:, -1].copy()
    pairs = symbols_KA[:, 1:-1].reshape(NUM_CLASSES, -1, 2)
    symbols_KA = symbols_KA.copy()
    symbols_KA[:, 1:-1] = np.repeat(pairs.mean(axis=2), 2, axis=1)
    symbols_KA[:, -1] = 0
    codable_KA = np.zeros(symbols_KA.shape, dtype=bool)
    symbols_KA[:first_class, 1:] = 0
    codable_KA[:first_class, 0] = True
    for k, counts_A in enumerate(symbols_KA[first_class:], start=first_class):
        seen = np.flatnonzero(counts_A)
        # Zero and one magnitude at least; the symbol after the last seen is the escape.
        escape = min(max(int(seen.max(initial=0)) + 1, 3), MAX_ALPHABET - 1)
        counts_A[escape] = beyond_K[k]
        codable_KA[k, : escape + 1] = True
    return SymbolModels.fit(symbols_KA, floor=codable_KA)
