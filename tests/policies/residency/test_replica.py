"""`ReplicaIndex`: at equal versions it answers exactly as the router's index does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.residency.changes import Change, Dropped, Feed, Joined
from policies.residency.events import Snapshot
from policies.residency.feedlog import FeedLog
from policies.residency.index import ResidencyIndex
from policies.residency.replica import ReplicaIndex
from tests.policies.residency.samples import (
    KEYS,
    STAGE,
    STAGES,
    TOKENS,
    changes,
    delta,
    placements,
)


class Authority:
    """An index with a log: what a router is to its replicas."""

    def __init__(self, *, epoch: int = 1, max_rows: int = 1000) -> None:
        self.epoch = epoch
        self.index = ResidencyIndex(tokens_per_chunk=TOKENS)
        self.log = FeedLog(max_rows=max_rows)

    def apply(self, change: Change) -> None:
        """Apply and log."""
        if self.index.apply(change).is_effective:
            self.log.append(change)

    def feed(self, since_version: int, epoch: int) -> Feed:
        """Changes if the log has them, else everything."""
        found = self.log.since(since_version) if epoch == self.epoch else None
        if found is None:
            nodes = self.index.dump()
            return Feed(self.epoch, since_version, self.index.version, nodes=nodes)
        return Feed(self.epoch, since_version, self.index.version, found)


def a_replica(authority: Authority) -> ReplicaIndex:
    """One that has caught up."""
    replica = ReplicaIndex(tokens_per_chunk=TOKENS)
    assert replica.apply(authority.feed(*replica.position))
    return replica


def busy_authority(*, epoch: int = 1) -> Authority:
    """One node with a prefix of four chunks."""
    authority = Authority(epoch=epoch)
    authority.apply(Joined("ada", 1))
    authority.apply(delta(1, placements(range(4))))
    return authority


@settings(max_examples=150, deadline=None)
@given(
    events=st.lists(st.tuples(changes(), st.booleans()), max_size=30),
    max_rows=st.sampled_from([1, 5, 1000]),
)
def test_a_replica_answers_as_the_authority(
    events: list[tuple[Change, bool]], max_rows: int
) -> None:
    """Whatever happens, however often it asks, however short the log is."""
    authority = Authority(max_rows=max_rows)
    replica = ReplicaIndex(tokens_per_chunk=TOKENS)

    for change, asks in [*events, *events[-1:]]:
        authority.apply(change)
        if not asks:
            continue
        assert replica.apply(authority.feed(*replica.position))
        replica.check()
        for stages in (STAGES[:1], STAGES):
            ours = replica.residency(KEYS, stages)
            assert ours == authority.index.residency(KEYS, stages)
        assert replica.version == authority.index.version
        assert replica.gauges()["placements"] == authority.index.gauges()["placements"]


def test_a_feed_that_comes_twice_or_overlaps_is_skipped() -> None:
    """Only what is new is applied, so that the numbers stay the router's."""
    authority = busy_authority()
    replica = a_replica(authority)
    news: tuple[Change, ...] = (Dropped("ada"), Joined("ada", 1), delta(1, placements([4])))
    for change in news:
        authority.apply(change)

    assert replica.apply(Feed(1, 2, 4, news[:2]))
    assert replica.apply(Feed(1, 2, 5, news))
    assert replica.apply(Feed(1, 3, 5, news[1:]))

    assert replica.version == authority.index.version
    assert replica.residency(KEYS, [STAGE]) == authority.index.residency(KEYS, [STAGE])


def test_a_feed_that_leaves_a_hole_is_refused() -> None:
    """The replica stays where it is and can ask again."""
    authority = busy_authority()
    replica = a_replica(authority)
    before = replica.residency(KEYS, [STAGE])

    assert not replica.apply(Feed(1, 5, 6, (delta(4, placements([5])),)))

    assert (replica.residency(KEYS, [STAGE]), replica.position) == (before, (2, 1))


def test_an_old_state_does_not_turn_the_replica_back() -> None:
    """A whole state that was overtaken on the way is known already."""
    authority = busy_authority()
    replica = a_replica(authority)
    old = Feed(1, 0, 2, nodes=authority.index.dump())
    authority.apply(delta(2, placements([4])))
    replica.apply(authority.feed(*replica.position))

    assert replica.apply(old)

    assert (replica.version, replica.residency(KEYS, [STAGE]).num_chunks) == (3, 5)


def test_a_restarted_router_is_followed_from_its_state() -> None:
    """Its versions count something else: equal numbers must not be taken for equal states."""
    replica = a_replica(busy_authority())
    restarted = busy_authority(epoch=2)
    restarted.apply(delta(2, removed=[0]))

    assert not replica.apply(Feed(2, 2, 3, (delta(2, removed=[0]),)))
    assert replica.apply(restarted.feed(*replica.position))

    assert replica.position == (3, 2)
    assert replica.residency(KEYS, [STAGE]) == restarted.index.residency(KEYS, [STAGE])


def test_feeds_of_an_earlier_router_are_refused() -> None:
    """Whole states as well as changes."""
    authority = busy_authority(epoch=2)
    replica = a_replica(authority)

    assert not replica.apply(Feed(1, 0, 9, nodes=()))
    assert not replica.apply(Feed(1, 2, 3, (delta(2),)))

    assert replica.residency(KEYS, [STAGE]) == authority.index.residency(KEYS, [STAGE])


def test_a_replica_is_ready_when_the_router_was() -> None:
    """Before its first feed it knows nothing and says so (day-one item 3)."""
    authority = Authority()
    replica = ReplicaIndex(tokens_per_chunk=TOKENS)
    assert not replica.ready
    authority.apply(Joined("ada", 1))
    replica.apply(authority.feed(*replica.position))
    assert not replica.ready

    authority.apply(Snapshot("ada", 1, 0))
    replica.apply(authority.feed(*replica.position))

    assert replica.ready
