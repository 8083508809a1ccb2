"""`ResidencyIndex` against a dictionary that is told the same and remembers it plainly."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from codec.geometry import Stage
from codec.identity import CodecId, ComponentKey
from policies.residency.changes import Outcome
from policies.residency.events import Placement, Snapshot
from policies.residency.index import ResidencyIndex
from tests.policies.residency.samples import (
    KVTC,
    NODES,
    RAW,
    STAGES,
    TOKENS,
    component,
    components,
    delta,
    key,
    placements_on,
)

ASKED = tuple(key(i) for i in range(5))


@dataclass
class Held:
    """What the model remembers of one node."""

    incarnation: int
    seq: int = 0
    synced: bool = False
    gapped: bool = False
    rows: dict[tuple[ComponentKey, CodecId], Placement] = field(default_factory=dict)


class IndexMachine(RuleBasedStateMachine):
    """Nodes that live, restart and lose messages, as seen by an index and by a model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ResidencyIndex(tokens_per_chunk=TOKENS)
        self.held: dict[str, Held] = {}
        self.version = 0

    def expect(self, outcome: Outcome, *, changed: bool) -> None:
        """Outcomes that say so raise the version by one, and no others do."""
        self.version += changed
        assert outcome.is_effective == changed

    @rule(node=st.sampled_from(NODES), incarnation=st.integers(0, 2))
    def join(self, node: str, incarnation: int) -> None:
        """A worker starts, or one that started earlier speaks up late."""
        known = self.held.get(node)
        is_new = known is None or incarnation > known.incarnation
        if is_new:
            self.held[node] = Held(incarnation)
        self.expect(self.index.join(node, incarnation), changed=is_new)

    @rule(
        node=st.sampled_from(NODES),
        skip=st.sampled_from([0, 0, 0, 0, 1, -1, -2]),
        restart=st.sampled_from([0, 0, 0, 0, 0, 1, -1]),
        data=st.data(),
    )
    def send_delta(self, node: str, skip: int, restart: int, data: st.DataObject) -> None:
        """The next change, mostly; now and then one lost, repeated, or of another start."""
        known = self.held.get(node, Held(1))
        incarnation = max(1, known.incarnation + restart)
        seq = max(1, (known.seq if incarnation == known.incarnation else 0) + 1 + skip)
        added = data.draw(placements_on(node))
        gone = data.draw(st.lists(st.integers(0, 4), max_size=3))
        outcome = self.index.apply_delta(
            delta(seq, added, gone, node=node, incarnation=incarnation)
        )
        if node not in self.held or incarnation < known.incarnation:
            return self.expect(outcome, changed=False)
        if incarnation > known.incarnation:
            known = self.held[node] = Held(incarnation)
        if seq <= known.seq:
            return self.expect(outcome, changed=False)
        known.gapped |= seq > known.seq + 1
        known.synced |= seq == 1
        known.seq = seq
        for ordinal in gone:
            known.rows.pop((component(ordinal), KVTC), None)
        known.rows.update({(p.component, p.codec): p for p in added})
        return self.expect(outcome, changed=True)

    @rule(node=st.sampled_from(NODES), ahead=st.integers(-1, 2), data=st.data())
    def send_snapshot(self, node: str, ahead: int, data: st.DataObject) -> None:
        """All that a worker holds, maybe overtaken by its own deltas."""
        known = self.held.get(node, Held(1))
        rows = data.draw(placements_on(node))
        seq, incarnation = max(0, known.seq + ahead), max(1, known.incarnation)
        outcome = self.index.apply_snapshot(Snapshot(node, incarnation, seq, rows))
        is_exact = known.synced and not known.gapped
        is_old = incarnation == known.incarnation and (
            seq < known.seq or (is_exact and seq == known.seq)
        )
        is_news = node in self.held and not is_old
        if is_news:
            latest = {(p.component, p.codec): p for p in rows}
            self.held[node] = Held(incarnation, seq, True, False, latest)
        self.expect(outcome, changed=is_news)

    @rule(node=st.sampled_from(NODES))
    def drop(self, node: str) -> None:
        """A worker is given up."""
        known = self.held.pop(node, None)
        self.expect(self.index.drop_node(node), changed=known is not None)

    @rule(node=st.sampled_from(NODES), ahead=st.integers(0, 2))
    def beat(self, node: str, ahead: int) -> None:
        """A heartbeat shows how far the stream has come."""
        known = self.held.get(node, Held(1))
        is_news = node in self.held and ahead > 0 and not known.gapped
        known.gapped |= ahead > 0
        outcome = self.index.mark_lost(node, known.incarnation, known.seq + ahead)
        self.expect(outcome, changed=is_news)

    @rule(node=st.sampled_from(NODES), what=components(), codec=st.sampled_from((RAW, KVTC)))
    def refute(self, node: str, what: ComponentKey, codec: CodecId) -> None:
        """A worker does not have what was asked of it."""
        known = self.held.get(node, Held(1))
        was_listed = known.rows.pop((what, codec), None) is not None
        known.gapped |= was_listed
        outcome = self.index.refute(node, known.incarnation, what, codec)
        self.expect(outcome, changed=was_listed)

    @invariant()
    def lists_what_the_model_holds(self) -> None:
        """Chunk by chunk, placement by placement."""
        self.index.check()
        for asked, found in zip(ASKED, self.index.lookup(ASKED, STAGES), strict=True):
            rows = [p for h in self.held.values() for p in h.rows.values()]
            assert len(set(found)) == len(found)
            assert set(found) == {p for p in rows if p.component.chunk_key == asked}

    @invariant()
    def offers_exactly_the_complete_prefixes(self) -> None:
        """For every codec, as far as every stage goes and no further."""
        for stages in (STAGES[:1], STAGES):
            answer = self.index.residency(ASKED, stages)
            lengths = {c: self.prefix(c, stages) for c in (RAW, KVTC)}
            assert {c.codecs[0]: c.num_chunks for c in answer.coverages} == {
                codec: length for codec, length in lengths.items() if length
            }
            listed = self.index.lookup(ASKED, stages)
            for chunk, found in enumerate(answer.placements()):
                reach = {c.codecs[0] for c in answer.coverages if c.num_chunks > chunk}
                assert set(found) == {p for p in listed[chunk] if p.codec in reach}
                assert len(set(found)) == len(found)

    def prefix(self, codec: CodecId, stages: tuple[Stage, ...]) -> int:
        """Count chunks by hand until one lacks a stage."""
        for ordinal in range(len(ASKED)):
            for stage in stages:
                wanted = (component(ordinal, stage), codec)
                if not any(wanted in held.rows for held in self.held.values()):
                    return ordinal
        return len(ASKED)

    @invariant()
    def says_how_fresh_it_is(self) -> None:
        """Version, numbers, incarnations, gaps, readiness."""
        answer = self.index.residency(ASKED, STAGES)
        held = self.held
        assert answer.as_of.version == self.index.version == self.version
        assert answer.as_of.seqs == {node: h.seq for node, h in held.items()}
        assert answer.incarnations == {node: h.incarnation for node, h in held.items()}
        assert answer.gapped == tuple(sorted(n for n, h in held.items() if h.gapped))
        assert answer.ready == (bool(held) and all(h.synced for h in held.values()))
        for node, h in held.items():
            assert self.index.needs_resync(node) == (h.gapped or not h.synced)

    @invariant()
    def gauges_and_counters_agree(self) -> None:
        """What came in and did not leave is there."""
        counters, gauges = self.index.counters, self.index.gauges()
        rows = [p for h in self.held.values() for p in h.rows.values()]
        left = counters.placements_removed + counters.stale_hits
        assert gauges["placements"] == len(rows) == counters.placements_added - left
        assert gauges["stored_bytes"] == sum(p.stored_bytes for p in rows)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
