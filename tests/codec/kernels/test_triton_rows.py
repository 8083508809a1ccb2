"""How rows are cut into pairs, and the tables that turn them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import UnsupportedModelError
from codec.rope import RotarySpec
from tests.codec.kernels.interpreter import why_not_interpreted

if WHY_NOT := why_not_interpreted("triton_rows"):
    pytest.skip(WHY_NOT, allow_module_level=True)

from codec.kernels.triton_rows import RotaryTables, RowShape, check_directions, row_shape

SPEC = RotarySpec(
    inv_freq_LF=((1.0, 0.25), (0.5, 0.125), (1.0, 0.25)),
    attention_scaling_L=(1.0, 1.5, 1.0),
    table_dtype="bfloat16",
)


def turned(keys_TLHD: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Keys of two rotary pairs turned by tables, pair by pair."""
    layers_L = tables.table_of_layer_L.long()
    cos, sin = (t[:, layers_L, None] for t in (tables.cos_TUF, tables.sin_TUF))
    out = keys_TLHD.clone()
    pairs = ((0, 1), (2, 3)) if tables.is_interleaved else ((0, 2), (1, 3))
    for f, (i, j) in enumerate(pairs):
        first, second = keys_TLHD[..., i], keys_TLHD[..., j]
        out[..., i] = first * cos[..., f] - second * sin[..., f]
        out[..., j] = second * cos[..., f] + first * sin[..., f]
    return out


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_tables_turn_as_the_spec_does(style: Any) -> None:
    """Layers that rotate alike share a table, and `undone` takes it back."""
    spec = RotarySpec(
        inv_freq_LF=SPEC.inv_freq_LF,
        attention_scaling_L=SPEC.attention_scaling_L,
        table_dtype="bfloat16",
        style=style,
    )
    keys = torch.randn(4, 3, 2, 5, generator=torch.Generator().manual_seed(0))
    positions_T = torch.tensor([7, 0, 900, 8])

    tables = RotaryTables.of(spec, positions_T)

    assert tables.cos_TUF.shape == (4, 2, 2)
    assert tables.table_of_layer_L.tolist() == [0, 1, 0]
    assert torch.equal(turned(keys, tables), spec.rotate(keys, positions_T))
    assert torch.equal(turned(keys, tables.undone()), spec.unrotate(keys, positions_T))


@pytest.mark.parametrize("positions_T", [torch.zeros(2), torch.zeros(2, 1, dtype=torch.long)])
def test_positions_are_a_vector_of_integers(positions_T: torch.Tensor) -> None:
    """Anything else would be broadcast into something."""
    with pytest.raises(ValueError, match="integer positions"):
        RotaryTables.of(SPEC, positions_T)


def test_positions_past_those_of_a_spec_are_refused() -> None:
    """Its frequencies do not hold there."""
    spec = replace(SPEC, max_positions=8)

    assert len(RotaryTables.of(spec, torch.tensor([7, 0])).cos_TUF) == 2
    assert len(RotaryTables.of(spec, torch.zeros(0, dtype=torch.long)).cos_TUF) == 0
    with pytest.raises(UnsupportedModelError):
        RotaryTables.of(spec, torch.tensor([0, 8, 1]))


@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 4))
def test_pairs_cover_a_head(num_heads: int, head_dim: int, pairs: int) -> None:
    """As many as can hold all elements, of which one may be missing."""
    shape = RowShape(2, num_heads, head_dim, min(pairs, head_dim // 2))

    assert shape.width == 2 * num_heads * head_dim
    assert 0 <= 2 * shape.num_pairs - shape.width <= 2 * num_heads
    assert 2 * shape.pairs_per_head - head_dim in (0, 1)


@pytest.mark.parametrize("shape", [(3, 3, 2, 5), (4, 2, 2, 5), (4, 3, 2, 3), (4, 3, 10)])
def test_rows_that_tables_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    """Other tokens, other layers, too narrow heads, or no heads."""
    tables = RotaryTables.of(SPEC, torch.arange(4))
    assert row_shape((4, 3, 2, 5), tables).num_rotary_pairs == 2

    with pytest.raises(ValueError, match=r"tables|need rows"):
        row_shape(shape, tables)


def test_directions_past_32_bit_offsets_are_refused() -> None:
    """Kernels count elements of a matrix in 32 bits."""
    # The same elements again and again, which span only the first row.
    array = torch.zeros(2**15, dtype=torch.float16).expand(2**16, -1)
    check_directions("these", array, (2**16, 2**15), array)

    with pytest.raises(ValueError, match="these must span fewer"):
        check_directions(
            "these",
            torch.empty(2**16, 2**15, dtype=torch.float16, device="meta"),
            (2**16, 2**15),
            torch.empty(0, device="meta"),
        )
