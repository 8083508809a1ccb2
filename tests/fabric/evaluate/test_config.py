"""The protocol's settings: what they must be, and that all of them are named."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from codec.errors import ConfigError
from fabric.evaluate.config import FULL, QUICK, EvaluationConfig


@pytest.mark.parametrize(
    "wrong",
    [
        {"context_tokens": 132},
        {"context_tokens": 0},
        {"continuation_tokens": 0},
        {"exact_first": -1},
        {"exact_last": 0},
        {"windows": 0},
        {"lookups": -1},
        {"lookup_pairs": 3},
        {"greedy_windows": -1},
        {"greedy_tokens": 0},
        {"seed": -1},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, int]) -> None:
    """A context must leave something to code."""
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        EvaluationConfig(**wrong)


def test_the_least_context_codes_one_row() -> None:
    """All but one of its tokens are exact."""
    config = EvaluationConfig(context_tokens=133)

    assert (config.num_exact, config.sample_tokens) == (132, 261)


def test_every_setting_is_in_the_text_that_is_digested() -> None:
    """So that two protocols never have one name."""
    texts = {FULL.text(), QUICK.text()}
    for field in fields(FULL):
        texts.add(replace(FULL, **{field.name: getattr(FULL, field.name) + 1}).text())

    assert len(texts) == 2 + len(fields(FULL))


def test_the_quick_form_has_tokens_and_lookups_enough_for_the_gate() -> None:
    """Three sets of natural text are pooled."""
    assert 3 * QUICK.windows * QUICK.continuation_tokens >= 512
    assert QUICK.lookups >= 8
