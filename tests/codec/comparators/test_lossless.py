"""Lossless arms: every bit back, whatever the layout, and less than raw where it repeats."""

from __future__ import annotations

import sys

import pytest
import torch

from codec.comparators.ans import TABLE_BYTES, RansCoder
from codec.comparators.lossless import BytesCoder
from codec.comparators.wire import tensor_bytes
from codec.entropy.deflate import DeflateCoder
from codec.entropy.stored import StoredCoder
from codec.entropy.zstd import ZstdCoder
from codec.errors import BackendUnavailable, CorruptBlobError
from tests.codec.comparators.caches import normal

AnyCoder = BytesCoder | RansCoder
CODERS: dict[str, AnyCoder] = {
    "zstd": BytesCoder(ZstdCoder),
    "zstd-planes": BytesCoder(ZstdCoder, has_planes=True),
    "deflate": BytesCoder(DeflateCoder),
    "deflate-planes": BytesCoder(DeflateCoder, has_planes=True),
    "ans-planes": RansCoder(),
}
SHAPES = [(1, 1, 1, 3), (33, 2, 3, 64), (64, 1, 2, 80), (7, 2, 1, 256)]


@pytest.fixture(params=CODERS.values(), ids=list(CODERS))
def coder(request: pytest.FixtureRequest) -> AnyCoder:
    """Each of them."""
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_comes_back(coder: AnyCoder, shape: tuple[int, ...]) -> None:
    """Of elements that bfloat16 holds, minus zero among them."""
    array = normal(*shape) * 10.0
    array = array.bfloat16().float()
    array.flatten()[0] = -0.0

    found = coder.decode(coder.encode(array), shape)

    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.int32), array.view(torch.int32))


def test_wider_elements_come_back_as_bfloat16(coder: AnyCoder) -> None:
    """Rounded to nearest, and nothing else."""
    array = normal(9, 1, 2, 8) / 3

    found = coder.decode(coder.encode(array), (9, 1, 2, 8))

    assert torch.equal(found, array.bfloat16().float())
    assert not torch.equal(found, array)


def test_a_constant_costs_next_to_nothing(coder: AnyCoder) -> None:
    """Tables and states, but no bits for elements."""
    array = torch.full((512, 2, 2, 32), -1.5)

    data = coder.encode(array)

    assert torch.equal(coder.decode(data, (512, 2, 2, 32)), array)
    assert len(data) < 2 * array.numel() / 50


def test_signs_and_exponents_of_normal_elements_repeat(coder: AnyCoder) -> None:
    """Smaller than raw, though no coder here can remove the mantissa."""
    array = normal(256, 2, 2, 64)

    saved = 1 - len(coder.encode(array)) / (2 * array.numel())

    assert 0.1 < saved < 0.4


def test_the_same_bytes_every_time(coder: AnyCoder) -> None:
    """Coding depends on nothing but the elements."""
    array = normal(40, 2, 2, 16)

    assert coder.encode(array) == coder.encode(array.clone())


@pytest.mark.parametrize("change", [-1, 1])
def test_bytes_of_another_length_are_refused(change: int) -> None:
    """Of coders that mind what follows their stream; DEFLATE leaves that to a checksum."""
    array = normal(9, 2, 1, 8)

    for coder in (CODERS["zstd"], CODERS["zstd-planes"], CODERS["ans-planes"]):
        data = coder.encode(array) + b"x"
        with pytest.raises((ValueError, CorruptBlobError)):
            coder.decode(data[: len(data) - 1 + change], (9, 2, 1, 8))


def test_planes_are_low_bytes_then_high_bytes() -> None:
    """Plain bytes have the low byte of an element first."""
    array = torch.tensor([1.0, -2.0]).view(2, 1, 1, 1)

    plain = BytesCoder(StoredCoder).encode(array)
    planes = BytesCoder(StoredCoder, has_planes=True).encode(array)

    assert plain == bytes([0x80, 0x3F, 0x00, 0xC0])
    assert planes == bytes([0x80, 0x00, 0x3F, 0xC0])
    assert plain == tensor_bytes(array.bfloat16())


def test_ans_is_as_small_as_the_entropy_of_its_planes() -> None:
    """Tables, states, and the order-0 entropy of each plane and layer, to a thousandth."""
    array = normal(512, 3, 2, 16) * torch.tensor([0.01, 1.0, 300.0])[:, None, None]
    array = array.bfloat16().float()
    entropy_bits = 0.0
    for layer in range(3):
        planes = array[:, layer].contiguous().bfloat16().view(torch.uint8).view(-1, 2)
        for plane in planes.T:
            share = plane.bincount().double() / len(plane)
            share = share[share > 0]
            entropy_bits -= float((share * share.log2()).sum()) * len(plane)

    data = RansCoder().encode(array)

    payload = len(data) - 2 * 3 * TABLE_BYTES - 4 * 32
    assert entropy_bits / 8 - 4 * 32 <= payload <= entropy_bits / 8 * 1.004


def test_ans_without_all_its_tables_is_refused() -> None:
    """Two per layer."""
    with pytest.raises(ValueError, match="need 4 tables"):
        RansCoder().decode(bytes(3 * TABLE_BYTES), (5, 2, 1, 8))


def test_zstd_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the remedy, and only once it is used."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    coder = BytesCoder(ZstdCoder)

    with pytest.raises(BackendUnavailable, match="zstandard is not available"):
        coder.encode(normal(2, 1, 1, 2))
