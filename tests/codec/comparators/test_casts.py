"""Arms that only cast: nothing lost in 16 bits, three bits of mantissa in 8."""

from __future__ import annotations

import pytest
import torch

from codec.comparators.casts import Fp8Coder, RawArm
from tests.codec.comparators.caches import normal

SHAPE = (7, 2, 3, 5)
SCALE_BYTES = 4 * 2 * 3


def test_raw_gives_everything_back_at_two_bytes_an_element() -> None:
    """Even bits that 16-bit storage would not hold; and not the caller's own tensors."""
    keys, values = normal(*SHAPE) + 1e-7, normal(7, 2, 3, 4) / 3

    restored = RawArm().restore(keys, values)

    assert torch.equal(restored.keys_TLHD, keys)
    assert torch.equal(restored.values_TLHD, values)
    assert restored.keys_TLHD.data_ptr() != keys.data_ptr()
    assert restored.stored_bytes == 2 * 7 * 2 * 3 * (5 + 4)
    assert restored.ratio == 1.0


def test_raw_refuses_what_is_not_finite() -> None:
    """As every arm does."""
    keys = normal(*SHAPE)
    keys[0, 0, 0, 0] = torch.nan

    with pytest.raises(ValueError, match="finite"):
        RawArm().restore(keys, normal(*SHAPE))


@pytest.mark.parametrize(("coder", "extra"), [(Fp8Coder(), 0), (Fp8Coder(True), SCALE_BYTES)])
def test_fp8_is_a_byte_an_element(coder: Fp8Coder, extra: int) -> None:
    """And four for each scale."""
    data = coder.encode(normal(*SHAPE))

    assert len(data) == 7 * 2 * 3 * 5 + extra


@pytest.mark.parametrize("coder", [Fp8Coder(), Fp8Coder(True)])
def test_fp8_is_within_half_a_step(coder: Fp8Coder) -> None:
    """Half of a mantissa's last bit, or of the least subnormal number."""
    array = normal(*SHAPE)
    scale = array.abs().amax(dim=(0, 3), keepdim=True) / 448 if coder.is_scaled else 1.0

    error = (coder.decode(coder.encode(array), SHAPE) - array).abs()

    assert (error <= torch.maximum(array.abs() * 2**-4, 2**-10 * scale * torch.ones(1))).all()
    assert error.max() > 0


def test_unscaled_fp8_gives_the_numbers_it_has_exactly_and_saturates() -> None:
    """448 is the greatest; 2 ** -9 the least, and half of it is nothing."""
    given = torch.tensor([1.0, -1.125, 448.0, 1e6, -1e6, 2.0**-9, 2.0**-10]).view(7, 1, 1, 1)

    found = Fp8Coder().decode(Fp8Coder().encode(given), (7, 1, 1, 1)).flatten()

    assert found.tolist() == [1.0, -1.125, 448.0, 448.0, -448.0, 2.0**-9, 0.0]


def test_scaled_fp8_follows_each_layer_and_head() -> None:
    """The largest of each comes back, whatever the others are like."""
    array = normal(*SHAPE) * torch.tensor([1e-6, 1.0, 1e6])[:, None]

    found = Fp8Coder(True).decode(Fp8Coder(True).encode(array), SHAPE)

    wanted_LH = array.abs().amax(dim=(0, 3))
    assert torch.allclose(found.abs().amax(dim=(0, 3)), wanted_LH, rtol=1e-6)
    assert ((found - array).square().sum((0, 3)) < 0.002 * array.square().sum((0, 3))).all()


@pytest.mark.parametrize("value", [0.0, 1e-42, 3e38])
def test_scaled_fp8_of_a_constant_is_finite(value: float) -> None:
    """No scale is zero, and none overflows."""
    array = torch.full(SHAPE, value)

    found = Fp8Coder(True).decode(Fp8Coder(True).encode(array), SHAPE)

    assert torch.allclose(found, array, rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("coder", [Fp8Coder(), Fp8Coder(True)])
@pytest.mark.parametrize("change", [-1, 1])
def test_fp8_bytes_of_another_length_are_refused(coder: Fp8Coder, change: int) -> None:
    """One too few, one too many."""
    data = coder.encode(normal(*SHAPE)) + b"x"

    with pytest.raises(ValueError, match="bytes"):
        coder.decode(data[: len(data) - 1 + change], SHAPE)
