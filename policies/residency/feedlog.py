"""The router's latest effective changes, by version, within a bound."""

from __future__ import annotations

from collections import deque
from itertools import islice

from policies.residency.changes import Change
from policies.residency.events import Delta, Snapshot


def num_rows(change: Change) -> int:
    """How much of the log's bound a change takes: one, and one per placement it names."""
    match change:
        case Delta():
            return 1 + len(change.added) + len(change.removed)
        case Snapshot():
            return 1 + len(change.placements)
        case _:
            return 1


class FeedLog:
    """A queue of changes whose oldest go when there are too many rows.

    Examples
    --------
    >>> from policies.residency.changes import Dropped
    >>> log = FeedLog(max_rows=2)
    >>> for node in "abc":
    ...     log.append(Dropped(node))
    >>> log.since(2), log.since(0) is None
    ((Dropped(node='c'),), True)
    """

    def __init__(self, *, max_rows: int) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        self._max_rows = max_rows
        #: The last is the change that made ``version``, the one before ``version - 1``, ...
        self._changes: deque[Change] = deque()
        #: Sum over ``_changes``; never above ``_max_rows``.
        self.num_rows = 0
        #: Changes ever appended.
        self.version = 0

    def append(self, change: Change) -> None:
        """Log the change that made the next version; the oldest may have to go, or itself."""
        self._changes.append(change)
        self.version += 1
        self.num_rows += num_rows(change)
        while self.num_rows > self._max_rows:
            self.num_rows -= num_rows(self._changes.popleft())

    def since(self, version: int) -> tuple[Change, ...] | None:
        """The changes after ``version``; None if not all are here, or it has yet to come."""
        num_wanted = self.version - version
        if not 0 <= num_wanted <= len(self._changes):
            return None
        return tuple(islice(self._changes, len(self._changes) - num_wanted, None))

    def check(self) -> None:
        """Assert every invariant.  For tests, not for control flow."""
        assert self.num_rows == sum(map(num_rows, self._changes)) <= self._max_rows
        assert len(self._changes) <= self.version
