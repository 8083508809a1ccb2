"""`calibrate`: found again by digest, the same twice, and honest about too little text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from codec.calibration import CalibrationConfig
from codec.errors import ConfigError
from fabric.calibrate import CorpusConfig, calibrate, default_corpus, default_prompt
from fabric.engines.loading import LoadedModel
from fabric.engines.transformers import TransformersEngine
from tests.fabric.calibrate_samples import CharacterTokenizer
from tests.fabric.engines.tiny import tiny_model

CORPUS = CorpusConfig(num_tokens=480, window_tokens=40)
CONFIG = CalibrationConfig(target=3.0, holdout_every=3)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LoadedModel:
    """A tiny model, with a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return LoadedModel(tiny_model("llama"), CharacterTokenizer(), "tiny", "weights of llama")


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    """Two files of different length."""
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    paths[0].write_text("The quick brown fox jumps over the lazy dog. " * 12)
    paths[1].write_text("def f(x):\n    return [y * y for y in range(x)]\n" * 9)
    return paths


def test_two_runs_give_one_digest(
    loaded: LoadedModel, corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In cache directories of their own, so that both really fit."""
    digests = []
    for run in ("first", "second"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / run))
        seen: list[str] = []
        (found,) = calibrate(
            TransformersEngine(loaded),
            loaded,
            config=CONFIG,
            corpus=corpus,
            corpus_config=CORPUS,
            on_progress=lambda what, _, seen=seen: seen.append(what),
        )
        digests.append(found.digest)
        assert {"capture", "fit"} == set(seen)

    assert digests[0] == digests[1]


def test_the_second_time_it_is_found(loaded: LoadedModel, corpus: list[Path]) -> None:
    """Nothing is run then, and a damaged file is replaced instead of used."""
    engine = TransformersEngine(loaded)
    (first,) = calibrate(engine, loaded, config=CONFIG, corpus=corpus, corpus_config=CORPUS)
    seen: list[str] = []

    def again() -> bytes:
        seen.clear()
        (found,) = calibrate(
            engine,
            loaded,
            config=CONFIG,
            corpus=corpus,
            corpus_config=CORPUS,
            on_progress=lambda what, _: seen.append(what),
        )
        return found.digest

    assert again() == first.digest
    assert seen == []
    (path,) = Path(loaded_cache()).glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    assert again() == first.digest
    assert seen


def loaded_cache() -> Path:
    """Where calibrations are kept for this test."""
    from fabric.engines.loading import cache_directory  # noqa: PLC0415 - reads the environment

    return cache_directory().parent / "calibrations"


@pytest.mark.parametrize("change", ["text", "target", "dtype", "stages"])
def test_other_inputs_are_other_calibrations(
    loaded: LoadedModel, corpus: list[Path], change: str
) -> None:
    """Corpus, target, data type and stages all count."""
    engine = TransformersEngine(loaded)
    (first,) = calibrate(engine, loaded, config=CONFIG, corpus=corpus, corpus_config=CORPUS)
    config, num_stages = CONFIG, 1
    if change == "text":
        corpus[0].write_text(corpus[0].read_text().upper())
    elif change == "target":
        config = CalibrationConfig(target=4.0, holdout_every=3)
    elif change == "stages":
        num_stages = 2
    else:
        loaded = LoadedModel(
            tiny_model("llama", torch.bfloat16), CharacterTokenizer(), "tiny", "weights of llama"
        )
        engine = TransformersEngine(loaded)

    others = calibrate(
        engine,
        loaded,
        config=config,
        corpus=corpus,
        corpus_config=CORPUS,
        num_stages=num_stages,
    )

    assert len(others) == num_stages
    assert first.digest not in {other.digest for other in others}
    assert [other.stage for other in others] == list(engine.geometry.split_layers(num_stages))


def test_too_little_text_is_an_error_with_a_remedy(loaded: LoadedModel, tmp_path: Path) -> None:
    """One window cannot be held out from itself."""
    path = tmp_path / "short.txt"
    path.write_text("x" * 50)

    with pytest.raises(ConfigError, match="--corpus"):
        calibrate(
            TransformersEngine(loaded), loaded, config=CONFIG, corpus=[path], corpus_config=CORPUS
        )


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"], ids=["missing", "not text"])
def test_a_file_that_cannot_be_read_is_named(
    loaded: LoadedModel, tmp_path: Path, content: bytes | None
) -> None:
    """With the reason."""
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"corpus\.txt"):
        calibrate(TransformersEngine(loaded), loaded, config=CONFIG, corpus=[path])


@pytest.mark.parametrize("num_stages", [0, 5])
def test_stages_that_the_model_has_no_layers_for_are_refused(
    loaded: LoadedModel, num_stages: int
) -> None:
    """One line, not a traceback."""
    with pytest.raises(ConfigError, match=r"stages must be in 1\.\.4"):
        calibrate(TransformersEngine(loaded), loaded, config=CONFIG, num_stages=num_stages)


def test_too_many_files_are_refused(loaded: LoadedModel, corpus: list[Path]) -> None:
    """With what to do instead."""
    with pytest.raises(ConfigError, match="join some"):
        calibrate(TransformersEngine(loaded), loaded, config=CONFIG, corpus=corpus * 200)


def test_bad_corpus_settings_are_refused() -> None:
    """A window longer than the corpus, or too short to say anything."""
    for wrong in ({"window_tokens": 8}, {"num_tokens": 100, "window_tokens": 200}):
        with pytest.raises(ConfigError, match="window_tokens"):
            CorpusConfig(**wrong)


def test_the_prompt_is_in_no_calibration_file() -> None:
    """The demo must not be shown text that the codec was fitted on."""
    prompt = default_prompt().read_text(encoding="utf-8")
    sentences = [part.strip() for part in prompt.split(".") if len(part.strip()) > 60]

    corpora = [path.read_text(encoding="utf-8") for path in default_corpus()]

    assert len(corpora) >= 4
    assert len(sentences) > 40
    assert not [s for s in sentences if any(s in text for text in corpora)]
