"""KIVI: errors of half a step, groups along the right axis, bytes as counted by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from codec.comparators.kivi import (
    PerChannelCoder,
    PerTokenCoder,
    _half_at_most,
    quantize_groups,
)
from tests.codec.comparators.caches import normal

BITS = (8, 4, 2)
SIZES = [(64, 64), (130, 80), (63, 256), (1, 7), (193, 64)]

halves = st.floats(-65504, 65504, width=32)


@given(st.lists(halves, min_size=1, max_size=20), st.sampled_from(BITS))
@example([0.0, 2.0**-149], 8)
def test_an_error_is_at_most_half_a_scale(elements: list[float], bits: int) -> None:
    """Of any group within the range of float16, because its range is rounded outwards."""
    values = torch.tensor([elements])

    groups = quantize_groups(values, 1, bits)

    error = (groups.values() - values).abs().max()
    rounding = 2**-23 * (values.abs().max() + groups.scale.float().abs() * 2**bits)
    rounding += torch.finfo(torch.float32).tiny  # a range below it divides to a scale of zero
    assert groups.zero.float() <= values.min()
    assert error <= groups.scale.float() / 2 + rounding


def test_a_scale_is_rounded_up() -> None:
    """Rounded to nearest it would be a quarter short here, and the top element out of reach."""
    values = torch.tensor([[0.0, 255 * 1.25 * 2**-24]])

    groups = quantize_groups(values, 1, 8)

    assert float(groups.scale) == 2 * 2**-24
    assert (groups.values() - values).abs().max() <= groups.scale.float() / 2


@given(st.lists(halves, min_size=2, max_size=20), st.sampled_from(BITS))
def test_a_scale_is_no_larger_than_the_range_asks_for(elements: list[float], bits: int) -> None:
    """Rounding outwards costs one float16 step of each, not more."""
    values = torch.tensor([elements])

    groups = quantize_groups(values, 1, bits)

    step = (values.max() - values.min()) / (2**bits - 1)
    zero_rounding = 2**-10 * values.min().abs() + 2**-24
    assert groups.scale.float() <= (step + zero_rounding / (2**bits - 1)) * (1 + 2**-9) + 2**-24


@given(st.floats(-65504, 2.0**100, width=32))
def test_rounding_down_to_float16_gives_the_next_one_below(value: float) -> None:
    """Not over the value, and the next float16 is."""
    found = _half_at_most(torch.tensor([value]))

    assert found.float() <= value
    above = torch.tensor(float(found.numpy()[0]), dtype=torch.float16).view(torch.int16)
    step = -1 if float(found) < 0 else 1
    if abs(float(found)) not in (0.0, 65504.0):
        assert (above + step).view(torch.float16).float() > value


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("num_tokens", "head_dim"), SIZES)
def test_keys_take_the_bytes_counted_by_hand(bits: int, num_tokens: int, head_dim: int) -> None:
    """Codes and four bytes per whole group; two bytes per element left over."""
    array = normal(num_tokens, 2, 3, head_dim)
    channels = 2 * 3 * head_dim
    groups, left = divmod(num_tokens, 64)

    data = PerChannelCoder(bits).encode(array)

    assert len(data) == groups * channels * (8 * bits + 4) + left * channels * 2


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "groups"), [(64, 64, 1), (130, 80, 2), (63, 256, 4), (1, 7, 1)]
)
def test_values_take_the_bytes_counted_by_hand(
    bits: int, num_tokens: int, head_dim: int, groups: int
) -> None:
    """Codes of each run of channels to a whole byte, and four bytes per group."""
    heads = num_tokens * 2 * 3
    runs = [64] * (head_dim // 64) + [head_dim % 64] * (head_dim % 64 > 0)

    data = PerTokenCoder(bits).encode(normal(num_tokens, 2, 3, head_dim))

    assert len(data) == sum(-(-heads * run * bits // 8) for run in runs) + 4 * heads * groups


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("num_tokens", "head_dim"), SIZES)
def test_keys_are_coded_per_channel(bits: int, num_tokens: int, head_dim: int) -> None:
    """Against a loop over groups; leftover tokens come back exactly."""
    array = normal(num_tokens, 1, 2, head_dim)
    coder = PerChannelCoder(bits)

    found = coder.decode(coder.encode(array), tuple(array.shape))

    for start in range(0, num_tokens // 64 * 64, 64):
        part, its = array[start : start + 64], found[start : start + 64]
        half_scale = (part.amax(0) - part.amin(0)) / (2**bits - 1) / 2
        assert ((its - part).abs() <= half_scale * 1.01 + 0.002).all()
    left = num_tokens // 64 * 64
    assert torch.equal(found[left:], array[left:])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("num_tokens", "head_dim"), SIZES)
def test_values_are_coded_per_token(bits: int, num_tokens: int, head_dim: int) -> None:
    """Against a loop over groups of channels."""
    array = normal(num_tokens, 1, 2, head_dim)
    coder = PerTokenCoder(bits)

    found = coder.decode(coder.encode(array), tuple(array.shape))

    for start in range(0, head_dim, 64):
        part, its = array[..., start : start + 64], found[..., start : start + 64]
        spread = part.amax(-1, keepdim=True) - part.amin(-1, keepdim=True)
        assert ((its - part).abs() <= spread / (2**bits - 1) / 2 * 1.01 + 0.002).all()


def test_an_outlier_channel_harms_no_other_key_channel() -> None:
    """What per-channel groups are for; values' groups would let it spoil the token."""
    array = normal(64, 1, 1, 64)
    array[..., 5] += 1000
    others = [channel for channel in range(64) if channel != 5]

    per_channel, per_token = (
        coder.decode(coder.encode(array), (64, 1, 1, 64))[..., others] - array[..., others]
        for coder in (PerChannelCoder(4), PerTokenCoder(4))
    )

    assert per_channel.abs().max() < 0.3
    assert per_token.abs().max() > 1


