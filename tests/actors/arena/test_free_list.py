"""`FreeList` against a set of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.arena.free_list import FreeList
from tests.suites.quiet import QUIET

SIZE = 16


def lowest_run(free: set[int], size: int) -> int | None:
    """What first-fit should take."""
    starts = range(SIZE - size + 1)
    return next((at for at in starts if free.issuperset(range(at, at + size))), None)


@QUIET
@given(st.lists(st.integers(-4, 6).filter(bool), max_size=40))
def test_it_takes_the_lowest_run_and_loses_nothing(steps: list[int]) -> None:
    """Any run of takes (n > 0) and gives (the -n-th oldest), as brute force has it."""
    runs, free = FreeList(SIZE), set(range(SIZE))
    taken: list[tuple[int, int]] = []
    for step in steps:
        if step > 0:
            wanted = lowest_run(free, step)
            assert runs.take(step) == wanted
            if wanted is not None:
                taken.append((wanted, step))
                free -= set(range(wanted, wanted + step))
        elif len(taken) >= -step:
            start, size = taken.pop(-step - 1)
            runs.give(start, size)
            free |= set(range(start, start + size))
        runs.check()
        assert runs.free == len(free)


@pytest.mark.parametrize(
    ("start", "size"), [(0, 4), (3, 2), (5, 4), (7, 1), (-1, 2), (15, 2), (4, 0), (4, -1), (3, 13)]
)
def test_only_what_is_taken_can_be_given(start: int, size: int) -> None:
    """A run that is free, partly free or outside is refused, and nothing changes."""
    runs = FreeList(SIZE)
    runs.take(12)
    runs.give(0, 4)
    runs.give(6, 2)

    with pytest.raises(ValueError, match="not wholly taken"):
        runs.give(start, size)

    runs.check()
    assert runs.free == 4 + 4 + 2


def test_sizes_are_positive() -> None:
    """Nothing is no run."""
    with pytest.raises(ValueError, match="at least 1"):
        FreeList(SIZE).take(0)
    with pytest.raises(ValueError, match="at least 0"):
        FreeList(-1)
    assert FreeList(0).take(1) is None
