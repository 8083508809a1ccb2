"""Codecs are measured once, before a model is served, unless everything is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from codec.calibration import Calibration, CalibrationConfig, Calibrator
from codec.codec import Codec
from codec.errors import UnqualifiedCodecError
from codec.identity import CodecId
from codec.quality_receipt import NOT_JUDGED, QualityReceipt
from fabric import evaluate
from fabric.engines.loading import LoadedModel
from fabric.engines.transformers import TransformersEngine
from fabric.model import describe_model
from fabric.qualification import qualify_codecs
from fabric.quality_store import find_receipt, receipt_path
from tests.codec.quality_samples import a_set, flat, receipt_of
from tests.fabric.engines.tiny import some_tokens, tiny_engine


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    """A tiny llama."""
    return tiny_engine("llama")


@pytest.fixture(scope="module")
def calibrations(engine: TransformersEngine) -> list[Calibration]:
    """Of two stages."""
    fitted = []
    for stage in engine.geometry.split_layers(2):
        layers = range(stage.layer_start, stage.layer_stop)
        calibrator = Calibrator(
            stage,
            engine.geometry.of_stage(stage),
            engine.rotary.of_layers(layers),
            CalibrationConfig(target=2.0, holdout_every=2),
        )
        for seed in range(4):
            tokens = some_tokens(32, seed=seed)
            cache, _ = engine.prefill(tokens)
            keys, values = engine.capture(cache, 0, 32)
            calibrator.add(
                keys[:, layers.start : layers.stop], values[:, layers.start : layers.stop]
            )
        fitted.append(calibrator.fit({"namespace": engine.namespace().digest().hex()}))
    return fitted


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def lossy_ids(engine: TransformersEngine, calibrations: list[Calibration]) -> list[CodecId]:
    """Of both stages."""
    _, codecs = describe_model(engine, calibrations, name="m", tokens_per_chunk=16)
    return [codec.codec_id for codec in codecs[:2]]


class Evaluation:
    """Stands in for `fabric.evaluate`: says what it is told to, and counts."""

    def __init__(self, **changes: object) -> None:
        self.num_calls = 0
        self._changes = changes

    def qualify(
        self, engine: object, loaded: object, codecs: list[Codec], progress: object
    ) -> QualityReceipt:
        """A receipt at once."""
        self.num_calls += 1
        return receipt_of(*codecs, **{"limits": (), "verdict": NOT_JUDGED} | self._changes)


def qualified(
    engine: TransformersEngine,
    calibrations: list[Calibration],
    evaluation: Evaluation,
    monkeypatch: pytest.MonkeyPatch,
    *,
    allow_unqualified: bool = False,
) -> list[QualityReceipt]:
    """`qualify_codecs` with ``evaluation`` in place of the real one."""
    monkeypatch.setattr(evaluate, "qualify", evaluation.qualify)
    return qualify_codecs(
        engine,
        LoadedModel(None, None, "m", "weights"),
        calibrations,
        tokens_per_chunk=16,
        allow_unqualified=allow_unqualified,
        on_progress=lambda _what, _fraction: None,
        say=lambda _text: None,
    )


def test_a_missing_receipt_is_measured_once_and_kept(
    engine: TransformersEngine,
    calibrations: list[Calibration],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second start finds it."""
    evaluation = Evaluation()

    first = qualified(engine, calibrations, evaluation, monkeypatch)
    second = qualified(engine, calibrations, evaluation, monkeypatch)

    assert evaluation.num_calls == 1
    assert first == second
    assert len(first) == 1
    assert first[0].verdict.passes
    assert find_receipt(lossy_ids(engine, calibrations)) == first[0]


def test_a_codec_that_fails_is_refused_and_not_measured_again(
    engine: TransformersEngine,
    calibrations: list[Calibration],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer would be the same; with a permission it is used all the same."""
    evaluation = Evaluation(pooled=a_set("pooled", mean_kl=flat(0.5)))

    for _ in range(2):
        with pytest.raises(UnqualifiedCodecError, match="mean KL"):
            qualified(engine, calibrations, evaluation, monkeypatch)
    allowed = qualified(engine, calibrations, evaluation, monkeypatch, allow_unqualified=True)

    assert evaluation.num_calls == 1
    assert allowed == []


def test_a_damaged_receipt_is_made_again(
    engine: TransformersEngine,
    calibrations: list[Calibration],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a damaged calibration is."""
    evaluation = Evaluation()
    [receipt] = qualified(engine, calibrations, evaluation, monkeypatch)
    path = receipt_path(lossy_ids(engine, calibrations))
    path.write_bytes(path.read_bytes()[:-9])

    assert qualified(engine, calibrations, evaluation, monkeypatch) == [receipt]
    assert evaluation.num_calls == 2


def test_nothing_is_measured_where_everything_is_allowed(
    engine: TransformersEngine,
    calibrations: list[Calibration],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever says so does not wait for it."""
    evaluation = Evaluation()

    assert qualified(engine, calibrations, evaluation, monkeypatch, allow_unqualified=True) == []
    assert evaluation.num_calls == 0
