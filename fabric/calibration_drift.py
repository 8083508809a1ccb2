"""How far text files lie outside what a calibration has seen: `codec.drift`, file by file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from codec.drift import DRIFT_BOUND, drift_of
from codec.entropy_calibration import EntropyCalibration, EntropyKind
from codec.errors import ConfigError
from codec.symbol_classes import step_factor
from fabric.calibrate.corpus import read_text, tokenize
from fabric.calibrate.progress import Progress, say_nothing
from fabric.engines.loading import LoadedModel
from fabric.engines.protocol import Engine

WINDOW_TOKENS: Final = 512
"""Tokens of one prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDrift:
    """One file's energy outside the basis, in multiples of the calibration's held-out text."""

    name: str
    num_tokens: int
    """Tokens looked at, sinks not counted."""

    keys: float
    """Of the stage where it is largest."""

    values: float

    @property
    def is_drifting(self) -> bool:
        """Whether a codec with this calibration would warn of the file."""
        return max(self.keys, self.values) > DRIFT_BOUND

    @property
    def verdict(self) -> str:
        """What to do."""
        if self.is_drifting:
            return f"drifts (over {DRIFT_BOUND:g}): calibrate with text like it"
        return "like the calibration's text"


def measure_drift(
    engine: Engine[Any],
    loaded: LoadedModel,
    calibrations: Sequence[EntropyCalibration],
    paths: Sequence[Path],
    *,
    max_tokens: int = 4096,
    on_progress: Progress = say_nothing,
) -> list[FileDrift]:
    """Run the first tokens of each file through the model and look outside the basis.

    Raises
    ------
    ConfigError
        If a file cannot be read, or has no token beyond the sinks.
    """
    if max_tokens < 1:
        raise ConfigError(f"need at least 1 token of each file, got {max_tokens}")
    sources = [tokenize(loaded, read_text(path))[:max_tokens] for path in paths]
    sinks = max(calibration.config.sink_tokens for calibration in calibrations)
    for path, tokens in zip(paths, sources, strict=True):
        if len(tokens) <= sinks:
            raise ConfigError(
                f"{path} has {len(tokens)} tokens; over {sinks} are needed to look beyond the sinks"
            )
    drifts = []
    for number, (path, tokens) in enumerate(zip(paths, sources, strict=True)):
        on_progress("drift", number / len(paths))
        drifts.append(_of_file(engine, calibrations, path.name, tokens))
    on_progress("drift", 1.0)
    return drifts


def _of_file(
    engine: Engine[Any],
    calibrations: Sequence[EntropyCalibration],
    name: str,
    tokens: Sequence[int],
) -> FileDrift:
    outside: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in calibrations]
    for first in range(0, len(tokens), WINDOW_TOKENS):
        window = tokens[first : first + WINDOW_TOKENS]
        cache, _ = engine.prefill(window)
        keys, values = engine.capture(cache, 0, len(window))
        keys = engine.rotary.unrotate(keys, torch.arange(len(keys)))
        for calibration, kinds in zip(calibrations, outside, strict=True):
            for parts, found in zip(kinds, outside_of(calibration, keys, values), strict=True):
                parts.append(found[calibration.config.sink_tokens :])
    by_kind = [
        max(
            drift_of(torch.cat(kinds[number]), part.outside_energy)
            for calibration, kinds in zip(calibrations, outside, strict=True)
            for part in ((calibration.keys, calibration.values)[number],)
        )
        for number in range(2)
    ]
    num_tokens = sum(map(len, outside[0][0]))
    return FileDrift(name=name, num_tokens=num_tokens, keys=by_kind[0], values=by_kind[1])


def outside_of(
    calibration: EntropyCalibration, keys_TLHD: Tensor, values_TLHD: Tensor
) -> tuple[Tensor, Tensor]:
    """Energy outside the coded coefficients of the model's rows, in squares of a token's step.

    Parameters
    ----------
    keys_TLHD
        Of all layers, unrotated.
    """
    stage = calibration.stage
    layers = slice(stage.layer_start, stage.layer_stop)
    heads = slice(stage.head_start, stage.head_stop)
    keys, values = (
        array[:, layers, heads].float().flatten(1) for array in (keys_TLHD, values_TLHD)
    )
    shift_T = calibration.importance.shifts(keys)
    step_T = torch.from_numpy(calibration.step * step_factor(shift_T)).double()

    def outside(part: EntropyKind, rows_TW: Tensor) -> Tensor:
        inside_CT = calibration.project(part, rows_TW - part.mean_W, shift_T).double()
        left_T = part.energy(rows_TW).double() - inside_CT.square().sum(dim=0)
        return left_T.clamp_min(0) / step_T.square()

    return outside(calibration.keys, keys), outside(calibration.values, values)
