"""Basis: streamed moments equal batch statistics; projection inverts on its span."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.basis import Basis, Moments, fit_basis


def rows(num_rows: int, width: int, seed: int = 0, mean: float = 50.0) -> torch.Tensor:
    """Rows with a mean much larger than their spread."""
    draw = torch.Generator().manual_seed(seed)
    spread = torch.linspace(1, -4, width).exp()
    return torch.randn(num_rows, width, generator=draw) * spread + mean


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(0, 1000))
def test_moments_do_not_depend_on_how_rows_are_batched(sizes: list[int], seed: int) -> None:
    """Streamed in windows, or all at once: the same mean and covariance."""
    data = rows(sum(sizes), 6, seed)
    streamed = Moments(6)

    for batch in data.split(sizes):
        streamed.add(batch)

    mean, covariance = streamed.mean_and_covariance()
    assert streamed.num_rows == len(data)
    assert torch.allclose(mean, data.mean(dim=0), rtol=1e-5)
    centered = (data - data.mean(dim=0)).double()
    assert torch.allclose(covariance.double(), centered.T @ centered / len(data), atol=1e-4)


def test_a_large_mean_does_not_eat_small_variances() -> None:
    """The least direction has a variance of 1e-7 of the squared mean and is still found."""
    moments = Moments(12)
    moments.add(rows(200, 12))
    moments.add(rows(200, 12, seed=1))

    variance = fit_basis(moments).variance_C

    assert variance[-1] == pytest.approx(float(torch.tensor(-8.0).exp()), rel=0.3)


def test_directions_are_orthonormal_and_sorted() -> None:
    """Squared error of coefficients is then squared error of rows."""
    moments = Moments(10)
    moments.add(rows(300, 10))

    basis = fit_basis(moments)

    gram = basis.directions_WC.float().T @ basis.directions_WC.float()
    assert torch.allclose(gram, torch.eye(10), atol=3e-3)
    assert (basis.variance_C.diff() <= 0).all()
    peaks = basis.directions_WC.abs().argmax(dim=0)
    assert (basis.directions_WC[peaks, torch.arange(10)] > 0).all()


def test_rows_in_the_span_come_back() -> None:
    """A full basis loses only what 16-bit directions cost."""
    data = rows(300, 10)
    moments = Moments(10)
    moments.add(data)
    basis = fit_basis(moments)

    again = basis.reconstruct(basis.project(data))

    assert torch.allclose(again, data, atol=0.02)


def test_columns_reconstruct_alone() -> None:
    """A layer's rows of the basis give that layer's elements, and no others are computed."""
    moments = Moments(10)
    moments.add(rows(300, 10))
    basis = fit_basis(moments).truncated(4)
    coefficients = basis.project(rows(7, 10, seed=3))

    whole = basis.reconstruct(coefficients)

    assert torch.equal(basis.reconstruct(coefficients, slice(4, 7)), whole[:, 4:7])


def test_fewer_rows_than_elements_give_fewer_directions() -> None:
    """Directions that no row spans are not invented."""
    moments = Moments(10)
    moments.add(rows(5, 10))

    assert fit_basis(moments).rank == 4
    assert fit_basis(moments, max_rank=2).rank == 2


def test_rows_that_are_not_finite_are_refused_and_change_nothing() -> None:
    """One would spoil every direction."""
    moments = Moments(3)
    moments.add(torch.eye(3))

    with pytest.raises(ValueError, match="finite"):
        moments.add(torch.tensor([[1.0, float("inf"), 0.0]]))

    assert moments.num_rows == 3
    assert torch.isfinite(moments.mean_and_covariance()[1]).all()


def test_one_row_has_no_covariance() -> None:
    """Said so rather than divided by."""
    moments = Moments(3)
    moments.add(torch.ones(1, 3))

    with pytest.raises(ValueError, match="at least 2 rows"):
        moments.mean_and_covariance()


def test_shapes_that_disagree_are_refused() -> None:
    """A basis that exists can be used."""
    with pytest.raises(ValueError, match="disagree"):
        Basis(
            mean_W=torch.zeros(3),
            directions_WC=torch.zeros(4, 2, dtype=torch.float16),
            variance_C=torch.zeros(2),
        )


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    at=st.integers(0, 5),
    seed=st.integers(0, 100),
)
def test_moments_go_on_from_a_state_to_the_same_bits(sizes: list[int], at: int, seed: int) -> None:
    """Before any row, between flushes and after them."""
    batches = rows(sum(sizes), 4, seed).split(sizes)
    straight, first = Moments(4), Moments(4)
    for batch in batches:
        straight.add(batch)
    for batch in batches[:at]:
        first.add(batch)

    resumed = Moments.from_state({name: part.clone() for name, part in first.state().items()})
    first.add(rows(5, 4, seed=999))
    for batch in batches[at:]:
        resumed.add(batch)

    assert resumed.num_rows == straight.num_rows
    assert torch.equal(resumed.shift_W, straight.shift_W)
    if straight.num_rows > 1:
        for mine, other in zip(
            resumed.mean_and_covariance(), straight.mean_and_covariance(), strict=True
        ):
            assert torch.equal(mine, other)


@pytest.mark.parametrize(
    "change",
    [
        {"gram": torch.zeros(3, 4)},
        {"shift": torch.zeros(3)},
        {"pending": torch.zeros(5, 3)},
        {"num_rows": torch.tensor([2])},
        {"num_rows": torch.tensor([0])},
    ],
)
def test_a_state_whose_shapes_disagree_is_refused(change: dict[str, torch.Tensor]) -> None:
    """Rather than sums of something else."""
    moments = Moments(4)
    moments.add(rows(5, 4))

    with pytest.raises(ValueError, match="disagree"):
        Moments.from_state(moments.state() | change)
