"""``kvfabric evaluate``: what it prints, writes and keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from codec.errors import ConfigError
from codec.identity import CodecId
from codec.raw import RawCodec
from fabric import evaluate_cli
from fabric.evaluate import codecs
from fabric.evaluate_cli import evaluate_command
from fabric.quality_store import find_receipt
from tests.fabric.evaluate.small import SMALL, small_loaded


class NearlyCodec(RawCodec):
    """Lossy, but not by much."""

    is_lossless = False

    def __init__(self, *args: Any, **options: Any) -> None:
        """Under an identity of its own."""
        super().__init__(*args, **options)
        self.codec_id = CodecId(b"a nearly raw one")

    def encode(self, *arrays: torch.Tensor, **options: Any) -> bytes:
        """See the parent."""
        coarse = (rows.to(torch.bfloat16).to(rows.dtype) for rows in arrays)
        return super().encode(*coarse, **options)


def nearly_codecs(engine: Any, *_: Any) -> tuple[NearlyCodec, ...]:
    """In place of a calibration."""
    return (NearlyCodec(engine.geometry.whole, engine.geometry, "float32"),)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tiny model, the small protocol, and a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(evaluate_cli, "load_model", lambda *_, **__: small_loaded())
    monkeypatch.setattr(evaluate_cli, "QUICK", SMALL)
    monkeypatch.setattr(codecs, "load_codecs", nearly_codecs)


def run(*args: str) -> Result:
    """The command, with its arguments."""
    return CliRunner().invoke(evaluate_command, ["--quick", *args])


def test_results_are_printed_and_written(tmp_path: Path) -> None:
    """All arms that were named, and a codec's receipt where a fabric looks for it."""
    path = tmp_path / "found.json"

    result = run("--arms", "full,paper,fp8", "--targets", "8,16", "--json", str(path))

    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    names = ["full", "paper@8", "paper@16", "fp8"]
    assert [arm["arm"] for arm in found["arms"]] == names
    assert all(name in result.stdout for name in names)
    assert found["is_registered"]
    assert found["arms"][0]["pooled"]["mean_kl"]["high"] < 1e-9
    receipt = find_receipt([CodecId(b"a nearly raw one")])
    assert receipt is not None
    assert receipt.evaluation_set == found["evaluation_set"]
    assert receipt.target == 16
    assert receipt.limits


def test_a_verdict_is_said_with_its_reasons() -> None:
    """The small protocol has too few tokens for any."""
    result = run("--targets", "8")

    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "entropy@8 does not pass: 72 tokens were scored, 256 are needed" in said
    assert "raw does not pass" not in said


def test_a_corpus_is_judged_and_qualifies_nothing(tmp_path: Path) -> None:
    """No receipt is kept."""
    text = tmp_path / "mine.txt"
    text.write_text("Any text will do for this, so long as there is enough of it. " * 9)

    result = run("--corpus", str(text), "--json", str(tmp_path / "found.json"))

    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["is_registered"]
    assert [one["name"] for one in found["arms"][0]["sets"]] == ["mine"]
    assert "qualifies no codec" in " ".join(result.stdout.split())
    assert find_receipt([CodecId(b"a nearly raw one")]) is None


def test_a_protocol_of_the_callers_own_keeps_no_receipt(tmp_path: Path) -> None:
    """Fewer windows could be chosen until they pass."""
    result = run("--windows", "1", "--context", "50", "--json", str(tmp_path / "found.json"))

    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "found.json").read_text())["config"]
    assert (config["windows"], config["context_tokens"]) == (1, 50)
    assert find_receipt([CodecId(b"a nearly raw one")]) is None


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--arms", "nonsense"], "choose from full"),
        (["--targets", "8,0"], "8,16,32"),
        (["--profile", "best"], "no profile"),
        (["--corpus", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--windows", "0"], "windows must be at least 1"),
        (["--context", "12"], "context_tokens must be over 12"),
        (["--context", "600"], "lower --context"),
    ],
)
def test_what_cannot_be_done_is_said(
    args: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an error that `kvfabric` turns into one line, and before anything is calibrated."""
    monkeypatch.setattr(codecs, "load_codecs", lambda *_: pytest.fail("calibrated"))

    result = run(*args)

    assert isinstance(result.exception, ConfigError)
    assert why in str(result.exception)


def test_a_file_that_cannot_be_written_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the work."""
    monkeypatch.setattr(evaluate_cli, "load_model", lambda *_: pytest.fail("loaded"))

    result = run("--json", "/nowhere/found.json")

    assert result.exit_code == 2
    assert "cannot write" in result.output
