"""A model's description: codecs for every stage, of this model and of no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.profile import ModelProfile
from codec.calibration import Calibration, CalibrationConfig, Calibrator
from codec.codec import Codec
from codec.errors import (
    ConfigError,
    CorruptBlobError,
    IdentityMismatchError,
    UnqualifiedCodecError,
)
from fabric.calibrate import calibrate
from fabric.engines.loading import LoadedModel
from fabric.engines.transformers import TransformersEngine
from fabric.model import check_engine, describe_model, offer_codecs
from fabric.quality_store import save_receipt
from tests.codec.quality_samples import a_set, flat, receipt_of
from tests.fabric.calibrate_samples import CORPUS, ENTROPY, tiny_pair, two_files
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


def test_the_lossy_set_is_named_for_its_codec(
    calibrations: list[Calibration], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And all stages must be of one profile."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engine, loaded = tiny_pair()
    ours = calibrate(
        engine,
        loaded,
        config=ENTROPY,
        corpus=two_files(tmp_path),
        corpus_config=CORPUS,
        num_stages=2,
    )

    profile, codecs = describe_model(engine, ours, name="m", tokens_per_chunk=16)
    published, _ = describe_model(engine, calibrations, name="m", tokens_per_chunk=16)

    assert [kind.name for kind in profile.codec_sets] == ["entropy", "raw"]
    assert [kind.name for kind in published.codec_sets] == ["kvtc", "raw"]
    assert [codec.name for codec in codecs] == ["entropy", "entropy", "raw", "raw"]
    with pytest.raises(ConfigError, match="one profile"):
        describe_model(engine, [ours[0], calibrations[1]], name="m", tokens_per_chunk=16)


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


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def described(
    engine: TransformersEngine, calibrations: list[Calibration]
) -> tuple[ModelProfile, list[Codec]]:
    """The model and its codecs: two lossy, two raw."""
    return describe_model(engine, calibrations, name="m", tokens_per_chunk=16)


def test_a_model_without_a_receipt_is_not_offered(
    store: Path, described: tuple[ModelProfile, list[Codec]]
) -> None:
    """Before any worker hears of it."""
    with pytest.raises(UnqualifiedCodecError, match="kvfabric evaluate"):
        offer_codecs(*described)


def test_a_receipt_given_or_kept_goes_with_every_stage(
    store: Path, described: tuple[ModelProfile, list[Codec]]
) -> None:
    """Raw codecs need none, and a model that allows everything none either."""
    profile, codecs = described
    receipt = receipt_of(*codecs[:2])

    given = offer_codecs(profile, codecs, [receipt])
    save_receipt(receipt)
    kept = offer_codecs(profile, codecs)

    assert given == kept
    assert [offer.receipt for offer in kept] == [receipt, receipt, None, None]
    assert [offer.codec for offer in kept] == codecs
    assert {offer.together for offer in kept[:2]} == {profile.codec_set("kvtc").codecs}
    assert not any(offer.allow_unqualified for offer in kept)


def test_a_permission_goes_with_the_offer(
    store: Path, described: tuple[ModelProfile, list[Codec]]
) -> None:
    """So that a worker which restarts has it too."""
    offers = offer_codecs(*described, allow_unqualified=True)

    assert all(offer.allow_unqualified for offer in offers)
    assert [offer.receipt for offer in offers] == [None] * 4


def test_a_receipt_that_does_not_pass_is_not_offered(
    store: Path, described: tuple[ModelProfile, list[Codec]]
) -> None:
    """The reasons are in the message."""
    profile, codecs = described
    bad = receipt_of(*codecs[:2], pooled=a_set("pooled", top1=flat(0.5)))

    with pytest.raises(UnqualifiedCodecError, match="top-1 agreement"):
        offer_codecs(profile, codecs, [bad])


def test_a_tampered_receipt_is_refused_and_where_it_is_not_needed_ignored(
    store: Path, described: tuple[ModelProfile, list[Codec]]
) -> None:
    """It proves nothing, and says nothing against the codec either."""
    profile, codecs = described
    path = save_receipt(receipt_of(*codecs[:2]))
    path.write_text(path.read_text().replace('"num_tokens": 1024', '"num_tokens": 4096'))

    with pytest.raises(CorruptBlobError, match="digest"):
        offer_codecs(profile, codecs)
    offers = offer_codecs(profile, codecs, allow_unqualified=True)

    assert [offer.receipt for offer in offers] == [None] * 4
