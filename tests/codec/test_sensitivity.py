"""The metric and the meter: algebra, and planted Fisher information that must be found."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.sensitivity import SHRINKAGE, TREND_TOKENS, Metric, SensitivityMeter, times_blocks
from tests.codec.entropy_samples import (
    DIMS,
    GEOMETRY,
    NUM_BLOCKS,
    WIDTHS,
    gradients,
    plain_rows,
    planted_blocks,
    planted_log_importance,
    sensitivity,
)


def some_blocks(num_blocks: int, head_dim: int, *, seed: int) -> torch.Tensor:
    """Positive semidefinite blocks, the first of which is not of full rank."""
    draw = torch.Generator().manual_seed(seed)
    half = torch.randn(num_blocks, head_dim, head_dim, generator=draw)
    half[0, :, 0] = 0
    return half @ half.transpose(1, 2)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 99), st.floats(0.001, 0.9))
def test_the_square_of_the_root_is_the_shrunk_block(
    num_blocks: int, head_dim: int, seed: int, shrinkage: float
) -> None:
    """A share of the identity of the block's own mean, the rest of the block."""
    blocks = some_blocks(num_blocks, head_dim, seed=seed) + 1e-3 * torch.eye(head_dim)

    root = Metric.of_blocks(blocks, shrinkage=shrinkage).root_BDD

    mean_B = blocks.diagonal(dim1=1, dim2=2).mean(1)
    shrunk = (1 - shrinkage) * blocks + shrinkage * mean_B[:, None, None] * torch.eye(head_dim)
    torch.testing.assert_close(root @ root, shrunk, rtol=1e-4, atol=1e-5 * float(mean_B.max()))
    torch.testing.assert_close(root, root.transpose(1, 2))
    assert (torch.linalg.eigvalsh(root) > 0).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_the_inverse_undoes_the_root(num_blocks: int, head_dim: int, seed: int) -> None:
    """Rows come back, each block by its own inverse."""
    metric = Metric.of_blocks(some_blocks(num_blocks, head_dim, seed=seed) + torch.eye(head_dim))
    rows = torch.randn(5, num_blocks * head_dim, generator=torch.Generator().manual_seed(seed))

    again = times_blocks(metric.scale(rows), metric.inverse_BDD)

    torch.testing.assert_close(again, rows, rtol=1e-3, atol=1e-4)


def test_a_block_is_used_for_its_own_columns() -> None:
    """Against a loop over the blocks."""
    blocks = some_blocks(3, 4, seed=5)
    rows = torch.randn(7, 12, generator=torch.Generator().manual_seed(1))

    found = times_blocks(rows, blocks)

    wanted = torch.cat([rows[:, 4 * b : 4 * b + 4] @ blocks[b] for b in range(3)], dim=1)
    torch.testing.assert_close(found, wanted)


def test_a_block_of_zeros_can_still_be_inverted() -> None:
    """A layer that nothing reads weighs a thousandth of the least of the others."""
    blocks = torch.stack([torch.zeros(4, 4), 3 * torch.eye(4), 7 * torch.eye(4)])

    metric = Metric.of_blocks(blocks)

    squares = (metric.root_BDD @ metric.root_BDD).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(squares[0], torch.full((4,), 3e-3 * SHRINKAGE))
    torch.testing.assert_close(squares[1:], torch.tensor([[3.0] * 4, [7.0] * 4]))
    assert torch.isfinite(metric.inverse_BDD).all()


def test_nothing_but_zeros_is_a_metric_too() -> None:
    """Roots are positive even where no gradient was seen at all."""
    metric = Metric.of_blocks(torch.zeros(2, 3, 3))

    assert (metric.root_BDD.diagonal(dim1=1, dim2=2) > 0).all()
    assert torch.isfinite(metric.inverse_BDD).all()


def test_the_scaled_covariance_is_that_of_scaled_rows() -> None:
    """Rows are never scaled one by one at a fit."""
    metric = Metric.of_blocks(some_blocks(3, 4, seed=2))
    rows = torch.randn(50, 12, generator=torch.Generator().manual_seed(3))

    found = metric.scale_covariance(torch.cov(rows.T))

    torch.testing.assert_close(found, torch.cov(metric.scale(rows).T), rtol=1e-3, atol=1e-3)


def test_the_plain_metric_changes_nothing() -> None:
    """All coordinates matter alike."""
    rows = torch.randn(3, 12)

    assert torch.equal(Metric.plain(3, 4).scale(rows), rows)


def test_planted_importance_is_found() -> None:
    """Tokens whose gradients were made larger count more, in proportion."""
    measured = sensitivity()
    keys = torch.cat([plain_rows(256, seed=300 + window)[0] for window in range(4)])

    pair = torch.stack([measured.importance_N.log(), planted_log_importance(keys)])

    assert torch.equal(measured.keys_NW, keys.bfloat16())
    assert float(torch.corrcoef(pair)[0, 1]) > 0.95
    assert (measured.importance_N > 0).all()


