"""The evaluation set: which prompts are run, fixed before anything is measured.

| set | prompts | scored |
|---|---|---|
| ``prose``, ``law``, ``code`` | natural text | what follows; these are pooled |
| ``spanish`` | another language than the calibration's | what follows |
| ``copy`` | random words, then their beginning again | the second copy |
| ``numbers`` | tables of random numbers | what follows |
| ``random`` | token ids drawn with equal chance | what follows |
| ``sinks`` | line ends and delimiters, beginning-of-sequence ids strewn in | what follows |
| ``poisoned`` | one token many times, then random ids, then prose | the prose that follows |
| ``lookup`` | keys with values, and a question | the value; is it found greedily |

Its digest is of the texts, generated ones included, the settings and the rules' version,
not of token ids: it is the same for every tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Final

from codec.errors import ConfigError
from codec.identity import digest
from fabric.evaluate.config import EvaluationConfig
from fabric.evaluate.generated import (
    Lookup,
    MakeText,
    lookup,
    number_table,
    random_ids,
    random_words,
    sink_text,
)
from fabric.evaluate.vocabulary import Vocabulary

NATURAL: Final[Mapping[str, tuple[str, ...]]] = {
    "prose": ("prose.txt",),
    "law": ("constitution.txt", "gpl-3.txt"),
    "code": ("statistics.txt",),
}
FOREIGN: Final[Mapping[str, tuple[str, ...]]] = {"spanish": ("spanish.txt",)}
LOOKUP: Final = "lookup"

COPY_LEAD_TOKENS: Final = 16
"""Of the second copy within the context, so that the model can tell that it is one."""

BOS_EVERY: Final = 32
REPEATED: Final = ("the", "\n", "0", ".", "A", "=", " and", "!")
"""Texts whose first token a poisoned prompt repeats, one after the other."""

_RULES: Final = "kvfabric.evaluation.1"
"""Goes up when prompts are made otherwise from the same texts."""

_CHARS_PER_TOKEN: Final = 12
"""Generated text is so long that no tokenizer runs out of it; if one does, it is repeated."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt, and what is measured on it."""

    set_name: str
    context: tuple[int, ...]
    continuation: tuple[int, ...]
    num_greedy: int = 0
    """Tokens to continue the context by greedily."""

    answer: str = ""
    """Of a look-up: the text that the greedy tokens must begin with."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """All prompts for one tokenizer, set by set."""

    samples: tuple[Sample, ...]
    digest: str
    """Hex; of what the prompts were made from."""

    pooled: frozenset[str]
    """Names of the sets whose samples are judged together."""

    is_registered: bool
    """Whether it is made from the packaged texts alone: only then may it qualify a codec."""


def registered_set(vocabulary: Vocabulary, config: EvaluationConfig) -> EvaluationSet:
    """The pre-registered set."""
    packaged = {name: packaged_text(name) for _, names in _text_sets() for name in names}
    parts = [f"copy lead {COPY_LEAD_TOKENS}, bos every {BOS_EVERY}, repeated {REPEATED!r}"]
    parts += [name + "\0" + text for name, text in packaged.items()]
    samples: list[Sample] = []
    for set_name, names in _text_sets():
        num_greedy = config.greedy_windows if set_name in NATURAL else 0
        texts = [packaged[name] for name in names]
        samples += _text_samples(vocabulary, set_name, texts, config, num_greedy)
    for set_name, texts, make in (
        ("copy", _texts(random_words, config), _copy),
        ("numbers", _texts(number_table, config), _plain),
        ("sinks", _texts(sink_text, config), _sinks),
    ):
        parts += texts
        samples += [_sample(set_name, make(vocabulary, text, config), config) for text in texts]
    samples += _random_samples(vocabulary, config)
    samples += _poisoned_samples(vocabulary, packaged["prose.txt"], config)
    lookups = [
        lookup(config.seed + number, config.lookup_pairs) for number in range(config.lookups)
    ]
    parts += [asked.text + "\0" + asked.answer for asked in lookups]
    samples += [_lookup_sample(vocabulary, asked, config) for asked in lookups]
    return EvaluationSet(tuple(samples), _digest(config, parts), frozenset(NATURAL), True)


def corpus_set(
    vocabulary: Vocabulary, config: EvaluationConfig, paths: Sequence[Path]
) -> EvaluationSet:
    """Windows spread over each of the files; one set per file, all pooled.

    Raises
    ------
    ConfigError
        If a file cannot be read, or is too short for a window.
    """
    samples: list[Sample] = []
    parts: list[str] = []
    names: list[str] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path} as UTF-8 text: {error}") from error
        name = next(n for n in _numbered(path.stem or path.name) if n not in names)
        found = _text_samples(vocabulary, name, [text], config, config.greedy_windows)
        if not found:
            raise ConfigError(
                f"{path} has {len(vocabulary.encode(text))} tokens and a sample needs "
                f"{config.sample_tokens}: name a longer file, or lower --context"
            )
        names.append(name)
        samples += found
        parts += ["corpus", text]
    return EvaluationSet(tuple(samples), _digest(config, parts), frozenset(names), False)


def packaged_text(name: str) -> str:
    """A text of ``fabric/data/evaluation``."""
    return (files("fabric") / "data" / "evaluation" / name).read_text(encoding="utf-8")


def _text_sets() -> list[tuple[str, tuple[str, ...]]]:
    return [*NATURAL.items(), *FOREIGN.items()]


def _digest(config: EvaluationConfig, parts: Sequence[str]) -> str:
    return digest(_RULES, *(part.encode() for part in (config.text(), *parts))).hex()


def _text_samples(
    vocabulary: Vocabulary,
    set_name: str,
    texts: Sequence[str],
    config: EvaluationConfig,
    num_greedy: int,
) -> list[Sample]:
    """Windows spread over the texts, the first of which are continued greedily too."""
    size = config.sample_tokens - len(vocabulary.prefix)
    wanted = -(-config.windows // len(texts))
    windows = [window for text in texts for window in spread(vocabulary.encode(text), size, wanted)]
    return [
        _sample(
            set_name,
            [*vocabulary.prefix, *window],
            config,
            num_greedy=config.greedy_tokens if number < num_greedy else 0,
        )
        for number, window in enumerate(windows[: config.windows])
    ]


def spread(tokens: Sequence[int], size: int, wanted: int) -> list[Sequence[int]]:
    """At most ``wanted`` windows that do not overlap, spread evenly."""
    count = min(wanted, len(tokens) // size)
    starts = [len(tokens) * number // count for number in range(count)]
    return [tokens[start : start + size] for start in starts]


def _sample(
    set_name: str, tokens: Sequence[int], config: EvaluationConfig, *, num_greedy: int = 0
) -> Sample:
    cut = config.context_tokens
    return Sample(
        set_name,
        tuple(tokens[:cut]),
        tuple(tokens[cut : config.sample_tokens]),
        num_greedy,
    )


def _texts(make: MakeText, config: EvaluationConfig) -> list[str]:
    num_chars = config.sample_tokens * _CHARS_PER_TOKEN
    return [make(config.seed + number, num_chars) for number in range(config.windows)]


def _cut(vocabulary: Vocabulary, text: str, size: int) -> list[int]:
    return list(islice(cycle(vocabulary.encode(text)), size))


def _plain(vocabulary: Vocabulary, text: str, config: EvaluationConfig) -> list[int]:
    size = config.sample_tokens - len(vocabulary.prefix)
    return [*vocabulary.prefix, *_cut(vocabulary, text, size)]


def _copy(vocabulary: Vocabulary, text: str, config: EvaluationConfig) -> list[int]:
    lead = min(COPY_LEAD_TOKENS, config.context_tokens // 4)
    passage = _cut(vocabulary, text, config.context_tokens - lead - len(vocabulary.prefix))
    tokens = [*vocabulary.prefix, *passage]
    return [*tokens, *_cut_tokens(passage, config.sample_tokens - len(tokens))]


def _cut_tokens(tokens: Sequence[int], size: int) -> list[int]:
    return list(islice(cycle(tokens), size))


def _sinks(vocabulary: Vocabulary, text: str, config: EvaluationConfig) -> list[int]:
    tokens = _plain(vocabulary, text, config)
    if vocabulary.bos_id is not None:
        tokens[BOS_EVERY - 1 :: BOS_EVERY] = [vocabulary.bos_id] * (len(tokens) // BOS_EVERY)
    return tokens


def _random_samples(vocabulary: Vocabulary, config: EvaluationConfig) -> list[Sample]:
    size = config.sample_tokens - len(vocabulary.prefix)
    return [
        _sample(
            "random",
            [
                *vocabulary.prefix,
                *random_ids(config.seed + number, size, vocabulary.plain_ids),
            ],
            config,
        )
        for number in range(config.windows)
    ]


def _poisoned_samples(vocabulary: Vocabulary, prose: str, config: EvaluationConfig) -> list[Sample]:
    """A quarter one token, a sixteenth random ids, then prose."""
    num_repeated, num_random = config.context_tokens // 4, config.context_tokens // 16
    size = config.sample_tokens - len(vocabulary.prefix) - num_repeated - num_random
    samples = []
    for number, window in enumerate(spread(vocabulary.encode(prose), size, config.windows)):
        repeated = vocabulary.encode(REPEATED[number % len(REPEATED)])[:1] * num_repeated
        strange = random_ids(-1 - config.seed - number, num_random, vocabulary.plain_ids)
        tokens = [*vocabulary.prefix, *repeated, *strange, *window]
        samples.append(_sample("poisoned", tokens, config))
    return samples


def _lookup_sample(vocabulary: Vocabulary, asked: Lookup, config: EvaluationConfig) -> Sample:
    context = (*vocabulary.prefix, *vocabulary.encode(asked.text))
    # The pair asked for is in the first third, and must not be in the exact window.
    if len(context) * 2 // 3 < config.exact_last or len(context) <= config.num_exact:
        raise ConfigError(
            f"this tokenizer makes {len(context)} tokens of {config.lookup_pairs} pairs: "
            "too few for one to be coded; raise lookup_pairs"
        )
    answer = tuple(vocabulary.encode(" " + asked.answer))
    return Sample(LOOKUP, context, answer, len(answer) + 1, asked.answer)


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}-{number}"
        number += 1
