"""Who holds what: the storage beneath the residency index.

Two maps, each the other's inverse:

* a *lane* (stage, retention class, codec) maps chunk keys to the shelves that hold them.
  It is flat: no chunk hangs on its parent, so one that leaves and comes back loses
  nothing behind it.
* a *shelf* (node, lane, tier, decoded size) maps chunk keys to stored bytes.  Dropping
  a node walks its shelves, so it costs what the node held and no more.

A placement so costs one key, one integer and an entry in two dictionaries: under 250
bytes in the worst state of both.  What its neighbours share is kept once, on the shelf.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import cast

from codec.geometry import Stage
from codec.identity import ChunkKey, CodecId, ComponentKey
from policies.residency.events import Placement
from policies.residency.view import Coverage, Holding, Run

KEY_MEMORY_BYTES = sys.getsizeof(bytes(16))
COUNT_MEMORY_BYTES = sys.getsizeof(1 << 20)


class Lane:
    """All chunks coded one way for one stage and retention class."""

    __slots__ = ("codec", "holders", "retention_class", "stage")

    def __init__(self, stage: Stage, retention_class: str, codec: CodecId) -> None:
        self.stage = stage
        self.retention_class = retention_class
        self.codec = codec
        #: ``{chunk: shelves that hold it}``; never empty, at most one per node, by node name.
        self.holders: dict[ChunkKey, tuple[Shelf, ...]] = {}

    def leading_holders(self, keys: Sequence[ChunkKey]) -> list[tuple[Shelf, ...]]:
        """Holders of ``keys`` up to the first that nobody holds."""
        # Everything here that is done once per chunk runs in C: it is what a query costs.
        if not keys or keys[0] not in self.holders:
            return []
        column = list(map(self.holders.get, keys))
        if not all(column):
            del column[column.index(None) :]
        return cast("list[tuple[Shelf, ...]]", column)

    def runs(
        self, keys: Sequence[ChunkKey], holders: Sequence[tuple[Shelf, ...]]
    ) -> tuple[Run, ...]:
        """Join neighbours that the same shelves hold; ``holders`` are those of ``keys``."""
        if holders.count(holders[0]) == len(holders):
            lengths = [(holders[0], len(holders))]
        else:
            lengths = [(shelves, len(list(group))) for shelves, group in groupby(holders)]
        runs: list[Run] = []
        start = 0
        for shelves, length in lengths:
            stop = start + length
            span = keys[start:stop]
            runs.append(Run(start, stop, tuple(shelf.holding(span) for shelf in shelves)))
            start = stop
        return tuple(runs)


class Shelf:
    """What one node holds of one lane in one tier, all of one decoded size."""

    __slots__ = ("alone", "decoded_bytes", "lane", "node", "stored", "tier")

    def __init__(self, node: str, lane: Lane, tier: str, decoded_bytes: int) -> None:
        self.node = node
        self.lane = lane
        self.tier = tier
        self.decoded_bytes = decoded_bytes
        #: ``{chunk: stored bytes}``; a chunk is here if and only if its holders name this shelf.
        self.stored: dict[ChunkKey, int] = {}
        #: The holders of a chunk that nobody else has: one tuple for all of them.
        self.alone: tuple[Shelf, ...] = (self,)

    def holding(self, keys: Sequence[ChunkKey]) -> Holding:
        """What this shelf holds of ``keys``, which are all here."""
        stored_bytes = tuple(map(self.stored.__getitem__, keys))
        return Holding(self.node, self.tier, self.decoded_bytes, stored_bytes)

    def placement(self, key: ChunkKey, num_tokens: int) -> Placement:
        """One chunk of the shelf, spelled out."""
        lane = self.lane
        component = ComponentKey(key, lane.stage, lane.retention_class)
        stored_bytes = self.stored[key]
        return Placement(
            component,
            lane.codec,
            self.node,
            self.tier,
            stored_bytes,
            self.decoded_bytes,
            num_tokens,
        )


class Shelves:
    """Every shelf of every node.  A chunk of a lane is at most once on a node."""

    def __init__(self) -> None:
        #: ``{codec: {(stage, class): lane}}``; no empty lane, no empty inner map.
        self._lanes: dict[CodecId, dict[tuple[Stage, str], Lane]] = {}
        #: ``{node: {(lane, tier, decoded bytes): shelf}}``; no empty shelf, no empty inner map.
        self._shelves: dict[str, dict[tuple[Lane, str, int], Shelf]] = {}
        #: Sum over all shelves.
        self.stored_bytes = 0

    # -- changes

    def put_all(self, node: str, placements: Iterable[Placement]) -> tuple[int, int]:
        """Shelve what ``node`` holds, each in place of what its component had there.

        Returns
        -------
        added, replaced
            How many were new on the node, and how many were there in some form.
        """
        added = replaced = 0
        shelf: Shelf | None = None
        last: Placement | None = None
        for placement in placements:
            if shelf is None or last is None or not _are_alike(last, placement):
                shelf = self._shelf(node, placement)
            last = placement
            if self._put(shelf, placement.component.chunk_key, placement.stored_bytes):
                added += 1
            else:
                replaced += 1
        return added, replaced

    def take(self, node: str, component: ComponentKey, codec: CodecId) -> bool:
        """Take a component off ``node``'s shelves; false if it is not there."""
        lane = self.lane(codec, component.stage, component.retention_class)
        if lane is None:
            return False
        key = component.chunk_key
        for shelf in lane.holders.get(key, ()):
            if shelf.node == node:
                self.stored_bytes -= shelf.stored.pop(key)
                self._unlist(lane, key, shelf)
                self._prune(shelf)
                return True
        return False

    def clear(self, node: str) -> int:
        """Empty ``node``'s shelves; linear in what they held, which is returned."""
        cleared = 0
        for shelf in self._shelves.pop(node, {}).values():
            lane = shelf.lane
            for key, stored_bytes in shelf.stored.items():
                self.stored_bytes -= stored_bytes
                self._unlist(lane, key, shelf)
            cleared += len(shelf.stored)
            if len(shelf.stored) > len(lane.holders):
                # A dictionary keeps the room of its largest state until it is copied.
                lane.holders = dict(lane.holders)
        return cleared

    # -- questions

    def codecs(self, stages: Sequence[Stage], retention_class: str) -> list[CodecId]:
        """Codecs that hold at least one chunk of every one of ``stages``."""
        places = [(stage, retention_class) for stage in stages]
        return [
            codec for codec, lanes in self._lanes.items() if all(place in lanes for place in places)
        ]

    def lane(self, codec: CodecId, stage: Stage, retention_class: str) -> Lane | None:
        """The lane, if it holds anything."""
        lanes = self._lanes.get(codec)
        return None if lanes is None else lanes.get((stage, retention_class))

    def of_node(self, node: str, num_tokens: int) -> tuple[Placement, ...]:
        """All that ``node`` holds, spelled out."""
        return tuple(
            shelf.placement(key, num_tokens)
            for shelf in self._shelves.get(node, {}).values()
            for key in shelf.stored
        )

    def cover(
        self,
        keys: Sequence[ChunkKey],
        stages: Sequence[Stage],
        codecs: tuple[CodecId, ...],
        retention_class: str,
    ) -> Coverage | None:
        """The longest prefix of ``keys`` that is there for every stage, if there is one.

        ``codecs`` are one per stage.
        """
        lanes: list[Lane] = []
        columns: list[list[tuple[Shelf, ...]]] = []
        count = len(keys)
        for codec, stage in zip(codecs, stages, strict=True):
            lane = self.lane(codec, stage, retention_class)
            if lane is None:
                return None
            column = lane.leading_holders(keys[:count])
            count = len(column)
            lanes.append(lane)
            columns.append(column)
        if not count:
            return None
        runs = (
            lane.runs(keys, column[:count]) for lane, column in zip(lanes, columns, strict=True)
        )
        return Coverage(codecs, count, tuple(runs))

    def spell_out(
        self,
        keys: Sequence[ChunkKey],
        stages: Sequence[Stage],
        retention_class: str,
        num_tokens: int,
    ) -> list[tuple[Placement, ...]]:
        """Every placement of each of ``keys``, by codec, stage, node."""
        lanes = [
            lane
            for codec in sorted(self._lanes)
            for stage in stages
            if (lane := self.lane(codec, stage, retention_class)) is not None
        ]
        return [
            tuple(
                shelf.placement(key, num_tokens)
                for lane in lanes
                for shelf in lane.holders.get(key, ())
            )
            for key in keys
        ]

    def nodes(self) -> set[str]:
        """Nodes that hold anything."""
        return set(self._shelves)

    def __len__(self) -> int:
        return sum(len(shelf.stored) for shelf in self._all())

    def memory_bytes(self) -> int:
        """What keys, counts and dictionaries take, short of what shelves share; cheap."""
        total = 0
        for shelf in self._all():
            each = KEY_MEMORY_BYTES + COUNT_MEMORY_BYTES
            total += sys.getsizeof(shelf.stored) + len(shelf.stored) * each
        for lanes in self._lanes.values():
            total += sum(sys.getsizeof(lane.holders) for lane in lanes.values())
        return total

    def check(self) -> None:
        """Assert every invariant.  For tests, not for control flow."""
        listed = 0
        for codec, lanes in self._lanes.items():
            assert lanes, codec
            for (stage, retention_class), lane in lanes.items():
                assert (lane.stage, lane.retention_class) == (stage, retention_class)
                assert lane.codec == codec
                assert lane.holders, (codec, stage)
                for key, holders in lane.holders.items():
                    nodes = [shelf.node for shelf in holders]
                    assert nodes == sorted(set(nodes)), nodes
                    assert nodes, key
                    assert all(key in shelf.stored and shelf.lane is lane for shelf in holders)
                    assert len(holders) > 1 or holders is holders[0].alone
                    listed += len(holders)
        # As many on shelves as are listed, and all that are listed are on a shelf.
        assert listed == len(self)
        for node, shelves in self._shelves.items():
            assert shelves, node
            assert all(s.stored and s.node == node for s in shelves.values()), node
        assert self.stored_bytes == sum(sum(shelf.stored.values()) for shelf in self._all())

    # -- helpers

    def _all(self) -> Iterator[Shelf]:
        for shelves in self._shelves.values():
            yield from shelves.values()

    def _shelf(self, node: str, placement: Placement) -> Shelf:
        """The shelf where ``placement`` belongs, made if need be; the caller fills it."""
        component, codec = placement.component, placement.codec
        lanes = self._lanes.setdefault(codec, {})
        place = (component.stage, component.retention_class)
        lane = lanes.get(place)
        if lane is None:
            lane = lanes[place] = Lane(*place, codec)
        shelves = self._shelves.setdefault(node, {})
        where = (lane, placement.tier, placement.decoded_bytes)
        shelf = shelves.get(where)
        if shelf is None:
            shelf = shelves[where] = Shelf(node, *where)
        return shelf

    def _put(self, shelf: Shelf, key: ChunkKey, stored_bytes: int) -> bool:
        """Shelve one chunk; false if the node had it in some form."""
        lane = shelf.lane
        holders = lane.holders.get(key)
        self.stored_bytes += stored_bytes
        if holders is None:
            lane.holders[key] = shelf.alone
            shelf.stored[key] = stored_bytes
            return True
        old = next((other for other in holders if other.node == shelf.node), None)
        if old is not None:
            self.stored_bytes -= old.stored.pop(key)
        shelf.stored[key] = stored_bytes
        if old is not shelf:
            kept = [other for other in holders if other is not old]
            lane.holders[key] = _in_order([*kept, shelf])
        if old is not None and old is not shelf:
            self._prune(old)
        return old is None

    def _unlist(self, lane: Lane, key: ChunkKey, shelf: Shelf) -> None:
        """Take ``shelf`` from the holders of ``key``."""
        holders = lane.holders[key]
        if holders is not shelf.alone:
            lane.holders[key] = _in_order([other for other in holders if other is not shelf])
            return
        del lane.holders[key]
        if not lane.holders:
            lanes = self._lanes[lane.codec]
            del lanes[lane.stage, lane.retention_class]
            if not lanes:
                del self._lanes[lane.codec]

    def _prune(self, shelf: Shelf) -> None:
        """Forget ``shelf`` if nothing is left on it."""
        if shelf.stored:
            return
        shelves = self._shelves[shelf.node]
        del shelves[shelf.lane, shelf.tier, shelf.decoded_bytes]
        if not shelves:
            del self._shelves[shelf.node]


def _in_order(shelves: list[Shelf]) -> tuple[Shelf, ...]:
    """Holders of a chunk, by node name; ``alone`` stands for a single one."""
    if len(shelves) == 1:
        return shelves[0].alone
    return tuple(sorted(shelves, key=lambda shelf: shelf.node))


def _are_alike(one: Placement, other: Placement) -> bool:
    """Whether two placements of one node plainly belong on the same shelf.

    Stages are compared by identity, since equality is slow and what one worker sends in
    one batch shares them.  A false answer costs a look-up, no more.
    """
    return (
        one.component.stage is other.component.stage
        and one.codec == other.codec
        and one.decoded_bytes == other.decoded_bytes
        and one.tier == other.tier
        and one.component.retention_class == other.component.retention_class
    )