def test_importance_has_no_trend_over_the_window() -> None:
    """How far a token is from the boundary is not what its keys could tell."""
    meters = SensitivityMeter(GEOMETRY), SensitivityMeter(GEOMETRY)
    lengths = (2 * TREND_TOKENS, 2 * TREND_TOKENS, 2 * TREND_TOKENS - 5)
    for number, length in enumerate(lengths):
        keys, _ = plain_rows(length, seed=number)
        plain = gradients(keys, seed=number)
        # Twice as large in the last bin of each window, counted from its end.
        near = torch.where(torch.arange(length) >= length - TREND_TOKENS, 2.0, 1.0)[:, None]
        meters[0].add(keys, *plain)
        meters[1].add(keys, *(rows * near for rows in plain))

    plain_N, trend_N = (made.result().importance_N.log() for made in meters)

    torch.testing.assert_close(trend_N, plain_N, rtol=0.0, atol=0.2)
    windows = plain_N.split(lengths)
    last = torch.cat([window[-TREND_TOKENS:] for window in windows])
    assert float(last.mean()) == pytest.approx(0, abs=1e-4)
    assert float(plain_N.mean()) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("kind", [0, 1])
def test_planted_blocks_are_found_up_to_one_scale(kind: int) -> None:
    """Relative sizes of the blocks as well as what is in them."""
    measured = sensitivity()
    metric = (measured.key_metric, measured.value_metric)[kind]

    found = metric.root_BDD @ metric.root_BDD

    planted = planted_blocks(kind)
    found *= planted.norm() / found.norm()
    error_B = (found - planted).norm(dim=(1, 2)) / planted.norm(dim=(1, 2))
    assert (error_B < 0.35).all()
    assert float((found - planted).norm() / planted.norm()) < 0.25


def test_few_important_tokens_do_not_make_the_metric() -> None:
    """Tokens that matter a hundred times as much as most weigh little more than they do."""
    keys, _ = plain_rows(128, seed=1)
    draw = torch.Generator().manual_seed(9)
    plain = [torch.randn(128, width, generator=draw) for width in WIDTHS]
    spike = torch.where(torch.arange(128) % 64 == 3, 10.0, 1.0)[:, None]
    roots = []
    for rows in (plain, [part * spike for part in plain]):
        meter = SensitivityMeter(GEOMETRY)
        meter.add(keys, *rows)
        roots.append(meter.result().key_metric.root_BDD)

    # The largest variance over the mean one.
    one_sided = [torch.linalg.eigvalsh(root @ root) for root in roots]
    plain_B, spiked_B = (variance[:, -1] / variance.mean(1) for variance in one_sided)
    average = (plain[0] * spike).view(128, NUM_BLOCKS, -1).transpose(0, 1)
    unweighted = torch.linalg.eigvalsh(average.transpose(1, 2) @ average)
    assert (spiked_B < 2 * plain_B).all()
    assert (unweighted[:, -1] / unweighted.mean(1) > 2.5 * plain_B).all()


def test_the_scale_of_all_gradients_is_one_factor() -> None:
    """It moves the metrics by that factor and the importance not at all."""
    scale = 1e-6
    one, other = sensitivity(), sensitivity(scale)

    for name in ("key_metric", "value_metric"):
        root, scaled = (getattr(part, name).root_BDD for part in (one, other))
        torch.testing.assert_close(scaled / scale, root, rtol=0.02, atol=0.02 * float(root.max()))
    torch.testing.assert_close(other.importance_N, one.importance_N, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_window_that_is_not_finite_is_refused_whole(which: int, bad: float) -> None:
    """One such gradient would spoil every block; the meter is as it was before."""
    meter = SensitivityMeter(GEOMETRY)
    keys, _ = plain_rows(8, seed=1)
    window = [keys, *gradients(keys, seed=2)]
    window[which][3, 1] = bad

    with pytest.raises(ValueError, match="must be finite"):
        meter.add(*window)
    assert meter.num_windows == 0


def test_no_window_is_too_few() -> None:
    """There is nothing to average."""
    with pytest.raises(ValueError, match="at least one window"):
        SensitivityMeter(GEOMETRY).result()


def test_windows_may_be_of_different_lengths() -> None:
    """Each token counts once."""
    meter = SensitivityMeter(GEOMETRY)
    for length in (1, 5, 30):
        keys, _ = plain_rows(length, seed=length)
        meter.add(keys, *gradients(keys, seed=length))

    measured = meter.result()

    assert meter.num_windows == 3
    assert measured.importance_N.shape == (36,)
    assert measured.key_metric.root_BDD.shape == (NUM_BLOCKS, DIMS[0], DIMS[0])
    assert measured.value_metric.root_BDD.shape == (NUM_BLOCKS, DIMS[1], DIMS[1])
