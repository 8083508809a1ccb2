"""Drift: a file like the calibration's text passes, another kind does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from codec.entropy_calibration import EntropyCalibration
from codec.errors import ConfigError
from codec.symbol_classes import step_factor
from fabric.calibrate import calibrate
from fabric.calibration_drift import FileDrift, measure_drift, outside_of
from fabric.engines.loading import LoadedModel
from fabric.engines.transformers import TransformersEngine
from tests.fabric.calibrate_samples import CORPUS, ENTROPY, tiny_pair, two_files

Calibrated = tuple[TransformersEngine, LoadedModel, list[EntropyCalibration]]


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calibrated:
    """A tiny model in two stages, and their calibrations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engine, loaded = tiny_pair()
    found = calibrate(
        engine,
        loaded,
        config=ENTROPY,
        corpus=two_files(tmp_path),
        corpus_config=CORPUS,
        num_stages=2,
    )
    return engine, loaded, [part for part in found if isinstance(part, EntropyCalibration)]


def test_text_of_another_kind_is_told_apart(calibrated: Calibrated, tmp_path: Path) -> None:
    """Letters that the calibration never saw lie further outside."""
    engine, loaded, calibrations = calibrated
    other = tmp_path / "other.txt"
    other.write_text("QZ~{}|^ %$JX&@" * 30)
    seen: list[float] = []

    like, unlike = measure_drift(
        engine,
        loaded,
        calibrations,
        [tmp_path / "a.txt", other],
        on_progress=lambda _, fraction: seen.append(fraction),
    )

    assert (like.name, unlike.name) == ("a.txt", "other.txt")
    assert like.num_tokens == 540 - 2 * 4
    assert max(unlike.keys, unlike.values) > 2 * max(like.keys, like.values)
    assert seen == [0.0, 0.5, 1.0]


def test_energy_outside_is_what_the_codec_leaves_out(calibrated: Calibrated) -> None:
    """In squares of each token's own step, after the coefficients that it is coded with."""
    _, _, (_, calibration) = calibrated
    draw = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 6, 4, 2, 8, generator=draw)

    found = outside_of(calibration, keys, values)

    shift_T = calibration.importance.shifts(keys[:, 2:].flatten(1))
    step_T = calibration.step * step_factor(shift_T)
    for number, (part, array) in enumerate(
        ((calibration.keys, keys), (calibration.values, values))
    ):
        scaled = part.metric.scale(array[:, 2:].flatten(1) - part.mean_W)
        for t, rank in enumerate(calibration.ranks(part, shift_T)):
            kept = scaled[t] @ part.directions_GC[:, :rank].float()
            left = float(scaled[t].square().sum() - kept.square().sum()) / float(step_T[t]) ** 2
            assert float(found[number][t]) == pytest.approx(left, rel=1e-2, abs=1e-3)


def test_a_verdict_follows_the_bound() -> None:
    """Keys or values over it are enough."""
    fits = FileDrift(name="x", num_tokens=9, keys=3.0, values=0.0)
    assert not fits.is_drifting
    assert "like" in fits.verdict
    for keys, values in ((3.01, 0.0), (0.0, 3.01)):
        drift = FileDrift(name="x", num_tokens=9, keys=keys, values=values)
        assert drift.is_drifting
        assert "drifts" in drift.verdict


def test_files_that_say_nothing_are_refused(calibrated: Calibrated, tmp_path: Path) -> None:
    """Too short, or absent, or none of it wanted."""
    engine, loaded, calibrations = calibrated
    short = tmp_path / "short.txt"
    short.write_text("abcd")

    with pytest.raises(ConfigError, match=r"short\.txt has 4 tokens"):
        measure_drift(engine, loaded, calibrations, [short])
    with pytest.raises(ConfigError, match=r"absent\.txt"):
        measure_drift(engine, loaded, calibrations, [tmp_path / "absent.txt"])
    with pytest.raises(ConfigError, match="at least 1 token"):
        measure_drift(engine, loaded, calibrations, [tmp_path / "a.txt"], max_tokens=0)
