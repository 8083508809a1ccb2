"""`ResidencyIndex`: fenced, gap-aware, and never lies about a prefix it has heard of."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from codec.geometry import Stage
from codec.identity import CodecId, ComponentKey, digest
from policies.residency.changes import Change, Joined, Outcome
from policies.residency.events import Delta, Placement, Snapshot
from policies.residency.index import ResidencyIndex
from tests.policies.residency.samples import (
    KEYS,
    KVTC,
    RAW,
    STAGE,
    STAGES,
    TOKENS,
    an_index,
    component,
    delta,
    placement,
    placements,
)


def listed(index: ResidencyIndex, node: str = "ada") -> list[int]:
    """Ordinals of the chunks that ``index`` lists on ``node``."""
    found = index.lookup(KEYS, STAGES)
    return [i for i, chunk in enumerate(found) if any(p.node == node for p in chunk)]


def prefix(index: ResidencyIndex, *stages: Stage) -> int:
    """Chunks of the longest prefix of `KEYS`."""
    return index.residency(KEYS, stages or (STAGE,)).num_chunks


# -- incarnations


def test_a_new_incarnation_clears_what_the_old_one_held() -> None:
    """A restart in place, numbers from 1: old 0, new 8, where the strongest baseline says 64, 0.

    This is the lie of router.md 3.0 (day-one item 1).
    """
    index = an_index("ada", "bob")
    index.apply_delta(delta(1, placements(range(8))))
    index.apply_delta(delta(1, placements(range(8), "bob"), node="bob"))

    outcome = index.apply_delta(delta(1, placements(range(8, 16)), incarnation=2))

    assert outcome is Outcome.APPLIED
    assert listed(index) == list(range(8, 16))
    assert listed(index, "bob") == list(range(8))
    assert not index.needs_resync("ada")


def test_an_old_incarnation_is_fenced_and_counted() -> None:
    """What a dead worker still had in flight changes nothing, whatever its number."""
    index = an_index("ada")
    index.apply_delta(delta(1, placements([0]), incarnation=2))
    version = index.version

    outcomes = {
        index.apply_delta(delta(2, placements([1]))),
        index.apply_snapshot(Snapshot("ada", 1, 9, placements([2]))),
        index.join("ada", 1),
        index.mark_lost("ada", 1, 9),
        index.refute("ada", 1, component(0), KVTC),
    }

    assert outcomes == {Outcome.FENCED}
    assert (index.counters.fenced, index.version) == (5, version)
    assert listed(index) == [0]


def test_a_dropped_node_stays_away_until_it_joins() -> None:
    """An event in flight when a node is removed does not add it back (3.1, item 9)."""
    index = an_index("ada")
    index.apply_delta(delta(1, placements([0])))
    index.drop_node("ada")

    late = {
        index.apply_delta(delta(2, placements([1]))),
        index.apply_snapshot(Snapshot("ada", 2, 0)),
        index.mark_lost("ada", 1, 9),
        index.refute("ada", 1, component(0), KVTC),
        index.drop_node("ada"),
    }

    assert late == {Outcome.UNKNOWN}
    assert index.counters.unknown == 5
    assert (listed(index), index.incarnation("ada")) == ([], None)
    index.join("ada", 1)
    index.apply_delta(delta(1, placements([3])))
    assert listed(index) == [3]


def test_a_newer_snapshot_clears_as_a_delta_does() -> None:
    """The first that is heard of a restart may be a snapshot."""
    index = an_index("ada")
    index.apply_delta(delta(4, placements([0])))

    index.apply_snapshot(Snapshot("ada", 2, 1, placements([5])))

    assert listed(index) == [5]
    assert index.residency(KEYS, [STAGE]).incarnations == {"ada": 2}


# -- gaps


def test_a_gap_is_said_and_what_is_known_stays_usable() -> None:
    """Lost deltas leave a mark in every answer until a snapshot comes (day-one items 1, 4)."""
    index = an_index("ada")
    index.apply_delta(delta(1, placements([0, 1])))

    outcome = index.apply_delta(delta(3, placements([2])))

    answer = index.residency(KEYS, [STAGE])
    assert outcome is Outcome.GAP
    assert (answer.prefix_tokens, answer.gap, answer.gapped) == (3 * TOKENS, True, ("ada",))
    assert index.needs_resync("ada")
    assert index.apply_delta(delta(4)) is Outcome.APPLIED
    assert index.residency(KEYS, [STAGE]).gap
    index.apply_snapshot(Snapshot("ada", 1, 4, placements([0])))
    assert not index.residency(KEYS, [STAGE]).gap
    assert (listed(index), index.needs_resync("ada")) == ([0], False)


def test_loss_in_a_quiet_stream_is_noticed() -> None:
    """A lost removal and then silence: the heartbeat's number tells (day-one item 2)."""
    index = an_index("ada")
    index.apply_delta(delta(1, placements([0])))

    assert index.mark_lost("ada", 1, 1) is Outcome.DUPLICATE
    assert not index.residency(KEYS, [STAGE]).gap
    assert index.mark_lost("ada", 1, 2) is Outcome.GAP
    assert index.residency(KEYS, [STAGE]).gap
    assert index.mark_lost("ada", 1, 3) is Outcome.DUPLICATE


