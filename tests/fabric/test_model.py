"""A model's description: codecs for every stage, of this model and of no other."""

from __future__ import annotations

import pytest

from codec.calibration import Calibration, CalibrationConfig, Calibrator
from codec.errors import ConfigError, IdentityMismatchError
from fabric.engines.loading import LoadedModel
from fabric.engines.transformers import TransformersEngine
from fabric.model import check_engine, describe_model
from tests.fabric.engines.tiny import some_tokens, tiny_engine, tiny_model


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


def test_every_stage_has_a_codec_of_each_kind(
    engine: TransformersEngine, calibrations: list[Calibration]
) -> None:
    """In the order of the stages; the profile lists exactly what is loaded."""
    profile, codecs = describe_model(engine, calibrations, name="m", tokens_per_chunk=16)

    assert profile.stages == engine.geometry.split_layers(2)
    assert [codec.stage for codec in codecs] == [*profile.stages, *profile.stages]
    listed = [codec for kind in profile.codec_sets for codec in kind.codecs]
    assert listed == [codec.codec_id for codec in codecs]
    assert len(set(listed)) == 4


def test_calibrations_that_leave_layers_out_are_refused(
    engine: TransformersEngine, calibrations: list[Calibration]
) -> None:
    """Half a model cannot be restored."""
    for some in (calibrations[:1], calibrations[::-1], []):
        with pytest.raises(ConfigError, match="must cover"):
            describe_model(engine, some, name="m", tokens_per_chunk=16)


def test_other_weights_of_the_same_shape_are_another_model(
    engine: TransformersEngine, calibrations: list[Calibration]
) -> None:
    """Neither their calibration nor their engine passes for this one's."""
    other = TransformersEngine(LoadedModel(tiny_model("llama"), None, "llama", "other weights"))
    profile, _ = describe_model(engine, calibrations, name="m", tokens_per_chunk=16)

    check_engine(engine, profile)
    with pytest.raises(IdentityMismatchError, match="namespace"):
        check_engine(other, profile)
    with pytest.raises(ConfigError, match="another model"):
        describe_model(other, calibrations, name="m", tokens_per_chunk=16)
