"""What is learned of a tokenizer: prefix, plain ids, and what counts as an answer."""

from __future__ import annotations

import pytest

from fabric.engines.transformers import TransformersEngine
from fabric.evaluate.vocabulary import Vocabulary
from tests.fabric.engines.tiny import VOCABULARY
from tests.fabric.evaluate.small import CharacterTokenizer, small_loaded


@pytest.mark.parametrize(("has_prefix", "prefix"), [(False, ()), (True, (0,))])
def test_the_prefix_is_what_the_tokenizer_puts_before_text(
    has_prefix: bool, prefix: tuple[int, ...]
) -> None:
    """And text alone is encoded without it."""
    vocabulary = Vocabulary(CharacterTokenizer(has_prefix=has_prefix), 9)

    assert vocabulary.prefix == prefix
    assert len(vocabulary.encode("abc")) == 3


def test_the_number_of_ids_is_the_models() -> None:
    """Special ids are not among the plain ones."""
    loaded = small_loaded()

    vocabulary = Vocabulary.of(TransformersEngine(loaded), loaded)

    assert vocabulary.plain_ids == tuple(range(1, VOCABULARY))
    assert vocabulary.bos_id == 0


def test_a_tokenizer_without_special_ids_will_do() -> None:
    """All its ids are plain then."""
    vocabulary = Vocabulary(lambda _text, **_: {"input_ids": []}, 3)

    assert (vocabulary.plain_ids, vocabulary.bos_id) == ((0, 1, 2), None)


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (" 4821\n", True),
        ("4821", True),
        ("\n 4821, 7", True),
        ("48215", False),
        ("482", False),
        ("x4821", False),
        ("", False),
    ],
)
def test_an_answer_is_the_whole_word_that_comes_first(text: str, is_right: bool) -> None:
    """White space before it is as good as none."""
    vocabulary = Vocabulary(CharacterTokenizer(), VOCABULARY)

    assert vocabulary.is_answer(vocabulary.encode(text), "4821") is is_right
