"""A set of small numbers whose least is had cheaply."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class NumberSet:
    """A subset of ``[0, size)``; each verb costs a logarithm at most, over time."""

    def __init__(self, size: int, *, is_full: bool = False) -> None:
        self._is_member = bytearray(b"\1" if is_full else b"\0") * size
        #: Every member is in the heap once; other numbers may be, until they come to its
        #: top.  ``_is_queued`` says who is in it.
        self._heap = list(range(size)) if is_full else []
        self._is_queued = bytearray(self._is_member)
        self._count = size if is_full else 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        return bool(self._is_member[number])

    def add(self, number: int) -> None:
        """Put ``number`` in; nothing changes if it is."""
        if self._is_member[number]:
            return
        self._is_member[number] = 1
        self._count += 1
        if not self._is_queued[number]:
            self._is_queued[number] = 1
            heappush(self._heap, number)

    def discard(self, number: int) -> None:
        """Take ``number`` out; nothing changes if it is not in."""
        if self._is_member[number]:
            self._is_member[number] = 0
            self._count -= 1

    def least(self) -> int | None:
        """The least member; nothing if there is none."""
        while self._heap and not self._is_member[self._heap[0]]:
            self._is_queued[heappop(self._heap)] = 0
        return self._heap[0] if self._heap else None

    def check(self) -> None:
        """Assert that the heap has every member once, and is one."""
        assert sorted(self._heap) == [n for n, queued in enumerate(self._is_queued) if queued]
        assert all(self._is_queued[n] for n, member in enumerate(self._is_member) if member)
        assert self._count == sum(self._is_member)
        ordered = list(self._heap)
        heapify(ordered)
        assert ordered == self._heap
