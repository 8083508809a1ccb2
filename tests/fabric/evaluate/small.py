"""A small model with a tokenizer that can be undone, and a protocol that it runs in no time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from codec.geometry import KVGeometry
from fabric.engines.loading import LoadedModel
from fabric.engines.transformers import TransformersEngine
from fabric.evaluate.config import EvaluationConfig
from tests.fabric.engines.tiny import VOCABULARY, tiny_model

SMALL = EvaluationConfig(
    context_tokens=48,
    continuation_tokens=12,
    exact_first=4,
    exact_last=8,
    windows=2,
    lookups=3,
    lookup_pairs=4,
    greedy_windows=1,
    greedy_tokens=5,
)

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""Those with a token; its id is one more than the place here, as 0 begins a sequence."""

IDS = {character: number for number, character in enumerate(CHARACTERS, start=1)}


class CharacterTokenizer:
    """A token per character; what has none is a question mark."""

    bos_token_id = 0
    all_special_ids = (0,)

    def __init__(self, *, has_prefix: bool = False) -> None:
        """Put a beginning-of-sequence id before texts, or do not."""
        self._has_prefix = has_prefix

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, **_: object
    ) -> dict[str, list[int]]:
        """Token ids under the name transformers gives them."""
        prefix = [0] if self._has_prefix and add_special_tokens else []
        return {"input_ids": prefix + [IDS.get(character, IDS["?"]) for character in text]}

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text back; special ids are none."""
        return "".join(CHARACTERS[number - 1] for number in token_ids if number)


class WordTokenizer(CharacterTokenizer):
    """Another way to cut text: ids of whole words, by their length and first letter."""

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, **_: object
    ) -> dict[str, list[int]]:
        """Token ids under the name transformers gives them."""
        words = text.replace("\n", " \n ").split(" ")
        return {"input_ids": [1 + sum(map(ord, word)) % (VOCABULARY - 1) for word in words]}


class NoiseArm:
    """Adds noise and remembers what it was asked for."""

    target = None

    def __init__(self, size: float, geometry: KVGeometry, name: str = "noise") -> None:
        """Noise of ``size`` times the rows' own spread."""
        self.name = name
        self.size = size
        self.calls: list[tuple[Tensor, Tensor, int]] = []
        self._bytes_per_token = geometry.raw_bytes_per_token // 4

    def code(
        self, keys_TLHD: Tensor, values_TLHD: Tensor, start_position: int
    ) -> tuple[Tensor, Tensor, int]:
        """See `fabric.evaluate.arms.Arm.code`; four times smaller, if it says so itself."""
        self.calls.append((keys_TLHD.clone(), values_TLHD.clone(), start_position))
        draw = torch.Generator().manual_seed(len(self.calls))
        keys, values = (
            rows + self.size * rows.std() * torch.randn(rows.shape, generator=draw)
            for rows in (keys_TLHD, values_TLHD)
        )
        return keys, values, self._bytes_per_token * len(keys)


def small_loaded(name: str = "llama", *, has_prefix: bool = False) -> LoadedModel:
    """A tiny model with the tokenizer above."""
    tokenizer = CharacterTokenizer(has_prefix=has_prefix)
    return LoadedModel(tiny_model(name), tokenizer, "tiny", f"weights of {name}")


def small_engine(name: str = "llama") -> tuple[TransformersEngine, LoadedModel]:
    """An engine, and the model it runs."""
    loaded = small_loaded(name)
    return TransformersEngine(loaded, window_tokens=8), loaded
