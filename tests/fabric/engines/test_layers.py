"""What is done to a cache's layers, tried on layers made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from codec.errors import UnsupportedModelError
from codec.geometry import KVGeometry
from fabric.engines.layers import common_geometry, first_position, refusal, stacked, truncate
from fabric.engines.transformers import KeepingSlidingLayer

SHAPE = (1, 2, 5, 3)


def layer_of(keys: torch.Tensor, values: torch.Tensor) -> DynamicLayer:
    """A full-attention layer that holds these."""
    layer = DynamicLayer()
    layer.update(keys, values)
    return layer


def cache_of(*layers: Any) -> Any:
    """As much of a cache as is looked at."""
    return SimpleNamespace(layers=list(layers))


def numbered(*shape: int) -> torch.Tensor:
    """Numbers that tell where each element was."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def test_the_first_position_counts_what_was_dropped() -> None:
    """Empty, full and sliding; the last holds the end of what it has seen."""
    sliding = DynamicSlidingWindowLayer(sliding_window=4)
    assert first_position(sliding) == 0

    sliding.update(numbered(*SHAPE), numbered(*SHAPE))

    assert first_position(sliding) == 5 - 3
    assert first_position(layer_of(numbered(*SHAPE), numbered(*SHAPE))) == 0


def test_stacking_takes_the_same_positions_of_every_layer() -> None:
    """Also where one of them starts later than the other."""
    keys, values = numbered(*SHAPE), numbered(*SHAPE) + 100
    late = KeepingSlidingLayer(sliding_window=3)
    late.update(keys[:, :, 2:] + 1000, values[:, :, 2:] + 1000)
    late.cumulative_length = 5

    keys_TLHD, values_TLHD = stacked(cache_of(layer_of(keys, values), late), 3, 5)

    assert keys_TLHD.shape == (2, 2, 2, 3)
    for token, position in enumerate((3, 4)):
        assert torch.equal(keys_TLHD[token, 0], keys[0, :, position])
        assert torch.equal(keys_TLHD[token, 1], keys[0, :, position] + 1000)
        assert torch.equal(values_TLHD[token, 0], values[0, :, position])


def test_truncation_levels_layers_of_any_length() -> None:
    """A failed run may have reached some of them; shorter ones are left alone."""
    cache = cache_of(
        *(layer_of(numbered(1, 2, n, 3), numbered(1, 2, n, 3)) for n in (5, 4, 3)),
        KeepingSlidingLayer(sliding_window=3),
        DynamicLayer(),
    )
    cache.layers[3].update(numbered(1, 2, 6, 3), numbered(1, 2, 6, 3))

    truncate(cache, 4)

    assert [layer.get_seq_length() for layer in cache.layers] == [4, 4, 3, 4, 0]
    assert torch.equal(cache.layers[3].keys, numbered(1, 2, 6, 3)[:, :, :4])


def test_geometry_is_read_from_the_cache() -> None:
    """Keys and values may differ in width."""
    cache = cache_of(*(layer_of(numbered(1, 2, 5, 3), numbered(1, 2, 5, 7)) for _ in range(2)))

    assert common_geometry(cache, 5, "model") == KVGeometry(
        num_layers=2, num_kv_heads=2, key_head_dim=3, value_head_dim=7
    )


@pytest.mark.parametrize(
    ("keys", "values", "why"),
    [
        ((1, 2, 5, 4), (1, 2, 5, 3), "layer 1: heads and widths .* differ"),
        ((1, 2, 5, 3), (1, 2, 5, 4), "layer 1: heads and widths .* differ"),
        ((1, 1, 5, 3), (1, 1, 5, 3), "layer 1: heads and widths .* differ"),
        ((1, 2, 5, 3), (1, 1, 5, 3), "layer 1: heads and widths .* differ"),
        ((1, 2, 4, 3), (1, 2, 4, 3), "layer 1: it does not cache every token"),
        ((2, 2, 5, 3), (2, 2, 5, 3), "layer 1: it does not cache every token"),
    ],
)
def test_a_layer_unlike_the_first_is_named(
    keys: tuple[int, ...], values: tuple[int, ...], why: str
) -> None:
    """One row of the codec has one width."""
    first = layer_of(numbered(*SHAPE), numbered(*SHAPE))

    with pytest.raises(UnsupportedModelError, match=why):
        common_geometry(cache_of(first, layer_of(numbered(*keys), numbered(*values))), 5, "model")


