"""`Router`: relearns, notices loss, forgets the dead, and feeds its replicas exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.router import PublishResult, Router, WorkerInfo
from codec.errors import StaleIncarnationError
from policies.latency import ANY_LABEL, Affine, LatencyModel, PrefillLaw
from policies.residency.changes import Outcome
from policies.residency.events import Delta, Placement, Snapshot
from policies.residency.replica import ReplicaIndex
from tests.policies.residency.samples import (
    KEYS,
    KVTC,
    NODES,
    STAGE,
    STAGES,
    TOKENS,
    component,
    delta,
    deltas,
    placement,
    placements,
    snapshots,
)

TIMEOUT_S = 30.0


def a_latency_model() -> LatencyModel:
    """One step, and prefill."""
    return LatencyModel(
        {("transfer", ANY_LABEL): Affine(0.01, 1e9)}, prefill={ANY_LABEL: PrefillLaw(0.1, 1e-3)}
    )


def a_router(
    *nodes: str, epoch: int = 1, expected: tuple[str, ...] = (), max_log_rows: int = 1000
) -> Router:
    """A router where ``nodes`` have registered in incarnation 1, at time 0."""
    router = Router(
        epoch=epoch,
        tokens_per_chunk=TOKENS,
        latency=a_latency_model(),
        expected=expected,
        max_log_rows=max_log_rows,
    )
    for node in nodes:
        router.register(info(node))
    return router


def info(
    node: str = "ada", incarnation: int = 1, *, port: int = 7000, at_s: float = 0
) -> WorkerInfo:
    """A worker that listens somewhere."""
    return WorkerInfo(
        node=node,
        host="10.0.0.1",
        port=port,
        incarnation=incarnation,
        codecs=(KVTC,),
        transports=("ucx", "tcp"),
        last_heartbeat_s=at_s,
    )


def prefix(router: Router) -> int:
    """Chunks of the longest prefix of `KEYS` in the first stage."""
    return router.residency(KEYS, [STAGE]).num_chunks


@pytest.fixture
def router() -> Iterator[Router]:
    """Ada and bob have registered; invariants are checked after the test."""
    router = a_router("ada", "bob")
    yield router
    router.check()


# -- registration


def test_a_registration_asks_for_a_snapshot(router: Router) -> None:
    """The router knows nothing of a new worker, not even that it holds nothing."""
    result = router.register(info("cyd"))

    assert result == PublishResult(Outcome.APPLIED, needs_snapshot=True)
    assert router.workers["cyd"] == info("cyd")
    assert router.alive() == {"ada", "bob", "cyd"}


def test_registering_again_updates_where_and_nothing_else(router: Router) -> None:
    """The same start may have been asked twice; what it holds stays."""
    router.publish(delta(1, placements([0])))

    result = router.register(info("ada", port=7001))

    assert result == PublishResult(Outcome.DUPLICATE)
    assert (router.workers["ada"].port, prefix(router)) == (7001, 1)


def test_a_restarted_worker_replaces_itself(router: Router) -> None:
    """A fast restart is noticed, and the old placements go (3.1, item 13)."""
    router.publish(delta(1, placements([0])))

    router.register(info("ada", 2, port=7002))

    assert (router.workers["ada"].incarnation, prefix(router)) == (2, 0)
    assert router.publish(delta(2)).outcome is Outcome.FENCED
    assert router.heartbeat("ada", 1, 2, 5.0).outcome is Outcome.FENCED
    assert router.workers["ada"].last_heartbeat_s == 0


def test_an_earlier_start_cannot_register(router: Router) -> None:
    """A late message must not turn a restarted worker back."""
    router.register(info("ada", 5))
    before = (router.version, dict(router.workers))

    with pytest.raises(StaleIncarnationError, match="incarnation 5, the caller meant 4"):
        router.register(info("ada", 4))

    assert (router.version, dict(router.workers)) == before


def test_goodbyes_count_for_their_own_start(router: Router) -> None:
    """A worker that was replaced cannot take its successor with it."""
    router.publish(delta(1, placements([0])))
    router.register(info("bob", 2))

    assert router.deregister("bob", 1) is Outcome.FENCED
    assert router.deregister("ada", 1) is Outcome.APPLIED
    assert router.deregister("ada", 1) is Outcome.UNKNOWN

    assert (router.alive(), prefix(router)) == (frozenset({"bob"}), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node": ""}, "a node and a host"),
        ({"host": ""}, "a node and a host"),
        ({"port": 0}, r"1\.\.65535, got 0"),
        ({"port": 65536}, r"1\.\.65535, got 65536"),
        ({"incarnation": 0}, "at least 1, got 0"),
        ({"last_heartbeat_s": math.nan}, "must be finite"),
    ],
    ids=str,
)
def test_a_worker_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    """What is registered can be reached."""
    fields = {"node": "ada", "host": "h", "port": 1, "incarnation": 1, "last_heartbeat_s": 0.0}

    with pytest.raises(ValueError, match=message):
        WorkerInfo(**(fields | change))  # type: ignore[arg-type]


# -- what workers publish


def test_a_stream_that_is_followed_needs_nothing(router: Router) -> None:
    """Numbers from 1 on, one by one."""
    assert router.publish(delta(1, placements([0]))) == PublishResult(Outcome.APPLIED)
    assert router.publish(delta(2, placements([1]))) == PublishResult(Outcome.APPLIED)
    assert router.publish(delta(2, placements([1]))) == PublishResult(Outcome.DUPLICATE)
    assert prefix(router) == 2


def test_a_gap_wants_a_snapshot_until_one_comes(router: Router) -> None:
    """Each reply repeats the wish: a lost reply loses nothing (day-one items 1, 3)."""
    router.publish(delta(1, placements([0])))

    assert router.publish(delta(3)) == PublishResult(Outcome.GAP, needs_snapshot=True)
    assert router.publish(delta(4)) == PublishResult(Outcome.APPLIED, needs_snapshot=True)
    assert router.residency(KEYS, [STAGE]).gapped == ("ada",)
    healed = router.apply_snapshot(Snapshot("ada", 1, 4, placements([0, 1])))

    assert healed == PublishResult(Outcome.APPLIED)
    assert (router.residency(KEYS, [STAGE]).gap, prefix(router)) == (False, 2)


@pytest.mark.parametrize(
    "event", [delta(1, placements([0], "eve"), node="eve"), Snapshot("eve", 1, 1)], ids=type
)
def test_an_unregistered_worker_is_asked_to_register(
    router: Router, event: Delta | Snapshot
) -> None:
    """After a router's restart this is how it learns of its workers."""
    say = router.publish if isinstance(event, Delta) else router.apply_snapshot
    version = router.version

    result = say(event)  # type: ignore[arg-type]

    assert result == PublishResult(Outcome.UNKNOWN, needs_registration=True)
    assert router.heartbeat("eve", 1, 1, 0.0) == result
    assert router.version == version


