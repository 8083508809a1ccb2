"""`Shelves`: small per placement, cheap to drop, and giving back what they took."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import pytest

from codec.identity import ChunkKey, CodecId, ComponentKey
from policies.residency.events import Delta, Placement
from policies.residency.index import ResidencyIndex
from policies.residency.shelves import Shelves
from tests.policies.residency.samples import (
    KEYS,
    KVTC,
    RAW,
    STAGE,
    STAGES,
    TOKENS,
    component,
    placement,
    placements,
)

MAX_BYTES_PER_PLACEMENT = 250
DELTA_ROWS = 100


def fresh_placements(count: int, num_nodes: int, num_stages: int) -> Iterator[Placement]:
    """Placements as they come off the wire: no key, string or number is shared with another's."""
    for i in range(count):
        ordinal, node = divmod(i, num_nodes)
        chunk, stage = divmod(ordinal, num_stages)
        yield Placement(
            ComponentKey(ChunkKey(chunk.to_bytes(16, "little")), STAGES[stage]),
            CodecId(bytes(bytearray(KVTC))),
            f"node-{node}",
            str(b"host", "ascii"),
            500_000 + i,
            5_898_240,
            int(str(TOKENS)),
        )


def measured_bytes(build: Callable[[], object]) -> tuple[int, object]:
    """Memory that what ``build`` returns keeps."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        built = build()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before, built
    finally:
        tracemalloc.stop()


def fill(index: ResidencyIndex, count: int, num_nodes: int, num_stages: int) -> None:
    """Feed ``index`` in deltas, one stream per node."""
    seqs = dict.fromkeys(range(num_nodes), 0)
    rows = fresh_placements(count, num_nodes, num_stages)
    for node in seqs:
        index.join(f"node-{node}", 1)
    while batch := list(islice(rows, DELTA_ROWS * num_nodes)):
        for node in seqs:
            seqs[node] += 1
            own = tuple(batch[node::num_nodes])
            index.apply_delta(Delta(f"node-{node}", 1, seqs[node], own))


@pytest.mark.parametrize(
    ("count", "num_nodes", "num_stages"),
    [(20_000, 1, 1), (21_900, 1, 1), (20_000, 4, 1), (20_000, 2, 2)],
    ids=["plain", "dictionaries just grown", "four copies", "two copies of two stages"],
)
def test_a_placement_takes_at_most_250_bytes(count: int, num_nodes: int, num_stages: int) -> None:
    """Key, number, both map entries and its share of the rest (day-one item 7).

    At 21,900 entries CPython's dictionaries of one node have just doubled: the worst case.
    """

    def build() -> ResidencyIndex:
        index = ResidencyIndex(tokens_per_chunk=TOKENS)
        fill(index, count, num_nodes, num_stages)
        return index

    taken, index = measured_bytes(build)

    assert isinstance(index, ResidencyIndex)
    assert index.gauges()["placements"] == count
    assert taken / count <= MAX_BYTES_PER_PLACEMENT


def test_the_gauge_of_memory_is_close_to_the_truth() -> None:
    """An operator reads it instead of a profiler; what the allocator adds is not in it."""

    def build() -> Shelves:
        shelves = Shelves()
        shelves.put_all("node-0", fresh_placements(20_000, 1, 1))
        return shelves

    taken, shelves = measured_bytes(build)

    assert isinstance(shelves, Shelves)
    assert shelves.memory_bytes() == pytest.approx(taken, rel=0.05)


def test_memory_returns_when_a_node_goes() -> None:
    """Dictionaries that held its chunks shrink, also where another node keeps a few."""
    shelves = Shelves()
    shelves.put_all("bob", placements(range(10), "bob"))
    empty = shelves.memory_bytes()

    shelves.put_all("ada", fresh_placements(20_000, 1, 1))
    full = shelves.memory_bytes()
    assert shelves.clear("ada") == 20_000

    assert shelves.memory_bytes() <= empty * 2 < full / 100
    assert shelves.clear("bob") == 10
    assert (shelves.memory_bytes(), shelves.stored_bytes, len(shelves)) == (0, 0, 0)


def test_clearing_a_node_looks_at_nothing_else() -> None:
    """Dropping a node costs what it held: holders of others' chunks are never read."""
    shelves = Shelves()
    shelves.put_all("ada", placements(range(4)))
    shelves.put_all("bob", placements(range(2, 16), "bob"))
    lane = shelves.lane(KVTC, STAGE, "unbounded")
    assert lane is not None
    touched: list[ChunkKey] = []

    class Watched(dict[ChunkKey, object]):
        """Notes every key that is asked for."""

        def __getitem__(self, key: ChunkKey) -> object:
            touched.append(key)
            return super().__getitem__(key)

    lane.holders = Watched(lane.holders)  # type: ignore[assignment]
    shelves.clear("ada")

    assert touched == list(KEYS[:4])


