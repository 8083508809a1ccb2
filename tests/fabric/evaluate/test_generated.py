"""Generated text: the same everywhere, and of the kind that its set is named for."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from codec.identity import digest
from fabric.evaluate.generated import (
    MARKS,
    MakeText,
    lookup,
    number_table,
    random_ids,
    random_words,
    shuffled,
    sink_text,
    words,
)

MAKERS = [number_table, random_words, sink_text]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (number_table, "4d552dea449731e698b24b6cf3720490"),
        (random_words, "ee2706a18948fd8bf2c20b6bbc0c1ada"),
        (sink_text, "4e26af321f072394096c503270cf14cf"),
    ],
)
def test_text_is_what_it_was_when_it_was_registered(make: MakeText, wanted: str) -> None:
    """Another text would be another evaluation set, under the digest of none."""
    assert digest("test", make(3, 2_000).encode()).hex() == wanted


def test_lookups_are_what_they_were_when_they_were_registered() -> None:
    """Question and answer."""
    found = lookup(3, 40)

    assert (
        digest("test", found.text.encode(), found.answer.encode()).hex()
        == "26315b10ffc5a3240833861764b403d5"
    )


@pytest.mark.parametrize("make", MAKERS)
def test_text_is_as_long_as_asked_and_another_for_another_seed(make: MakeText) -> None:
    """And no longer than one more piece of it."""
    text = make(0, 500)

    assert 500 <= len(text) + 30 <= 600
    assert make(1, 500) != text


def test_a_lookup_is_of_a_pair_in_the_first_third() -> None:
    """Whose key is there once before, and whose value nowhere else."""
    for seed in range(50):
        found = lookup(seed, 12)
        *pairs, empty, question = found.text.split("\n")
        keys = [pair.split(": ")[0] for pair in pairs]
        place = keys.index(question.removesuffix(":"))

        assert empty == ""
        assert len(set(keys)) == 12
        assert place < 4
        assert pairs[place] == f"{keys[place]}: {found.answer}"


def test_every_pair_of_the_first_third_is_asked_for() -> None:
    """Over enough seeds: the question gives nothing away."""
    asked = set()
    for seed in range(60):
        found = lookup(seed, 12)
        asked.add(next(n for n, row in enumerate(found.text.split("\n")) if found.answer in row))

    assert asked == {0, 1, 2, 3}


def test_random_words_are_packaged_ones_in_no_order() -> None:
    """Nearly all of them in a long text, none much more often than others."""
    counts = Counter(random_words(0, 20_000).split(" "))

    assert set(counts) == set(words())
    assert max(counts.values()) < 4 * min(counts.values())


def test_the_packaged_words_differ() -> None:
    """A key that is there twice would have two answers."""
    assert len(set(words())) == len(words()) >= 60


def test_sinks_are_mostly_marks() -> None:
    """Line ends and delimiters outnumber words."""
    text = sink_text(0, 5_000)

    num_words = sum(text.count(" " + word) for word in words())
    num_marks = sum(text.count(mark) for mark in MARKS if mark.strip())
    assert num_marks + text.count("\n") > 2 * num_words > 0


def test_numbers_are_rows_of_five() -> None:
    """Under a heading."""
    head, *rows = number_table(0, 2_000).split("\n")

    assert head.count(",") == 4
    assert len(rows) > 40
    assert all(row.count(",") == 4 and row.split(",")[0].isdigit() for row in rows)


def test_random_ids_are_allowed_ones() -> None:
    """And repeat only by chance."""
    allowed = range(5, 1_000, 3)

    found = random_ids(0, 400, allowed)

    assert set(found) <= set(allowed)
    assert len(set(found)) > 200
    assert found == random_ids(0, 400, allowed) != random_ids(1, 400, allowed)


def test_shuffled_keeps_every_item() -> None:
    """In another order."""
    found = shuffled(Random(0), range(30))

    assert sorted(found) == list(range(30)) != found
