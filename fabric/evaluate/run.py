"""Run an evaluation: every sample of a set, all arms on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from codec.codec import Codec
from codec.errors import ConfigError
from codec.quality_receipt import QualityReceipt
from fabric.engines.loading import LoadedModel
from fabric.engines.protocol import Engine
from fabric.evaluate.arms import Arm, CodecArm
from fabric.evaluate.config import FULL, QUICK, EvaluationConfig
from fabric.evaluate.receipts import make_receipt
from fabric.evaluate.results import ArmResult, Evaluation, arm_result
from fabric.evaluate.scoring import Figures, Scorer
from fabric.evaluate.sets import EvaluationSet, corpus_set, registered_set
from fabric.evaluate.vocabulary import Vocabulary

Progress = Callable[[str, float], None]
"""Told what is being done and which fraction of it is done."""


def _say_nothing(_what: str, _fraction: float) -> None:
    """Progress for those who did not ask."""


def evaluate(
    engine: Engine[Any],
    loaded: LoadedModel,
    arms: Sequence[Arm],
    *,
    config: EvaluationConfig = FULL,
    corpus: Sequence[Path] = (),
    on_progress: Progress = _say_nothing,
) -> Evaluation:
    """Measure what each arm does to a model, on the pre-registered set or on other text.

    Parameters
    ----------
    arms
        Of different names; each codes the same rows of every sample.
    corpus
        Text files in place of the pre-registered set.

    Raises
    ------
    ConfigError
        If there is no arm or a name is there twice, samples are longer than the model
        takes, or a corpus file cannot be read or is too short.
    """
    names = [arm.name for arm in arms]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"need one or more arms of different names, got {names}")
    vocabulary = Vocabulary.of(engine, loaded)
    chosen = choose_set(vocabulary, loaded, config, corpus)
    results = _results(Scorer(engine, vocabulary, config), chosen, arms, on_progress)
    return Evaluation(
        model=loaded.name,
        namespace=engine.namespace().digest().hex(),
        evaluation_set=chosen.digest,
        is_registered=chosen.is_registered,
        config=config,
        arms=tuple(results),
    )


def qualify(
    engine: Engine[Any],
    loaded: LoadedModel,
    codecs: Sequence[Codec],
    on_progress: Progress = _say_nothing,
    *,
    config: EvaluationConfig = QUICK,
    date: str | None = None,
) -> QualityReceipt:
    """Measure one set of codecs on a small part of the pre-registered set; no verdict yet.

    Parameters
    ----------
    codecs
        One per stage, of the whole model.
    date
        ``YYYY-MM-DD``; today's by default.

    Raises
    ------
    ConfigError
        If samples are longer than the model takes.
    ValueError
        If the codecs are not of this engine's model, each layer once.
    """
    calibration = getattr(codecs[0], "calibration", None) if codecs else None
    target = None if calibration is None else float(calibration.config.target)
    arm = CodecArm("codec", codecs, engine, target=target)
    found = evaluate(engine, loaded, [arm], config=config, on_progress=on_progress)
    return make_receipt(codecs, found.arms[0], found, date=date)


def choose_set(
    vocabulary: Vocabulary,
    loaded: LoadedModel,
    config: EvaluationConfig,
    corpus: Sequence[Path] = (),
) -> EvaluationSet:
    """The prompts that `evaluate` would run: nothing has been computed yet.

    Raises
    ------
    ConfigError
        If samples are longer than the model takes, or a corpus file cannot be read or is
        too short.
    """
    model_config = getattr(loaded.model, "config", None)
    limit = getattr(model_config, "max_position_embeddings", None)
    if isinstance(limit, int) and config.sample_tokens > limit:
        raise ConfigError(
            f"the model takes {limit} tokens and a sample has {config.sample_tokens}: "
            "lower --context"
        )
    if corpus:
        return corpus_set(vocabulary, config, corpus)
    return registered_set(vocabulary, config)


def _results(
    scorer: Scorer, chosen: EvaluationSet, arms: Sequence[Arm], on_progress: Progress
) -> list[ArmResult]:
    figures: list[list[Figures]] = [[] for _ in arms]
    for number, sample in enumerate(chosen.samples):
        on_progress("evaluate", number / len(chosen.samples))
        for of_arm, found in zip(figures, scorer.score(sample, arms), strict=True):
            of_arm.append(found)
    on_progress("evaluate", 1.0)
    return [
        arm_result(arm.name, arm.target, of_arm, chosen.pooled)
        for arm, of_arm in zip(arms, figures, strict=True)
    ]
