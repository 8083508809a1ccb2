"""Settings of a fabric: typed, checked, from a TOML file and ``KVFABRIC_*`` variables.

Components get the part they need; nothing reads the environment but `load_config`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from actors.arena.driver_host import DEFAULT_GRANULE_BYTES
from codec.errors import ConfigError

ENVIRONMENT_PREFIX = "KVFABRIC_"


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricConfig:
    """What a fabric is started with."""

    ray_namespace: str = "kvfabric"
    """Ray namespace of the router and the workers: one fabric each."""

    tokens_per_chunk: int = 256
    """Unit of identity, storage and routing."""

    window_tokens: int = 128
    """Last tokens of a restored prefix that are computed again instead."""

    arena_bytes: int = 1 << 30
    """Address range, and most bytes, of one worker's arena."""

    extent_bytes: int = 4 << 20
    """Unit in which an arena commits memory."""

    memory_price_us_per_gib_s: float = 0.0
    """What a GiB held idle for a second costs others, in microseconds of their work.

    An arena gives idle memory back once that has cost as much as taking it anew; at 0 never.
    """

    deadline_s: float = 30.0
    """Most seconds that any one wait of a transfer may take."""

    heartbeat_s: float = 1.0
    """How often workers publish what changed, and say that they are there."""

    lost_after_s: float = 10.0
    """Silence after which a worker counts as gone."""

    def __post_init__(self) -> None:
        if not self.ray_namespace:
            raise ConfigError("ray_namespace must not be empty")
        for name in ("tokens_per_chunk", "window_tokens", "arena_bytes", "extent_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("deadline_s", "heartbeat_s", "lost_after_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.memory_price_us_per_gib_s < float("inf"):
            raise ConfigError(
                "memory_price_us_per_gib_s must be at least 0 and finite, "
                f"got {self.memory_price_us_per_gib_s}"
            )
        if self.extent_bytes % DEFAULT_GRANULE_BYTES:
            raise ConfigError(
                f"extent_bytes must be a multiple of {DEFAULT_GRANULE_BYTES}, "
                f"got {self.extent_bytes}"
            )
        if self.arena_bytes % self.extent_bytes:
            raise ConfigError(
                "arena_bytes must be a multiple of extent_bytes, "
                f"got {self.arena_bytes} and {self.extent_bytes}"
            )
        if self.lost_after_s <= self.heartbeat_s:
            raise ConfigError(
                "lost_after_s must exceed heartbeat_s, "
                f"got {self.lost_after_s} and {self.heartbeat_s}"
            )


def load_config(path: Path | None, environment: Mapping[str, str]) -> FabricConfig:
    """Read settings: defaults, then the file, then the environment.

    Parameters
    ----------
    path
        TOML file whose top level holds the settings; ``None`` for none.
    environment
        ``os.environ``, as a rule; only names with the prefix are looked at.

    Raises
    ------
    ConfigError
        If the file cannot be read, a name is unknown or a value is of the wrong kind;
        the message names the setting and where it came from.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            stated = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read settings from {path}: {error}") from error
        for name, value in stated.items():
            values[name] = _checked(name, value, str(path))
    for variable, text in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            values[name] = _parsed(name, text, variable)
    return FabricConfig(**values)


def _kind(name: str, where: str) -> type:
    defaults = {field.name: field.default for field in fields(FabricConfig)}
    if name not in defaults:
        raise ConfigError(f"{where}: unknown setting {name!r}; there are {', '.join(defaults)}")
    return type(defaults[name])


def _checked(name: str, value: object, where: str) -> object:
    kind = _kind(name, where)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where}: {name} must be {kind.__name__}, got {value!r}")
    return value


def _parsed(name: str, text: str, where: str) -> object:
    kind = _kind(name, where)
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{where}: {name} must be {kind.__name__}, got {text!r}") from None
