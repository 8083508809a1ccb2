"""All arms without parameters, each under its name: what holds of every one."""

from __future__ import annotations

import pytest
import torch

from codec.comparators.registry import arms
from tests.codec.comparators.caches import normal, relative_error

LOSSLESS = {"raw", "zstd", "zstd-planes", "deflate", "deflate-planes", "ans-planes"}
NAMES = [
    "raw",
    "zstd",
    "zstd-planes",
    "deflate",
    "deflate-planes",
    "ans-planes",
    "fp8",
    "fp8-scaled",
    "kivi-int8",
    "kivi-int4",
    "kivi-int2",
    "turboquant-4b",
    "turboquant-3b",
    "turboquant-2b",
]


def test_arms_have_a_fixed_order_and_their_own_names() -> None:
    """Tables and stored results refer to them by name."""
    assert list(arms()) == NAMES
    assert all(arm.name == name for name, arm in arms().items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("num_tokens", "key_dim", "value_dim"), [(1, 64, 64), (65, 80, 64), (128, 256, 80)]
)
def test_a_cache_comes_back(name: str, num_tokens: int, key_dim: int, value_dim: int) -> None:
    """In shape and type, exactly or close, every time alike; and what went in is unchanged."""
    keys, values = normal(num_tokens, 2, 1, key_dim), normal(num_tokens, 2, 1, value_dim, seed=1)
    keys_before, values_before = keys.clone(), values.clone()

    restored, again = (arms()[name].restore(keys, values) for _ in range(2))

    for found, wanted in ((restored.keys_TLHD, keys), (restored.values_TLHD, values)):
        assert found.shape == wanted.shape
        assert found.dtype == torch.float32
        assert relative_error(found, wanted) < (1e-12 if name in LOSSLESS else 0.3)
    assert torch.equal(keys, keys_before)
    assert torch.equal(values, values_before)
    assert restored.stored_bytes == again.stored_bytes
    assert torch.equal(restored.keys_TLHD, again.keys_TLHD)
    assert torch.equal(restored.values_TLHD, again.values_TLHD)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [0, 1])
def test_no_arm_stores_what_is_not_finite(name: str, kind: int) -> None:
    """In keys or in values."""
    arrays = [normal(3, 1, 1, 8), normal(3, 1, 1, 8)]
    arrays[kind][1, 0, 0, 2] = torch.nan

    with pytest.raises(ValueError, match="finite"):
        arms()[name].restore(*arrays)


@pytest.mark.parametrize("name", NAMES)
def test_outliers_and_constants_come_back_finite(name: str) -> None:
    """A thousand times the rest in one channel; nothing but zeros in a layer."""
    keys, values = normal(70, 2, 1, 64), normal(70, 2, 1, 64)
    keys[:, 0, 0, 3] = 1000.0
    values[:, 1] = 0.0

    restored = arms()[name].restore(keys, values)

    assert torch.isfinite(restored.keys_TLHD).all()
    assert restored.values_TLHD[:, 1].abs().max() == 0


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("raw", 1.0),
        ("fp8", 2.0),
        # Of 64 elements: 64 codes, a zero point and a scale.
        ("kivi-int8", 16 / (8 + 32 / 64)),
        ("kivi-int4", 16 / (4 + 32 / 64)),
        ("kivi-int2", 16 / (2 + 32 / 64)),
        # Of 64 elements: 64 codes and a norm.
        ("turboquant-4b", 16 / (4 + 16 / 64)),
        ("turboquant-3b", 16 / (3 + 16 / 64)),
        ("turboquant-2b", 16 / (2 + 16 / 64)),
    ],
)
def test_ratios_are_those_of_the_papers_on_whole_groups(name: str, ratio: float) -> None:
    """Heads of 64, 64 tokens: side information counted, nothing left over."""
    keys, values = normal(64, 2, 3, 64), normal(64, 2, 3, 64, seed=1)

    assert arms()[name].restore(keys, values).ratio == pytest.approx(ratio, rel=1e-12)


def test_more_bits_cost_more_and_err_less() -> None:
    """Within a family, on any cache."""
    keys, values = normal(128, 2, 2, 64), normal(128, 2, 2, 64, seed=1)

    for family in (("kivi-int8", "kivi-int4", "kivi-int2"), tuple(NAMES[-3:])):
        found = [arms()[name].restore(keys, values) for name in family]
        errors = [relative_error(one.keys_TLHD, keys) for one in found]
        assert errors == sorted(errors)
        assert [one.ratio for one in found] == sorted(one.ratio for one in found)


@pytest.mark.parametrize("name", ["kivi-int8", "kivi-int4", "kivi-int2"])
def test_kivi_groups_keys_by_channel_and_values_by_token(name: str) -> None:
    """Keys bear a channel that differs from the others, values a token that does."""
    keys, values = normal(64, 1, 1, 64), normal(64, 1, 1, 64)
    keys[..., 7] += 4096.0
    values[11] += 4096.0

    restored = arms()[name].restore(keys, values)

    rest = torch.arange(64) != 7
    assert relative_error(restored.keys_TLHD[..., rest], keys[..., rest]) < 0.3
    rest = torch.arange(64) != 11
    assert relative_error(restored.values_TLHD[rest], values[rest]) < 0.3
