"""What a calibration looks like inside: numbers in a JSON file, and plots of them.

Rows that were held out are coded and brought back, and from that come the variance and the
bits of each coefficient, the error of each layer, and the curve of error against bits.  Errors
are squared, over the rows' variance; *in the metric* they are weighted as the model reacts
to them (`codec.sensitivity`), which is what the codec keeps small.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from codec.calibration import KindCalibration
from codec.entropy_calibration import EntropyCalibration, EntropyKind
from codec.step_quantizer import (
    Floats,
    Ints,
    coding_gains,
    dequantize_steps,
    quantize_steps,
)
from fabric.calibrate.domains import Domain
from fabric.calibrate.profiles import AnyCalibration, profile_of
from fabric.calibrate.progress import Progress, say_nothing
from fabric.calibrate.run import StageFit
from fabric.calibration_plots import check_plots, draw_report

REPORT_ROWS: Final = 512
"""Held-out rows that are coded."""

CURVE_TARGETS: Final = (4.0, 8.0, 16.0, 32.0, 64.0)
"""Fitted for the curve beside those asked for, where the profile has a fitter."""


@dataclass(frozen=True, kw_only=True)
class KindReport:
    """Keys, or values, of one stage under one calibration."""

    rank: int
    width: int
    variance_C: list[float]
    """Of each coefficient on held-out rows, in the order of the basis."""

    bits_C: list[float]
    """Bits per token that each coefficient takes, before headers."""

    error: float
    """Squared error over variance, in the metric if the profile has one."""

    layer_error_L: list[float]
    """Plain squared error over variance, layer by layer."""


@dataclass(frozen=True, kw_only=True)
class TargetReport:
    """One stage under one calibration."""

    profile: str
    target: float
    digest: str
    bits_per_token: float
    """Of coefficients alone, on held-out rows."""

    keys: KindReport
    values: KindReport


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """What a target costs, and what it leaves."""

    target: float
    bits_per_token: float
    key_error: float
    value_error: float


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """Everything about one stage."""

    stage: str
    first_layer: int
    raw_bits_per_token: int
    targets: list[TargetReport]
    curve: list[CurvePoint]
    """By rising target."""


class CalibrationReport:
    """Gathers stages as they are fitted, and writes them to a folder."""

    def __init__(self, folder: Path) -> None:
        """Check what can be checked before hours of work.

        Raises
        ------
        BackendUnavailable
            If there is nothing to draw with.
        """
        check_plots()
        self._folder = folder
        self._stages: list[StageReport] = []
        self.domains: Sequence[Domain] = ()

    def add(self, fit: StageFit, on_progress: Progress = say_nothing) -> None:
        """Take one stage."""
        self.domains = fit.domains
        self._stages.append(report_of(fit, on_progress))

    def write(self, model: str) -> list[Path]:
        """Write ``report.json`` and the plots; where they are."""
        self._folder.mkdir(parents=True, exist_ok=True)
        content = {
            "model": model,
            "domains": [asdict(domain) for domain in self.domains],
            "stages": [asdict(stage) for stage in self._stages],
        }
        path = self._folder / "report.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return [path, *draw_report(content, self._folder)]


def report_of(fit: StageFit, on_progress: Progress = say_nothing) -> StageReport:
    """Numbers about one stage's fits, from rows that no basis has seen."""
    rows = _chosen(fit.rows.held_out)
    targets = [_target(calibration, rows) for calibration in fit.calibrations]
    curve = [_point(target) for target in targets]
    known = {point.target for point in curve}
    fitted = [c for c in fit.calibrations if isinstance(c, EntropyCalibration)]
    if fit.fitter is not None and fitted:
        wanted = [target for target in CURVE_TARGETS if target not in known]
        for number, target in enumerate(wanted):
            on_progress("report", number / len(wanted))
            config = replace(fitted[0].config, target=target)
            found = fit.fitter.fit(config, {})
            if min(found.keys.rank, found.values.rank) > 0:
                curve.append(_point(_target(found, rows)))
    on_progress("report", 1.0)
    return StageReport(
        stage=str(fit.rows.stage),
        first_layer=fit.rows.stage.layer_start,
        raw_bits_per_token=8 * fit.rows.geometry.raw_bytes_per_token,
        targets=targets,
        curve=sorted(curve, key=lambda point: point.target),
    )


