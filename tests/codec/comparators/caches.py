"""Small caches for tests of comparison arms."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Independent normal elements that bfloat16 holds exactly."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).bfloat16().float()


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Squared error over energy."""
    return float((found - wanted).square().sum() / wanted.square().sum())
