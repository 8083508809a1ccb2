"""Both profiles from one capture; what each depends on, and which inputs are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from codec.calibration import Calibration, CalibrationConfig
from codec.entropy_calibration import EntropyCalibration, EntropyConfig
from codec.entropy_codec import EntropyCodec
from codec.errors import ConfigError, CorruptBlobError
from codec.geometry import Stage
from codec.kvtc import KvtcCodec
from fabric.calibrate import CorpusConfig, calibrate, calibrate_all, capture
from fabric.calibrate.corpus import cut_windows, gradient_windows
from fabric.calibrate.domains import OUTLIER_FACTOR, DomainTable
from fabric.calibrate.profiles import codec_of, config_of, load_calibration, profile_of
from fabric.calibrate.rows import StageRows
from fabric.calibrate.run import StageFit
from tests.fabric.calibrate_samples import CORPUS, ENTROPY, PAPER, tiny_pair, two_files


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Two files, and a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return two_files(tmp_path)


def test_both_profiles_and_all_targets_share_one_capture(corpus: list[Path]) -> None:
    """They are what each gives alone; text is run once, and found again without any run."""
    engine, loaded = tiny_pair()
    configs = [ENTROPY, PAPER, replace(ENTROPY, target=3.0)]
    seen: list[str] = []

    def run() -> list[list[bytes]]:
        found = calibrate_all(
            engine,
            loaded,
            configs=configs,
            corpus=corpus,
            corpus_config=CORPUS,
            num_stages=2,
            on_progress=lambda what, _: seen.append(what),
        )
        for config, parts in zip(configs, found, strict=True):
            assert all(part.config == config for part in parts)
            assert [part.stage for part in parts] == list(engine.geometry.split_layers(2))
        return [[part.digest for part in parts] for parts in found]

    together = run()
    assert seen.count("capture") == 13
    assert seen.count("sensitivity") == 6
    seen.clear()
    assert run() == together
    assert not seen


def test_a_target_fitted_alone_is_the_same(
    corpus: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What else is fitted leaves no trace."""
    engine, loaded = tiny_pair()
    options: dict[str, Any] = {"corpus": corpus, "corpus_config": CORPUS}
    together = calibrate_all(engine, loaded, configs=[PAPER, ENTROPY], **options)

    for config, (whole,) in zip((PAPER, ENTROPY), together, strict=True):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / profile_of(config)))
        (alone,) = calibrate(engine, loaded, config=config, **options)
        assert alone.digest == whole.digest


def test_a_calibration_meets_its_target_and_codes(corpus: list[Path]) -> None:
    """On text that it held out, everything counted; its file says of which profile it is."""
    engine, loaded = tiny_pair()

    (found,) = calibrate(engine, loaded, config=ENTROPY, corpus=corpus, corpus_config=CORPUS)

    assert isinstance(found, EntropyCalibration)
    assert found.held_out_ratio == pytest.approx(5.0, rel=0.15)
    assert found.provenance["gradient_windows"] == 5
    assert isinstance(codec_of(found, b"n" * 16), EntropyCodec)


@pytest.mark.parametrize("change", ["gradient_windows", "context_tokens", "following_tokens"])
def test_gradients_shape_our_profile_and_not_the_published(change: str, corpus: list[Path]) -> None:
    """So a change of theirs leaves its calibrations found."""
    engine, loaded = tiny_pair()
    other = replace(CORPUS, **{change: getattr(CORPUS, change) + 3})
    digests = {
        profile_of(config): [
            calibrate(engine, loaded, config=config, corpus=corpus, corpus_config=sizes)[0].digest
            for sizes in (CORPUS, other)
        ]
        for config in (PAPER, ENTROPY)
    }

    assert digests["paper"][0] == digests["paper"][1]
    assert digests["entropy"][0] != digests["entropy"][1]


def test_a_file_is_read_as_the_profile_it_names(corpus: list[Path], tmp_path: Path) -> None:
    """Whichever that is; something else is damaged."""
    engine, loaded = tiny_pair()
    options: dict[str, Any] = {"corpus": corpus, "corpus_config": CORPUS}
    for config, kind in ((PAPER, Calibration), (ENTROPY, EntropyCalibration)):
        (found,) = calibrate(engine, loaded, config=config, **options)
        path = tmp_path / "one.safetensors"
        found.save(path)
        again = load_calibration(path)
        assert type(again) is kind
        assert again.digest == found.digest
        assert profile_of(again) == profile_of(config)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptBlobError):
        load_calibration(path)


def test_the_default_profile_is_ours() -> None:
    """With its own target, as the published one has its own."""
    assert config_of() == EntropyConfig(target=16.0)
    assert config_of("paper") == CalibrationConfig(target=8.0)
    assert config_of("entropy", 32.0) == EntropyConfig(target=32.0)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("best",), "no profile 'best': choose from entropy, paper"),
        (("entropy", 0.5), "target must be between 1 and 256"),
        (("paper", float("nan")), "target must be between 1 and 256"),
    ],
)
def test_bad_settings_are_refused(arguments: tuple[Any, ...], why: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=why):
        config_of(*arguments)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"configs": []}, "at least one target"),
        ({"num_stages": 0}, r"stages must be in 1\.\.4"),
        ({"num_stages": 5}, r"stages must be in 1\.\.4"),
        ({"configs": [replace(ENTROPY, sink_tokens=40)]}, "over the 40 sink tokens"),
        ({"configs": [replace(ENTROPY, target=256.0)]}, "nothing is left of stage"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    options: dict[str, Any], why: str, corpus: list[Path]
) -> None:
    """In one line, with the number."""
    engine, loaded = tiny_pair()
    asked: dict[str, Any] = {"configs": [ENTROPY], "corpus": corpus, "corpus_config": CORPUS}

    with pytest.raises(ConfigError, match=why):
        calibrate_all(engine, loaded, **(asked | options))