def test_a_late_joiner_is_a_gap_and_not_ready() -> None:
    """Hearing number 5 first, we know what 5 says and that we know no more (items 3, 4)."""
    index = an_index("ada")

    outcome = index.apply_delta(delta(5, placements([0])))

    assert outcome is Outcome.GAP
    assert (listed(index), index.ready) == ([0], False)
    index.apply_snapshot(Snapshot("ada", 1, 5, placements([0, 1])))
    assert (listed(index), index.ready) == ([0, 1], True)


@pytest.mark.parametrize("seq", [1, 2])
def test_duplicates_are_ignored(seq: int) -> None:
    """A delta that comes again, or late, does not undo what came after it."""
    index = an_index("ada")
    index.apply_delta(delta(1, placements([0])))
    index.apply_delta(delta(2, removed=[0]))
    version = index.version

    outcome = index.apply_delta(delta(seq, placements([0])))

    assert (outcome, index.version, listed(index)) == (Outcome.DUPLICATE, version, [])


def test_a_stale_snapshot_does_not_undo_later_deltas() -> None:
    """Neither an older one, nor, where nothing was lost, one of the same age."""
    index = an_index("ada")
    index.apply_delta(delta(1, placements([0])))
    index.apply_delta(delta(2, placements([1])))

    outcomes = [index.apply_snapshot(Snapshot("ada", 1, seq)) for seq in (0, 1, 2)]

    assert outcomes == [Outcome.DUPLICATE] * 3
    assert listed(index) == [0, 1]
    assert index.apply_snapshot(Snapshot("ada", 1, 3)) is Outcome.APPLIED
    assert listed(index) == []


def test_a_gap_stays_with_a_snapshot_from_before_it() -> None:
    """A snapshot at 2 cannot make good what was lost before 4."""
    index = an_index("ada")
    index.apply_delta(delta(1))
    index.apply_delta(delta(4))

    assert index.apply_snapshot(Snapshot("ada", 1, 2)) is Outcome.DUPLICATE
    assert index.residency(KEYS, [STAGE]).gap


# -- scope


def test_removals_are_scoped_to_their_node() -> None:
    """One node's eviction leaves the block to the others (3.1, item 7; day-one item 5)."""
    index = an_index("ada", "bob")
    for node in ("ada", "bob"):
        index.apply_delta(delta(1, placements([0, 1], node), node=node))

    index.apply_delta(delta(2, removed=[0]))
    index.drop_node("ada")

    assert (listed(index), listed(index, "bob")) == ([], [0, 1])


