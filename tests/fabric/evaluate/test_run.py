"""Whole evaluations of a tiny model: every arm on every sample, and the receipt of one codec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from codec.errors import ConfigError
from codec.quality_receipt import QualityReceipt
from codec.raw import RawCodec
from fabric.engines.loading import LoadedModel
from fabric.engines.transformers import TransformersEngine
from fabric.evaluate import Evaluation, evaluate, qualify
from fabric.evaluate.arms import FullPrecision
from fabric.evaluate.receipts import make_receipt
from tests.fabric.evaluate.small import SMALL, NoiseArm, small_engine

Made = tuple[TransformersEngine, LoadedModel]


@pytest.fixture(scope="module")
def made() -> Made:
    """A tiny engine and the model it runs."""
    return small_engine()


@pytest.fixture(scope="module")
def found(made: Made) -> Evaluation:
    """Two arms on the small form of the pre-registered set."""
    engine, loaded = made
    arms = [FullPrecision(engine.geometry), NoiseArm(0.5, engine.geometry)]
    return evaluate(engine, loaded, arms, config=SMALL)


def test_every_arm_is_measured_on_every_set(found: Evaluation) -> None:
    """In the same order; natural text is pooled."""
    full, noise = found.arms

    assert [one.name for one in full.sets] == [one.name for one in noise.sets]
    assert len(full.sets) == 10
    assert full.pooled.name == "prose+law+code"
    assert full.pooled.num_tokens == 3 * SMALL.windows * SMALL.continuation_tokens
    assert found.is_registered
    assert found.model == "tiny"


def test_full_precision_changes_nothing_and_noise_does(found: Evaluation) -> None:
    """On every set."""
    full, noise = found.arms

    for one, other in zip(full.sets, noise.sets, strict=True):
        assert one.mean_kl.high < 1e-9
        assert one.top1.low == 1.0
        assert other.mean_kl.low > 1e-6
    assert full.net_ratio == 1.0
    assert noise.net_ratio == pytest.approx(4.0)
    assert full.perplexity_full == noise.perplexity_full


def test_lookups_stand_beside_what_the_model_finds_itself(found: Evaluation) -> None:
    """In their set alone."""
    for arm in found.arms:
        asked = [one for one in arm.sets if one.retrieval is not None]
        assert [one.name for one in asked] == ["lookup"]
        assert asked[0].num_samples == SMALL.lookups
    full = found.arms[0].sets[-1]
    assert full.retrieval == full.retrieval_reference


def test_progress_rises_to_the_end(made: Made, tmp_path: Path) -> None:
    """One step for each sample."""
    engine, loaded = made
    path = tmp_path / "text.txt"
    path.write_text("So it goes on. " * 30)
    seen: list[tuple[str, float]] = []

    evaluate(
        engine,
        loaded,
        [FullPrecision(engine.geometry)],
        config=SMALL,
        corpus=[path],
        on_progress=lambda *step: seen.append(step),
    )

    assert seen == [("evaluate", 0.0), ("evaluate", 0.5), ("evaluate", 1.0)]


def test_a_corpus_makes_another_evaluation(made: Made, found: Evaluation, tmp_path: Path) -> None:
    """It is named for what it is, and makes no receipt."""
    engine, loaded = made
    path = tmp_path / "text.txt"
    path.write_text("So it goes on. " * 30)

    other = evaluate(engine, loaded, [NoiseArm(0.5, engine.geometry)], config=SMALL, corpus=[path])

    assert not other.is_registered
    assert other.evaluation_set != found.evaluation_set
    assert [one.name for one in other.arms[0].sets] == ["text"]
    with pytest.raises(ValueError, match="pre-registered"):
        make_receipt([], other.arms[0], other)


@pytest.mark.parametrize("num_arms", [0, 2])
def test_arms_need_names_of_their_own(made: Made, num_arms: int) -> None:
    """And there must be one."""
    engine, loaded = made
    with pytest.raises(ConfigError, match="different names"):
        evaluate(engine, loaded, [FullPrecision(engine.geometry)] * num_arms, config=SMALL)


def test_samples_longer_than_the_model_takes_are_refused(made: Made) -> None:
    """Before anything is run, with what to do."""
    engine, loaded = made
    with pytest.raises(ConfigError, match=r"512 tokens.*--context"):
        evaluate(
            engine,
            loaded,
            [FullPrecision(engine.geometry)],
            config=replace(SMALL, context_tokens=501),
        )


class CoarseCodec(RawCodec):
    """Stores what it is given with 6 bits of mantissa."""

    is_lossless = False

    def encode(self, *arrays: torch.Tensor, **options: Any) -> bytes:
        """See the parent."""
        coarse = (rows.to(torch.bfloat16).to(rows.dtype) for rows in arrays)
        return super().encode(*coarse, **options)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_receipt_is_of_exactly_these_codecs(made: Made, num_stages: int) -> None:
    """Of all stages, used together, on the set that is registered; not judged yet."""
    engine, loaded = made
    namespace = engine.namespace()
    codecs = [
        CoarseCodec(stage, engine.geometry.of_stage(stage), "float32", namespace=namespace.digest())
        for stage in engine.geometry.split_layers(num_stages)
    ]

    receipt = qualify(engine, loaded, codecs, config=SMALL, date="2026-11-30")

    assert receipt.codec_ids == tuple(codec.codec_id.hex() for codec in codecs)
    assert receipt.stages == tuple(str(codec.stage) for codec in codecs)
    assert receipt.calibrations == ("",) * num_stages
    assert receipt.namespace == namespace.digest().hex()
    assert (receipt.profile, receipt.target, receipt.date) == ("raw", 1.0, "2026-11-30")
    assert not receipt.verdict.passes
    assert receipt.pooled.mean_kl.value > 0
    # 32 bits an element, and headers.
    assert 0.3 < receipt.net_ratio < 0.5
    assert QualityReceipt.from_json(receipt.to_json()) == receipt


def test_the_receipt_names_the_registered_set(made: Made, found: Evaluation) -> None:
    """The same as any evaluation by the same protocol; today if no date is given."""
    engine, loaded = made
    codec = RawCodec(engine.geometry.whole, engine.geometry, "float32")

    receipt = qualify(engine, loaded, [codec], config=SMALL)

    assert receipt.evaluation_set == found.evaluation_set
    assert receipt.date > "2026"
    assert receipt.pooled.mean_kl.high < 1e-9


def test_no_codec_is_refused(made: Made) -> None:
    """There is nothing to be said of none."""
    with pytest.raises(ValueError, match="stages"):
        qualify(*made, [], config=SMALL)
