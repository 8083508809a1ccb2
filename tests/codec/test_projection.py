"""Projection by rank and by group against one dense product."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.projection import LAYERS_AT_ONCE, LayerGroup, TokenRanks, ranks_of
from tests.codec.entropy_samples import calibrated, dense, plain_rows

RANK = 300


@settings(deadline=None)
@given(ranks=st.lists(st.integers(0, RANK), max_size=12))
def test_a_token_gets_its_first_coefficients_and_no_others(ranks: list[int]) -> None:
    """Whatever the ranks of the tokens beside it; back, they give what a dense product gives."""
    draw = torch.Generator().manual_seed(0)
    rows_TW = torch.randn(len(ranks), 8, generator=draw)
    forward_WC = torch.randn(8, RANK, generator=draw)
    is_coded_TC = torch.arange(RANK) < torch.tensor(ranks, dtype=torch.int64)[:, None]
    found = TokenRanks.of(np.array(ranks, np.int64), sorted({*ranks, 7, RANK}))

    projected_CT = found.project(rows_TW, forward_WC.T.contiguous())
    back_TW = torch.empty_like(rows_TW)
    back_TW[found.order_T] = found.reconstruct(
        projected_CT.T[found.order_T], forward_WC.T.contiguous(), torch.ones(8)
    )

    wanted_TC = torch.where(is_coded_TC, rows_TW @ forward_WC, torch.tensor(0.0))
    torch.testing.assert_close(projected_CT.T, wanted_TC, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(back_TW, wanted_TC @ forward_WC.T + 1, rtol=1e-4, atol=1e-3)


@settings(deadline=None)
@given(
    levels=st.lists(st.integers(0, 40), max_size=30),
    first_class=st.integers(0, 20),
    shift=st.integers(-9, 9),
)
def test_a_rank_counts_the_classes_that_are_coded(
    levels: list[int], first_class: int, shift: int
) -> None:
    """Level plus shift is the class, before it is held to the ladder."""
    level_C = np.array(sorted(levels, reverse=True), np.int32)

    (rank,) = ranks_of(level_C, first_class, np.array([shift], np.int32)).tolist()

    assert rank == sum(level + shift >= first_class for level in levels)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_groups_are_blocks_of_one_projection(name: str) -> None:
    """Of uneven size; each coefficient and each coordinate is in one of them."""
    made = calibrated(8.0)
    kind = getattr(made, name)
    rows = plain_rows(30, seed=4)[name == "values"]
    shift_T = np.tile(np.array([-9, 0, 9], np.int32), 10)
    forward_WC, _ = dense(kind)
    is_coded_TC = torch.arange(kind.rank) < torch.from_numpy(made.ranks(kind, shift_T))[:, None]

    found_CT = made.project(kind, rows - kind.mean_W, shift_T)

    widths = [group.coordinates.stop - group.coordinates.start for group in kind.groups]
    assert widths == [len(kind.mean_W) * 3 // 4, len(kind.mean_W) // 4]
    columns = torch.cat([group.columns_C for group in kind.groups])
    assert sorted(columns.tolist()) == list(range(kind.rank))
    wanted_TC = torch.where(is_coded_TC, (rows - kind.mean_W) @ forward_WC, torch.tensor(0.0))
    torch.testing.assert_close(found_CT.T, wanted_TC, rtol=1e-4, atol=1e-4)


@settings(deadline=None)
@given(start=st.integers(0, 12), num=st.integers(0, 12))
def test_runs_are_the_wanted_layers_of_a_group_once(start: int, num: int) -> None:
    """A few at a time, in order; none if the group has none of them."""
    group = LayerGroup(
        coordinates=slice(6, 20),
        columns_C=torch.arange(5),
        level_C=np.zeros(5, np.int32),
        forward_CG=torch.zeros(5, 14),
        backward_CG=torch.arange(70.0).view(5, 14),
    )

    runs = group.runs(2, range(start, start + num))

    assert torch.equal(group.backward(slice(8, 10)), group.backward_CG[:, 2:4])
    assert all(len(run) <= LAYERS_AT_ONCE for run in runs)
    layers = [layer for run in runs for layer in run]
    assert layers == [layer for layer in range(start, start + num) if 3 <= layer < 10]
