"""Small worlds of nodes, chunks and codecs for tests of residency, and their random events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from codec.geometry import Stage
from codec.identity import UNBOUNDED, ChunkKey, CodecId, ComponentKey, digest
from policies.residency.changes import Change, Dropped, Joined, Lost, Refuted
from policies.residency.events import Delta, Placement, Snapshot
from policies.residency.index import ResidencyIndex

TOKENS = 256
STAGES = (Stage(0, 4, 0, 2), Stage(4, 8, 0, 2))
STAGE = STAGES[0]
NODES = ("ada", "bob", "cyd")
RAW, KVTC = (CodecId(digest("test.codec", name)) for name in (b"raw", b"kvtc"))


def key(ordinal: int) -> ChunkKey:
    """The key of chunk ``ordinal``; they are as unlike each other as digests are."""
    return ChunkKey(digest("test.chunk", str(ordinal).encode()))


KEYS = tuple(key(i) for i in range(16))


def component(ordinal: int, stage: Stage = STAGE, retention_class: str = UNBOUNDED) -> ComponentKey:
    """Chunk ``ordinal`` of ``stage``."""
    return ComponentKey(key(ordinal), stage, retention_class)


def placement(
    ordinal: int,
    node: str = "ada",
    *,
    stage: Stage = STAGE,
    codec: CodecId = KVTC,
    tier: str = "host",
    stored_bytes: int = 1000,
    decoded_bytes: int = 16_000,
) -> Placement:
    """Chunk ``ordinal`` on ``node``."""
    return Placement(
        component(ordinal, stage), codec, node, tier, stored_bytes, decoded_bytes, TOKENS
    )


def placements(
    ordinals: Iterable[int], node: str = "ada", *, stage: Stage = STAGE
) -> tuple[Placement, ...]:
    """Several chunks on ``node``."""
    return tuple(placement(ordinal, node, stage=stage) for ordinal in ordinals)


def delta(
    seq: int,
    added: Sequence[Placement] = (),
    removed: Iterable[int] = (),
    *,
    node: str = "ada",
    incarnation: int = 1,
) -> Delta:
    """Change number ``seq`` of ``node``; removals are of the plain stage and codec."""
    gone = tuple((component(ordinal), KVTC) for ordinal in removed)
    return Delta(node, incarnation, seq, tuple(added), gone)


def an_index(*nodes: str) -> ResidencyIndex:
    """An index that ``nodes`` have joined in incarnation 1."""
    index = ResidencyIndex(tokens_per_chunk=TOKENS)
    for node in nodes:
        index.join(node, 1)
    return index


def components() -> st.SearchStrategy[ComponentKey]:
    """Any of few components, so that events meet."""
    return st.builds(component, st.integers(0, 4), st.sampled_from(STAGES))


def placements_on(node: str) -> st.SearchStrategy[tuple[Placement, ...]]:
    """A few placements on ``node``."""
    one = st.builds(
        placement,
        st.integers(0, 4),
        st.just(node),
        stage=st.sampled_from(STAGES),
        codec=st.sampled_from((RAW, KVTC)),
        tier=st.sampled_from(("host", "disk")),
        stored_bytes=st.integers(1, 5),
        decoded_bytes=st.sampled_from((16_000, 32_000)),
    )
    return st.lists(one, max_size=6).map(tuple)


def deltas() -> st.SearchStrategy[Delta]:
    """Deltas in any order, of any of few incarnations."""
    removals = st.lists(st.tuples(components(), st.sampled_from((RAW, KVTC))), max_size=4)
    return st.sampled_from(NODES).flatmap(
        lambda node: st.builds(
            Delta,
            st.just(node),
            st.integers(1, 3),
            st.integers(1, 6),
            placements_on(node),
            removals.map(tuple),
        )
    )


def snapshots() -> st.SearchStrategy[Snapshot]:
    """Snapshots likewise."""
    return st.sampled_from(NODES).flatmap(
        lambda node: st.builds(
            Snapshot, st.just(node), st.integers(1, 3), st.integers(0, 6), placements_on(node)
        )
    )


def changes() -> st.SearchStrategy[Change]:
    """Any change, effective or not."""
    nodes, incarnations = st.sampled_from(NODES), st.integers(1, 3)
    codecs = st.sampled_from((RAW, KVTC))
    return st.one_of(
        st.builds(Joined, nodes, st.integers(0, 3)),
        deltas(),
        deltas(),
        snapshots(),
        st.builds(Lost, nodes, incarnations, st.integers(0, 6)),
        st.builds(Refuted, nodes, incarnations, components(), codecs),
        st.builds(Dropped, nodes),
    )
