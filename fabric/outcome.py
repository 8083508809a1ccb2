"""What became of a restore, and how an error is named to those who only want the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from policies.planner import RestorePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOutcome:
    """What became of a restore: a cache to go on from, or nothing and the reason."""

    plan: RestorePlan
    cache: Any
    """The engine's cache of the first `tokens_restored` tokens; ``None``: compute them."""

    tokens_restored: int
    reason: str
    """Code: the plan's reason, or the class of the error that ended the restore."""

    explanation: str
    bytes_moved: int = 0
    transport: str = "none"
    steps: Mapping[str, float] = field(default_factory=dict)
    """Seconds per step, until the engine has the cache."""


def error_name(error: Exception) -> str:
    """Class of what went wrong; of the cause, where Ray wraps one."""
    return type(_cause(error)).__name__


def first_line(error: Exception) -> str:
    """What went wrong, in one line; never empty."""
    text = str(_cause(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _cause(error: Exception) -> Exception:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error
