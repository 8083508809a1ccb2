"""Calibrations of every stage and every target: found, or fitted to one capture and kept.

Each is a file under a digest of everything that went in.  What an interrupted run has
captured lies beside them until its fits are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codec.calibration import fit_calibration
from codec.entropy_calibration import EntropyConfig
from codec.entropy_fit import EntropyFitter
from codec.errors import ConfigError, CorruptBlobError
from codec.geometry import Stage
from codec.identity import digest
from fabric.calibrate.capture import Capture, CaptureConfig
from fabric.calibrate.corpus import Corpus, CorpusConfig, read_corpus
from fabric.calibrate.domains import Domain
from fabric.calibrate.profiles import (
    AnyCalibration,
    AnyConfig,
    load_calibration,
    profile_of,
    settings_of,
)
from fabric.calibrate.progress import Progress, say_nothing
from fabric.calibrate.rows import StageRows
from fabric.engines.loading import LoadedModel, cache_directory
from fabric.engines.protocol import Engine


@dataclass(frozen=True, kw_only=True)
class StageFit:
    """What a fit of one stage was made of, for those who report on it."""

    rows: StageRows
    fitter: EntropyFitter | None
    """None where only the published profile was fitted."""

    calibrations: Sequence[AnyCalibration]
    """Of every target."""

    domains: Sequence[Domain]


Examine = Callable[[StageFit], None]


def calibrate(
    engine: Engine[Any],
    loaded: LoadedModel,
    *,
    config: AnyConfig,
    corpus: Sequence[Path] = (),
    corpus_config: CorpusConfig | None = None,
    num_stages: int = 1,
    on_progress: Progress = say_nothing,
) -> list[AnyCalibration]:
    """Calibrations of every stage, from the cache directory or fitted now and saved there.

    Parameters
    ----------
    corpus
        Text files, UTF-8; those of `default_corpus` if none is given.
    num_stages
        Pipeline stages to split the layers into; each has its own basis.

    Raises
    ------
    ConfigError
        If a file cannot be read, there is too little text, or a number is out of range.
    """
    (found,) = calibrate_all(
        engine,
        loaded,
        configs=[config],
        corpus=corpus,
        corpus_config=corpus_config,
        num_stages=num_stages,
        on_progress=on_progress,
    )
    return found


def calibrate_all(
    engine: Engine[Any],
    loaded: LoadedModel,
    *,
    configs: Sequence[AnyConfig],
    corpus: Sequence[Path] = (),
    corpus_config: CorpusConfig | None = None,
    num_stages: int = 1,
    on_progress: Progress = say_nothing,
    examine: Examine | None = None,
) -> list[list[AnyCalibration]]:
    """For each of ``configs`` what `calibrate` gives; text is run once for all of them.

    Parameters
    ----------
    examine
        Called with what each stage's fits were made of; then nothing is taken from the cache
        directory.

    Raises
    ------
    ConfigError
        As `calibrate`, and if there is no configuration.
    """
    if not configs:
        raise ConfigError("need at least one target to calibrate for")
    if not 1 <= num_stages <= engine.geometry.num_layers:
        raise ConfigError(f"stages must be in 1..{engine.geometry.num_layers}, got {num_stages}")
    text = read_corpus(corpus, corpus_config or CorpusConfig())
    job = _Job(engine, loaded, text, engine.geometry.split_layers(num_stages), on_progress)
    found = {config: job.find(config) for config in configs}
    missing = [
        config
        for config, stages in found.items()
        if examine is not None or any(part is None for part in stages)
    ]
    for group in _sharing_a_capture(missing):
        found |= job.fit(group, examine)
    return [[part for part in found[config] if part is not None] for config in configs]


class _Job:
    """One model, corpus and split into stages."""

    def __init__(
        self,
        engine: Engine[Any],
        loaded: LoadedModel,
        corpus: Corpus,
        stages: Sequence[Stage],
        on_progress: Progress,
    ) -> None:
        self._engine, self._loaded, self._corpus = engine, loaded, corpus
        self._stages, self._on_progress = tuple(stages), on_progress
        self._facts: dict[str, str | int] = {
            "model": loaded.fingerprint,
            "namespace": engine.namespace().digest().hex(),
            "corpus": corpus.digest,
        }

    def find(self, config: AnyConfig) -> list[AnyCalibration | None]:
        """What the cache directory has; a damaged file counts as absent."""
        found: list[AnyCalibration | None] = []
        for stage in self._stages:
            path = self._path(stage, config)
            try:
                found.append(load_calibration(path) if path.exists() else None)
            except CorruptBlobError:
                found.append(None)
        return found

    def fit(
        self, configs: Sequence[AnyConfig], examine: Examine | None
    ) -> dict[AnyConfig, list[AnyCalibration | None]]:
        """Capture once, fit every stage and target, and keep the results."""
        with_gradients = any(isinstance(config, EntropyConfig) for config in configs)
        capture = Capture(
            self._engine,
            self._loaded,
            self._corpus,
            CaptureConfig(
                stages=self._stages,
                sink_tokens=configs[0].sink_tokens,
                holdout_every=configs[0].holdout_every,
                with_gradients=with_gradients,
            ),
        )
        partial = _directory() / f"{capture.key}.partial"
        capture.run(partial, self._on_progress)
        fitted: dict[AnyConfig, list[AnyCalibration | None]] = {config: [] for config in configs}
        bar = _FitBar(len(capture.stages) * (len(configs) + with_gradients), self._on_progress)
        for rows in capture.stages:
            fitter = _fitter(rows, bar) if with_gradients else None
            calibrations = [self._fit_one(rows, fitter, config, bar) for config in configs]
            for config, calibration in zip(configs, calibrations, strict=True):
                fitted[config].append(calibration)
            if examine is not None:
                examine(
                    StageFit(
                        rows=rows,
                        fitter=fitter,
                        calibrations=calibrations,
                        domains=capture.domains,
                    )
                )
        partial.unlink(missing_ok=True)
        return fitted

    def _fit_one(
        self, rows: StageRows, fitter: EntropyFitter | None, config: AnyConfig, bar: _FitBar
    ) -> AnyCalibration:
        on_progress = bar.next()
        calibration: AnyCalibration
        if isinstance(config, EntropyConfig):
            assert fitter is not None
            calibration = fitter.fit(config, self._provenance(config), on_progress)
            if not min(calibration.keys.rank, calibration.values.rank):
                raise ConfigError(
                    f"at a target of {config.target:g} nothing is left of stage {rows.stage}: "
                    "lower it, or make fewer stages"
                )
        else:
            calibration = fit_calibration(
                rows.stage,
                rows.geometry,
                rows.rotary,
                config,
                moments=rows.moments,
                held_out=rows.held_out,
                provenance=self._provenance(config),
                on_progress=on_progress,
            )
        calibration.save(self._path(rows.stage, config))
        return calibration

    def _provenance(self, config: AnyConfig) -> dict[str, str | int]:
        sizes = self._corpus.config
        is_entropy = isinstance(config, EntropyConfig)
        return {**self._facts, **(sizes.whole() if is_entropy else sizes.plain())}

    def _path(self, stage: Stage, config: AnyConfig) -> Path:
        inputs: dict[str, object] = {
            "profile": profile_of(config),
            "stage": str(stage),
            **settings_of(config),
            **self._provenance(config),
        }
        parts = [f"{name}={value}".encode() for name, value in sorted(inputs.items())]
        name = digest("kvfabric.calibration.input.3", *parts).hex()
        return _directory() / f"{name}.safetensors"


class _FitBar:
    """Progress of several fits as one."""

    def __init__(self, num_fits: int, on_progress: Progress) -> None:
        self._num_fits, self._on_progress = num_fits, on_progress
        self._num_begun = 0

    def next(self) -> Callable[[float], None]:
        """What the next fit is to call."""
        at = self._num_begun
        self._num_begun += 1
        return lambda part: self._on_progress("fit", (at + part) / self._num_fits)


def _fitter(rows: StageRows, bar: _FitBar) -> EntropyFitter:
    assert rows.sensitivity is not None
    return EntropyFitter(
        rows.stage,
        rows.geometry,
        rows.rotary,
        moments=rows.moments,
        held_out=rows.held_out,
        sensitivity=rows.sensitivity,
        on_progress=bar.next(),
    )


def _sharing_a_capture(configs: Sequence[AnyConfig]) -> list[list[AnyConfig]]:
    """Groups that skip and hold out the same tokens."""
    groups: dict[tuple[int, int], list[AnyConfig]] = {}
    for config in configs:
        groups.setdefault((config.sink_tokens, config.holdout_every), []).append(config)
    return list(groups.values())


def _directory() -> Path:
    return cache_directory().parent / "calibrations"
