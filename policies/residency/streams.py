"""What the residency index remembers of each node's stream, and of streams as a whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class IndexCounters:
    """What an index has been told, by what became of it; only ever rises."""

    applied: int = 0
    gaps: int = 0
    duplicate: int = 0
    fenced: int = 0
    unknown: int = 0
    placements_added: int = 0
    placements_replaced: int = 0
    placements_removed: int = 0
    removals_absent: int = 0
    stale_hits: int = 0


class Stream:
    """How far one node has been heard."""

    __slots__ = ("incarnation", "is_gapped", "is_synced", "seq")

    def __init__(self, incarnation: int) -> None:
        #: Only ever rises.
        self.incarnation = incarnation
        #: The last delta or snapshot applied; 0 before the first.
        self.seq = 0
        #: Whether the shelves are what the node held at ``seq``, but for what ``is_gapped`` says.
        self.is_synced = False
        #: Whether a change up to ``seq``, or one announced, was not heard.
        self.is_gapped = False

    @property
    def is_exact(self) -> bool:
        """Whether the shelves are what the node held at ``seq``."""
        return self.is_synced and not self.is_gapped
