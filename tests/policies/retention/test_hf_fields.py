"""Single fields: defaults of the family, types, ranges, and refusals that name them."""

from __future__ import annotations

import pytest

from codec.errors import RetentionError
from policies.retention.hf_fields import Fields
from policies.retention.hf_tables import CHUNKED, FULL, LINEAR, SLIDING, Family
from policies.retention.ir import INT_MAX
from policies.retention.program import MAX_COUNT

FAMILY = Family(
    layers="pattern",
    prefix="Demo",
    allowed=frozenset({FULL, SLIDING}),
    defaults={"head_dim": 256, "sliding_window": 4096, "use_cache": True},
)


def fields(**config: object) -> Fields:
    """A config of the family above."""
    return Fields(config, FAMILY)


def test_the_config_comes_before_the_default() -> None:
    """A null in the config is an answer, not an absence."""
    assert fields(head_dim=64).get("head_dim") == 64
    assert fields().get("head_dim") == 256
    assert fields(head_dim=None).get("head_dim") is None
    assert fields().get("hidden_size") is None


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8", [8], MAX_COUNT + 1])
def test_counts_are_positive_integers(value: object) -> None:
    """Nothing that merely looks like one."""
    with pytest.raises(RetentionError) as caught:
        fields(hidden_size=value).count("hidden_size", rule="no-head-geometry")

    assert caught.value.rule == "no-head-geometry"
    assert caught.value.term == f"hidden_size={value!r}"


def test_a_missing_count_takes_the_callers_default() -> None:
    """Or is refused, if there is none."""
    assert fields().count("expand", default=2) == 2
    assert fields(expand=3).count("expand", default=2) == 3
    with pytest.raises(RetentionError, match="expand=None"):
        fields().count("expand")


def test_flags_are_booleans() -> None:
    """Absent means off; a number is not a flag."""
    assert fields().flag("use_cache")
    assert not fields().flag("use_sliding_window")
    with pytest.raises(RetentionError, match="true or false"):
        fields(use_sliding_window=1).flag("use_sliding_window")


@pytest.mark.parametrize(
    ("config", "window"),
    [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": INT_MAX}, INT_MAX)],
)
def test_windows_may_be_unset(config: dict[str, object], window: int | None) -> None:
    """Null says that there is none."""
    assert Fields(config, FAMILY).window() == window


@pytest.mark.parametrize("value", [0, -4, 2.5, False, INT_MAX + 1])
def test_windows_have_a_range(value: object) -> None:
    """From one token to the largest 64-bit integer."""
    with pytest.raises(RetentionError) as caught:
        fields(sliding_window=value).window()
    assert caught.value.rule == "window-range"


def test_a_needed_window_must_be_set() -> None:
    """Where layers slide."""
    assert fields().need_window() == 4096
    with pytest.raises(RetentionError) as caught:
        fields(sliding_window=None).need_window()
    assert caught.value.rule == "no-window"


def test_listed_layer_types_are_translated_and_checked() -> None:
    """Older names are known; a type that the family lacks is named with its place."""
    listed = fields(layer_types=["attention", SLIDING])

    assert listed.listed_types(2) == (FULL, SLIDING)
    assert fields().listed_types(2) is None
    for entry in (LINEAR, CHUNKED, "mamba", 7, None):
        with pytest.raises(RetentionError) as caught:
            fields(layer_types=[FULL, entry]).listed_types(2)
        assert caught.value.rule == "unknown-layer-type"
        assert "layer_types[1]" in caught.value.term


@pytest.mark.parametrize("value", [[], [FULL], [FULL] * 3, FULL, {"0": FULL}])
def test_one_type_for_each_layer(value: object) -> None:
    """Neither more nor fewer."""
    with pytest.raises(RetentionError) as caught:
        fields(layer_types=value).listed_types(2)
    assert caught.value.rule == "bad-layers"
