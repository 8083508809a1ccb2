"""Calibration: held-out rows stay held out, equal input gives an equal digest, files are checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from codec.calibration import Calibration, CalibrationConfig, Calibrator
from codec.errors import ConfigError, CorruptBlobError
from codec.geometry import Stage
from tests.codec.synthetic import GEOMETRY, ROTARY, cache, calibrated


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    """One fit for the module; it is immutable."""
    return calibrated()


def test_equal_input_gives_an_equal_digest(calibration: Calibration) -> None:
    """The digest names content, so two runs agree."""
    assert calibrated().digest == calibration.digest


@pytest.mark.parametrize("change", [{"seed": 200}, {"target": 8.0}, {"stage": Stage(0, 2, 0, 2)}])
def test_other_input_gives_another_digest(calibration: Calibration, change: dict) -> None:  # type: ignore[type-arg]
    """Rows, target and stage all count."""
    assert calibrated(**change).digest != calibration.digest


def test_provenance_and_every_setting_enter_the_digest(calibration: Calibration) -> None:
    """A calibration of another model with equal numbers is another calibration."""
    others = [
        dataclasses.replace(calibration, provenance={"model": "other"}),
        dataclasses.replace(
            calibration, config=dataclasses.replace(calibration.config, sink_tokens=5)
        ),
        dataclasses.replace(
            calibration, keys=dataclasses.replace(calibration.keys, max_row_error=0.5)
        ),
    ]

    assert len({calibration.digest, *(other.digest for other in others)}) == 4


def test_the_basis_never_sees_held_out_rows_or_sinks() -> None:
    """Of eight windows two are held out; each loses its four sinks."""
    calibrator = Calibrator(GEOMETRY.whole, GEOMETRY, ROTARY, CalibrationConfig(holdout_every=4))

    for seed in range(8):
        calibrator.add(*cache(20, seed=seed))

    assert calibrator._moments["keys"].num_rows == 6 * 16
    assert [len(rows) for rows in calibrator._held_out["values"]] == [16, 16]


def test_the_allocation_sees_only_held_out_rows() -> None:
    """Held-out windows twice as far from the mean ask for another plan with the same basis."""
    fits = []
    for stretch in (1.0, 3.0):
        config = CalibrationConfig(holdout_every=2, block_stride=1)
        calibrator = Calibrator(GEOMETRY.whole, GEOMETRY, ROTARY, config)
        for seed in range(8):
            keys, values = cache(48, seed=seed)
            calibrator.add(keys * (stretch if seed % 2 else 1.0), values)
        fits.append(calibrator.fit({}))

    plain, stretched = fits
    assert torch.equal(plain.keys.basis.mean_W, stretched.keys.basis.mean_W)
    assert stretched.keys.max_row_error > 2 * plain.keys.max_row_error


def test_keys_are_fitted_before_their_rotation() -> None:
    """Windows at other positions give the same basis once rotation is undone."""
    fits = []
    for start in (0, 1000):
        calibrator = Calibrator(
            GEOMETRY.whole, GEOMETRY, ROTARY, CalibrationConfig(sink_tokens=0, holdout_every=4)
        )
        for seed in range(8):
            calibrator.add(*cache(48, seed=seed, start=start), start_position=start)
        fits.append(calibrator.fit({}))

    near, far = (fit.keys.basis.variance_C for fit in fits)
    assert torch.allclose(near, far, rtol=1e-3, atol=1e-4)


def test_a_file_comes_back(calibration: Calibration, tmp_path: Path) -> None:
    """Everything, and by the same digest."""
    path = tmp_path / "deep" / "c.safetensors"

    calibration.save(path)
    again = Calibration.load(path)

    assert again.digest == calibration.digest
    assert again.rotary == calibration.rotary
    assert again.config == calibration.config
    assert again.keys.allocation == calibration.keys.allocation
    assert torch.equal(again.values.basis.directions_WC, calibration.values.basis.directions_WC)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("where", [0.02, 0.3, 0.6, 0.95])
def test_a_flipped_byte_in_the_file_is_refused(
    calibration: Calibration, tmp_path: Path, where: float
) -> None:
    """In the metadata or in a tensor: no codec is made of it."""
    path = tmp_path / "c.safetensors"
    calibration.save(path)
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 0x10
    path.write_bytes(data)

    with pytest.raises(CorruptBlobError, match="calibration"):
        Calibration.load(path)


def test_a_cut_or_missing_file_is_refused(calibration: Calibration, tmp_path: Path) -> None:
    """As a typed error, whatever the reader below raises."""
    path = tmp_path / "c.safetensors"
    calibration.save(path)
    path.write_bytes(path.read_bytes()[:-8])

    for bad in (path, tmp_path / "absent"):
        with pytest.raises(CorruptBlobError, match="cannot be read"):
            Calibration.load(bad)


def test_one_window_is_too_few() -> None:
    """There is nothing to hold out."""
    calibrator = Calibrator(GEOMETRY.whole, GEOMETRY, ROTARY, CalibrationConfig())
    calibrator.add(*cache(48, seed=0))

    with pytest.raises(ConfigError, match="at least 2 windows"):
        calibrator.fit({})


@pytest.mark.parametrize(
    "change",
    [
        {"target": 0.5},
        {"target": float("nan")},
        {"sink_tokens": -1},
        {"holdout_every": 1},
        {"allocation_rows": 0},
        {"block_stride": 0},
        {"max_rank": 0},
        {"exact_factor": 0.0},
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, float]) -> None:
    """The message names the setting."""
    with pytest.raises(ConfigError, match=next(iter(change))):
        CalibrationConfig(**change)  # type: ignore[arg-type]


def test_progress_rises_to_one() -> None:
    """It spans both kinds."""
    calibrator = Calibrator(GEOMETRY.whole, GEOMETRY, ROTARY, CalibrationConfig())
    for seed in range(4):
        calibrator.add(*cache(48, seed=seed))
    seen: list[float] = []

    calibrator.fit({}, on_progress=seen.append)

    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)
