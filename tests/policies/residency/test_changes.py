"""`Outcome` and `Feed`: what counts as a change, and what a feed may claim."""

from __future__ import annotations

import pickle

import pytest

from policies.residency.changes import Dropped, Feed, Outcome


def test_only_changes_are_effective() -> None:
    """The version rises with these two and no others."""
    assert {o for o in Outcome if o.is_effective} == {Outcome.APPLIED, Outcome.GAP}


def test_a_feed_has_one_change_per_version() -> None:
    """Else a replica would number its state differently from the router for ever."""
    with pytest.raises(ValueError, match="got 1 from 3 to 5"):
        Feed(1, 3, 5, (Dropped("ada"),))


def test_a_feed_is_changes_or_the_whole_state() -> None:
    """Both at once would be ambiguous."""
    with pytest.raises(ValueError, match="changes or the whole state"):
        Feed(1, 3, 4, (Dropped("ada"),), nodes=())


def test_a_feed_can_be_sent() -> None:
    """It crosses an actor call as the value it is."""
    feed = Feed(1, 3, 4, (Dropped("ada"),))

    assert pickle.loads(pickle.dumps(feed)) == feed
