"""Transformers' own sliding-window cache layers, as contenders in a race of appends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

Append = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes tokens' keys and values, gives the window's; shapes ``(1, heads, tokens, dim)``."""


def dynamic_layer(window_tokens: int) -> Append:
    """What a sliding layer does by default: concatenate, and keep a view."""
    return DynamicSlidingWindowLayer(sliding_window=window_tokens).update  # type: ignore[no-any-return]


def static_layer(window_tokens: int) -> Append:
    """What it does with a static cache: roll, write, and copy back."""
    layer = StaticSlidingWindowLayer(max_cache_len=window_tokens, sliding_window=window_tokens)
    return layer.update  # type: ignore[no-any-return]
