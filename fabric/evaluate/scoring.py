"""One sample: the reference pass once, then each arm's restored cache against it.

1. The context but for its last token is prefilled at full precision, and captured.
2. The continuation is scored from that cache, teacher-forced, and where asked for the
   context is continued greedily: the reference.
3. Each arm codes the rows between the exact first and last ones; a cache is restored from
   what came back, and does the same.

One sample and one arm are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fabric.engines.protocol import Engine
from fabric.evaluate.arms import Arm
from fabric.evaluate.config import EvaluationConfig
from fabric.evaluate.sets import Sample
from fabric.evaluate.vocabulary import Vocabulary

_BLOCK_TOKENS: Final = 32
"""Compared at a time: distributions are widened to 64 bits, over the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one arm did to one sample."""

    set_name: str
    num_tokens: int
    kl: float
    """Mean over the scored tokens of KL(full precision || restored), nats."""

    top1: float
    """Share of tokens with the same likeliest next token."""

    nll: float
    """Mean negative log likelihood of the tokens that follow, from the restored cache."""

    nll_reference: float
    greedy_match: float | None
    """Share of greedy tokens before the first that differs."""

    is_found: bool | None
    """Whether a look-up was answered; ``None`` where there was none."""

    is_found_reference: bool | None
    raw_bytes: int
    """Of the coded tokens, in 16 bits."""

    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Restored predictions of some tokens beside those of full precision; means over tokens."""

    kl: float
    top1: float
    nll: float
    nll_reference: float


def compare(reference_TV: Tensor, restored_TV: Tensor, continuation: Sequence[int]) -> Comparison:
    """Compare logits that predict the same tokens, ``continuation``.

    Raises
    ------
    ValueError
        If there is no token, or the shapes do not fit together.
    """
    shape = (len(continuation), reference_TV.shape[-1])
    if not continuation or reference_TV.shape != shape or restored_TV.shape != shape:
        raise ValueError(
            f"need logits of {len(continuation)} > 0 tokens, "
            f"got {tuple(reference_TV.shape)} and {tuple(restored_TV.shape)}"
        )
    totals = torch.zeros(4, dtype=torch.float64)
    wanted = torch.tensor(list(continuation))
    for start in range(0, len(wanted), _BLOCK_TOKENS):
        block = slice(start, start + _BLOCK_TOKENS)
        reference = reference_TV[block].double().log_softmax(dim=-1)
        restored = restored_TV[block].double().log_softmax(dim=-1)
        at = wanted[block, None]
        # Where the reference rules a token out entirely, it adds nothing.
        apart = torch.where(reference.isneginf(), 0.0, reference.exp() * (reference - restored))
        same = reference.argmax(dim=-1) == restored.argmax(dim=-1)
        totals += torch.stack(
            [
                apart.sum(),
                same.double().sum(),
                -restored.gather(1, at).sum(),
                -reference.gather(1, at).sum(),
            ]
        )
    kl, top1, nll, nll_reference = (totals / len(wanted)).tolist()
    return Comparison(max(0.0, kl), top1, nll, nll_reference)


def matched(reference: Sequence[int], found: Sequence[int]) -> float:
    """Share of ``reference`` before the first token that ``found`` has otherwise.

    Examples
    --------
    >>> matched([5, 6, 7, 8], [5, 6, 9, 8])
    0.5
    """
    pairs = zip(reference, found, strict=False)
    differs = (number for number, (one, other) in enumerate(pairs) if one != other)
    return next(differs, min(len(reference), len(found))) / len(reference)


class Scorer:
    """Runs samples through one engine; holds nothing between them."""

    def __init__(
        self, engine: Engine[Any], vocabulary: Vocabulary, config: EvaluationConfig
    ) -> None:
        """Score on ``engine`` by the protocol of ``config``."""
        self._engine = engine
        self._vocabulary = vocabulary
        self._config = config

    def score(self, sample: Sample, arms: Sequence[Arm]) -> Iterator[Figures]:
        """What each arm does to ``sample``, in order."""
        context = sample.context
        cache, _ = self._engine.prefill(context[:-1])
        keys_TLHD, values_TLHD = self._engine.capture(cache, 0, len(context) - 1)
        reference_TV = self._engine.score(context, cache, sample.continuation)
        reference_tokens = self._continued(sample, cache)
        del cache
        coded = slice(self._config.exact_first, len(context) - self._config.exact_last)
        raw_bytes = (coded.stop - coded.start) * self._engine.geometry.raw_bytes_per_token
        for arm in arms:
            keys, values, stored_bytes = arm.code(keys_TLHD[coded], values_TLHD[coded], coded.start)
            restored = self._engine.restore(
                _patched(keys_TLHD, coded, keys), _patched(values_TLHD, coded, values)
            )
            restored_TV = self._engine.score(context, restored, sample.continuation)
            tokens = self._continued(sample, restored)
            del restored
            found = compare(reference_TV, restored_TV, sample.continuation)
            yield Figures(
                set_name=sample.set_name,
                num_tokens=len(sample.continuation),
                kl=found.kl,
                top1=found.top1,
                nll=found.nll,
                nll_reference=found.nll_reference,
                greedy_match=self._match(sample, reference_tokens, tokens),
                is_found=self._is_found(sample, tokens),
                is_found_reference=self._is_found(sample, reference_tokens),
                raw_bytes=raw_bytes,
                stored_bytes=stored_bytes,
            )

    def _continued(self, sample: Sample, cache: object) -> list[int]:
        """Greedy tokens; they stay in ``cache``, so this comes last."""
        if not sample.num_greedy:
            return []
        return self._engine.generate(sample.context, cache, sample.num_greedy)

    def _match(
        self, sample: Sample, reference: Sequence[int], tokens: Sequence[int]
    ) -> float | None:
        return matched(reference, tokens) if sample.num_greedy and not sample.answer else None

    def _is_found(self, sample: Sample, tokens: Sequence[int]) -> bool | None:
        return self._vocabulary.is_answer(tokens, sample.answer) if sample.answer else None


def _patched(rows_TLHD: Tensor, coded: slice, with_TLHD: Tensor) -> Tensor:
    """A copy of ``rows_TLHD`` with the rows of ``coded`` replaced."""
    patched = rows_TLHD.clone()
    patched[coded] = with_TLHD
    return patched
