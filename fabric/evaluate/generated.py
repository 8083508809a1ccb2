"""Text made from seeds, for sets that no book has: the same on every machine.

Only `random.Random.random` is drawn from, whose sequence Python keeps between versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random
from typing import Final, TypeVar

ItemT = TypeVar("ItemT")
MakeText = Callable[[int, int], str]
"""Makes text from a seed, at least so many characters."""

MARKS: Final = ("\n", "\n\n", ".", ",", ";", ":", "---", "***", " - ", "\t", "...", "()", '"', "|")
"""What models are known to pile attention on, besides their first tokens."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A list of keys with values, and a question for one of them at its end."""

    text: str
    answer: str
    """What must come next, but for white space."""


@cache
def words() -> tuple[str, ...]:
    """The packaged words, no two alike."""
    path = files("fabric") / "data" / "evaluation" / "words.txt"
    return tuple(path.read_text(encoding="utf-8").split())


def draw(random: Random, items: Sequence[ItemT]) -> ItemT:
    """One of ``items``."""
    return items[int(random.random() * len(items))]


def shuffled(random: Random, items: Sequence[ItemT]) -> list[ItemT]:
    """All of ``items``, every order equally likely."""
    left = list(items)
    return [left.pop(int(random.random() * len(left))) for _ in items]


def number_table(seed: int, num_chars: int) -> str:
    """Rows of numbers of several kinds, at least ``num_chars`` long."""
    random = Random(f"numbers {seed}")
    lines = ["id,count,share,total,when"]
    while sum(map(len, lines)) < num_chars:
        count, share = int(random.random() * 10_000), random.random()
        total, day = random.random() * 1e6, 1 + int(random.random() * 28)
        lines.append(f"{len(lines)},{count},{share:.4f},{total:.2f},2{count % 1000:03}-07-{day:02}")
    return "\n".join(lines)


def random_words(seed: int, num_chars: int) -> str:
    """Words in no order, so that only a copy of them can be foreseen."""
    random = Random(f"words {seed}")
    drawn: list[str] = []
    length = 0
    while length < num_chars:
        drawn.append(draw(random, words()))
        length += len(drawn[-1]) + 1
    return " ".join(drawn)


def sink_text(seed: int, num_chars: int) -> str:
    """Mostly line ends, punctuation and delimiters, with a word now and then."""
    random = Random(f"sinks {seed}")
    parts: list[str] = []
    length = 0
    while length < num_chars:
        is_word = random.random() < 0.2
        parts.append(" " + draw(random, words()) if is_word else draw(random, MARKS))
        length += len(parts[-1])
    return "".join(parts)


def lookup(seed: int, num_pairs: int) -> Lookup:
    """Words with numbers, no word twice; the question is for one of the first third.

    That is what a codec has had to bring back: the last tokens stay exact.
    """
    random = Random(f"lookup {seed}")
    keys = shuffled(random, words())[:num_pairs]
    values = [str(1000 + int(random.random() * 9000)) for _ in keys]
    asked = int(random.random() * (len(keys) // 3))
    pairs = "\n".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
    return Lookup(f"{pairs}\n\n{keys[asked]}:", values[asked])


def random_ids(seed: int, num_ids: int, allowed: Sequence[int]) -> list[int]:
    """Token ids drawn from ``allowed`` with equal chance."""
    random = Random(f"ids {seed}")
    return [draw(random, allowed) for _ in range(num_ids)]