@pytest.mark.parametrize("coder", [PerChannelCoder(2), PerTokenCoder(2)])
@pytest.mark.parametrize("value", [0.0, -3.0, 0.125])
def test_a_constant_comes_back_exactly(
    coder: PerChannelCoder | PerTokenCoder, value: float
) -> None:
    """A scale of zero divides nothing."""
    array = torch.full((66, 1, 2, 80), value)

    assert torch.equal(coder.decode(coder.encode(array), tuple(array.shape)), array)


@pytest.mark.parametrize("coder", [PerChannelCoder(4), PerTokenCoder(4)])
@pytest.mark.parametrize("outlier", [1e6, -1e6, 3e38, -3e38])
def test_what_float16_cannot_hold_saturates(
    coder: PerChannelCoder | PerTokenCoder, outlier: float
) -> None:
    """The outlier's group may be lost, but everything is finite, and others are as before."""
    array = normal(64, 1, 2, 64)
    plain = coder.decode(coder.encode(array), (64, 1, 2, 64))
    array[7, 0, 1, 9] = outlier

    found = coder.decode(coder.encode(array), (64, 1, 2, 64))

    assert torch.isfinite(found).all()
    assert torch.equal(found[:, :, 0], plain[:, :, 0])
    assert abs(float(found[7, 0, 1, 9])) > 60000


@pytest.mark.parametrize("low", [-3e38, 70000.0])
def test_a_group_wholly_outside_float16_is_finite(low: float) -> None:
    """Its scale does not turn negative."""
    groups = quantize_groups(torch.tensor([[low, low + abs(low) / 4]]), 1, 2)

    assert groups.scale.float() >= 0
    assert torch.isfinite(groups.values()).all()


@pytest.mark.parametrize("coder", [PerChannelCoder(4), PerTokenCoder(4)])
@pytest.mark.parametrize("change", [-1, 1])
def test_bytes_of_another_length_are_refused(
    coder: PerChannelCoder | PerTokenCoder, change: int
) -> None:
    """So every byte that is counted is needed."""
    data = coder.encode(normal(70, 1, 2, 80)) + b"x"

    with pytest.raises(ValueError, match="bytes"):
        coder.decode(data[: len(data) - 1 + change], (70, 1, 2, 80))
