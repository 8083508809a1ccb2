"""How much a restored cache changes what the model says next.

Both logits predict the same tokens: the reference from the full-precision cache, the
other from the restored one, teacher-forced, so that one early difference does not count
again at every later token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Agreement:
    """Restored against full-precision predictions over some tokens."""

    num_tokens: int
    mean_kl: float
    """Mean over tokens of KL(reference || restored), nats."""

    top1_agreement: float
    """Share of tokens whose most likely next token is the same."""


def compare_logits(reference_TV: torch.Tensor, restored_TV: torch.Tensor) -> Agreement:
    """Compare predictions of the same tokens.

    Parameters
    ----------
    reference_TV, restored_TV
        Shape ``(T, vocabulary)``, any float type, ``T >= 1``.

    Raises
    ------
    ValueError
        If the shapes differ or there is no token.
    """
    if reference_TV.shape != restored_TV.shape or reference_TV.ndim != 2 or not len(reference_TV):
        raise ValueError(
            f"need equal shapes (T, V), got {tuple(reference_TV.shape)} and {tuple(restored_TV.shape)}"
        )
    reference = reference_TV.double().log_softmax(dim=-1)
    restored = restored_TV.double().log_softmax(dim=-1)
    divergence = (reference.exp() * (reference - restored)).sum(dim=-1)
    same = reference.argmax(dim=-1) == restored.argmax(dim=-1)
    return Agreement(
        num_tokens=len(reference),
        mean_kl=max(0.0, float(divergence.mean())),
        top1_agreement=float(same.double().mean()),
    )
