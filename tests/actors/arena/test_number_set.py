"""`NumberSet` against a set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.arena.number_set import NumberSet
from tests.suites.quiet import QUIET

SIZE = 12
STEPS = st.lists(st.tuples(st.sampled_from(["add", "discard", "least"]), st.integers(0, SIZE - 1)))


@QUIET
@given(steps=STEPS, is_full=st.booleans())
def test_it_is_a_set_and_knows_its_least(steps: list[tuple[str, int]], is_full: bool) -> None:
    """Whatever is added and taken out, in any order and repeatedly."""
    numbers, model = NumberSet(SIZE, is_full=is_full), set(range(SIZE) if is_full else ())
    for verb, number in steps:
        if verb == "least":
            assert numbers.least() == min(model, default=None)
        else:
            getattr(numbers, verb)(number)
            getattr(model, verb)(number)
        numbers.check()
        assert len(numbers) == len(model)
        assert [n in numbers for n in range(SIZE)] == [n in model for n in range(SIZE)]


def test_what_comes_and_goes_leaves_no_garbage() -> None:
    """The heap never has more than the numbers there are."""
    numbers = NumberSet(4)
    for _ in range(100):
        numbers.add(3)
        numbers.discard(3)

    assert len(numbers._heap) == 1
    assert numbers.least() is None