def test_a_layer_that_stored_nothing_is_named() -> None:
    """Its state is somewhere else."""
    with pytest.raises(UnsupportedModelError, match="model layer 0: it does not cache"):
        common_geometry(cache_of(DynamicLayer()), 5, "model")


def test_keys_and_values_of_a_layer_have_the_same_heads() -> None:
    """Even where all layers agree, as in latent attention."""
    layer = layer_of(numbered(1, 1, 5, 3), numbered(1, 2, 5, 3))

    with pytest.raises(UnsupportedModelError, match="layer 0"):
        common_geometry(cache_of(layer), 5, "model")


@pytest.mark.parametrize(
    ("config", "layer", "why"),
    [
        ({}, DynamicLayer(), ""),
        ({"sliding_window": 4}, DynamicSlidingWindowLayer(4), ""),
        ({"attention_chunk_size": 4}, DynamicSlidingWindowLayer(4), "chunked"),
        ({"attention_chunk_size": 4, "sliding_window": 4}, DynamicSlidingWindowLayer(4), ""),
        (
            {"attention_chunk_size": 4, "layer_types": ["chunked_attention"]},
            DynamicSlidingWindowLayer(4),
            "chunked",
        ),
        (
            {"attention_chunk_size": 4, "layer_types": ["full_attention"]},
            DynamicLayer(),
            "",
        ),
        ({"kv_lora_rank": 16}, DynamicLayer(), "latent"),
        ({}, KeepingSlidingLayer(4), "KeepingSlidingLayer"),
    ],
)
def test_only_plain_layers_are_served(config: dict[str, Any], layer: Any, why: str) -> None:
    """A subclass may do anything, so only the two known kinds pass."""
    found = refusal(SimpleNamespace(**config), 0, layer)

    assert (why in found) if why else found == ""


def test_a_keeping_layer_shows_attention_what_its_parent_shows() -> None:
    """For every mix of steps, lengths and windows; and it forgets nothing."""
    generator = torch.Generator().manual_seed(0)
    for window in (1, 2, 4):
        plain, keeping = DynamicSlidingWindowLayer(window), KeepingSlidingLayer(window)
        seen = torch.zeros(1, 2, 0, 3)
        for step in (1, 2, 1, 5, 1, 1):
            assert keeping.get_mask_sizes(step) == plain.get_mask_sizes(step)
            new = torch.randn(1, 2, step, 3, generator=generator)
            seen = torch.cat([seen, new], dim=2)
            shown = keeping.update(new, -new)
            if window > 1:  # slicing by -0 makes the parent keep all
                assert all(map(torch.equal, shown, plain.update(new, -new)))
            else:
                assert torch.equal(shown[0], new)
                plain.update(new, -new)
            assert torch.equal(keeping.keys, seen)
            assert keeping.get_seq_length() == seen.shape[2]


def test_a_keeping_layer_can_go_back_past_its_window() -> None:
    """As far as it holds, and on from there."""
    layer = KeepingSlidingLayer(3)
    layer.update(numbered(1, 1, 9, 2), numbered(1, 1, 9, 2))

    layer.crop(-5)

    assert layer.get_seq_length() == 4
    assert torch.equal(layer.values, numbered(1, 1, 9, 2)[:, :, :4])
    assert layer.update(numbered(1, 1, 1, 2), numbered(1, 1, 1, 2))[0].shape[2] == 3
