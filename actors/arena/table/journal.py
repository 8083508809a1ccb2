"""Where a page table's events go, before they happen.

This one goes nowhere; `actors.arena.table.certificates` writes them to a log that can be checked.
An event is its name and its fields; those of one call happen together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from policies.retention.plan import Plan

Event = tuple[str, dict[str, Any]]


class Journal:
    """Takes events and keeps none."""

    def begin(self, plan: Plan, epoch: int) -> None:
        """Take note of the classes that everything else is about."""

    def write(self, events: Iterable[Event]) -> None:
        """Take events.  If it raises, none of them may happen."""
