"""A report's numbers are those of the codec itself, and its pictures can be read by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from codec.entropy_calibration import EntropyCalibration
from codec.errors import BackendUnavailable
from fabric import calibration_plots
from fabric.calibrate import AnyConfig, calibrate_all
from fabric.calibrate.run import StageFit
from fabric.calibration_report import CalibrationReport, report_of
from tests.fabric.calibrate_samples import CORPUS, ENTROPY, PAPER, tiny_pair, two_files


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that calibrates and hands out what the fits were made of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    corpus = two_files(tmp_path)
    engine, loaded = tiny_pair()

    def run(*configs: AnyConfig, num_stages: int = 1) -> list[StageFit]:
        found: list[StageFit] = []
        calibrate_all(
            engine,
            loaded,
            configs=configs,
            corpus=corpus,
            corpus_config=CORPUS,
            num_stages=num_stages,
            examine=found.append,
        )
        return found

    return run


def test_numbers_are_those_of_the_codec(fits: Any) -> None:
    """Bits add up to what the fit says but for headers; errors fall as bits grow."""
    (fit,) = fits(ENTROPY, replace(ENTROPY, target=2.5))

    report = report_of(fit)

    for calibration, target in zip(fit.calibrations, report.targets, strict=True):
        assert isinstance(calibration, EntropyCalibration)
        assert target.target == calibration.config.target
        assert len(target.keys.bits_C) == len(target.keys.variance_C) == calibration.keys.rank
        # A header, tables and states are spread over 256 tokens.
        assert target.bits_per_token == pytest.approx(calibration.held_out_bits - 47, rel=0.15)
        assert len(target.values.layer_error_L) == 4
        assert 0 < target.keys.error < 1
    bits = [point.bits_per_token for point in report.curve]
    assert [point.target for point in report.curve][:2] == [2.5, 4.0]
    assert bits == sorted(bits, reverse=True)
    assert report.curve[0].key_error < report.curve[-1].key_error
    assert report.curve[0].value_error < report.curve[-1].value_error


def test_errors_by_layer_are_those_of_rows_that_come_back(fits: Any) -> None:
    """For the published profile, by its own code."""
    (fit,) = fits(PAPER)
    (calibration,) = fit.calibrations

    report = report_of(fit)

    keys = fit.rows.held_out[0].float()
    back = calibration.keys.code_rows(keys)
    mean = calibration.keys.basis.mean_W
    for layer, found in enumerate(report.targets[0].keys.layer_error_L):
        run = slice(layer * 16, layer * 16 + 16)
        wrong = (keys - back)[:, run].square().sum() / (keys - mean)[:, run].square().sum()
        assert found == pytest.approx(float(wrong), rel=1e-4)
    used = calibration.keys.allocation.used_bits + calibration.values.allocation.used_bits
    assert report.targets[0].bits_per_token == pytest.approx(used)
    assert [point.target for point in report.curve] == [PAPER.target]


def test_a_report_is_written_with_a_picture_of_everything(
    fits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each stage; equal content gives equal pictures."""
    pytest.importorskip("matplotlib")
    writer = CalibrationReport(tmp_path / "one")
    seen: list[float] = []
    for fit in fits(ENTROPY, num_stages=2):
        writer.add(fit, lambda _, fraction: seen.append(fraction))

    written = {path.name: path.read_bytes() for path in writer.write("tiny")}

    assert seen[-1] == 1.0
    assert all(written.values())
    assert len(written) == 1 + 2 * 2 * 4
    assert {"spectrum-l0-2.h0-2.png", "layer-error-l2-4.h0-2.svg"} <= written.keys()
    content = json.loads(written["report.json"])
    assert content["model"] == "tiny"
    assert [domain["name"] for domain in content["domains"]] == ["a.txt", "b.txt"]
    assert content["stages"][1]["first_layer"] == 2
    assert written["bits-l0-2.h0-2.png"].startswith(b"\x89PNG")
    monkeypatch.setattr(calibration_plots, "_PICTURES", {"bits": calibration_plots._bits})
    for path in calibration_plots.draw_report(content, tmp_path):
        assert path.read_bytes() == written[path.name]


def test_without_matplotlib_it_is_said_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the extra to install."""
    monkeypatch.setattr(calibration_plots, "find_spec", lambda _: None)

    with pytest.raises(BackendUnavailable, match=r"kvfabric\[plots\]"):
        CalibrationReport(tmp_path)


def test_rows_of_the_report_are_spread_over_all_held_out(fits: Any) -> None:
    """They are the same whatever is reported, and stay as they are."""
    (fit,) = fits(PAPER)
    before = fit.rows.held_out[0].clone()

    first, second = report_of(fit), report_of(fit)

    assert first == second
    assert torch.equal(fit.rows.held_out[0], before)