def test_an_absent_removal_does_not_stop_the_others() -> None:
    """The rest of the batch is applied, and the absent one is counted (3.1, item 3)."""
    index = an_index("ada")
    index.apply_delta(delta(1, placements([0, 1, 2])))

    index.apply_delta(delta(2, removed=[0, 9, 1]))

    assert listed(index) == [2]
    assert index.counters.removals_absent == 1


def test_removals_apply_before_additions() -> None:
    """A delta that names a component in both lists has replaced it."""
    index = an_index("ada")
    index.apply_delta(delta(1, [placement(0, stored_bytes=10)]))

    index.apply_delta(delta(2, [placement(0, stored_bytes=20)], removed=[0]))

    assert [p.stored_bytes for p in index.lookup(KEYS[:1], STAGES)[0]] == [20]


def test_a_component_moves_between_tiers_without_being_twice() -> None:
    """One node lists a component once per codec, where it was last."""
    index = an_index("ada")
    index.apply_delta(delta(1, [placement(0), placement(0, codec=RAW)]))

    index.apply_delta(delta(2, [placement(0, tier="disk", stored_bytes=7)]))

    found = index.lookup(KEYS[:1], STAGES)[0]
    assert {(p.codec, p.tier, p.stored_bytes) for p in found} == {
        (RAW, "host", 1000),
        (KVTC, "disk", 7),
    }
    assert index.gauges()["stored_bytes"] == 1007
    index.check()


# -- prefixes


def test_a_hole_that_is_filled_gives_the_tail_back() -> None:
    """One interior chunk removed and put back: 16 of 16, where a tree says 4 (item 6)."""
    index = an_index("ada")
    index.apply_delta(delta(1, placements(range(16))))

    index.apply_delta(delta(2, removed=[4]))
    assert prefix(index) == 4
    index.apply_delta(delta(3, placements([4])))

    assert prefix(index) == 16


def test_a_prefix_is_complete_over_all_stages() -> None:
    """A chunk that lacks one stage cannot be restored, so it is not offered (item 10)."""
    index = an_index("ada", "bob")
    index.apply_delta(delta(1, placements(range(8), stage=STAGES[0])))
    index.apply_delta(delta(1, placements([0, 1, 3], "bob", stage=STAGES[1]), node="bob"))

    assert prefix(index, STAGES[0]) == 8
    assert prefix(index, STAGES[1]) == 2
    assert prefix(index, *STAGES) == 2
    assert prefix(index, Stage(8, 9, 0, 1)) == 0


def test_codecs_do_not_complete_each_other() -> None:
    """Half a prefix raw and half coded is two half prefixes, the longer first."""
    index = an_index("ada")
    raw = [placement(i, codec=RAW) for i in (0, 3)]
    index.apply_delta(delta(1, [*raw, *placements(range(3))]))

    found = index.residency(KEYS, [STAGE]).coverages

    assert [(c.codecs, c.num_chunks) for c in found] == [((KVTC,), 3), ((RAW,), 1)]


def test_codecs_whose_identity_names_the_stage_are_asked_as_one() -> None:
    """A calibration per stage gives an identity per stage; the caller says what belongs together.

    Left out, only codecs that all stages share are tried.
    """
    index = an_index("ada")
    first, second = (CodecId(digest("test.codec", str(s).encode())) for s in STAGES)
    pairs = [(0, STAGES[0], first), (0, STAGES[1], second), (1, STAGES[0], first)]
    rows = [placement(i, stage=stage, codec=codec) for i, stage, codec in pairs]
    index.apply_delta(delta(1, rows))

    together = index.residency(KEYS, STAGES, codecs=[(first, second), (second, first)])

    assert [c.codecs for c in together.coverages] == [(first, second)]
    assert together.num_chunks == 1
    assert index.residency(KEYS, STAGES).coverages == ()
    with pytest.raises(ValueError, match="a codec for each of 2 stages"):
        index.residency(KEYS, STAGES, codecs=[(first,)])


