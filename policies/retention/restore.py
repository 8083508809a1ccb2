"""What must be present to go on from a boundary, and which boundaries stay possible.

Per class: token ranges of keys and values, one snapshot for recurrent state, the encoder's
tokens for cross-attention.  Components are stored per chunk and class, so a boundary on a
chunk's end is restorable iff every chunk that a needed range touches has that class's
component, and recurrent state was saved at exactly that boundary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from policies.retention.claims import Keys
from policies.retention.plan import Plan, PlannedClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one class must have at a boundary."""

    class_name: str
    kind: str
    ranges: tuple[tuple[int, int], ...]
    """Positions ``[start, stop)`` that are live, joined where they touch or interleave."""

    pages: tuple[int, int]
    """Pages that hold them, with the partly filled last one."""

    num_tokens: int
    """Live tokens; fewer than the ranges span if only some residues are live."""

    snapshot_boundary: int | None = None
    """The boundary at which recurrent state must have been saved."""


def restore_needs(plan: Plan, boundary: int) -> tuple[Need, ...]:
    """What the queries from ``boundary`` on can read, class by class."""
    if boundary < 0:
        raise ValueError(f"need a boundary from 0 up, got {boundary}")
    return tuple(_need(found, boundary) for found in plan.classes)


def _need(found: PlannedClass, boundary: int) -> Need:
    is_recurrent = found.kind == "recurrent"
    return Need(
        class_name=found.name,
        kind=found.kind,
        ranges=live_ranges(found, boundary),
        pages=found.continuation(boundary),
        num_tokens=found.live_tokens(boundary),
        snapshot_boundary=boundary if is_recurrent and boundary else None,
    )


def live_ranges(found: PlannedClass, boundary: int) -> tuple[tuple[int, int], ...]:
    """Ranges of positions that contain every live token of a class, tight at both ends."""
    if found.kind == "recurrent":
        return ()
    if found.kind == "cross":
        return ((0, found.live_tokens(boundary)),) if boundary else ()
    spans = [_span(keys, boundary) for keys in found.live_claims(boundary)]
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return tuple(joined)


def _span(keys: Keys, boundary: int) -> tuple[int, int]:
    first, last = keys.first_from(0), keys.last_before(boundary)
    assert first is not None
    assert last is not None
    return first, last + 1


def needed_chunks(found: PlannedClass, boundary: int, chunk_tokens: int) -> frozenset[int]:
    """Chunks with a live token of an attention class at ``boundary``."""
    if found.kind != "attention":
        return frozenset()
    chunks: set[int] = set()
    for keys in found.live_claims(boundary):
        start, stop = _span(keys, boundary)
        for chunk in range(start // chunk_tokens, -(-stop // chunk_tokens)):
            if keys.between(chunk * chunk_tokens, (chunk + 1) * chunk_tokens):
                chunks.add(chunk)
    return frozenset(chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What is kept of one prefix."""

    chunk_tokens: int
    num_chunks: int
    dropped: Mapping[str, Collection[int]]
    """Per class, the chunks whose component is gone."""

    snapshots: Collection[int] = ()
    """Boundaries at which recurrent state was saved."""

    has_source: bool = True
    """Whether the encoder's tokens are kept."""

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1 or self.num_chunks < 0:
            raise ValueError(f"need chunks, got {self.num_chunks} of {self.chunk_tokens} tokens")


def restorable_boundaries(plan: Plan, stored: Stored) -> tuple[int, ...]:
    """Chunk ends at which every class has what it needs, rising; 0 always is one."""
    ends = (stored.chunk_tokens * count for count in range(1, stored.num_chunks + 1))
    return (0, *(end for end in ends if _is_restorable(plan, stored, end)))


def _is_restorable(plan: Plan, stored: Stored, boundary: int) -> bool:
    for found in plan.classes:
        if found.kind == "recurrent" and boundary not in stored.snapshots:
            return False
        if found.kind == "cross" and not stored.has_source:
            return False
        gone = stored.dropped.get(found.name)
        if gone and needed_chunks(found, boundary, stored.chunk_tokens) & frozenset(gone):
            return False
    return True


def droppable_chunks(
    plan: Plan, boundaries: Collection[int], *, chunk_tokens: int, num_chunks: int
) -> dict[str, frozenset[int]]:
    """Per attention class, the chunks that none of ``boundaries`` needs: interior windows."""
    everything = frozenset(range(num_chunks))
    return {
        found.name: everything.difference(
            *(needed_chunks(found, boundary, chunk_tokens) for boundary in boundaries)
        )
        for found in plan.classes
        if found.kind == "attention"
    }
