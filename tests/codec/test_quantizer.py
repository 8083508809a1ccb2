"""Block quantizer: error within half a step, metadata as the decoder sees it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.quantizer import (
    CODED_TYPES,
    METADATA_BITS,
    BlockType,
    dequantize,
    quantize,
    squared_error,
)

finite = st.floats(-1e4, 1e4, width=32)
blocks = st.integers(1, 9).flatmap(
    lambda size: st.lists(st.lists(finite, min_size=size, max_size=size), min_size=1, max_size=5)
)


@given(blocks, st.sampled_from([BlockType.INT2, BlockType.INT4]))
def test_an_integer_code_is_within_half_a_step(rows: list[list[float]], kind: BlockType) -> None:
    """The bound holds with the *rounded* shift and scale, up to what rounding them clips."""
    values = torch.tensor(rows)

    coded = quantize(values, kind)
    error = (dequantize(coded, kind) - values).abs()

    spread = values.amax(dim=1) - values.amin(dim=1)
    exact_step = spread / (2**kind.bits - 1)
    # Rounding to 11 bits moves shift and scale by a part in 2048, at each end of the range.
    slack = (values.abs().amax(dim=1) + spread) / 1024 + 1e-6
    assert (error <= (exact_step / 2 + slack)[:, None]).all()


@given(blocks)
def test_fp8_is_within_a_sixteenth_of_each_distance_from_the_middle(
    rows: list[list[float]],
) -> None:
    """E4M3 keeps 3 bits of mantissa, so half a unit is 1/16 of the value it rounds."""
    values = torch.tensor(rows)

    coded = quantize(values, BlockType.FP8)
    error = (dequantize(coded, BlockType.FP8) - values).abs()

    reach = (values - coded.shift_T.float()[:, None]).abs()
    farthest = reach.amax(dim=1, keepdim=True)
    # Past 3 bits: codes below the normal range, the scale's own rounding to 11 bits, and
    # the least float16, in which a tiny scale is counted.
    slack = farthest / 448 * 2**-9 + farthest / 512 + 448 * 2**-24
    assert (error <= reach / 16 + slack).all()


def test_a_constant_block_is_stored_in_its_shift() -> None:
    """A zero step must not divide."""
    values = torch.full((3, 7), 2.5)

    for kind in CODED_TYPES:
        coded = quantize(values, kind)
        assert coded.scale_T.tolist() == [0.0] * 3
        assert torch.equal(dequantize(coded, kind), values)


def test_values_beyond_sixteen_bits_saturate_to_finite_codes() -> None:
    """A coefficient past the float16 range costs error, never an infinity."""
    values = torch.tensor([[1e6, -1e6, 0.0]])

    for kind in CODED_TYPES:
        assert torch.isfinite(dequantize(quantize(values, kind), kind)).all()


@pytest.mark.parametrize(
    ("kind", "size", "bits"),
    [
        (BlockType.NONE, 64, 0),
        (BlockType.INT2, 1, 34),
        (BlockType.INT4, 1, 36),
        (BlockType.FP8, 1, 40),
        (BlockType.INT2, 1024, 2080),
        (BlockType.FP8, 16, 160),
    ],
)
def test_used_bits_count_shift_and_scale(kind: BlockType, size: int, bits: int) -> None:
    """The published budget: payload plus 32 bits per block and token; nothing for none."""
    assert METADATA_BITS == 32
    assert kind.used_bits(size) == bits


def test_squared_error_is_that_of_a_round_trip() -> None:
    """The allocator's error is the error a reader would see."""
    values = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0))

    for kind in CODED_TYPES:
        expected = (dequantize(quantize(values, kind), kind) - values).square().sum(dim=-1)
        assert torch.equal(squared_error(values, kind), expected)
    assert torch.equal(squared_error(values, BlockType.NONE), values.square().sum(dim=-1))


def test_none_has_no_codes() -> None:
    """Asking for them is a programming error, said so."""
    with pytest.raises(ValueError, match="no codes"):
        quantize(torch.zeros(1, 1), BlockType.NONE)
