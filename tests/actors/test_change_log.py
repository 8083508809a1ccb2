"""`ChangeLog`: whoever follows the deltas, from any snapshot on, knows what is held."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.change_log import ChangeLog, PlacementKey
from policies.residency.events import Delta, Placement, Snapshot
from tests.suites.blobs import codec_of, key_of
from tests.suites.quiet import QUIET_STATEFUL


def placed(chunk: int, stored_bytes: int = 1) -> Placement:
    """A placement of that chunk."""
    return Placement(key_of(chunk), codec_of(), "node", "host", stored_bytes, 100, 1)


def name(chunk: int) -> PlacementKey:
    """The key of `placed`."""
    return (key_of(chunk), codec_of())


class Follower:
    """What an index does with a worker's stream."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.seq = snapshot.seq
        self.held = {(p.component, p.codec): p for p in snapshot.placements}

    def apply(self, delta: Delta) -> None:
        """Apply ``delta`` unless the snapshot has it; removals first."""
        if delta.seq <= self.seq:
            return
        assert delta.seq == self.seq + 1, "a gap"
        self.seq = delta.seq
        for key in delta.removed:
            del self.held[key]
        for placement in delta.added:
            key = (placement.component, placement.codec)
            assert key not in self.held, "added twice"
            self.held[key] = placement


class ChangeLogMachine(RuleBasedStateMachine):
    """Followers that start at any snapshot all arrive at what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.log = ChangeLog(node="node", incarnation=7)
        self.held: dict[PlacementKey, Placement] = {}
        self.followers = [Follower(Snapshot("node", 7, 0))]

    @rule(chunk=st.integers(0, 3), stored_bytes=st.integers(1, 3))
    def set(self, chunk: int, stored_bytes: int) -> None:
        """Hold something."""
        self.held[name(chunk)] = placed(chunk, stored_bytes)
        self.log.set(placed(chunk, stored_bytes))

    @rule(chunk=st.integers(0, 3))
    def remove(self, chunk: int) -> None:
        """Hold it no more."""
        if self.held.pop(name(chunk), None):
            self.log.remove(name(chunk))

    @rule()
    def snapshot(self) -> None:
        """Start a follower here."""
        snapshot = self.log.snapshot()
        assert Follower(snapshot).held == self.held
        self.followers.append(Follower(snapshot))

    @rule()
    def take(self) -> None:
        """Feed everybody."""
        for delta in self.log.take_deltas():
            assert delta.added or delta.removed
            assert (delta.node, delta.incarnation) == ("node", 7)
            for follower in self.followers:
                follower.apply(delta)
        for follower in self.followers:
            assert follower.held == self.held
        assert self.log.take_deltas() == []

    @invariant()
    def it_is_right(self) -> None:
        """The log itself answers from the same state."""
        self.log.check()
        assert len(self.log) == len(self.held)
        assert all(self.log.get(name(i)) == self.held.get(name(i)) for i in range(4))


TestChangeLogMachine = ChangeLogMachine.TestCase
TestChangeLogMachine.settings = QUIET_STATEFUL


@pytest.fixture
def log() -> Iterator[ChangeLog]:
    """A log whose invariants are checked after the test."""
    log = ChangeLog(node="node", incarnation=7)
    yield log
    log.check()


def test_changes_gather_into_one_delta(log: ChangeLog) -> None:
    """However many there are."""
    log.set(placed(1))
    log.set(placed(2))

    assert log.take_deltas() == [Delta("node", 7, 1, added=(placed(1), placed(2)))]


def test_what_came_and_went_is_in_no_delta(log: ChangeLog) -> None:
    """And no number is used for it."""
    log.set(placed(1))
    log.remove(name(1))

    assert log.take_deltas() == []
    assert log.snapshot().seq == 0


def test_a_replacement_is_a_removal_and_an_addition(log: ChangeLog) -> None:
    """So that it means the same to whoever overwrites and to whoever counts."""
    log.set(placed(1, stored_bytes=10))
    log.take_deltas()
    log.set(placed(1, stored_bytes=20))
    assert log.take_deltas() == [
        Delta("node", 7, 2, added=(placed(1, stored_bytes=20),), removed=(name(1),))
    ]

    log.set(placed(1, stored_bytes=20))

    assert log.take_deltas() == []


def test_a_snapshot_has_the_pending_changes_and_their_number(log: ChangeLog) -> None:
    """The delta it made of them is taken later and is not applied to it."""
    log.set(placed(1))

    snapshot = log.snapshot()
    log.remove(name(1))

    assert snapshot == Snapshot("node", 7, 1, (placed(1),))
    assert [delta.seq for delta in log.take_deltas()] == [1, 2]
