"""Any order of extending, cropping, capturing and restoring gives the KV of the same tokens."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fabric.engines.tiny import VOCABULARY, WINDOW, tiny_engine

ENGINE = tiny_engine("gemma3")
BATCH = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=2 * WINDOW)


class ConversationMachine(RuleBasedStateMachine):
    """One cache of a model with sliding layers, beside the tokens that it stands for."""

    def __init__(self) -> None:
        super().__init__()
        #: The model of the cache: its tokens, and the first position every layer still has.
        self.tokens: list[int] = []
        self.first = 0
        self.cache: Any = ENGINE.new_cache()

    @rule(batch=BATCH)
    def extend(self, batch: list[int]) -> None:
        """The user says something."""
        self.tokens += batch
        ENGINE.prefill(self.tokens, self.cache)

    @rule(batch=BATCH, num_new=st.integers(1, 4))
    def answer(self, batch: list[int], num_new: int) -> None:
        """The model says something; its last token is not in the cache yet."""
        prompt = [*self.tokens, *batch]
        self.tokens = [*prompt, *ENGINE.generate(prompt, self.cache, num_new)[:-1]]

    @rule(batch=BATCH, continuation=BATCH)
    def score(self, batch: list[int], continuation: list[int]) -> None:
        """Asking how likely something is leaves no trace."""
        ENGINE.score([*self.tokens, *batch], self.cache, continuation)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        """An answer is taken back, as far as the windows reach."""
        lowest = 0 if self.first == 0 else self.first + WINDOW - 1
        length = data.draw(st.integers(lowest, len(self.tokens)))
        ENGINE.crop(self.cache, length)
        del self.tokens[length:]

    @precondition(lambda self: self.tokens and self.first == 0)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """A prefix goes to the fabric and comes back."""
        length = data.draw(st.integers(1, len(self.tokens)))
        self.cache = ENGINE.restore(*ENGINE.capture(self.cache, 0, length))
        del self.tokens[length:]
        self.first = max(0, length - WINDOW + 1)

    @invariant()
    def holds_the_kv_of_its_tokens(self) -> None:
        """Oracle: all of them computed at once, in a new cache."""
        assert ENGINE.cached_tokens(self.cache) == len(self.tokens)
        if len(self.tokens) > self.first:
            again, _ = ENGINE.prefill(self.tokens)
            expected = ENGINE.capture(again, self.first, len(self.tokens))
            found = ENGINE.capture(self.cache, self.first, len(self.tokens))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


TestConversation = ConversationMachine.TestCase
TestConversation.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