def test_nothing_is_found_for_nothing_and_no_stage_is_refused() -> None:
    """An empty prompt has an empty prefix; a question about no stage is a mistake."""
    index = an_index("ada")

    assert index.residency([], [STAGE]).prefix_tokens == 0
    assert index.lookup([], STAGES) == []
    with pytest.raises(ValueError, match="at least one stage"):
        index.residency(KEYS, [])


def test_lookup_also_shows_what_lies_behind_a_hole() -> None:
    """It serves people: everything listed, by codec, stage and node."""
    index = an_index("ada", "bob")
    index.apply_delta(delta(1, [placement(2), placement(2, stage=STAGES[1])], node="ada"))
    index.apply_delta(delta(1, placements([2], "bob"), node="bob"))

    found = index.lookup(KEYS[:3], STAGES)

    assert found[:2] == [(), ()]
    assert [(p.component.stage, p.node) for p in found[2]] == [
        (STAGES[0], "ada"),
        (STAGES[0], "bob"),
        (STAGES[1], "ada"),
    ]


def test_retention_classes_are_kept_apart() -> None:
    """A window's component does not stand in for the whole."""
    index = an_index("ada")
    plain = placement(0)
    windowed = ComponentKey(KEYS[1], STAGE, "window:1024")
    index.apply_delta(delta(1, [plain, replace(plain, component=windowed)]))

    assert prefix(index) == 1
    in_window = index.residency(KEYS[1:], [STAGE], retention_class="window:1024")
    assert in_window.num_chunks == 1
    assert in_window.component(0, 0) == windowed


# -- freshness and readiness


def test_answers_say_as_of_when_they_are_true() -> None:
    """Version, numbers and incarnations are of the answer, not of now (day-one item 4)."""
    index = an_index("ada", "bob")
    index.apply_delta(delta(1, placements([0])))
    before = index.residency(KEYS, [STAGE])

    index.apply_delta(delta(2, placements([1])))
    index.drop_node("bob")

    after = index.residency(KEYS, [STAGE])
    assert (before.as_of.version, before.as_of.seqs) == (3, {"ada": 1, "bob": 0})
    assert (after.as_of.version, after.as_of.seqs) == (5, {"ada": 2})
    assert before.incarnations == {"ada": 1, "bob": 1}
    assert before.prefix_tokens == TOKENS


def test_an_index_is_ready_when_all_have_spoken() -> None:
    """A snapshot counts, or a stream heard from its first number (day-one item 3)."""
    index = ResidencyIndex(tokens_per_chunk=TOKENS)
    assert not index.ready
    for node in ("ada", "bob", "cyd"):
        index.join(node, 1)

    index.apply_delta(delta(1))
    index.apply_snapshot(Snapshot("bob", 1, 7))
    assert not index.ready
    index.drop_node("cyd")

    assert index.ready
    index.join("ada", 2)
    assert not index.ready


def test_an_expected_node_is_waited_for() -> None:
    """Incarnation 0 holds the place of a worker that has not started."""
    index = ResidencyIndex(tokens_per_chunk=TOKENS)
    index.join("ada", 0)
    assert not index.ready

    index.join("ada", 7)
    index.apply_delta(delta(1, incarnation=7))

    assert index.ready


def test_a_stale_hit_is_taken_off_and_counted() -> None:
    """Negative entry, counter, and a gap since index and node disagree (day-one item 11)."""
    index = an_index("ada", "bob")
    index.apply_delta(delta(1, placements([0, 1])))
    index.apply_delta(delta(1, placements([0], "bob"), node="bob"))

    assert index.refute("ada", 1, component(0), KVTC) is Outcome.APPLIED
    assert index.refute("ada", 1, component(0), KVTC) is Outcome.DUPLICATE

    assert (listed(index), listed(index, "bob")) == ([1], [0])
    assert index.counters.stale_hits == 1
    assert index.residency(KEYS, [STAGE]).gapped == ("ada",)
    index.apply_snapshot(Snapshot("ada", 1, 1, placements([1])))
    assert not index.residency(KEYS, [STAGE]).gap


