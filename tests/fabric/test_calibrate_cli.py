"""``kvfabric calibrate`` and ``kvfabric drift``: options, output and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from codec.entropy_calibration import EntropyConfig
from codec.errors import ConfigError
from fabric import calibrate_cli
from fabric.calibrate.domains import Domain, Outliers
from fabric.calibrate.profiles import load_calibration
from fabric.calibrate_cli import chosen_model, domain_line, progress_bars
from fabric.cli import main
from tests.fabric.calibrate_samples import tiny_loaded, two_files


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tiny model in place of any, and a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(calibrate_cli, "load_model", lambda *_, **__: tiny_loaded())


def run(command: str, folder: Path, *arguments: str) -> Result:
    """A command on two small files."""
    corpus = [part for path in two_files(folder) for part in ("--corpus", str(path))]
    sizes = ("--tokens", "480", "--window", "40")
    return CliRunner().invoke(main, [command, *corpus, *sizes, *arguments])


def test_every_target_and_stage_is_a_file(tmp_path: Path) -> None:
    """Of our profile, unless the other is asked for; one line says what each is."""
    out = tmp_path / "out"

    result = run("calibrate", tmp_path, "--targets", "4,2.5", "--stages", "2", "--out", str(out))

    assert result.exit_code == 0, result.output
    found = [load_calibration(path) for path in out.iterdir()]
    assert sorted(part.config.target for part in found) == [2.5, 2.5, 4.0, 4.0]
    assert {type(part.config) for part in found} == {EntropyConfig}
    for part in found:
        assert part.digest.hex() in result.output
    assert "held-out ratio" in result.output


def test_the_published_profile_says_its_errors(tmp_path: Path) -> None:
    """One target may be called so."""
    result = run("calibrate", tmp_path, "--profile", "paper", "--target", "3")

    assert result.exit_code == 0, result.output
    assert "target 3 " in result.output
    assert "held-out error K" in result.output


def test_a_report_comes_with_what_each_file_gave(tmp_path: Path) -> None:
    """Even where the calibration was found."""
    pytest.importorskip("matplotlib")
    arguments = ("--targets", "4", "--report", str(tmp_path / "report"))
    assert run("calibrate", tmp_path, "--targets", "4").exit_code == 0

    result = run("calibrate", tmp_path, *arguments)

    assert result.exit_code == 0, result.output
    assert "a.txt: 240 tokens in 6 windows" in result.output
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert content["stages"][0]["targets"][0]["target"] == 4.0
    assert (tmp_path / "report" / "rate-distortion.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--targets", "0"), "target must be between 1 and 256"),
        (("--targets", "8,x"), "--targets needs numbers such as 8,16,32, got '8,x'"),
        (("--targets", " , "), "--targets needs numbers"),
        (("--stages", "9"), "stages must be in 1..4"),
        (("--gradient-windows", "0"), "gradient_windows must be at least 1"),
        (("here", "--model", "there"), "two models are named, here and there"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """With exit code 1."""
    result = run("calibrate", tmp_path, *arguments)

    assert result.exit_code == 1
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_an_unknown_profile_is_a_usage_error(tmp_path: Path) -> None:
    """Click names the choices."""
    result = run("calibrate", tmp_path, "--profile", "best")

    assert result.exit_code == 2
    assert "entropy" in result.output


def test_drift_is_a_table_with_verdicts(tmp_path: Path) -> None:
    """File by file."""
    other = tmp_path / "other.txt"
    other.write_text("QZ~{}|^ %$JX&@" * 30)

    result = run("drift", tmp_path, str(tmp_path / "a.txt"), str(other), "--target", "4")

    assert result.exit_code == 0, result.output
    assert "a.txt" in result.output
    assert "other.txt" in result.output
    refused = run("drift", tmp_path, str(other), "--profile", "paper")
    assert refused.exit_code == 1
    assert "entropy profile only" in refused.output


def test_a_model_is_named_once_either_way() -> None:
    """As an argument or as an option."""
    assert chosen_model("m", None) == chosen_model(None, "m") == chosen_model("m", "m") == "m"
    assert chosen_model(None, None) is None
    with pytest.raises(ConfigError, match="two models"):
        chosen_model("m", "n")


def test_outliers_are_named_beyond_the_sinks_only() -> None:
    """The first few positions of them."""
    sinks = Outliers(kind="keys", count_by_position={0: 9, 3: 1}, largest=1e3)
    beyond = Outliers(
        kind="values", count_by_position={0: 9, **dict.fromkeys(range(10, 18), 2)}, largest=99.0
    )
    domain = Domain(
        name="x.txt",
        num_windows=9,
        num_tokens=360,
        num_held_out_tokens=40,
        num_gradient_tokens=0,
        outliers=(sinks, beyond),
    )

    assert domain_line(domain, 4) == (
        "x.txt: 360 tokens in 9 windows; 16 outlying values beyond the sinks, "
        "at 10, 11, 12, 13, 14, 15, ..."
    )


def test_progress_shows_each_kind_of_work_once() -> None:
    """Bars come as work begins."""
    console = Console(record=True, width=100)

    with progress_bars(console) as on_progress:
        on_progress("capture", 0.5)
        on_progress("capture", 1.0)
        on_progress("another", 0.2)

    said = console.export_text()
    assert said.count("running text through the model") == 1
    assert "another" in said
