"""The pages of a step, against every token of it one by one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import RetentionError
from policies.retention.fuzz import random_relation
from policies.retention.plan import PlannedClass, compile_program
from policies.retention.program import AttentionState, CrossState, Program, RecurrentState
from policies.retention.steps import step_shape, stop_ordinal
from tests.suites.quiet import QUIET


def planned(seed: int, page_tokens: int) -> tuple[PlannedClass, ...]:
    """The classes of a random relation; none if it has no readers or is not aligned."""
    _, relation = random_relation(Random(seed))
    state = AttentionState(name="s", layers=(0,), reads=relation, bytes_per_token_layer=2)
    try:
        program = Program(page_tokens=page_tokens, states=(state,))
        return compile_program(program, step_tokens=64).classes
    except RetentionError:
        return ()


def live(found: PlannedClass, key: int, boundary: int) -> bool:
    """Whether a query at or after ``boundary`` may read ``key``."""
    return any(key in keys for keys in found.live_claims(boundary))


@given(
    st.integers(0, 5000),
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
)
@QUIET
def test_a_head_has_every_page_that_is_read_and_every_page_that_is_written(
    seed: int, page_tokens: int, sizes: list[int]
) -> None:
    """Stepping by the shapes alone, whatever the relation and the steps."""
    for found in planned(seed, page_tokens):
        head: set[int] = set()
        before = 0
        for size in sizes:
            after = before + size
            shape = step_shape(found, before, after)

            assert head.isdisjoint(shape.fresh)
            assert shape.tail is None or shape.tail in head
            written = {found.page_of(key) for key in range(before, after)} - {None}
            assert written <= {*shape.fresh, shape.tail}
            assert shape.tail is None or found.tokens_of(shape.tail)[1] > before
            head = {o for o in head.union(shape.fresh) if o >= shape.live_from}
            needed = {found.page_of(k) for k in range(after) if live(found, k, after)}
            assert needed <= head
            assert max(head, default=-1) < stop_ordinal(found, after)
            before = after


@given(st.integers(1, 40), st.integers(1, 40))
@QUIET
def test_recurrent_state_is_one_page_that_every_step_writes(before: int, size: int) -> None:
    """It begins with the first step and never dies before its request."""
    state = RecurrentState(name="r", layers=(0,), bytes_per_layer=8)
    (found,) = compile_program(Program(page_tokens=4, states=(state,))).classes

    first, later = step_shape(found, 0, size), step_shape(found, before, before + size)

    assert (first.tail, list(first.fresh), first.live_from) == (None, [0], 0)
    assert (later.tail, list(later.fresh), later.live_from) == (0, [], 0)
    assert (stop_ordinal(found, 0), stop_ordinal(found, before)) == (0, 1)


def test_an_encoders_output_is_written_whole_by_the_first_step() -> None:
    """Whatever part of the sequence that step takes."""
    state = CrossState(name="c", layers=(0,), bytes_per_token_layer=8, source_tokens=9)
    (found,) = compile_program(Program(page_tokens=4, states=(state,))).classes

    first, later = step_shape(found, 0, 1), step_shape(found, 1, 50)

    assert (first.tail, list(first.fresh), first.live_from) == (None, [0, 1, 2], 0)
    assert (later.tail, list(later.fresh), later.live_from) == (None, [], 0)


@pytest.mark.parametrize(("before", "after"), [(-1, 1), (3, 3), (4, 3)])
def test_a_step_goes_forward(before: int, after: int) -> None:
    """Anything else is no step."""
    state = RecurrentState(name="r", layers=(0,), bytes_per_layer=8)
    (found,) = compile_program(Program(page_tokens=4, states=(state,))).classes

    with pytest.raises(ValueError, match="need 0 <= before < after"):
        step_shape(found, before, after)
