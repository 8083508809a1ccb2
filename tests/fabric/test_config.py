"""Settings: a frozen list, one order of precedence, and errors that name the setting."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from codec.errors import ConfigError
from fabric.config import FabricConfig, load_config


def test_the_list_of_settings_is_a_decision() -> None:
    """Adding one changes this line."""
    assert [field.name for field in fields(FabricConfig)] == [
        "ray_namespace",
        "tokens_per_chunk",
        "window_tokens",
        "arena_bytes",
        "extent_bytes",
        "memory_price_us_per_gib_s",
        "deadline_s",
        "heartbeat_s",
        "lost_after_s",
    ]


def test_the_environment_overrides_the_file_overrides_the_defaults(tmp_path: Path) -> None:
    """And variables without the prefix are not looked at."""
    path = tmp_path / "fabric.toml"
    path.write_text("tokens_per_chunk = 512\nwindow_tokens = 64\ndeadline_s = 5\n")

    config = load_config(path, {"KVFABRIC_WINDOW_TOKENS": "32", "WINDOW_TOKENS": "1"})

    assert (config.tokens_per_chunk, config.window_tokens, config.deadline_s) == (512, 32, 5.0)
    assert config.ray_namespace == "kvfabric"


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("tokens_per_chnk = 1", {}, "unknown setting 'tokens_per_chnk'"),
        ("tokens_per_chunk = 'many'", {}, "tokens_per_chunk must be int"),
        ("tokens_per_chunk = true", {}, "tokens_per_chunk must be int"),
        ("tokens_per_chunk = ", {}, "cannot read settings"),
        ("", {"KVFABRIC_TYPO": "1"}, "KVFABRIC_TYPO: unknown setting"),
        ("", {"KVFABRIC_DEADLINE_S": "soon"}, "KVFABRIC_DEADLINE_S: deadline_s must be float"),
        ("tokens_per_chunk = 0", {}, "tokens_per_chunk must be at least 1"),
        ("deadline_s = inf", {}, "deadline_s must be positive"),
        ("deadline_s = nan", {}, "deadline_s must be positive"),
        ("ray_namespace = ''", {}, "ray_namespace must not be empty"),
        ("extent_bytes = 4096", {}, "extent_bytes must be a multiple of 2097152"),
        ("arena_bytes = 5000000", {}, "multiple of extent_bytes"),
        ("memory_price_us_per_gib_s = -1", {}, "memory_price_us_per_gib_s must be at least 0"),
        ("memory_price_us_per_gib_s = inf", {}, "memory_price_us_per_gib_s must be at least 0"),
        ("memory_price_us_per_gib_s = nan", {}, "memory_price_us_per_gib_s must be at least 0"),
        ("heartbeat_s = 20.0", {}, "lost_after_s must exceed heartbeat_s"),
    ],
)
def test_a_bad_setting_is_named(
    tmp_path: Path, text: str, environment: dict[str, str], message: str
) -> None:
    """Nothing is ignored or guessed."""
    path = tmp_path / "fabric.toml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        load_config(path, environment)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """It was named, so it should be there."""
    with pytest.raises(ConfigError, match="cannot read settings"):
        load_config(tmp_path / "absent.toml", {})
