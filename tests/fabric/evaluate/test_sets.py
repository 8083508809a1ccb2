"""The evaluation set: what each prompt is made of, and what its digest names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import ConfigError
from fabric.calibrate import default_corpus, default_prompt
from fabric.evaluate import sets
from fabric.evaluate.config import FULL
from fabric.evaluate.sets import (
    BOS_EVERY,
    LOOKUP,
    NATURAL,
    EvaluationSet,
    Sample,
    corpus_set,
    registered_set,
    spread,
)
from fabric.evaluate.vocabulary import Vocabulary
from tests.fabric.engines.tiny import VOCABULARY
from tests.fabric.evaluate.small import SMALL, CharacterTokenizer, WordTokenizer

WORDS = Vocabulary(CharacterTokenizer(has_prefix=True), VOCABULARY)
DATA = Path(sets.__file__).parents[1] / "data" / "evaluation"
SET_NAMES = {
    *NATURAL,
    "spanish",
    "copy",
    "numbers",
    "sinks",
    "random",
    "poisoned",
    LOOKUP,
}


@pytest.fixture(scope="module")
def registered() -> EvaluationSet:
    """The set that the small protocol makes."""
    return registered_set(WORDS, SMALL)


def of_set(found: EvaluationSet, name: str) -> list[Sample]:
    """The samples of one set."""
    return [sample for sample in found.samples if sample.set_name == name]


def test_every_set_has_its_samples_at_the_length_asked(registered: EvaluationSet) -> None:
    """Only look-ups are as long as they are."""
    counts = Counter(sample.set_name for sample in registered.samples)
    scored = [sample for sample in registered.samples if sample.set_name != LOOKUP]

    assert counts == dict.fromkeys(SET_NAMES, SMALL.windows) | {LOOKUP: SMALL.lookups}
    assert {len(sample.context) for sample in scored} == {SMALL.context_tokens}
    assert {len(sample.continuation) for sample in scored} == {SMALL.continuation_tokens}
    assert len({(sample.context, sample.continuation) for sample in registered.samples}) == len(
        registered.samples
    )


def test_windows_that_do_not_divide_by_the_texts_are_still_as_many_as_asked() -> None:
    """Of law there are two texts."""
    found = registered_set(WORDS, replace(SMALL, windows=3))

    assert len(of_set(found, "law")) == 3


def test_every_prompt_begins_as_the_tokenizer_begins_texts(registered: EvaluationSet) -> None:
    """Once, and nowhere else but among sinks."""
    assert {sample.context[0] for sample in registered.samples} == {0}
    others = [sample for sample in registered.samples if sample.set_name != "sinks"]
    assert not any(0 in (*sample.context[1:], *sample.continuation) for sample in others)


def test_natural_text_alone_is_pooled_and_continued_greedily(registered: EvaluationSet) -> None:
    """The first windows of each; look-ups need their answers' tokens."""
    greedy = [sample for sample in registered.samples if sample.num_greedy]

    assert registered.pooled == set(NATURAL)
    assert Counter(sample.set_name for sample in greedy) == dict.fromkeys(
        NATURAL, SMALL.greedy_windows
    ) | {LOOKUP: SMALL.lookups}


def test_a_copy_is_of_what_the_codec_has_to_bring_back(registered: EvaluationSet) -> None:
    """The scored tokens are those that followed the same lead, long before."""
    for sample in of_set(registered, "copy"):
        lead = SMALL.context_tokens // 4
        passage = sample.context[1 : SMALL.context_tokens - lead]

        assert sample.context[-lead:] == passage[:lead]
        assert sample.continuation == passage[lead : lead + SMALL.continuation_tokens]
        assert lead + SMALL.continuation_tokens < SMALL.context_tokens - SMALL.exact_last


def test_a_poisoned_prompt_is_one_token_then_anything_then_prose(
    registered: EvaluationSet,
) -> None:
    """What is scored is prose again."""
    prose = sets.packaged_text("prose.txt")
    for sample in of_set(registered, "poisoned"):
        num_repeated = SMALL.context_tokens // 4
        start = 1 + num_repeated + SMALL.context_tokens // 16

        assert len(set(sample.context[1 : 1 + num_repeated])) == 1
        text = CharacterTokenizer().decode((*sample.context[start:], *sample.continuation))
        assert text in prose
    first, second = of_set(registered, "poisoned")
    assert first.context[1] != second.context[1]


def test_sinks_have_beginnings_strewn_in(registered: EvaluationSet) -> None:
    """Every so many tokens, if the tokenizer has such an id."""
    (sample, _) = of_set(registered, "sinks")
    tokens = (*sample.context, *sample.continuation)

    assert [n for n, token in enumerate(tokens) if token == 0] == [
        0,
        *range(BOS_EVERY - 1, len(tokens), BOS_EVERY),
    ]


def test_a_lookup_asks_for_what_is_not_in_the_exact_window(registered: EvaluationSet) -> None:
    """Its answer is scored, and is what the greedy tokens must begin with."""
    for sample in of_set(registered, LOOKUP):
        text = CharacterTokenizer().decode(sample.context)

        assert text.index(sample.answer) < len(text) - SMALL.exact_last
        assert CharacterTokenizer().decode(sample.continuation) == f" {sample.answer}"
        assert sample.num_greedy > len(sample.answer)


