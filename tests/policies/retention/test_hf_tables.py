"""The table: rows are consistent with themselves."""

from __future__ import annotations

import pytest

from policies.retention.hf_tables import (
    FAMILIES,
    FULL,
    HYBRID,
    LEGACY_TYPES,
    LINEAR,
    SHAPING,
    SLIDING,
    WRAPPERS,
    Family,
)

ROWS = list(FAMILIES.items())
ASKED_FOR = {
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "phi3", "cohere2",
    "llama4_text", "deepseek_v2", "deepseek_v3", "mamba", "mamba2", "jamba", "qwen3_next",
    "falcon_h1",
}  # fmt: skip


def test_every_type_that_must_be_covered_is() -> None:
    """Further ones are welcome."""
    assert set(FAMILIES) >= ASKED_FOR


@pytest.mark.parametrize(("kind", "row"), ROWS, ids=[kind for kind, _ in ROWS])
def test_rows_name_fields_that_shape_attention(kind: str, row: Family) -> None:
    """A field that a rule reads is in the list of those that must otherwise be unset."""
    assert row.shaping <= SHAPING
    assert all(name in row.shaping or name not in SHAPING for name in row.defaults), kind


@pytest.mark.parametrize(("kind", "row"), ROWS, ids=[kind for kind, _ in ROWS])
def test_rows_with_recurrent_layers_know_their_size(kind: str, row: Family) -> None:
    """And only those."""
    assert bool(row.recurrent) == bool(row.allowed & {LINEAR, HYBRID}), kind


@pytest.mark.parametrize(("kind", "row"), ROWS, ids=[kind for kind, _ in ROWS])
def test_rows_with_windows_read_their_length(kind: str, row: Family) -> None:
    """A sliding layer without a window could not be compiled."""
    assert (SLIDING in row.allowed) == ("sliding_window" in row.shaping), kind


def test_patterns_have_a_default() -> None:
    """Of at least two layers."""
    rules = {"pattern", "interval"}

    assert all((row.pattern >= 2) == (row.layers in rules) for _, row in ROWS)


def test_wrappers_lead_to_rows() -> None:
    """A multimodal config is read as one of them."""
    assert set(WRAPPERS.values()) <= set(FAMILIES)
    assert not set(WRAPPERS) & set(FAMILIES)


def test_old_names_lead_to_new_ones() -> None:
    """As Transformers renames them."""
    assert LEGACY_TYPES == {"attention": FULL, "mamba": LINEAR}