def test_a_later_start_proves_the_earlier_one_dead(router: Router) -> None:
    """Whatever it says first, what its predecessor held goes at once, and so does its address."""
    router.publish(delta(1, placements([0])))
    router.publish(delta(1, placements([0], "bob"), node="bob"))

    told = router.publish(delta(1, placements([3]), incarnation=2))
    beat = router.heartbeat("bob", 2, 0, 1.0)

    assert told == beat == PublishResult(Outcome.UNKNOWN, needs_registration=True)
    assert (prefix(router), router.alive()) == (0, frozenset())
    assert router.register(info("ada", 2)).needs_snapshot


def test_a_broken_delta_is_refused_and_changes_nothing(router: Router) -> None:
    """A worker with another chunk size hears of it at once (day-one item 13)."""
    router.publish(delta(1, placements([0])))
    before = (router.version, router.stat())
    small = Placement(component(1), KVTC, "ada", "host", 1, 1, 128)

    with pytest.raises(ValueError, match="128 tokens, this index of 256"):
        router.publish(delta(2, [small]))
    with pytest.raises(ValueError, match="may not speak for bob"):
        router.apply_snapshot(Snapshot("ada", 1, 5, placements([1], "bob")))

    assert (router.version, router.stat()) == before


def test_a_stale_hit_is_taken_off_and_resynced(router: Router) -> None:
    """Who was sent in vain says so, once (day-one item 11)."""
    router.publish(delta(1, placements([0, 1])))

    assert router.report_stale_hit("ada", 1, component(1), KVTC) is Outcome.APPLIED
    assert router.report_stale_hit("ada", 1, component(1), KVTC) is Outcome.DUPLICATE
    assert router.report_stale_hit("ada", 9, component(0), KVTC) is Outcome.FENCED

    assert prefix(router) == 1
    assert router.stat()["stale_hits"] == 1
    assert router.heartbeat("ada", 1, 1, 1.0).needs_snapshot


# -- heartbeats