def test_the_digest_does_not_depend_on_the_tokenizer(registered: EvaluationSet) -> None:
    """It names the texts and the rules, so that models can be compared."""
    other = registered_set(Vocabulary(WordTokenizer(), VOCABULARY), replace(SMALL, exact_last=2))
    same = registered_set(WORDS, replace(SMALL, exact_last=2))

    assert other.digest == same.digest
    assert other.samples != same.samples
    assert same.digest != registered.digest


@pytest.mark.parametrize("name", ["prose.txt", "gpl-3.txt", "spanish.txt"])
def test_a_changed_text_is_another_set(
    registered: EvaluationSet, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even at its very end, where no window reaches."""
    real = sets.packaged_text
    monkeypatch.setattr(sets, "packaged_text", lambda found: real(found) + " " * (found == name))

    assert registered_set(WORDS, SMALL).digest != registered.digest


@pytest.mark.parametrize(
    ("name", "value"), [("COPY_LEAD_TOKENS", 3), ("BOS_EVERY", 9), ("REPEATED", ("a", "b"))]
)
def test_a_changed_rule_is_another_set(
    registered: EvaluationSet, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How prompts are put together from text counts as the text does."""
    monkeypatch.setattr(sets, name, value)

    assert registered_set(WORDS, SMALL).digest != registered.digest


def test_another_seed_is_another_set(registered: EvaluationSet) -> None:
    """Generated text and random ids change with it; books do not."""
    other = registered_set(WORDS, replace(SMALL, seed=10))

    assert other.digest != registered.digest
    assert of_set(other, "prose") == of_set(registered, "prose")
    for name in ("copy", "numbers", "sinks", "random", "poisoned", LOOKUP):
        assert of_set(other, name) != of_set(registered, name)


def test_no_text_is_shared_with_calibration_or_the_demo() -> None:
    """A codec must not be judged on what it was fitted to."""
    seen = "\n".join(
        path.read_text(encoding="utf-8") for path in (*default_corpus(), default_prompt())
    )
    texts = [path.read_text(encoding="utf-8") for path in sorted(DATA.glob("*.txt"))]
    pieces = [part.strip() for text in texts for part in text.replace("\n", ".").split(".")]
    long_pieces = [piece for piece in pieces if len(piece) > 60]

    assert len(long_pieces) > 500
    assert not [piece for piece in long_pieces if piece in seen]


def test_the_data_is_small_and_its_sources_are_named() -> None:
    """In the folder's own table."""
    paths = sorted(DATA.glob("*.txt"))
    table = (DATA / "README.md").read_text(encoding="utf-8")

    assert sum(path.stat().st_size for path in DATA.iterdir()) <= 200_000
    assert all(f"`{path.name}`" in table for path in paths)
    assert {name for names in NATURAL.values() for name in names} < {path.name for path in paths}


def test_the_full_form_finds_text_for_all_its_windows() -> None:
    """Of tokenizers that make a token of three and a half characters, as those here do."""
    for names in (*NATURAL.values(), ("spanish.txt",)):
        size = sum(len(sets.packaged_text(name)) for name in names)
        assert size / 3.5 > FULL.windows * FULL.sample_tokens


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 9))
def test_windows_are_spread_and_do_not_overlap(length: int, size: int, wanted: int) -> None:
    """As many as asked, or as there is room for."""
    windows = spread(range(length), size, wanted)

    assert len(windows) == min(wanted, length // size)
    assert all(len(window) == size for window in windows)
    assert all(a[-1] < b[0] for a, b in pairwise(windows))


def write(folder: Path, names: Sequence[str]) -> list[Path]:
    """Files that differ, in folders of their own."""
    paths = []
    for number, name in enumerate(names):
        path = folder / str(number) / name
        path.parent.mkdir()
        path.write_text(f"Text number {number} goes on and on. " * 40, encoding="utf-8")
        paths.append(path)
    return paths


def test_a_corpus_takes_the_place_of_the_set(tmp_path: Path, registered: EvaluationSet) -> None:
    """A set for each file, all pooled, under another digest, which qualifies nothing."""
    paths = write(tmp_path, ["a.txt", "b.md", "a.txt"])

    found = corpus_set(WORDS, SMALL, paths)

    assert Counter(sample.set_name for sample in found.samples) == dict.fromkeys(
        ["a", "b", "a-2"], SMALL.windows
    )
    assert found.pooled == {"a", "b", "a-2"}
    assert not found.is_registered
    assert registered.is_registered
    digests = {found.digest, registered.digest, corpus_set(WORDS, SMALL, paths[:2]).digest}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "cannot read"), (b"\xff\xfe\xff", "cannot read"), (b"", "0 tokens"), (b"x" * 58, "58")],
    ids=["missing", "not text", "empty", "too short"],
)
def test_a_corpus_file_that_will_not_do_is_named(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    """With the reason, and what to do where something can be done."""
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=rf"corpus\.txt.*{why}|{why}.*corpus\.txt"):
        corpus_set(WORDS, SMALL, [path])


def test_a_corpus_of_just_one_window_will_do(tmp_path: Path) -> None:
    """The prefix is one of the sample's tokens."""
    path = tmp_path / "corpus.txt"
    path.write_text("y" * (SMALL.sample_tokens - 1))

    (sample,) = corpus_set(WORDS, SMALL, [path]).samples

    assert len(sample.context) + len(sample.continuation) == SMALL.sample_tokens


def test_lookups_too_short_to_be_coded_are_refused() -> None:
    """A pair in the exact window would be found whatever the codec does."""
    with pytest.raises(ConfigError, match="lookup_pairs"):
        registered_set(WORDS, replace(SMALL, exact_last=43))
