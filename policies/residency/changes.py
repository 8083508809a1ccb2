"""Changes of residency: what an index applies, and what replicas of it are fed.

The authority numbers its *effective* changes: each raises the index's version by one.
An index that applies the same changes in the same order is the same index, so a replica
needs only the changes since its own version, or the whole state when those are gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from codec.identity import CodecId, ComponentKey
from policies.residency.events import Delta, Placement, Snapshot


class Outcome(StrEnum):
    """What became of one change."""

    APPLIED = "applied"
    """The index has changed as the event says."""

    GAP = "gap"
    """Applied, but changes before it were lost: ask the node for a snapshot."""

    DUPLICATE = "duplicate"
    """Known already; nothing changed."""

    FENCED = "fenced"
    """From an earlier incarnation of the node; nothing changed."""

    UNKNOWN = "unknown"
    """From a node that has not joined, or was dropped; nothing changed."""

    @property
    def is_effective(self) -> bool:
        """Whether the index changed, and its version rose."""
        return self in {Outcome.APPLIED, Outcome.GAP}


@dataclass(frozen=True, slots=True)
class Joined:
    """A node's worker is about to say what it holds; the index is not ready until it has."""

    node: str
    incarnation: int
    """0 for a node that is expected and has not started yet."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A node is gone, with all that it held."""

    node: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A heartbeat shows that the node's stream reached ``last_seq`` and we did not hear it."""

    node: str
    incarnation: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class Refuted:
    """A stale hit: the node was asked for a component that we listed and it did not have it."""

    node: str
    incarnation: int
    component: ComponentKey
    codec: CodecId


Change = Joined | Dropped | Lost | Refuted | Delta | Snapshot


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """All that an index knows of one node."""

    node: str
    incarnation: int
    seq: int
    is_synced: bool
    is_gapped: bool
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Feed:
    """What takes a replica from ``since_version`` to ``version``.

    ``changes[i]`` makes version ``since_version + i + 1``.  With ``nodes`` set the feed is the
    whole state instead, ``changes`` is empty, and any replica can take it.
    """

    epoch: int
    """The router's start that numbered the versions; rises with every start."""

    since_version: int
    version: int
    changes: tuple[Change, ...] = ()
    nodes: tuple[NodeRecord, ...] | None = None

    def __post_init__(self) -> None:
        if self.nodes is None and self.since_version + len(self.changes) != self.version:
            raise ValueError(
                f"need one change per version, got {len(self.changes)} "
                f"from {self.since_version} to {self.version}"
            )
        if self.nodes is not None and self.changes:
            raise ValueError(f"need changes or the whole state, got {len(self.changes)} and both")