# -- refusals


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (delta(0), "seq must be at least 1, got 0"),
        (delta(2, incarnation=0), "incarnation must be at least 1, got 0"),
        (delta(2, [placement(3, "bob")]), "ada may not speak for bob"),
        (
            delta(2, [Placement(component(3), KVTC, "ada", "host", 1, 1, 128)]),
            "chunks of 128 tokens, this index of 256",
        ),
        (Snapshot("ada", 1, -1), "seq must not be negative, got -1"),
        (Snapshot("ada", 2, 3, placements([4], "bob")), "ada may not speak for bob"),
        (Joined("ada", -1), "incarnation must not be negative, got -1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_breaks_the_contract_is_refused_and_changes_nothing(
    event: Delta | Snapshot | Joined, message: str
) -> None:
    """A silent miss for ever is worse than an error at once (day-one item 13)."""
    index = an_index("ada")
    index.apply_delta(delta(1, placements([0])))
    before = (index.dump(), index.version, asdict(index.counters))

    with pytest.raises(ValueError, match=message):
        index.apply(event)

    assert (index.dump(), index.version, asdict(index.counters)) == before


def test_a_bad_record_is_refused_before_anything_is_loaded() -> None:
    """A replica that cannot take a state keeps the one it has."""
    index, other = an_index("ada"), an_index("bob")
    index.apply_delta(delta(1, placements([0])))
    small = Placement(component(3), KVTC, "bob", "host", 1, 1, 128)
    strange = ResidencyIndex(tokens_per_chunk=128)
    strange.join("bob", 1)
    strange.apply_delta(delta(1, [small], node="bob"))

    with pytest.raises(ValueError, match="128 tokens"):
        index.load(9, [*other.dump(), *strange.dump()])

    assert (listed(index), index.version) == ([0], 2)


def test_a_chunk_has_at_least_one_token() -> None:
    """The index cannot be built otherwise."""
    with pytest.raises(ValueError, match="at least 1, got 0"):
        ResidencyIndex(tokens_per_chunk=0)


# -- a scripted day


def test_counters_of_a_scripted_trace_are_exact() -> None:
    """Every event is counted once, under what became of it (3.1, item 2)."""
    index = an_index("ada", "bob")  # 2 applied
    trace: list[Change] = [
        delta(1, placements(range(4))),  # applied, 4 added
        delta(1, placements(range(4))),  # duplicate
        delta(2, placements([3, 4]), removed=[0, 9]),  # applied: 1 out, 1 absent, 1 re-put, 1 added
        delta(4, placements([5])),  # gap, 1 added
        Snapshot("ada", 1, 3),  # duplicate
        Snapshot("ada", 1, 5, placements(range(2))),  # applied: 5 out, 2 added
        delta(1, placements([0], "bob"), node="bob"),  # applied, 1 added
        delta(1, placements([7]), incarnation=2),  # applied: 2 out, 1 added
        delta(6),  # fenced
        delta(1, node="eve"),  # unknown
    ]
    for event in trace:
        index.apply(event)
    index.refute("bob", 1, component(0), KVTC)  # applied, stale hit
    index.mark_lost("ada", 2, 2)  # gap
    index.drop_node("ada")  # applied, 1 out

    assert asdict(index.counters) == {
        "applied": 9,
        "gaps": 2,
        "duplicate": 2,
        "fenced": 1,
        "unknown": 1,
        "placements_added": 10,
        "placements_replaced": 1,
        "placements_removed": 9,
        "removals_absent": 1,
        "stale_hits": 1,
    }
    assert index.version == 11
    assert index.gauges() | {"memory_bytes": 0} == {
        "nodes": 1,
        "gapped_nodes": 1,
        "placements": 0,
        "stored_bytes": 0,
        "memory_bytes": 0,
    }
    index.check()
