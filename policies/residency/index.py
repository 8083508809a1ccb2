"""The residency index: which node holds which chunk, exactly as far as it has heard.

1. A node joins, and is not *synced* until its first delta or a snapshot has come.
2. Its deltas apply in order.  An older incarnation is fenced, a newer one clears what the
   node held, a repeated one is ignored.  A jump in the numbers marks the node as *gapped*:
   what is known of it stays usable, every answer says so, and a snapshot ends it.
3. A question is answered at once from flat maps (see `policies.residency.shelves`): for
   each codec, the longest run of leading chunks that every stage has.

Each effective change raises the version by one, and nothing else enters: equal changes
make equal indexes, which is what replicas rest on.  Not thread-safe, and no clock:
whoever owns the index feeds it events in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from codec.geometry import Stage
from codec.identity import UNBOUNDED, ChunkKey, CodecId, ComponentKey
from policies.residency.changes import (
    Change,
    Dropped,
    Joined,
    Lost,
    NodeRecord,
    Outcome,
    Refuted,
)
from policies.residency.events import Delta, Placement, Snapshot
from policies.residency.shelves import Shelves
from policies.residency.streams import IndexCounters, Stream
from policies.residency.view import AsOf, Residency


@dataclass(frozen=True, slots=True)
class _Freshness:
    """What every answer says of itself until the index changes."""

    as_of: AsOf
    incarnations: Mapping[str, int]
    gapped: tuple[str, ...]
    ready: bool


class ResidencyIndex:
    """Flat map from chunk key to placements, fenced by incarnation and sequence number.

    A call that raises `ValueError` has changed nothing.  Nodes enter by `join` only, so an
    event still in flight when its node is dropped cannot bring it back.
    """

    def __init__(self, *, tokens_per_chunk: int) -> None:
        if tokens_per_chunk < 1:
            raise ValueError(f"tokens_per_chunk must be at least 1, got {tokens_per_chunk}")
        self.tokens_per_chunk = tokens_per_chunk
        self.counters = IndexCounters()
        #: Effective changes so far.
        self._version = 0
        #: One per node that has joined and was not dropped; nobody else has shelves.
        self._streams: dict[str, Stream] = {}
        self._shelves = Shelves()
        #: None once the index has changed.
        self._freshness: _Freshness | None = None

    @property
    def version(self) -> int:
        """Effective changes applied so far."""
        return self._version

    # -- events

    def apply(self, change: Change) -> Outcome:
        """Apply any change, by the method of its kind."""
        match change:
            case Delta():
                return self.apply_delta(change)
            case Snapshot():
                return self.apply_snapshot(change)
            case Joined():
                return self.join(change.node, change.incarnation)
            case Dropped():
                return self.drop_node(change.node)
            case Lost():
                return self.mark_lost(change.node, change.incarnation, change.last_seq)
            case Refuted():
                return self.refute(change.node, change.incarnation, change.component, change.codec)

    def join(self, node: str, incarnation: int) -> Outcome:
        """Expect ``node`` to say what it holds; a new incarnation holds nothing yet.

        Nodes enter here only, so that an event still in flight when its node is dropped
        cannot bring it back.  Incarnation 0 is a node that has yet to start.
        """
        if incarnation < 0:
            raise ValueError(f"incarnation must not be negative, got {incarnation}")
        stream = self._streams.get(node)
        if stream is None:
            self._streams[node] = Stream(incarnation)
        elif incarnation > stream.incarnation:
            self._restart(node, incarnation)
        elif incarnation == stream.incarnation:
            return self._count(Outcome.DUPLICATE)
        else:
            return self._count(Outcome.FENCED)
        return self._count(Outcome.APPLIED)

    def apply_delta(self, delta: Delta) -> Outcome:
        """Apply a numbered change; linear in its rows.

        After lost deltas the change is applied all the same, for it is true.

        Raises
        ------
        ValueError
            If a placement names another node or another chunk size, or a number is below 1;
            nothing has changed then.
        """
        if delta.seq < 1:
            raise ValueError(f"a delta's seq must be at least 1, got {delta.seq}")
        self._validate(delta.node, delta.incarnation, delta.added)
        stream = self._streams.get(delta.node)
        if stream is None:
            return self._count(Outcome.UNKNOWN)
        if delta.incarnation < stream.incarnation:
            return self._count(Outcome.FENCED)
        if delta.incarnation > stream.incarnation:
            stream = self._restart(delta.node, delta.incarnation)
        if delta.seq <= stream.seq:
            return self._count(Outcome.DUPLICATE)
        is_next = delta.seq == stream.seq + 1
        stream.is_synced = stream.is_synced or delta.seq == 1
        stream.is_gapped = stream.is_gapped or not is_next
        stream.seq = delta.seq
        self._remove(delta.node, delta.removed)
        self._add(delta.node, delta.added)
        return self._count(Outcome.APPLIED if is_next else Outcome.GAP)

    def apply_snapshot(self, snapshot: Snapshot) -> Outcome:
        """Replace all that is known of a node, which ends its gap.

        A snapshot older than what is known is ignored: a worker sends its snapshot on the
        same ordered stream as its deltas.

        Raises
        ------
        ValueError
            If a placement names another node or another chunk size, or a number is too low;
            nothing has changed then.
        """
        if snapshot.seq < 0:
            raise ValueError(f"a snapshot's seq must not be negative, got {snapshot.seq}")
        self._validate(snapshot.node, snapshot.incarnation, snapshot.placements)
        stream = self._streams.get(snapshot.node)
        if stream is None:
            return self._count(Outcome.UNKNOWN)
        if snapshot.incarnation < stream.incarnation:
            return self._count(Outcome.FENCED)
        if snapshot.incarnation == stream.incarnation:
            first_useful = stream.seq + 1 if stream.is_exact else stream.seq
            if snapshot.seq < first_useful:
                return self._count(Outcome.DUPLICATE)
        stream = self._restart(snapshot.node, snapshot.incarnation)
        stream.seq, stream.is_synced = snapshot.seq, True
        self._add(snapshot.node, snapshot.placements)
        return self._count(Outcome.APPLIED)

    def drop_node(self, node: str) -> Outcome:
        """Forget a node and all that it held; linear in what it held."""
        if self._streams.pop(node, None) is None:
            return self._count(Outcome.UNKNOWN)
        self.counters.placements_removed += self._shelves.clear(node)
        return self._count(Outcome.APPLIED)

    def mark_lost(self, node: str, incarnation: int, last_seq: int) -> Outcome:
        """Note that the node's stream has reached ``last_seq``, wherever we are.

        This is how loss shows in a stream that has gone quiet.
        """
        stream = self._streams.get(node)
        if stream is None:
            return self._count(Outcome.UNKNOWN)
        if incarnation != stream.incarnation:
            return self._count(Outcome.FENCED)
        if last_seq <= stream.seq or stream.is_gapped:
            return self._count(Outcome.DUPLICATE)
        stream.is_gapped = True
        return self._count(Outcome.GAP)

    def refute(
        self, node: str, incarnation: int, component: ComponentKey, codec: CodecId
    ) -> Outcome:
        """Stop listing a component that the node turned out not to hold.

        Index and node disagree, so the node is gapped until a snapshot comes.
        """
        stream = self._streams.get(node)
        if stream is None:
            return self._count(Outcome.UNKNOWN)
        if incarnation != stream.incarnation:
            return self._count(Outcome.FENCED)
        if not self._shelves.take(node, component, codec):
            return self._count(Outcome.DUPLICATE)
        self.counters.stale_hits += 1
        stream.is_gapped = True
        return self._count(Outcome.APPLIED)

    # -- questions

    @property
    def ready(self) -> bool:
        """Whether at least one node has joined, and all that have are synced."""
        return self._fresh().ready

    def needs_resync(self, node: str) -> bool:
        """Whether a snapshot of ``node`` would tell something new."""
        stream = self._streams.get(node)
        return stream is not None and not stream.is_exact

    def incarnation(self, node: str) -> int | None:
        """The incarnation whose stream is followed; None for a node that has not joined."""
        stream = self._streams.get(node)
        return None if stream is None else stream.incarnation

    def residency(
        self,
        keys: Sequence[ChunkKey],
        stages: Sequence[Stage],
        *,
        codecs: Iterable[Sequence[CodecId]] | None = None,
        retention_class: str = UNBOUNDED,
    ) -> Residency:
        """Answer where the prefix ``keys`` can be restored from, for all of ``stages``.

        Parameters
        ----------
        codecs
            Which codecs count as one, each a codec per stage: identities name their stage
            where the calibration does.  By default, every codec that all stages share.

        Raises
        ------
        ValueError
            If there is no stage, or a codec is not given for each.
        """
        if not stages:
            raise ValueError("need at least one stage, got none")
        asked = tuple(keys)
        choices = self._choices(stages, codecs, retention_class)
        found = (self._shelves.cover(asked, stages, choice, retention_class) for choice in choices)
        coverages = [coverage for coverage in found if coverage is not None]
        coverages.sort(key=lambda coverage: (-coverage.num_chunks, coverage.codecs))
        fresh = self._fresh()
        return Residency(
            keys=asked,
            stages=tuple(stages),
            retention_class=retention_class,
            tokens_per_chunk=self.tokens_per_chunk,
            coverages=tuple(coverages),
            as_of=fresh.as_of,
            incarnations=fresh.incarnations,
            gapped=fresh.gapped,
            ready=fresh.ready,
        )

    def lookup(
        self,
        keys: Sequence[ChunkKey],
        stages: Sequence[Stage],
        *,
        retention_class: str = UNBOUNDED,
    ) -> list[tuple[Placement, ...]]:
        """Spell out every placement of each chunk, also behind a hole; for people and tools.

        Placements come by codec, stage, node.
        """
        return self._shelves.spell_out(keys, stages, retention_class, self.tokens_per_chunk)

    def gauges(self) -> dict[str, int]:
        """How much there is now: nodes, placements, their bytes, and the index's own memory."""
        return {
            "nodes": len(self._streams),
            "gapped_nodes": len(self._fresh().gapped),
            "placements": len(self._shelves),
            "stored_bytes": self._shelves.stored_bytes,
            "memory_bytes": self._shelves.memory_bytes(),
        }

    # -- the whole state

    def dump(self) -> tuple[NodeRecord, ...]:
        """All that is known, for `load`."""
        return tuple(
            NodeRecord(
                node=node,
                incarnation=stream.incarnation,
                seq=stream.seq,
                is_synced=stream.is_synced,
                is_gapped=stream.is_gapped,
                placements=self._shelves.of_node(node, self.tokens_per_chunk),
            )
            for node, stream in self._streams.items()
        )

    def load(self, version: int, records: Iterable[NodeRecord]) -> None:
        """Become the index that was dumped at ``version``; counters stay.

        Raises
        ------
        ValueError
            If a placement names another node or another chunk size; nothing has changed then.
        """
        records = tuple(records)
        for record in records:
            self._validate(record.node, max(record.incarnation, 1), record.placements)
        self._streams, self._shelves = {}, Shelves()
        for record in records:
            stream = self._streams[record.node] = Stream(record.incarnation)
            stream.seq = record.seq
            stream.is_synced, stream.is_gapped = record.is_synced, record.is_gapped
            self._shelves.put_all(record.node, record.placements)
        self._version = version
        self._freshness = None

    def check(self) -> None:
        """Assert every invariant.  For tests, not for control flow."""
        self._shelves.check()
        assert all(stream.seq >= 0 for stream in self._streams.values())
        assert self._shelves.nodes() <= self._streams.keys()

    # -- helpers

    def _validate(self, node: str, incarnation: int, placements: Iterable[Placement]) -> None:
        """Refuse what no worker of ours can have meant, before anything changes."""
        if incarnation < 1:
            raise ValueError(f"incarnation must be at least 1, got {incarnation}")
        for placement in placements:
            if placement.node != node:
                raise ValueError(f"{node} may not speak for {placement.node}")
            if placement.num_tokens != self.tokens_per_chunk:
                raise ValueError(
                    f"{node} stores chunks of {placement.num_tokens} tokens, "
                    f"this index of {self.tokens_per_chunk}"
                )

    def _count(self, outcome: Outcome) -> Outcome:
        """Note what became of an event; every one ends here exactly once."""
        name = "gaps" if outcome is Outcome.GAP else outcome.value
        setattr(self.counters, name, getattr(self.counters, name) + 1)
        if outcome.is_effective:
            self._version += 1
            self._freshness = None
        return outcome

    def _restart(self, node: str, incarnation: int) -> Stream:
        """Begin the node's stream anew, with nothing held."""
        self.counters.placements_removed += self._shelves.clear(node)
        stream = self._streams[node] = Stream(incarnation)
        return stream

    def _add(self, node: str, placements: Iterable[Placement]) -> None:
        added, replaced = self._shelves.put_all(node, placements)
        self.counters.placements_added += added
        self.counters.placements_replaced += replaced

    def _remove(self, node: str, gone: Iterable[tuple[ComponentKey, CodecId]]) -> None:
        """Take what is there; one that is absent does not stop the others."""
        for component, codec in gone:
            if self._shelves.take(node, component, codec):
                self.counters.placements_removed += 1
            else:
                self.counters.removals_absent += 1

    def _fresh(self) -> _Freshness:
        if self._freshness is None:
            streams = self._streams
            self._freshness = _Freshness(
                as_of=AsOf(self._version, {node: s.seq for node, s in streams.items()}),
                incarnations={node: s.incarnation for node, s in streams.items()},
                gapped=tuple(sorted(node for node, s in streams.items() if s.is_gapped)),
                ready=bool(streams) and all(s.is_synced for s in streams.values()),
            )
        return self._freshness

    def _choices(
        self,
        stages: Sequence[Stage],
        codecs: Iterable[Sequence[CodecId]] | None,
        retention_class: str,
    ) -> list[tuple[CodecId, ...]]:
        """The codecs to try, one per stage each."""
        if codecs is None:
            shared = self._shelves.codecs(stages, retention_class)
            return [(codec,) * len(stages) for codec in shared]
        choices = [tuple(choice) for choice in codecs]
        for choice in choices:
            if len(choice) != len(stages):
                raise ValueError(f"need a codec for each of {len(stages)} stages, got {choice}")
        return choices
