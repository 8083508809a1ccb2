"""The text of ``kvfabric plan``: sizes, columns and honest labels."""

from __future__ import annotations

from typing import Any

import pytest

from codec.errors import RetentionError
from policies.retention.digest import plan_digest
from policies.retention.report import (
    PlanOptions,
    format_bytes,
    parse_bytes,
    parse_config,
    plan_report,
    table,
)

GEMMA = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 18,
    "hidden_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
}


def options(**fields: Any) -> PlanOptions:
    """Options that differ from plain ones in ``fields``."""
    return PlanOptions(**{"context_tokens": 8192, "budget_bytes": 2**30, **fields})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 * 2**30),
        ("20 gib", 20 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("512MB", 512 * 10**6),
        ("1024", 1024),
        ("7B", 7),
        ("0.001KB", 1),
    ],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    """Binary and decimal units, decimals exactly."""
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "20G", "-1GiB", "1e9", "1..5GiB", "0", "0.1B", "20 GiB x", "9" * 20, "٣GiB"]
)
def test_other_sizes_are_refused(text: str) -> None:
    """Including nothing at all."""
    with pytest.raises(RetentionError) as caught:
        parse_bytes(text)
    assert caught.value.rule == "bad-size"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**41, "2.00 TiB"),
    ],
)
def test_sizes_are_written(nbytes: int, text: str) -> None:
    """In the largest unit in which they are at least 1."""
    assert format_bytes(nbytes) == text


def test_columns_line_up() -> None:
    """Names to the left, numbers to the right, nothing behind the last."""
    assert table([["ab", "1"], ["c", "23"]], left={0}) == ["ab   1", "c   23"]


def test_the_report_shows_each_class() -> None:
    """Layers, address, death, live and held tokens, and the pool of what was admitted."""
    report = plan_report(GEMMA, options(requests=64))
    lines = report.text().splitlines()
    (swa,) = [line.split() for line in lines if line.startswith("swa")]

    assert swa[1:3] == ["15", "periodic(33)"]
    assert swa[-8:-6] == ["511", "528"]
    assert plan_digest(report.plan).hex() in report.text()
    assert "pattern" in lines[0]


def test_admission_is_by_lifetime_and_beside_it_all_full() -> None:
    """The same budget, twice."""
    report = plan_report(GEMMA, options(requests=64))

    assert report.admission.per_request_bytes == report.usage.reserved_bytes
    assert report.full_admission.per_request_bytes == 8192 * 18 * 1024
    assert report.admission.admitted > report.full_admission.admitted > 0
    assert f"admits {report.admission.admitted} of 64 requests" in report.text()


def test_a_smaller_pool_is_not_called_compression() -> None:
    """Only the stored form of a codec is."""
    plain = plan_report(GEMMA, options()).text()
    coded = plan_report(GEMMA, options(codec_target=16.0)).text()

    assert "by keeping fewer tokens: a smaller pool, not compression" in plain
    assert "stored form" not in plain
    (stored,) = [line for line in coded.splitlines() if line.startswith("stored form")]
    assert "compression, decoded before use" in stored
    assert "codec target of 16x" in stored


def test_a_model_that_keeps_everything_claims_no_saving() -> None:
    """Full attention has none to offer."""
    assert "nothing dies before the end" in plan_report(LLAMA, options()).text()


def test_a_budget_that_is_too_small_says_so() -> None:
    """Instead of zero requests in no waves."""
    text = plan_report(LLAMA, options(budget_bytes=1000)).text()

    assert "does not fit one request" in text


def test_steps_and_pages_reach_the_plan() -> None:
    """Larger steps need more cells, one-token pages need no rounding."""
    stepped = plan_report(GEMMA, options(step_tokens=512))
    single = plan_report(GEMMA, options(page_tokens=1))

    assert stepped.plan.class_named("swa").address.cells == 65
    assert single.plan.class_named("swa").address.cells == 512
    assert single.usage.held_bytes > single.usage.live_bytes


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"context_tokens": 0}, "bad-option"),
        ({"context_tokens": 1.5}, "bad-option"),
        ({"page_tokens": 0}, "bad-option"),
        ({"step_tokens": -1}, "bad-option"),
        ({"requests": 0}, "bad-option"),
        ({"budget_bytes": 0}, "bad-budget"),
        ({"codec_target": 0.5}, "bad-target"),
        ({"codec_target": float("inf")}, "bad-target"),
        ({"codec_target": float("nan")}, "bad-target"),
    ],
)
def test_impossible_options_cannot_be_built(fields: dict[str, Any], rule: str) -> None:
    """One at a time."""
    with pytest.raises(RetentionError) as caught:
        options(**fields)
    assert caught.value.rule == rule


def test_configs_are_parsed() -> None:
    """Infinity is legal in released configs."""
    assert parse_config('{"time_step_limit": [0.0, Infinity]}')["time_step_limit"]


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"a": 1, "a": 2}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_other_configs_are_refused(text: str) -> None:
    """Not JSON, not an object, a field twice."""
    with pytest.raises(RetentionError) as caught:
        parse_config(text)
    assert caught.value.rule == "syntax"
