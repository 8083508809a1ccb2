"""``kvfabric bench codec``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from codec.errors import ConfigError
from fabric import codec_bench_cli
from fabric.codec_bench.floors import MachineRates
from fabric.codec_bench.run import FULL, QUICK, BenchConfig, BenchResult
from fabric.codec_bench_cli import codec_command
from fabric.engines.transformers import TransformersEngine
from tests.fabric.codec_bench.small import BENCH, measured
from tests.fabric.codec_bench.test_report import comparison
from tests.fabric.evaluate.small import small_loaded


def invoke(*args: str) -> Result:
    """The command, with its arguments."""
    return CliRunner().invoke(codec_command, list(args))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BenchConfig]:
    """Settings of every run; a run finds two gains, one of which is missing."""
    found: list[BenchConfig] = []

    def run(
        engine: TransformersEngine,
        loaded: Any,
        config: BenchConfig,
        on_progress: Callable[[str, float], None],
    ) -> BenchResult:
        found.append(config)
        on_progress("capture", 0.5)
        return result(loaded.name, config)

    monkeypatch.setattr(codec_bench_cli, "load_model", lambda *_, **__: small_loaded())
    monkeypatch.setattr(codec_bench_cli, "run", run)
    return found


def result(model: str, config: BenchConfig) -> BenchResult:
    """Figures without a run."""
    return BenchResult(
        model=model,
        config=config,
        arms=(measured("full", None, [0.0], 1), measured("paper@8", 8, [0.01], 8)),
        ranks={"paper@8": (3, 4)},
        comparison=comparison(2.0, None),
        rates=MachineRates(flops_per_s=1e9, bytes_per_s=1e9),
        prefix_tokens=4096,
        races={},
    )


def test_figures_are_printed_and_written(asked: list[BenchConfig], tmp_path: Path) -> None:
    """The same to both; tables go beside them."""
    path = tmp_path / "found.json"

    done = invoke("--quick", "--json", str(path))

    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert json.loads(done.stdout) == found
    assert found["quick"] is True
    assert [arm["arm"] for arm in found["figures"]["arms"]] == ["full", "paper@8"]
    assert found["figures"]["entropy_gain_at_equal_kl"] is None
    assert "measure more" in " ".join(done.stderr.split())
    assert asked == [QUICK]


def test_without_quick_everything_is_measured(asked: list[BenchConfig]) -> None:
    """With as many threads as were asked for in the race."""
    assert invoke("--threads", "2").exit_code == 0
    assert invoke().exit_code == 0

    assert asked[0].speed.num_threads == 2
    assert asked[0].settings == FULL.settings
    assert asked[1] == FULL


def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder, or a file in none."""
    monkeypatch.setattr(codec_bench_cli, "load_model", lambda *_, **__: pytest.fail("loaded"))

    for path in (tmp_path, tmp_path / "nowhere" / "found.json"):
        done = invoke("--json", str(path))
        assert done.exit_code == 2
        assert "cannot write" in done.output


def test_a_model_that_is_not_there_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the words of the loader."""
    monkeypatch.setattr(codec_bench_cli, "run", lambda *_, **__: pytest.fail("ran"))

    done = invoke("--model", str(tmp_path / "nothing"))

    assert isinstance(done.exception, ConfigError)
    assert "nothing" in str(done.exception)


def test_a_race_needs_a_thread() -> None:
    """None is no number of them."""
    assert invoke("--threads", "0").exit_code == 2
    assert BENCH.speed.num_threads == 1
