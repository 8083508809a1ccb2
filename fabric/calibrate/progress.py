"""How long work says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Told what is being done and which fraction of it is done."""


def say_nothing(_what: str, _fraction: float) -> None:
    """Progress for those who did not ask."""
