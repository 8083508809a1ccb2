"""`CodedArm` and `checked`: what an arm is given, what it gives, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from codec.comparators.arm import CodedArm, Restored, checked, raw_bytes
from tests.codec.comparators.caches import normal


class Doubling:
    """Stores elements as float32 and gives twice of them back."""

    def encode(self, array_TLHD: Tensor) -> bytes:
        """All bytes of the elements."""
        return array_TLHD.numpy().tobytes()

    def decode(self, data: bytes, shape: tuple[int, ...]) -> Tensor:
        """Twice the elements."""
        return 2 * torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)


def test_an_arm_gives_what_its_coders_decode_and_counts_their_bytes() -> None:
    """Nothing comes back but through the bytes, and each kind through its own coder."""
    keys, values = normal(5, 2, 3, 4), normal(5, 2, 3, 6)

    restored = CodedArm("twice", Doubling(), Doubling()).restore(keys, values)

    assert torch.equal(restored.keys_TLHD, 2 * keys)
    assert torch.equal(restored.values_TLHD, 2 * values)
    assert restored.stored_bytes == 4 * 5 * 2 * 3 * (4 + 6)
    assert restored.ratio == 0.5


def test_a_ratio_is_against_sixteen_bits() -> None:
    """Whatever the tensors hold: 2 bytes an element, keys and values together."""
    keys, values = torch.zeros(10, 1, 1, 4), torch.zeros(10, 1, 1, 6)

    restored = Restored(keys_TLHD=keys, values_TLHD=values, stored_bytes=50)

    assert raw_bytes(keys, values) == 200
    assert restored.ratio == 4.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_arrays_are_made_float32_in_order(dtype: torch.dtype) -> None:
    """Any float type and any strides go in."""
    keys = normal(4, 3, 2, 5).transpose(1, 2).to(dtype)

    found, _ = checked(keys, keys)

    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert torch.equal(found, keys.float())


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_elements_that_are_not_finite_are_refused(kind: str, bad: float) -> None:
    """One is enough, in either array, and the message names which."""
    arrays = {"keys": normal(3, 2, 2, 4), "values": normal(3, 2, 2, 4)}
    arrays[kind][2, 1, 0, 3] = bad

    with pytest.raises(ValueError, match=f"{kind} must be finite"):
        checked(arrays["keys"], arrays["values"])


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (torch.zeros(3, 2, 4), torch.zeros(3, 2, 4)),
        (torch.zeros(3, 2, 2, 4), torch.zeros(2, 2, 2, 4)),
        (torch.zeros(3, 2, 2, 4), torch.zeros(3, 1, 2, 4)),
        (torch.zeros(3, 2, 2, 4), torch.zeros(3, 2, 1, 4)),
        (torch.zeros(0, 2, 2, 4), torch.zeros(0, 2, 2, 4)),
        (torch.zeros(3, 2, 2, 0), torch.zeros(3, 2, 2, 4)),
        (torch.zeros(3, 2, 2, 4, dtype=torch.int32), torch.zeros(3, 2, 2, 4)),
    ],
)
def test_arrays_that_are_no_cache_are_refused(keys: Tensor, values: Tensor) -> None:
    """Wrong axes, tokens, layers or heads that disagree, nothing at all, integers."""
    with pytest.raises(ValueError, match=r"need some float|must agree"):
        checked(keys, values)
