"""What the engine does with the layers of a transformers cache, without importing it.

Letters that end array names are those of `codec.geometry`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from codec.errors import UnsupportedModelError
from codec.geometry import KVGeometry

Cache: TypeAlias = Any
"""A ``transformers.Cache``, which is untyped."""
Layer: TypeAlias = Any
"""One of the ``layers`` of a cache."""
Config: TypeAlias = Any
"""The configuration of a model's decoder."""


def refusal(config: Config, index: int, layer: Layer) -> str:
    """Why a layer that would cache in ``layer`` is not served; empty if it is."""
    kinds = getattr(config, "layer_types", None)
    is_chunked = getattr(config, "attention_chunk_size", None) and (
        kinds[index] == "chunked_attention"
        if kinds
        else not getattr(config, "sliding_window", None)
    )
    kind = type(layer).__name__
    if getattr(config, "kv_lora_rank", None):
        return "it caches a latent shared by all heads, and positions apart from it"
    if kind == "DummyLayer":
        return "it has no cache of its own"
    if kind.startswith("LinearAttention"):
        return "its recurrent state is right at one boundary only"
    if kind not in ("DynamicLayer", "DynamicSlidingWindowLayer"):
        return f"its cache is a {kind}"
    if is_chunked and kind == "DynamicSlidingWindowLayer":
        return "its attention is chunked"
    return ""


def common_geometry(cache: Cache, num_tokens: int, name: str) -> KVGeometry:
    """What the layers of ``cache`` hold, which must be the same in each."""
    shapes = []
    for index, layer in enumerate(cache.layers):
        if layer.keys is None or layer.keys.shape[::2] != (1, num_tokens):
            raise UnsupportedModelError(f"{name} layer {index}", "it does not cache every token")
        (_, heads, _, key_dim), value_dim = layer.keys.shape, layer.values.shape[-1]
        shapes.append((heads, key_dim, layer.values.shape[1], value_dim))
        if shapes[-1] != shapes[0] or heads != layer.values.shape[1]:
            raise UnsupportedModelError(
                f"{name} layer {index}", f"heads and widths {shapes[-1]} differ from {shapes[0]}"
            )
    return KVGeometry(
        num_layers=len(shapes),
        num_kv_heads=shapes[0][0],
        key_head_dim=shapes[0][1],
        value_head_dim=shapes[0][3],
    )


def first_position(layer: Layer) -> int:
    """Lowest position that a layer's cache still holds."""
    return int(layer.get_seq_length()) - (layer.keys.shape[-2] if layer.is_initialized else 0)


def stacked(cache: Cache, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of positions ``[start, stop)`` of every layer, ``(T, L, H, D)``, on the CPU."""

    def stack(name: str) -> torch.Tensor:
        parts = []
        for layer in cache.layers:
            first = first_position(layer)
            parts.append(getattr(layer, name)[0, :, start - first : stop - first].transpose(0, 1))
        return torch.stack(parts, dim=1).cpu()

    return stack("keys"), stack("values")


def truncate(cache: Cache, num_tokens: int) -> None:
    """Cut every layer to ``num_tokens``, even where a failed run left them uneven."""
    for layer in cache.layers:
        # Never by 0: older releases take that for the length to keep.
        if (excess := int(layer.get_seq_length()) - num_tokens) > 0:
            layer.crop(-excess)
