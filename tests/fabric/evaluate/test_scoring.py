"""One sample: logits compared as by hand, the reference run once, only what is coded replaced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fabric.engines.transformers import TransformersEngine
from fabric.evaluate.arms import FullPrecision
from fabric.evaluate.scoring import Figures, Scorer, compare, matched
from fabric.evaluate.sets import Sample
from fabric.evaluate.vocabulary import Vocabulary
from tests.fabric.engines.tiny import VOCABULARY, logits_without_cache, some_tokens
from tests.fabric.evaluate.small import SMALL, CharacterTokenizer, NoiseArm, small_loaded

WORDS = Vocabulary(CharacterTokenizer(), VOCABULARY)


class CountingEngine(TransformersEngine):
    """Counts the prompts that were prefilled."""

    num_prefills = 0

    def prefill(self, *args: Any, **options: Any) -> Any:
        """See the parent."""
        self.num_prefills += 1
        return super().prefill(*args, **options)


@pytest.fixture(scope="module")
def engine() -> CountingEngine:
    """A tiny model."""
    return CountingEngine(small_loaded(), window_tokens=8)


def a_sample(**options: Any) -> Sample:
    """Random tokens of the small protocol's length."""
    tokens = some_tokens(SMALL.sample_tokens, seed=3)
    cut = SMALL.context_tokens
    return Sample("prose", tuple(tokens[:cut]), tuple(tokens[cut:]), **options)


def scored(engine: TransformersEngine, sample: Sample, *arms: Any) -> list[Figures]:
    """Figures of each arm."""
    return list(Scorer(engine, WORDS, SMALL).score(sample, arms))


def test_logits_are_compared_as_by_hand() -> None:
    """Over more tokens than are compared at a time, and a block that is not full."""
    draw = np.random.default_rng(0)
    reference, restored = draw.normal(0, 3, size=(2, 70, 11))
    tokens = draw.integers(11, size=70).tolist()

    def log_probabilities(logits: Any) -> Any:
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    p, q = log_probabilities(reference), log_probabilities(restored)
    rows = np.arange(70)

    found = compare(torch.tensor(reference), torch.tensor(restored), tokens)

    assert found.kl == pytest.approx((np.exp(p) * (p - q)).sum(axis=1).mean())
    assert found.top1 == pytest.approx((p.argmax(1) == q.argmax(1)).mean())
    assert found.nll == pytest.approx(-q[rows, tokens].mean())
    assert found.nll_reference == pytest.approx(-p[rows, tokens].mean())
    assert found.kl > 0.1
    assert 0 < found.top1 < 1


def test_equal_logits_are_at_no_distance() -> None:
    """Exactly, even where a token is ruled out."""
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    logits[:, 3] = -torch.inf

    found = compare(logits, logits.clone(), [0, 1, 2, 4, 5])

    assert (found.kl, found.top1) == (0.0, 1.0)
    assert found.nll == found.nll_reference


@pytest.mark.parametrize(("shape", "tokens"), [((3, 5), [1, 2]), ((2, 4), [1, 2]), ((0, 5), [])])
def test_logits_that_do_not_fit_are_refused(shape: tuple[int, int], tokens: list[int]) -> None:
    """Other tokens, another vocabulary, nothing at all."""
    with pytest.raises(ValueError, match="logits"):
        compare(torch.zeros(len(tokens), 5), torch.zeros(shape), tokens)


@pytest.mark.parametrize(
    ("found", "share"),
    [([1, 2, 3, 4], 1.0), ([9, 2, 3, 4], 0.0), ([1, 2, 9, 4], 0.5), ([1, 2, 3], 0.75), ([], 0.0)],
)
def test_tokens_match_until_the_first_that_differs(found: list[int], share: float) -> None:
    """What comes after it follows from it, and an early end is a difference."""
    assert matched([1, 2, 3, 4], found) == share


