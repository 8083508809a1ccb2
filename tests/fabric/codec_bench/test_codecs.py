"""Codecs of several settings, and the arms that are made of them."""

from __future__ import annotations

import pytest

from codec.errors import BackendUnavailable
from codec.raw import RawCodec
from fabric.codec_bench import codecs as codecs_module
from fabric.codec_bench.codecs import (
    ENTROPY,
    PAPER,
    Setting,
    load_codecs,
    make_arms,
    ranks,
    try_rivals,
)
from fabric.evaluate.arms import CodecArm
from tests.fabric.codec_bench.small import CORPUS, PAIR, Made, entropy_codec


def test_every_setting_has_a_codec_for_each_stage(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of its own profile and target, whatever the order that they were asked in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    settings = [Setting(ENTROPY, 4.0), Setting(PAPER, 4.0)]

    found = load_codecs(made.engine, made.loaded, settings, corpus_config=CORPUS, num_stages=2)

    assert list(found) == settings
    assert [[codec.name for codec in stages] for stages in found.values()] == [
        ["entropy"] * 2,
        ["kvtc"] * 2,
    ]
    stages = made.engine.geometry.split_layers(2)
    assert all(tuple(codec.stage for codec in part) == stages for part in found.values())
    namespace = made.engine.namespace().digest()
    paper = found[settings[1]]
    kinds = [(one.calibration.keys, one.calibration.values) for one in paper]
    sums = tuple(sum(part.basis.rank for part in side) for side in zip(*kinds, strict=True))
    assert ranks(paper) == sums
    assert {codec.namespace for part in found.values() for codec in part} == {namespace}


def test_ranks_are_of_all_stages(made: Made) -> None:
    """Keys and values apart; a codec without a basis has none."""
    codec = entropy_codec(made.codecs)
    calibration = codec.calibration

    assert ranks([codec]) == (calibration.keys.rank, calibration.values.rank)
    assert ranks([codec, codec]) == (2 * calibration.keys.rank, 2 * calibration.values.rank)
    raw = RawCodec(made.engine.geometry.whole, made.engine.geometry, "float32")
    assert ranks([raw]) is None


def test_arms_have_both_controls_then_settings_then_rivals(made: Made) -> None:
    """All names are different, and targets are those of the settings."""
    arms = make_arms(made.engine, made.codecs, ["fp8", "kivi-int4"])

    names = [arm.name for arm in arms]
    assert names == ["full", "raw", "entropy@2", "entropy@8", "fp8", "kivi-int4"]
    assert [arm.target for arm in arms] == [None, None, 2, 8, None, None]
    coded = arms[2]
    assert isinstance(coded, CodecArm)
    assert coded.codecs == made.codecs[PAIR[0]]


def test_a_rival_without_its_package_says_so_before_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others are tried and found fit."""

    class Lacking:
        name = "zstd"

        def restore(self, *_: object) -> None:
            raise BackendUnavailable("zstandard", "install it")

    try_rivals(["fp8", "kivi-int2", "ans-planes"])
    monkeypatch.setattr(codecs_module, "comparators", lambda: {"zstd": Lacking()})
    with pytest.raises(BackendUnavailable, match="zstandard"):
        try_rivals(["zstd"])
