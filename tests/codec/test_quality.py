"""`compare_logits`: known values, and no silent broadcast."""

from __future__ import annotations

import math

import pytest
import torch

from codec.quality import compare_logits


def test_equal_logits_agree_entirely() -> None:
    """Also when one is shifted: only differences of logits mean anything."""
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))

    found = compare_logits(logits, logits + 3)

    assert found.mean_kl == pytest.approx(0, abs=1e-12)
    assert (found.num_tokens, found.top1_agreement) == (5, 1.0)


def test_a_known_divergence() -> None:
    """KL of (1/2, 1/2) against (1/4, 3/4), on one of two tokens; that one's top differs."""
    fair, skewed = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()

    found = compare_logits(torch.stack([fair, skewed]), torch.stack([skewed, skewed]))

    assert found.mean_kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2)
    assert found.top1_agreement == 0.5


@pytest.mark.parametrize("shapes", [((2, 3), (1, 3)), ((0, 3), (0, 3)), ((3,), (3,))])
def test_other_shapes_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Broadcasting would compare one token with many."""
    with pytest.raises(ValueError, match="need equal shapes"):
        compare_logits(torch.zeros(shapes[0]), torch.zeros(shapes[1]))
