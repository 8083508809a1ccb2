"""`FeedLog`: the latest changes, never more rows than allowed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.residency.changes import Change, Dropped, Joined
from policies.residency.events import Snapshot
from policies.residency.feedlog import FeedLog, num_rows
from tests.policies.residency.samples import changes, delta, placements


def test_a_change_weighs_what_it_carries() -> None:
    """The bound is on memory, which placements take."""
    assert num_rows(Joined("ada", 1)) == 1
    assert num_rows(delta(1, placements([0, 1]), removed=[2])) == 4
    assert num_rows(Snapshot("ada", 1, 1, placements([0, 1]))) == 3


@settings(deadline=None)
@given(st.lists(changes(), max_size=20), st.integers(1, 12))
def test_the_log_is_a_bounded_suffix(events: list[Change], max_rows: int) -> None:
    """It answers for the longest suffix within its bound, and for nothing else."""
    log = FeedLog(max_rows=max_rows)
    for event in events:
        log.append(event)
        log.check()

    assert log.version == len(events)
    for version in range(-1, len(events) + 2):
        wanted = tuple(events[version:]) if 0 <= version <= len(events) else None
        fits = wanted is not None and sum(map(num_rows, wanted)) <= max_rows
        assert log.since(version) == (wanted if fits else None)


def test_a_change_larger_than_the_log_empties_it() -> None:
    """Replicas then get the whole state, and the log goes on from there."""
    log = FeedLog(max_rows=2)
    log.append(Dropped("ada"))

    log.append(Snapshot("ada", 1, 1, placements(range(5))))

    assert (log.num_rows, log.version, log.since(1), log.since(2)) == (0, 2, None, ())


def test_a_log_holds_something() -> None:
    """A bound of nothing is a mistake."""
    with pytest.raises(ValueError, match="at least 1, got 0"):
        FeedLog(max_rows=0)