def test_loss_in_a_quiet_stream_shows_at_the_next_heartbeat(router: Router) -> None:
    """A removal lost, then silence: the strongest baseline claims 64 for ever (item 2)."""
    router.publish(delta(1, placements([0])))
    assert router.heartbeat("ada", 1, 1, 1.0) == PublishResult(Outcome.DUPLICATE)

    result = router.heartbeat("ada", 1, 2, 2.0)

    assert result == PublishResult(Outcome.GAP, needs_snapshot=True)
    assert router.residency(KEYS, [STAGE]).gap
    assert router.heartbeat("ada", 1, 2, 3.0).needs_snapshot
    assert router.stat()["losses_noticed"] == 1


def test_a_heartbeat_repeats_the_wish_for_a_first_snapshot(router: Router) -> None:
    """A worker that holds nothing and so publishes nothing is still asked."""
    assert router.heartbeat("ada", 1, 0, 1.0).needs_snapshot

    router.apply_snapshot(Snapshot("ada", 1, 0))

    assert not router.heartbeat("ada", 1, 0, 2.0).needs_snapshot


def test_silent_workers_expire_by_name(router: Router) -> None:
    """With all they held; who is named can be reported (3.1, item 12)."""
    router.publish(delta(1, placements([0])))
    router.publish(delta(1, placements([0, 1], "bob"), node="bob"))
    router.heartbeat("bob", 1, 1, 20.0)

    assert router.expire(TIMEOUT_S, TIMEOUT_S) == ()
    assert router.expire(TIMEOUT_S + 0.5, TIMEOUT_S) == ("ada",)

    assert (router.alive(), prefix(router)) == (frozenset({"bob"}), 2)
    assert router.publish(delta(2)).needs_registration
    assert router.expire(99.0, TIMEOUT_S) == ("bob",)
    assert router.stat()["workers_expired"] == 2


def test_a_heartbeat_from_the_past_does_not_age_a_worker(router: Router) -> None:
    """They may overtake each other on the way."""
    router.heartbeat("ada", 1, 0, 40.0)
    router.heartbeat("ada", 1, 0, 10.0)

    assert router.expire(60.0, TIMEOUT_S) == ("bob",)


def test_a_time_that_is_none_is_refused(router: Router) -> None:
    """It would make a worker immortal."""
    with pytest.raises(ValueError, match="must be finite, got inf"):
        router.heartbeat("ada", 1, 0, math.inf)

    assert router.workers["ada"].last_heartbeat_s == 0


# -- readiness


def test_a_router_is_ready_when_all_registered_have_spoken() -> None:
    """By a snapshot, or a stream from number 1 on (3.1, item 18; day-one item 3)."""
    router = a_router()
    assert not router.ready
    for node in NODES:
        router.register(info(node))

    router.publish(delta(1))
    router.apply_snapshot(Snapshot("bob", 1, 8))
    router.publish(delta(5, node="cyd"))
    assert not router.ready
    assert not router.residency(KEYS, [STAGE]).ready

    router.apply_snapshot(Snapshot("cyd", 1, 5))
    assert router.ready


def test_a_restarted_router_waits_for_those_it_expects() -> None:
    """Else the first worker to come back would make it ready for all."""
    router = a_router("ada", expected=("ada", "bob"))
    router.publish(delta(1))
    assert not router.ready

    router.register(info("bob"))
    router.apply_snapshot(Snapshot("bob", 1, 3))

    assert router.ready
    router.check()


# -- feeds


def catch_up(replica: ReplicaIndex, router: Router) -> None:
    """Feed once and compare every answer."""
    assert replica.apply(router.feed(*replica.position))
    for stages in (STAGES[:1], STAGES):
        assert replica.residency(KEYS, stages) == router.residency(KEYS, stages)
    assert replica.version == router.version


def test_a_feed_holds_the_changes_since_a_version(router: Router) -> None:
    """In order, and only what was effective."""
    version = router.version
    router.publish(delta(1, placements([0])))
    router.publish(delta(1, placements([0])))
    router.publish(delta(3))

    feed = router.feed(version)

    assert feed.changes == (delta(1, placements([0])), delta(3))
    assert (feed.since_version, feed.version, feed.nodes) == (version, version + 2, None)
    assert router.feed(router.version).changes == ()


def test_a_replica_that_lags_too_far_gets_everything() -> None:
    """The log is bounded by rows, and what it lost is made good by the whole state."""
    router = a_router("ada", "bob", max_log_rows=10)
    replica = ReplicaIndex(tokens_per_chunk=TOKENS)
    for seq in range(1, 9):
        router.publish(delta(seq, placements([seq - 1])))

    feed = router.feed(0)

    assert feed.nodes is not None
    assert feed.changes == ()
    catch_up(replica, router)
    assert router.feed(router.version - 5).nodes is None
    assert router.stat()["log_rows"] == 10
    router.check()