def test_full_precision_is_the_zero_of_every_scale(engine: CountingEngine) -> None:
    """A cache restored from what was captured says what the model says."""
    (found,) = scored(engine, a_sample(num_greedy=5), FullPrecision(engine.geometry))

    assert found.kl < 1e-9
    assert (found.top1, found.greedy_match) == (1.0, 1.0)
    assert found.nll == pytest.approx(found.nll_reference, abs=1e-6)
    assert found.raw_bytes == found.stored_bytes


def test_the_reference_is_what_one_plain_run_says(engine: CountingEngine) -> None:
    """Likelihood of each following token, over the whole sequence at once."""
    loaded = small_loaded()
    sample = a_sample()
    tokens = [*sample.context, *sample.continuation]
    logits = logits_without_cache(loaded.model, tokens)[len(sample.context) - 1 : -1]
    wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(sample.continuation))

    (found,) = scored(engine, sample, FullPrecision(engine.geometry))

    assert found.nll_reference == pytest.approx(float(wanted), abs=1e-4)


def test_only_rows_between_the_exact_ones_are_coded(engine: CountingEngine) -> None:
    """An arm is given them as the engine holds them, and from where they begin."""
    arm = NoiseArm(0.0, engine.geometry)
    sample = a_sample()
    cache, _ = engine.prefill(sample.context[:-1])
    stop = SMALL.context_tokens - SMALL.exact_last
    keys, values = engine.capture(cache, SMALL.exact_first, stop)

    (found,) = scored(engine, sample, arm)

    ((keys_given, values_given, start),) = arm.calls
    assert start == SMALL.exact_first
    assert torch.equal(keys_given, keys)
    assert torch.equal(values_given, values)
    assert found.raw_bytes == len(keys) * engine.geometry.raw_bytes_per_token
    assert found.raw_bytes == 4 * found.stored_bytes


def test_more_noise_is_further_away(engine: CountingEngine) -> None:
    """What an arm gives back reaches the model, and one arm does not touch the next."""
    arms = [
        NoiseArm(0.02, engine.geometry),
        NoiseArm(1.0, engine.geometry),
        FullPrecision(engine.geometry),
    ]

    little, much, none = scored(engine, a_sample(num_greedy=8), *arms)

    assert 1e-6 < little.kl < much.kl / 10
    assert little.top1 >= much.top1
    assert much.greedy_match is not None
    assert much.greedy_match < 1
    assert none.kl < 1e-9
    assert little.nll_reference == much.nll_reference == none.nll_reference


def test_the_reference_is_run_once_for_all_arms(engine: CountingEngine) -> None:
    """It is most of the time."""
    engine.num_prefills = 0

    found = scored(engine, a_sample(), *(NoiseArm(0.1, engine.geometry) for _ in range(4)))

    assert len(found) == 4
    assert engine.num_prefills == 1


def test_a_lookup_is_found_or_not_by_each(engine: CountingEngine) -> None:
    """The answer that the model itself gives is found by an arm that changes nothing."""
    sample = a_sample()
    said = CharacterTokenizer().decode(engine.generate(sample.context, None, 4)).strip()
    right = a_sample(num_greedy=4, answer=said)
    wrong = a_sample(num_greedy=4, answer="not that")

    (found,) = scored(engine, right, FullPrecision(engine.geometry))
    (missed,) = scored(engine, wrong, FullPrecision(engine.geometry))
    (broken,) = scored(engine, right, NoiseArm(5.0, engine.geometry))

    assert (found.is_found, found.is_found_reference, found.greedy_match) == (True, True, None)
    assert (missed.is_found, missed.is_found_reference) == (False, False)
    assert (broken.is_found, broken.is_found_reference) == (False, True)


def test_a_sample_that_is_not_continued_has_no_such_figures(engine: CountingEngine) -> None:
    """None, which is not zero."""
    (found,) = scored(engine, a_sample(), FullPrecision(engine.geometry))

    assert (found.greedy_match, found.is_found, found.is_found_reference) == (None, None, None)
