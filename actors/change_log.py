"""What a worker holds, as a numbered stream of changes that others can follow.

Changes gather until somebody asks; then they become one `Delta` with the next number.
A delta says what is different at its end, not what happened on the way: a component
that came and went in between is in none.
"""

from __future__ import annotations

from typing import TypeAlias

from codec.identity import CodecId, ComponentKey
from policies.residency.events import Delta, Placement, Snapshot

PlacementKey: TypeAlias = tuple[ComponentKey, CodecId]


class ChangeLog:
    """The placements of one worker's life, and the deltas that lead to them."""

    def __init__(self, *, node: str, incarnation: int) -> None:
        self._node = node
        self._incarnation = incarnation
        #: What is held now.
        self._held: dict[PlacementKey, Placement] = {}
        #: What was held when ``_seq`` was given out, of the keys touched since.
        self._before: dict[PlacementKey, Placement | None] = {}
        #: Number of the last delta made; rises by one with each.
        self._seq = 0
        #: Deltas made but not taken, oldest first; the last is number ``_seq``.
        self._outbox: list[Delta] = []

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: PlacementKey) -> Placement | None:
        """What is held under ``key``."""
        return self._held.get(key)

    def set(self, placement: Placement) -> None:
        """Hold ``placement``, instead of what its key had."""
        key = (placement.component, placement.codec)
        self._before.setdefault(key, self._held.get(key))
        self._held[key] = placement

    def remove(self, key: PlacementKey) -> None:
        """Hold nothing under ``key`` any more, which must be held."""
        placement = self._held.pop(key)
        self._before.setdefault(key, placement)

    def take_deltas(self) -> list[Delta]:
        """Every delta not taken yet, the newest up to now; each is given out once."""
        self._flush()
        taken, self._outbox = self._outbox, []
        return taken

    def snapshot(self) -> Snapshot:
        """All that is held now.

        Changes still pending are made a delta first, which waits to be taken: so the
        snapshot's number tells exactly which deltas it already contains, and those with
        higher numbers apply to it.
        """
        self._flush()
        return Snapshot(self._node, self._incarnation, self._seq, tuple(self._held.values()))

    def check(self) -> None:
        """Assert every invariant."""
        assert all(key == (p.component, p.codec) for key, p in self._held.items())
        first = self._seq - len(self._outbox) + 1
        assert [delta.seq for delta in self._outbox] == list(range(first, self._seq + 1))

    def _flush(self) -> None:
        changes = [
            (key, before, self._held.get(key))
            for key, before in self._before.items()
            if before != self._held.get(key)
        ]
        self._before.clear()
        if changes:
            self._seq += 1
            self._outbox.append(
                Delta(
                    self._node,
                    self._incarnation,
                    self._seq,
                    added=tuple(now for _, _, now in changes if now is not None),
                    removed=tuple(key for key, before, _ in changes if before is not None),
                )
            )
