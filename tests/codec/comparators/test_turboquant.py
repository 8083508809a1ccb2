"""TurboQuant: the codebook is the best one, the rotation is one, bytes are as counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from codec.comparators.turboquant import RotationCoder, lloyd_max, rotation
from tests.codec.comparators.caches import normal, relative_error

NORMAL = 10**6
"""A head so wide that a coordinate's density is the normal one."""


@pytest.mark.parametrize(
    ("bits", "wanted"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)]
)
def test_the_normal_density_gives_the_published_distortion(bits: int, wanted: float) -> None:
    """Max (1960) to the four digits that a hand calculation could give."""
    assert lloyd_max(NORMAL, bits).distortion == pytest.approx(wanted, rel=5e-4)


def test_two_bits_of_the_normal_density_have_the_published_levels() -> None:
    """In units of the standard deviation: 0.4528 and 1.510, cut at 0.9816."""
    book = lloyd_max(NORMAL, 2)

    levels = np.array(book.levels) * math.sqrt(NORMAL)
    borders = np.array(book.borders) * math.sqrt(NORMAL)

    assert levels == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=5e-4)
    assert borders == pytest.approx([-0.9816, 0, 0.9816], abs=5e-4)


def test_many_levels_come_near_the_high_rate_formula() -> None:
    """Panter and Dite: pi sqrt(3) / 2 / levels ** 2, from below."""
    distortion = lloyd_max(NORMAL, 8).distortion

    assert distortion == pytest.approx(math.pi * math.sqrt(3) / 2 / 256**2, rel=0.02)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_uniform_density_gives_even_levels(bits: int) -> None:
    """A coordinate of a random point of the ordinary sphere is uniform (Archimedes)."""
    book = lloyd_max(3, bits)
    num = 2**bits

    assert book.levels == pytest.approx([(2 * n + 1 - num) / num for n in range(num)], abs=1e-4)
    assert book.distortion == pytest.approx(num**-2, rel=1e-4)


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_the_means_of_their_cells(head_dim: int, bits: int) -> None:
    """Both conditions of an optimum, on drawn coordinates instead of the density."""
    draw = np.random.default_rng(0)
    vectors = draw.standard_normal((200_000 // head_dim * 8, head_dim))
    drawn = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).ravel()
    book = lloyd_max(head_dim, bits)

    cells = np.searchsorted(book.borders, drawn)
    means = [drawn[cells == number].mean() for number in range(2**bits)]

    sigma = head_dim**-0.5
    assert means == pytest.approx(book.levels, abs=0.02 * sigma)
    halfway = (np.array(book.levels)[1:] + np.array(book.levels)[:-1]) / 2
    assert book.borders == pytest.approx(halfway.tolist(), abs=1e-9)
    error = (drawn - np.array(book.levels)[cells]) ** 2
    assert head_dim * error.mean() == pytest.approx(book.distortion, rel=0.01)


@pytest.mark.parametrize(("head_dim", "bits"), [(2, 4), (0, 4), (64, 0), (64, 9)])
def test_a_quantizer_that_is_not_defined_is_refused(head_dim: int, bits: int) -> None:
    """In a plane the density has no bound."""
    with pytest.raises(ValueError, match="need heads of 3"):
        lloyd_max(head_dim, bits)


@pytest.mark.parametrize("head_dim", [3, 64, 80, 256])
def test_a_rotation_keeps_lengths_and_is_the_same_every_time(head_dim: int) -> None:
    """Orthogonal to 24 bits; another seed gives another."""
    turn = rotation(head_dim, 0)
    rotation.cache_clear()

    assert torch.allclose(turn @ turn.T, torch.eye(head_dim), atol=2e-6)
    assert torch.equal(turn, rotation(head_dim, 0))
    assert not torch.allclose(turn, rotation(head_dim, 1), atol=0.1)


def test_a_rotation_is_the_orthogonal_factor_with_a_positive_diagonal() -> None:
    """Whatever signs a linear algebra library prefers."""
    normals = torch.randn(8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    triangular = rotation(8, 5).double().T @ normals

    assert (triangular.diagonal() > 0.01).all()
    assert triangular.tril(-1).abs().max() < 1e-5


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("num_tokens", "head_dim"), [(1, 64), (67, 80), (64, 256), (5, 7)])
def test_a_cache_takes_the_bytes_counted_by_hand(bits: int, num_tokens: int, head_dim: int) -> None:
    """The codes in one stream of bits, and two bytes per head vector."""
    vectors = num_tokens * 2 * 3

    data = RotationCoder(bits).encode(normal(num_tokens, 2, 3, head_dim))

    assert len(data) == math.ceil(vectors * head_dim * bits / 8) + 2 * vectors


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_any_vectors_come_back_with_the_error_of_the_codebook(bits: int, head_dim: int) -> None:
    """Also those with one outlying channel: that is the rotation's use.

    One direction is one draw of the rotation, so its error varies more than a mean does.
    """
    coder = RotationCoder(bits)
    spiky = normal(200, 1, 2, head_dim) * torch.where(torch.arange(head_dim) == 3, 100.0, 0.1)
    wanted = lloyd_max(head_dim, bits).distortion

    for array, tolerance in ((normal(200, 1, 2, head_dim), 0.05), (spiky, 0.6)):
        found = coder.decode(coder.encode(array), tuple(array.shape))

        assert relative_error(found, array) == pytest.approx(wanted, rel=tolerance)


def test_scale_does_not_matter() -> None:
    """A power of two changes the norms' exponents only, far beyond float16."""
    array, coder = normal(20, 1, 2, 64), RotationCoder(3)

    plain = coder.decode(coder.encode(array), (20, 1, 2, 64))
    large = coder.decode(coder.encode(array * 2.0**100), (20, 1, 2, 64))

    assert torch.equal(large, plain * 2.0**100)


def test_nothing_comes_back_as_nothing() -> None:
    """A zero vector has no direction; its norm says it all."""
    array = torch.zeros(4, 1, 2, 64)
    array[2] = 1.5

    found = RotationCoder(4).decode(RotationCoder(4).encode(array), (4, 1, 2, 64))

    assert found[[0, 1, 3]].abs().max() == 0
    assert relative_error(found[2], array[2]) < 0.05


def test_every_head_vector_is_turned_alike() -> None:
    """Equal vectors come back equal: the rotation is no function of place."""
    array = normal(1, 1, 1, 64).expand(3, 2, 2, 64).contiguous()

    found = RotationCoder(2).decode(RotationCoder(2).encode(array), (3, 2, 2, 64))

    # Not to the bit: a product of matrices may round by row.
    assert torch.allclose(found, found[:1, :1, :1].expand_as(found), atol=1e-5)


@pytest.mark.parametrize("change", [-1, 1])
def test_bytes_of_another_length_are_refused(change: int) -> None:
    """So every byte that is counted is needed."""
    data = RotationCoder(3).encode(normal(7, 1, 2, 64)) + b"x"

    with pytest.raises(ValueError, match="bytes"):
        RotationCoder(3).decode(data[: len(data) - 1 + change], (7, 1, 2, 64))