@pytest.mark.parametrize(("since", "epoch"), [(2, 7), (99, None), (99, 1)])
def test_a_replica_of_another_router_gets_everything(
    router: Router, since: int, epoch: int | None
) -> None:
    """Its version counts another's changes, or changes that never were."""
    assert router.feed(since, epoch).nodes is not None
    with pytest.raises(ValueError, match="negative, got -1"):
        router.feed(-1)


def test_a_replica_follows_a_restart_of_the_router() -> None:
    """Equal version numbers of two starts are not taken for each other."""
    router, replica = a_router("ada"), ReplicaIndex(tokens_per_chunk=TOKENS)
    router.publish(delta(1, placements([0, 1])))
    catch_up(replica, router)
    restarted = a_router("bob", epoch=2)
    restarted.publish(delta(1, placements([0], "bob"), node="bob"))

    assert restarted.version == router.version
    catch_up(replica, restarted)

    assert replica.residency(KEYS, [STAGE]).prefix_tokens == TOKENS


worker_acts = st.one_of(
    deltas(),
    deltas(),
    snapshots(),
    st.builds(info, st.sampled_from(NODES), st.integers(1, 3)),
    st.tuples(st.sampled_from(NODES), st.integers(1, 3), st.integers(0, 6)),
    st.just("expire"),
    st.just("feed"),
)


def act(router: Router, event: object, now_s: float) -> None:
    """Do to ``router`` what ``event`` stands for."""
    match event:
        case Delta():
            router.publish(event)
        case Snapshot():
            router.apply_snapshot(event)
        case WorkerInfo():
            known = router.workers.get(event.node)
            if known is None or known.incarnation <= event.incarnation:
                router.register(event)
        case (str(node), int(incarnation), int(last_seq)):
            router.heartbeat(node, incarnation, last_seq, now_s)
        case "expire":
            router.expire(now_s, 5.0)


@settings(max_examples=120, deadline=None)
@given(events=st.lists(worker_acts, max_size=30), max_log_rows=st.sampled_from([1, 8, 1000]))
def test_replicas_answer_as_the_router(events: list[object], max_log_rows: int) -> None:
    """Whatever workers do, however rarely a replica asks, however short the log."""
    router = a_router(*NODES, max_log_rows=max_log_rows)
    replica = ReplicaIndex(tokens_per_chunk=TOKENS)

    for now_s, event in enumerate([*events, "feed"]):
        act(router, event, float(now_s))
        router.check()
        if event == "feed":
            catch_up(replica, router)


# -- the rest


def test_observations_teach_the_latency_model(router: Router) -> None:
    """Receipts report how long things really took (day-one item 12)."""
    router.observe("transfer", "tcp/host", 1e6, 0.5)
    router.observe_prefill("gpu", 0, 100, 2.0)

    assert router.latency.predict("transfer", "tcp/host", 1e6).seconds == pytest.approx(0.5)
    assert router.latency.predict_prefill("gpu", 0, 100).seconds == pytest.approx(2.0)


def test_lookup_spells_placements_out(router: Router) -> None:
    """For tools and dashboards."""
    router.publish(delta(1, placements([1])))

    assert router.lookup(KEYS[:2], STAGES) == [(), (placement(1),)]


def test_statistics_of_a_scripted_day_are_exact(router: Router) -> None:
    """Counters and gauges, by name (day-one item 7)."""
    router.publish(delta(1, placements([0, 1])))
    router.publish(delta(2, removed=[0]))
    router.apply_snapshot(Snapshot("bob", 1, 4, placements([0], "bob")))
    router.heartbeat("ada", 1, 2, 1.0)
    router.heartbeat("bob", 1, 5, 100.0)
    router.feed(0)
    router.feed(0, 9)
    router.expire(100.0, TIMEOUT_S)

    found = router.stat()

    assert found.pop("memory_bytes") > 0
    assert found == {
        "registrations": 2,
        "heartbeats": 2,
        "losses_noticed": 1,
        "workers_expired": 1,
        "feeds_of_changes": 1,
        "feeds_of_state": 1,
        "applied": 6,
        "gaps": 1,
        "duplicate": 1,
        "fenced": 0,
        "unknown": 0,
        "placements_added": 3,
        "placements_replaced": 0,
        "placements_removed": 2,
        "removals_absent": 0,
        "stale_hits": 0,
        "nodes": 1,
        "gapped_nodes": 1,
        "placements": 1,
        "stored_bytes": 1000,
        "workers": 1,
        "version": 7,
        "log_rows": 11,
    }


def test_an_epoch_is_positive() -> None:
    """0 is what a replica has that has heard of no router."""
    with pytest.raises(ValueError, match="at least 1, got 0"):
        a_router(epoch=0)
