"""A tiny model and two files of text, which calibrate in a second."""

from __future__ import annotations

from pathlib import Path

from codec.calibration import CalibrationConfig
from codec.entropy_calibration import EntropyConfig
from fabric.calibrate import CorpusConfig
from fabric.engines.loading import LoadedModel
from fabric.engines.transformers import TransformersEngine
from tests.fabric.engines.tiny import VOCABULARY, tiny_model

CORPUS = CorpusConfig(
    num_tokens=480, window_tokens=40, gradient_windows=5, context_tokens=70, following_tokens=12
)
PAPER = CalibrationConfig(target=3.0, holdout_every=3)
ENTROPY = EntropyConfig(target=5.0, holdout_every=3)


class CharacterTokenizer:
    """A token per character: enough for text to reach the model."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        """Token ids under the name transformers gives them."""
        return {"input_ids": [ord(character) % VOCABULARY for character in text]}


def tiny_loaded(name: str = "llama") -> LoadedModel:
    """A tiny model with that tokenizer."""
    return LoadedModel(tiny_model(name), CharacterTokenizer(), "tiny", f"weights of {name}")


def tiny_pair(name: str = "llama") -> tuple[TransformersEngine, LoadedModel]:
    """An engine and the model it runs."""
    loaded = tiny_loaded(name)
    return TransformersEngine(loaded), loaded


def two_files(folder: Path) -> list[Path]:
    """Prose and code, of different length."""
    paths = [folder / "a.txt", folder / "b.txt"]
    paths[0].write_text("The quick brown fox jumps over the lazy dog. " * 12)
    paths[1].write_text("def f(x):\n    return [y * y for y in range(x)]\n" * 9)
    return paths


def kept_files(cache: Path) -> list[Path]:
    """Everything that is kept under ``XDG_CACHE_HOME``."""
    return sorted((cache / "kvfabric" / "calibrations").iterdir())
