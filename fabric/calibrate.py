"""Calibrate a model: run text through it, capture its cache, fit one codec per stage.

1. Every corpus file is tokenized and cut into windows spread evenly over it.
2. Windows are ordered by digest, so that held-out ones come from every file, in an
   order that is the same on every machine.
3. The engine prefills each window; the calibrators of all stages take their share.
4. The fits are saved under a digest of everything that went in, and found there again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from codec.calibration import PROFILE, Calibration, CalibrationConfig, Calibrator
from codec.errors import ConfigError, CorruptBlobError
from codec.geometry import Stage
from codec.identity import digest
from fabric.engines.loading import LoadedModel, cache_directory
from fabric.engines.protocol import Engine

Progress = Callable[[str, float], None]
"""Told what is being done and which fraction of it is done."""

MAX_FILES = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusConfig:
    """How calibration text is read."""

    num_tokens: int = 48_000
    """Tokens to run through the model, spread over all files."""

    window_tokens: int = 512
    """Tokens of one prefill."""

    def __post_init__(self) -> None:
        if not 32 <= self.window_tokens <= self.num_tokens:
            raise ConfigError(
                "need 32 <= window_tokens <= num_tokens, "
                f"got {self.window_tokens} and {self.num_tokens}"
            )


def default_corpus() -> list[Path]:
    """The text files shipped with the package (their licences: fabric/data/README.md)."""
    return sorted(Path(str(files("fabric") / "data" / "calibration")).glob("*.txt"))


def default_prompt() -> Path:
    """The demo's prompt: text that no calibration file contains."""
    return Path(str(files("fabric") / "data" / "prompt.txt"))


def calibrate(
    engine: Engine[Any],
    loaded: LoadedModel,
    *,
    config: CalibrationConfig,
    corpus: Sequence[Path] = (),
    corpus_config: CorpusConfig | None = None,
    num_stages: int = 1,
    on_progress: Progress = lambda _what, _fraction: None,
) -> list[Calibration]:
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
    corpus_config = corpus_config or CorpusConfig()
    if not 1 <= num_stages <= engine.geometry.num_layers:
        raise ConfigError(f"stages must be in 1..{engine.geometry.num_layers}, got {num_stages}")
    if len(corpus) > MAX_FILES:
        raise ConfigError(f"the corpus may have {MAX_FILES} files, got {len(corpus)}: join some")
    texts = [_read(path) for path in corpus or default_corpus()]
    stages = engine.geometry.split_layers(num_stages)
    provenance: dict[str, str | int] = {
        "model": loaded.fingerprint,
        "namespace": engine.namespace().digest().hex(),
        "corpus": digest("kvfabric.corpus.1", *(text.encode() for text in texts)).hex(),
        **asdict(corpus_config),
    }
    paths = [_path(stage, config, provenance) for stage in stages]
    found = [_load(path) for path in paths]
    if all(found):
        return [calibration for calibration in found if calibration is not None]
    windows = _windows([_tokenize(loaded, text) for text in texts], corpus_config)
    calibrators = _capture(engine, stages, config, windows, on_progress)

    def fit(number: int, calibrator: Calibrator) -> Calibration:
        return calibrator.fit(
            provenance, lambda part: on_progress("fit", (number + part) / len(calibrators))
        )

    calibrations = [fit(number, calibrator) for number, calibrator in enumerate(calibrators)]
    for path, calibration in zip(paths, calibrations, strict=True):
        calibration.save(path)
    return calibrations


def _capture(
    engine: Engine[Any],
    stages: Sequence[Stage],
    config: CalibrationConfig,
    windows: Sequence[Sequence[int]],
    on_progress: Progress,
) -> list[Calibrator]:
    """Calibrators of all stages that have seen every window."""
    calibrators = [
        Calibrator(
            stage,
            engine.geometry.of_stage(stage),
            engine.rotary.of_layers(range(stage.layer_start, stage.layer_stop)),
            config,
        )
        for stage in stages
    ]
    for number, tokens in enumerate(windows):
        on_progress("capture", number / len(windows))
        cache, _ = engine.prefill(tokens)
        keys, values = engine.capture(cache, 0, len(tokens))
        for stage, calibrator in zip(stages, calibrators, strict=True):
            layers = slice(stage.layer_start, stage.layer_stop)
            heads = slice(stage.head_start, stage.head_stop)
            calibrator.add(keys[:, layers, heads], values[:, layers, heads])
    on_progress("capture", 1.0)
    return calibrators


def _windows(sources: Sequence[Sequence[int]], config: CorpusConfig) -> list[Sequence[int]]:
    """Windows of all sources, equally many from each as far as its length allows."""
    size = config.window_tokens
    wanted = max(1, config.num_tokens // size // len(sources))
    chosen: list[tuple[bytes, Sequence[int]]] = []
    for number, tokens in enumerate(sources):
        count = min(wanted, len(tokens) // size)
        for part in range(count):
            start = len(tokens) * part // count
            key = digest("kvfabric.window.1", bytes([number]), part.to_bytes(4, "little"))
            chosen.append((key, tokens[start : start + size]))
    if len(chosen) < 2:
        raise ConfigError(
            f"the corpus gives {len(chosen)} windows of {size} tokens and calibration needs 2; "
            "name more text with --corpus"
        )
    return [tokens for _, tokens in sorted(chosen, key=lambda pair: pair[0])]


def _path(stage: Stage, config: CalibrationConfig, provenance: dict[str, str | int]) -> Path:
    inputs = {"profile": PROFILE, "stage": str(stage), **asdict(config), **provenance}
    parts = [f"{name}={value}".encode() for name, value in sorted(inputs.items())]
    name = digest("kvfabric.calibration.input.1", *parts).hex()
    return cache_directory().parent / "calibrations" / f"{name}.safetensors"


def _load(path: Path) -> Calibration | None:
    """The calibration saved there; a damaged one counts as absent and will be replaced."""
    if not path.exists():
        return None
    try:
        return Calibration.load(path)
    except CorruptBlobError:
        return None


def _tokenize(loaded: LoadedModel, text: str) -> list[int]:
    return list(loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} as UTF-8 text: {error}") from error
