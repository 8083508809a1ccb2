"""Free runs of a line of numbers, lowest first."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise


class FreeList:
    """First-fit book-keeping over ``[0, size)``; it owns no memory."""

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"need a size of at least 0, got {size}")
        self.size = size
        #: Disjoint ``(start, stop)``, sorted, none empty, and no two meet.
        self._runs: list[tuple[int, int]] = [(0, size)] if size else []

    @property
    def free(self) -> int:
        """Numbers in no taken run."""
        return sum(stop - start for start, stop in self._runs)

    def take(self, size: int) -> int | None:
        """Take the lowest free run of ``size`` and return its start; None if there is none."""
        if size < 1:
            raise ValueError(f"need a size of at least 1, got {size}")
        for i, (start, stop) in enumerate(self._runs):
            if stop - start >= size:
                self._runs[i : i + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Make ``[start, start + size)`` free again.

        Raises
        ------
        ValueError
            If part of it is free already, or lies outside.
        """
        stop = start + size
        at = bisect_left(self._runs, (start, stop))
        before = self._runs[at - 1] if at else (-1, -1)
        after = self._runs[at] if at < len(self._runs) else (self.size + 1, self.size + 1)
        inside = size > 0 and start >= 0 and stop <= self.size
        if not inside or before[1] > start or after[0] < stop:
            raise ValueError(f"[{start}, {stop}) is not wholly taken")
        joins_before, joins_after = before[1] == start, after[0] == stop
        joined = (before[0] if joins_before else start, after[1] if joins_after else stop)
        self._runs[at - joins_before : at + joins_after] = [joined]

    def check(self) -> None:
        """Assert that the runs are sorted, apart, and inside."""
        assert all(0 <= start < stop <= self.size for start, stop in self._runs), self._runs
        assert all(a[1] < b[0] for a, b in pairwise(self._runs)), self._runs
