"""Everything that ``kvfabric bench codec`` measures, in one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from codec.comparators.registry import arms as comparators
from codec.entropy_codec import EntropyCodec
from codec.errors import ConfigError
from fabric.calibrate import Progress
from fabric.codec_bench.chunks import longest_prefix
from fabric.codec_bench.codecs import (
    ENTROPY,
    PAPER,
    RAW,
    Setting,
    load_codecs,
    make_arms,
    ranks,
    try_rivals,
)
from fabric.codec_bench.floors import MachineRates
from fabric.codec_bench.measure import Comparison, Measured, compare, measure
from fabric.codec_bench.speed import Race, SpeedConfig, race
from fabric.engines.loading import LoadedModel
from fabric.engines.protocol import Engine
from fabric.evaluate.config import FULL as FULL_EVALUATION
from fabric.evaluate.config import EvaluationConfig
from fabric.evaluate.run import choose_set
from fabric.evaluate.vocabulary import Vocabulary

COMPARED_TARGETS: Final = (8.0, 16.0, 32.0)
"""Of the paper profile, at whose KL the entropy profile's ratio is read."""

_NATURAL_TEXT: Final = replace(FULL_EVALUATION, lookups=0, greedy_windows=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What a run measures."""

    paper_targets: tuple[float, ...] = (4.0, 8.0, 16.0, 32.0, 64.0)
    entropy_targets: tuple[float, ...] = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
    """Must go so far that the paper's compared points lie between two of its own."""

    rivals: tuple[str, ...] = tuple(name for name in comparators() if name != RAW)
    evaluation: EvaluationConfig = _NATURAL_TEXT
    race_targets: tuple[float, ...] = (16.0, 8.0)
    """Of the entropy profile."""

    speed: SpeedConfig = field(default_factory=SpeedConfig)

    def __post_init__(self) -> None:
        if missing := set(COMPARED_TARGETS) - set(self.paper_targets):
            raise ConfigError(f"paper_targets lacks {sorted(missing)}, which are compared")
        if missing := set(self.race_targets) - set(self.entropy_targets):
            raise ConfigError(f"entropy_targets lacks {sorted(missing)}, which are raced")
        if unknown := set(self.rivals) - set(comparators()):
            raise ConfigError(f"no comparator is called {', '.join(sorted(unknown))}")

    @property
    def settings(self) -> list[Setting]:
        """Every codec that is fitted, in the order of tables."""
        return [
            *(Setting(PAPER, target) for target in self.paper_targets),
            *(Setting(ENTROPY, target) for target in self.entropy_targets),
        ]


FULL: Final = BenchConfig()
QUICK: Final = BenchConfig(
    paper_targets=COMPARED_TARGETS,
    entropy_targets=(8.0, 16.0, 32.0, 64.0, 128.0),
    rivals=("fp8", "kivi-int4"),
    evaluation=replace(_NATURAL_TEXT, windows=2),
    speed=SpeedConfig(num_turns=1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """What was found."""

    model: str
    config: BenchConfig
    arms: tuple[Measured, ...]
    ranks: Mapping[str, tuple[int, int]]
    """Coefficients of keys and of values, by arm, where it has a basis."""

    comparison: Comparison
    """The entropy profile at the paper profile's `COMPARED_TARGETS`."""

    rates: MachineRates
    prefix_tokens: int
    races: Mapping[float, Race]
    """By target."""


def check(engine: Engine[Any], loaded: LoadedModel, config: BenchConfig) -> None:
    """Refuse now what would fail after minutes of calibration.

    Raises
    ------
    ConfigError
        If samples or a chunk are longer than the model takes.
    BackendUnavailable
        If a comparator needs a package that is missing.
    """
    choose_set(Vocabulary.of(engine, loaded), loaded, config.evaluation)
    longest_prefix(loaded, config.speed.prefix_tokens, config.speed.tokens_per_chunk)
    try_rivals(config.rivals)


def run(
    engine: Engine[Any],
    loaded: LoadedModel,
    config: BenchConfig,
    on_progress: Progress = lambda _what, _fraction: None,
) -> BenchResult:
    """Fit what has not been fitted, race the codecs, and run all arms on natural text.

    Raises
    ------
    ConfigError
        See `check`.
    """
    check(engine, loaded, config)
    codecs = load_codecs(engine, loaded, config.settings, on_progress=on_progress)
    rates, races = race(
        engine,
        loaded,
        {
            f"{target:g}": codec
            for target in config.race_targets
            for codec in codecs[Setting(ENTROPY, target)]
            if isinstance(codec, EntropyCodec)
        },
        config.speed,
        on_progress,
    )
    arms = make_arms(engine, codecs, config.rivals)
    measured = measure(engine, loaded, arms, config.evaluation, on_progress=on_progress)
    by_name = {one.arm: one for one in measured}
    return BenchResult(
        model=loaded.name,
        config=config,
        arms=tuple(measured),
        ranks={
            setting.name: found
            for setting, stages in codecs.items()
            if (found := ranks(stages)) is not None
        },
        comparison=compare(
            [by_name[Setting(PAPER, target).name] for target in COMPARED_TARGETS],
            [by_name[Setting(ENTROPY, target).name] for target in config.entropy_targets],
        ),
        rates=rates,
        prefix_tokens=longest_prefix(
            loaded, config.speed.prefix_tokens, config.speed.tokens_per_chunk
        ),
        races={float(one.name): one for one in races},
    )
