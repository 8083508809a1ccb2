"""One whole run on a tiny model, and what is refused before it begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from codec.comparators.registry import arms as comparators
from codec.errors import ConfigError
from fabric.codec_bench import run as run_module
from fabric.codec_bench.codecs import Setting
from fabric.codec_bench.run import COMPARED_TARGETS, FULL, QUICK, BenchConfig, run
from tests.fabric.codec_bench.small import BENCH, Made


def test_a_run_has_all_arms_gains_and_races(made: Made) -> None:
    """Each named once, in the order of the settings."""
    found = made.found

    names = [one.arm for one in found.arms]
    settings = [setting.name for setting in BENCH.settings]
    assert names == ["full", "raw", *settings, "fp8"]
    assert list(found.ranks) == settings
    assert [gain.target for gain in found.comparison.gains] == list(COMPARED_TARGETS)
    assert list(found.races) == [16.0, 8.0]
    assert found.prefix_tokens == 96
    paper = {one.target: one.point() for one in found.arms if one.arm.startswith("paper")}
    for gain in found.comparison.gains:
        point = paper[gain.target]
        assert point is not None
        assert (gain.ratio, gain.kl) == (point.ratio, point.kl)
    reached = [gain for gain in found.comparison.gains if gain.ratio_at_kl is not None]
    ratios = [one.result.net_ratio for one in found.arms if one.arm.startswith("entropy")]
    assert reached
    assert all(min(ratios) <= (gain.ratio_at_kl or 0) <= max(ratios) for gain in reached)


def test_controls_lose_nothing(made: Made) -> None:
    """Or the protocol itself would be what is measured."""
    by_name = {one.arm: one.result for one in made.found.arms}

    assert by_name["full"].pooled.mean_kl.high < 1e-9
    assert by_name["raw"].pooled.mean_kl.high < 1e-9
    assert by_name["full"].net_ratio == 1
    assert by_name["entropy@32"].pooled.mean_kl.low > 0


def test_the_full_form_has_every_comparator_and_the_quick_one_is_smaller() -> None:
    """Both read the gain at the same points, on contexts of the same length."""
    assert set(FULL.rivals) == set(comparators()) - {"raw"}
    assert set(QUICK.settings) < set(FULL.settings)
    assert set(QUICK.rivals) == {"fp8", "kivi-int4"}
    for config in (FULL, QUICK):
        assert {Setting("paper", target) for target in COMPARED_TARGETS} < set(config.settings)
        assert max(config.entropy_targets) > max(COMPARED_TARGETS)
        assert config.speed.prefix_tokens == 4096
        evaluation = config.evaluation
        assert (evaluation.context_tokens, evaluation.continuation_tokens) == (1024, 128)
    assert QUICK.evaluation.windows < FULL.evaluation.windows


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"paper_targets": (8.0, 16.0)}, "paper_targets"),
        ({"entropy_targets": (16.0, 32.0)}, "entropy_targets"),
        ({"rivals": ("fp8", "best")}, "best"),
    ],
)
def test_settings_without_an_answer_are_refused(wrong: dict[str, Any], why: str) -> None:
    """Where a compared or raced target would be missing, or a comparator is unknown."""
    with pytest.raises(ConfigError, match=why):
        BenchConfig(**wrong)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (replace(BENCH, evaluation=FULL.evaluation), "lower --context"),
        (
            replace(BENCH, speed=replace(BENCH.speed, prefix_tokens=999, tokens_per_chunk=999)),
            "a chunk has 999",
        ),
    ],
)
def test_what_the_model_cannot_take_is_refused_before_calibration(
    made: Made, monkeypatch: pytest.MonkeyPatch, config: BenchConfig, why: str
) -> None:
    """The tiny model takes 512 tokens."""
    monkeypatch.setattr(run_module, "load_codecs", lambda *_, **__: pytest.fail("began"))

    with pytest.raises(ConfigError, match=why):
        run(made.engine, made.loaded, config)
