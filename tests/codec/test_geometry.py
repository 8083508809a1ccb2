"""`Stage` and `KVGeometry`: only real shares exist, and shares add up to the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.geometry import KVGeometry, Stage
from tests.codec.samples import stages

#: 30 layers of 3 heads, keys wider than values.
GEOMETRY = KVGeometry(num_layers=30, num_kv_heads=3, key_head_dim=64, value_head_dim=48)


@pytest.mark.parametrize("bad", [(2, 2), (3, 2), (-1, 2)])
def test_an_empty_or_reversed_range_is_refused(bad: tuple[int, int]) -> None:
    """A stage that exists holds at least one layer and one head."""
    with pytest.raises(ValueError, match=r"need 0 <= start < stop, got layers"):
        Stage(*bad, 0, 1)
    with pytest.raises(ValueError, match=r"need 0 <= start < stop, got heads"):
        Stage(0, 1, *bad)


@given(stages(most=999_999_999))
def test_a_stage_is_read_back_from_its_text(stage: Stage) -> None:
    """The text is a name: one for each stage."""
    assert Stage.parse(str(stage)) == stage


@pytest.mark.parametrize(
    "text",
    [
        "",
        "l0-30",
        "l0-30.h0-3 ",
        "l0-30.h0-3\n",
        "l00-30.h0-3",
        "l+0-30.h0-3",
        "l0-30.h3-3",
        "l30-0.h0-3",
        "l-1-30.h0-3",
        "l0-30.h0-\u0663",
        "L0-30.h0-3",
        "l0-1000000000.h0-3",
    ],
)
def test_another_text_is_no_stage(text: str) -> None:
    """Names that differ never mean the same stage, and bad ones mean none."""
    with pytest.raises(ValueError, match="need"):
        Stage.parse(text)


def test_stages_sort_by_layer_and_then_head() -> None:
    """The order in which the shares of one model follow each other."""
    low, middle, high = Stage(0, 2, 0, 1), Stage(0, 2, 1, 2), Stage(2, 4, 0, 1)

    assert sorted([high, low, middle]) == [low, middle, high]


def test_a_stage_counts_its_layers_and_heads() -> None:
    """Counts, not bounds."""
    stage = Stage(10, 15, 1, 3)

    assert (stage.num_layers, stage.num_heads) == (5, 2)


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "key_head_dim", "value_head_dim"])
def test_a_geometry_of_nothing_is_refused(name: str) -> None:
    """Every dimension counts something; the message says which does not."""
    fields = {"num_layers": 1, "num_kv_heads": 1, "key_head_dim": 1, "value_head_dim": 1}

    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        KVGeometry(**{**fields, name: 0})


def test_widths_and_bytes_count_keys_and_values_apart() -> None:
    """Keys and values may have different head dims, as under MLA."""
    assert GEOMETRY.key_width == 30 * 3 * 64
    assert GEOMETRY.value_width == 30 * 3 * 48
    assert GEOMETRY.raw_bytes_per_token == 30 * 3 * (64 + 48) * 2


def test_the_whole_is_a_stage_of_itself() -> None:
    """One worker that holds everything is no special case."""
    assert GEOMETRY.whole == Stage(0, 30, 0, 3)
    assert GEOMETRY.of_stage(GEOMETRY.whole) == GEOMETRY


def test_the_geometry_of_a_stage_keeps_head_dims() -> None:
    """Layers and heads are cut, heads never are."""
    assert GEOMETRY.of_stage(Stage(10, 15, 1, 3)) == KVGeometry(
        num_layers=5, num_kv_heads=2, key_head_dim=64, value_head_dim=48
    )


@pytest.mark.parametrize("stage", [Stage(0, 31, 0, 3), Stage(0, 30, 0, 4), Stage(40, 41, 0, 1)])
def test_a_stage_outside_the_geometry_is_refused(stage: Stage) -> None:
    """A worker cannot hold layers that the model has not got."""
    with pytest.raises(ValueError, match=r"reaches outside l0-30\.h0-3"):
        GEOMETRY.of_stage(stage)


@given(st.integers(1, 80), st.data())
def test_layers_split_into_even_runs_that_cover_them(num_layers: int, data: st.DataObject) -> None:
    """Every layer is in one stage, and stages differ by at most one layer."""
    geometry = KVGeometry(num_layers=num_layers, num_kv_heads=2, key_head_dim=4, value_head_dim=4)
    num_stages = data.draw(st.integers(1, num_layers))

    split = geometry.split_layers(num_stages)

    layers = [layer for s in split for layer in range(s.layer_start, s.layer_stop)]
    assert layers == list(range(num_layers))
    assert len(split) == num_stages
    assert max(s.num_layers for s in split) - min(s.num_layers for s in split) <= 1
    assert {(s.head_start, s.head_stop) for s in split} == {(0, 2)}
    parts = [geometry.of_stage(stage).raw_bytes_per_token for stage in split]
    assert sum(parts) == geometry.raw_bytes_per_token


@pytest.mark.parametrize("num_stages", [0, -1, 31])
def test_more_stages_than_layers_are_refused(num_stages: int) -> None:
    """No stage may come out empty."""
    with pytest.raises(ValueError, match=r"need 1\.\.30 stages"):
        GEOMETRY.split_layers(num_stages)