def test_a_run_ends_where_the_holders_change() -> None:
    """Neighbours with the same holders are one run, and sizes keep their order."""
    shelves = Shelves()
    rows = [placement(i, stored_bytes=i + 1) for i in range(6)]
    shelves.put_all("ada", rows)
    shelves.put_all("bob", placements([2, 3], "bob"))
    shelves.put_all("ada", [placement(5, tier="disk")])

    coverage = shelves.cover(KEYS, [STAGE], (KVTC,), "unbounded")

    assert coverage is not None
    (runs,) = coverage.runs
    assert [(r.start, r.stop) for r in runs] == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert [[(h.node, h.tier, h.stored_bytes) for h in r.holdings] for r in runs] == [
        [("ada", "host", (1, 2))],
        [("ada", "host", (3, 4)), ("bob", "host", (1000, 1000))],
        [("ada", "host", (5,))],
        [("ada", "disk", (1000,))],
    ]


def test_putting_counts_what_is_new_and_what_is_not() -> None:
    """Within one call, too, the last word on a component wins."""
    shelves = Shelves()

    first = shelves.put_all("ada", [placement(0), placement(0, stored_bytes=5), placement(1)])
    second = shelves.put_all("bob", placements([0], "bob"))

    assert (first, second) == ((2, 1), (1, 0))
    assert shelves.stored_bytes == 5 + 1000 + 1000
    shelves.check()


@pytest.mark.parametrize(
    "other",
    [
        replace(placement(1), tier="disk"),
        replace(placement(1), codec=RAW),
        replace(placement(1), decoded_bytes=7),
        replace(placement(1), component=component(1, retention_class="window:64")),
        replace(placement(1), component=component(1, STAGES[1])),
    ],
    ids=["tier", "codec", "size", "class", "stage"],
)
def test_neighbours_in_a_batch_are_told_apart(other: Placement) -> None:
    """A batch is shelved by runs of like placements; one that differs ends the run."""
    shelves = Shelves()
    batch = [placement(0), other, placement(2)]

    shelves.put_all("ada", batch)

    assert set(shelves.of_node("ada", TOKENS)) == set(batch)
    shelves.check()


def test_taking_what_is_not_there_says_so() -> None:
    """Another chunk, node, codec or stage is not it."""
    shelves = Shelves()
    shelves.put_all("ada", placements([0]))

    assert not shelves.take("ada", component(1), KVTC)
    assert not shelves.take("bob", component(0), KVTC)
    assert not shelves.take("ada", component(0), CodecId(bytes(16)))
    assert not shelves.take("ada", component(0, STAGES[1]), KVTC)
    assert shelves.take("ada", component(0), KVTC)
    assert (len(shelves), shelves.nodes()) == (0, set())


def test_check_sees_maps_that_disagree() -> None:
    """The test oracle can fail."""
    shelves = Shelves()
    shelves.put_all("ada", placements([0, 1]))
    lane = shelves.lane(KVTC, STAGE, "unbounded")
    assert lane is not None

    del lane.holders[KEYS[0]]

    with pytest.raises(AssertionError):
        shelves.check()