def _chosen(held_out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    num_rows = len(held_out[0])
    chosen = torch.linspace(0, num_rows - 1, min(REPORT_ROWS, num_rows)).long()
    return held_out[0][chosen].float(), held_out[1][chosen].float()


def _point(target: TargetReport) -> CurvePoint:
    return CurvePoint(
        target=target.target,
        bits_per_token=target.bits_per_token,
        key_error=target.keys.error,
        value_error=target.values.error,
    )


def _target(calibration: AnyCalibration, rows: tuple[Tensor, Tensor]) -> TargetReport:
    num_layers = calibration.stage.num_layers
    if isinstance(calibration, EntropyCalibration):
        shift_T = calibration.importance.shifts(rows[0])
        keys, values = (
            _entropy_kind(calibration, part, rows_TW, shift_T)
            for part, rows_TW in zip((calibration.keys, calibration.values), rows, strict=True)
        )
    else:
        keys, values = (
            _paper_kind(part, rows_TW, num_layers)
            for part, rows_TW in zip((calibration.keys, calibration.values), rows, strict=True)
        )
    return TargetReport(
        profile=profile_of(calibration),
        target=calibration.config.target,
        digest=calibration.digest.hex(),
        bits_per_token=sum(keys.bits_C) + sum(values.bits_C),
        keys=keys,
        values=values,
    )


def _entropy_kind(
    calibration: EntropyCalibration, part: EntropyKind, rows_TW: Tensor, shift_T: Ints
) -> KindReport:
    projected: Floats = calibration.project(part, rows_TW - part.mean_W, shift_T).T.numpy()
    step, classes = calibration.step, calibration.classes
    codes = quantize_steps(projected, step, shift_T, part.layout, classes)
    values = dequantize_steps(codes, step, shift_T, part.layout, classes)
    back_TW = part.rows(torch.from_numpy(values))
    wrong = part.metric.scale(rows_TW - back_TW).square().sum()
    gains, _ = coding_gains(projected, step, shift_T, part.layout, classes)
    return KindReport(
        rank=part.rank,
        width=len(part.mean_W),
        variance_C=part.coefficients(rows_TW).square().mean(dim=0).tolist(),
        bits_C=(gains.bits / len(rows_TW)).tolist(),
        error=float(wrong / part.energy(rows_TW).sum().clamp_min(1e-30)),
        layer_error_L=_by_layer(rows_TW, back_TW, part.mean_W, calibration.stage.num_layers),
    )


def _paper_kind(part: KindCalibration, rows_TW: Tensor, num_layers: int) -> KindReport:
    back_TW = part.code_rows(rows_TW)
    bits_C = np.zeros(part.basis.rank)
    for block in part.allocation.blocks:
        bits_C[block.start : block.stop] = block.block_type.used_bits(block.size) / block.size
    centered = rows_TW - part.basis.mean_W
    return KindReport(
        rank=part.basis.rank,
        width=part.basis.width,
        variance_C=part.basis.project(rows_TW).double().square().mean(dim=0).tolist(),
        bits_C=bits_C.tolist(),
        error=float((rows_TW - back_TW).square().sum() / centered.square().sum().clamp_min(1e-30)),
        layer_error_L=_by_layer(rows_TW, back_TW, part.basis.mean_W, num_layers),
    )


def _by_layer(rows_TW: Tensor, back_TW: Tensor, mean_W: Tensor, num_layers: int) -> list[float]:
    wrong, energy = (
        part.view(len(part), num_layers, -1).square().sum(dim=(0, 2))
        for part in (rows_TW - back_TW, rows_TW - mean_W)
    )
    found: list[float] = (wrong / energy.clamp_min(1e-30)).tolist()
    return found