@pytest.mark.parametrize(
    "change",
    [
        {"gradient_windows": 0},
        {"context_tokens": 0},
        {"following_tokens": -1},
        {"context_tokens": 20, "following_tokens": 20},
    ],
)
def test_bad_gradient_sizes_are_refused(change: dict[str, int]) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=next(iter(change))):
        CorpusConfig(**change)


def test_windows_for_gradients_are_spread_over_files() -> None:
    """Evenly over each, shorter where a file is; one that is too short gives none."""
    sources = [list(range(5000)), list(range(63)), list(range(1000, 1100)), list(range(9000))]
    config = CorpusConfig(gradient_windows=7, context_tokens=256, following_tokens=64)

    found = gradient_windows(sources, config)

    assert [window.domain for window in found] == [0, 0, 0, 2, 2, 3, 3]
    assert [window.tokens[0] for window in found[:3]] == [0, 2340, 4680]
    assert {(len(w.tokens), w.num_context) for w in found if w.domain != 2} == {(320, 256)}
    assert {(len(w.tokens), w.num_context) for w in found if w.domain == 2} == {(100, 80)}
    with pytest.raises(ConfigError, match="64 tokens"):
        gradient_windows(sources[1:2], config)


def test_held_out_rows_are_spread_and_bounded(
    corpus: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much text there is, from all held-out windows, and no moments have seen them."""
    engine, loaded = tiny_pair()
    fits: list[StageFit] = []
    for most in (1000, 50):
        monkeypatch.setattr(capture, "MAX_HELD_OUT_ROWS", most)
        calibrate_all(
            engine,
            loaded,
            configs=[PAPER],
            corpus=corpus,
            corpus_config=CORPUS,
            examine=fits.append,
        )
    every, some = (fit.rows.held_out for fit in fits)

    num_held_out = 4 * (40 - PAPER.sink_tokens)
    assert len(every[0]) == num_held_out
    assert every[0].dtype == torch.bfloat16
    assert torch.equal(some[0], every[0][::3])
    assert torch.equal(some[1], every[1][::3])
    assert fits[0].rows.moments[0].num_rows == 8 * (40 - PAPER.sink_tokens)
    assert sum(domain.num_held_out_tokens for domain in fits[0].domains) == 160


def test_a_layer_that_nothing_reads_leaves_all_tokens_alike() -> None:
    """A stage whose layers all slide past the tokens that are looked at."""
    engine, _ = tiny_pair()
    stage = Stage(0, 2, 0, 2)
    rows = StageRows(
        stage=stage,
        geometry=engine.geometry.of_stage(stage),
        rotary=engine.rotary.of_layers(range(2)),
    )
    keys = torch.randn(6, 4, 2, 8)

    rows.measure([(keys, torch.zeros_like(keys), torch.zeros_like(keys))])

    assert rows.sensitivity is not None
    assert (rows.sensitivity.importance_N == 1).all()
    assert torch.equal(rows.sensitivity.key_metric.root_BDD, torch.eye(8).repeat(4, 1, 1))


def test_domains_are_counted_with_their_outliers(corpus: list[Path]) -> None:
    """Tokens of each file; a token far above its window's median is named by its position."""
    engine, loaded = tiny_pair()
    fits: list[StageFit] = []
    calibrate_all(
        engine,
        loaded,
        configs=[ENTROPY],
        corpus=corpus,
        corpus_config=CORPUS,
        examine=fits.append,
    )
    first, second = fits[0].domains
    assert (first.name, second.name) == ("a.txt", "b.txt")
    assert (first.num_tokens, second.num_tokens) == (240, 240)
    assert first.num_gradient_tokens > second.num_gradient_tokens > 0

    table = DomainTable(["a", "b"], window_tokens=8)
    energies = torch.ones(2, 8)
    energies[0, 0] = energies[0, 5] = OUTLIER_FACTOR + 1
    energies[1, 6] = OUTLIER_FACTOR - 1
    table.add_window(1, energies, is_held_out=False)
    table.add_window(1, energies, is_held_out=True)
    copy = DomainTable(["a", "b"], window_tokens=8)
    copy.restore({name: part.clone() for name, part in table.state().items()})
    table.add_window(0, torch.ones(2, 8), is_held_out=False)

    quiet, loud = copy.result()
    assert quiet.num_windows == 0
    assert (loud.num_tokens, loud.num_held_out_tokens) == (16, 8)
    keys, values = loud.outliers
    assert keys.count_by_position == {0: 2, 5: 2}
    assert keys.largest == OUTLIER_FACTOR + 1
    assert values.count_by_position == {}
    with pytest.raises(ValueError, match="counts"):
        DomainTable(["a"], window_tokens=8).restore(table.state())


def test_windows_come_from_all_files_as_far_as_they_go() -> None:
    """What a short file has no room for is taken from the other; held-out ones are of both."""
    sources = [list(range(400)), list(range(1000, 1090))]

    found = cut_windows(sources, CorpusConfig(num_tokens=320, window_tokens=40))

    assert sorted(window.domain for window in found) == [0, 0, 0, 0, 0, 0, 1, 1]
    assert {window.tokens[0] for window in found} == {0, 66, 133, 200, 266, 333, 1000, 1045}


def test_codecs_are_made_by_the_calibrations_type(corpus: list[Path]) -> None:
    """Of the published profile too."""
    engine, loaded = tiny_pair()

    (found,) = calibrate(engine, loaded, config=PAPER, corpus=corpus, corpus_config=CORPUS)

    assert isinstance(codec_of(found, b"n" * 16), KvtcCodec)
