"""Calibration text, cut into windows: each file is a domain.

1. Every file is tokenized and cut into windows spread evenly over it, equally many from
   each file as far as its length allows.
2. Windows are ordered by digest, so that held-out ones come from every file, in an order
   that is the same on every machine.
3. Windows for gradients are spread evenly over the files too, and longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from codec.errors import ConfigError
from codec.identity import digest
from fabric.engines.loading import LoadedModel

MAX_FILES = 255
MIN_WINDOW_TOKENS = 256
"""A file with fewer is left out, unless windows are shorter still."""
MIN_GRADIENT_TOKENS = 64
"""A file with fewer gives no gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusConfig:
    """How calibration text is read."""

    num_tokens: int = 61_440
    """Tokens to run through the model, spread over all files."""

    window_tokens: int = 2048
    """Tokens of one prefill.

    Caches change with the position: one that was calibrated on windows of 512 tokens takes a
    third more bits at position 1,500 (SmolLM2; docs/codec.md).
    """

    gradient_windows: int = 20
    """Windows that are run with gradients, for the profiles that need them."""

    context_tokens: int = 1024
    """Tokens of such a window whose cache is looked at."""

    following_tokens: int = 192
    """Tokens after them, from which the model predicts."""

    def __post_init__(self) -> None:
        if not 32 <= self.window_tokens <= self.num_tokens:
            raise ConfigError(
                "need 32 <= window_tokens <= num_tokens, "
                f"got {self.window_tokens} and {self.num_tokens}"
            )
        for name in ("gradient_windows", "context_tokens", "following_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.context_tokens + self.following_tokens < MIN_GRADIENT_TOKENS:
            raise ConfigError(
                f"context_tokens and following_tokens must be {MIN_GRADIENT_TOKENS} together"
            )

    def plain(self) -> dict[str, int]:
        """The part that shapes captured rows."""
        return {"num_tokens": self.num_tokens, "window_tokens": self.window_tokens}

    def whole(self) -> dict[str, int]:
        """All of it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens in a row from one file."""

    domain: int
    """Number of its file."""

    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class GradientWindow:
    """Tokens in a row, of which the first are context."""

    domain: int
    tokens: Sequence[int]
    num_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Text that was read, with a digest of all of it."""

    names: tuple[str, ...]
    texts: tuple[str, ...]
    config: CorpusConfig

    @property
    def digest(self) -> str:
        """Of the texts in their order, hex."""
        return digest("kvfabric.corpus.1", *(text.encode() for text in self.texts)).hex()

    def tokenized(self, loaded: LoadedModel) -> list[list[int]]:
        """Tokens of each file."""
        return [tokenize(loaded, text) for text in self.texts]


def prefix_of(loaded: LoadedModel) -> list[int]:
    """Tokens that the model wants at the start of every sequence; often none.

    A model that was trained with such a token uses it as its attention sink.
    """
    return list(loaded.tokenizer("", verbose=False)["input_ids"])


def tokenize(loaded: LoadedModel, text: str) -> list[int]:
    """Tokens of a text, and no others that a model may want at its start."""
    return list(loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def default_corpus() -> list[Path]:
    """The text files shipped with the package (their licences: fabric/data/README.md)."""
    return sorted(Path(str(files("fabric") / "data" / "calibration")).glob("*.txt"))


def default_prompt() -> Path:
    """The demo's prompt: text that no calibration file contains."""
    return Path(str(files("fabric") / "data" / "prompt.txt"))


def read_corpus(paths: Sequence[Path], config: CorpusConfig) -> Corpus:
    """Text of ``paths``, or of `default_corpus` if there are none.

    Raises
    ------
    ConfigError
        If there are too many files, or one cannot be read.
    """
    if len(paths) > MAX_FILES:
        raise ConfigError(f"the corpus may have {MAX_FILES} files, got {len(paths)}: join some")
    paths = paths or default_corpus()
    return Corpus(
        names=tuple(path.name for path in paths),
        texts=tuple(read_text(path) for path in paths),
        config=config,
    )


def read_text(path: Path) -> str:
    """Text of a file.

    Raises
    ------
    ConfigError
        If it cannot be read as UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} as UTF-8 text: {error}") from error


def cut_windows(
    sources: Sequence[Sequence[int]], config: CorpusConfig, prefix: Sequence[int] = ()
) -> list[Window]:
    """Windows of all sources, equally many from each as far as its length allows.

    A file shorter than a window is one window by itself, if it is worth one.
    """
    size = config.window_tokens - len(prefix)
    room = [max(len(part) // size, int(len(part) >= MIN_WINDOW_TOKENS)) for part in sources]
    counts = _fair_shares(config.num_tokens // config.window_tokens, room)
    chosen: list[tuple[bytes, Window]] = []
    for number, (tokens, count) in enumerate(zip(sources, counts, strict=True)):
        for part in range(count):
            start = len(tokens) * part // count
            key = digest("kvfabric.window.1", bytes([number]), part.to_bytes(4, "little"))
            piece = [*prefix, *tokens[start : start + size]]
            chosen.append((key, Window(number, piece)))
    if len(chosen) < 2:
        raise ConfigError(
            f"the corpus gives {len(chosen)} windows of {size} tokens and calibration needs 2; "
            "name more text with --corpus"
        )
    return [window for _, window in sorted(chosen, key=lambda pair: pair[0])]


def _fair_shares(total: int, room: Sequence[int]) -> list[int]:
    """Split ``total`` evenly; what one has no room for goes to the others.

    Each gets one at least, where it has room.

    Examples
    --------
    >>> _fair_shares(10, [1, 9, 4])
    [1, 5, 4]
    """
    shares = [min(1, most) for most in room]
    for _ in range(total - sum(shares)):
        open_ = [n for n, most in enumerate(room) if shares[n] < most]
        if not open_:
            break
        shares[min(open_, key=shares.__getitem__)] += 1
    return shares


def gradient_windows(
    sources: Sequence[Sequence[int]], config: CorpusConfig, prefix: Sequence[int] = ()
) -> list[GradientWindow]:
    """Windows for gradients, spread over all files; shorter where a file is.

    Raises
    ------
    ConfigError
        If no file is long enough for one.
    """
    usable = [n for n, tokens in enumerate(sources) if len(tokens) >= MIN_GRADIENT_TOKENS]
    if not usable:
        raise ConfigError(
            f"no file of the corpus has {MIN_GRADIENT_TOKENS} tokens; name more text with --corpus"
        )
    chosen = []
    for place, number in enumerate(usable):
        tokens = sources[number]
        whole = config.context_tokens + config.following_tokens - len(prefix)
        size = min(whole, len(tokens))
        following = max(1, config.following_tokens * size // whole)
        count = config.gradient_windows // len(usable)
        count += place < config.gradient_windows % len(usable)
        for part in range(count):
            start = (len(tokens) - size) * part // max(1, count - 1)
            piece = tokens[start : start + size]
            context = len(prefix) + size - following
            chosen.append(GradientWindow(number, [*prefix, *piece], context))
    return chosen
