"""What building samples needs to know of a model's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fabric.engines.loading import LoadedModel
from fabric.engines.protocol import Engine


class Vocabulary:
    """Text to token ids and back, and the ids that mean no text; immutable."""

    def __init__(self, tokenizer: Any, num_ids: int) -> None:  # noqa: ANN401 - transformers is untyped
        """Wrap a tokenizer of a model that knows ``num_ids`` ids."""
        self._tokenizer = tokenizer
        special = set(getattr(tokenizer, "all_special_ids", ()))
        #: What the tokenizer puts before any text: a beginning-of-sequence id, or nothing.
        self.prefix = tuple(self._ids("", add_special_tokens=True))
        #: Ids of text, rising.
        self.plain_ids = tuple(number for number in range(num_ids) if number not in special)
        #: The beginning-of-sequence id, whether or not texts begin with it.
        self.bos_id: int | None = getattr(tokenizer, "bos_token_id", None)

    @classmethod
    def of(cls, engine: Engine[Any], loaded: LoadedModel) -> Vocabulary:
        """Vocabulary of a loaded model; the engine is run for one token to learn its size."""
        _, logits = engine.prefill([0])
        return cls(loaded.tokenizer, len(logits))

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` alone."""
        return self._ids(text, add_special_tokens=False)

    def is_answer(self, token_ids: Sequence[int], answer: str) -> bool:
        """Whether the ids' text begins with ``answer``, and not with a longer word."""
        text = self._tokenizer.decode(list(token_ids)).strip()
        return re.match(rf"{re.escape(answer)}(?!\w)", text) is not None

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        found = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return list(found["input_ids"])
