"""Compiled plans, against brute force over relations, pages and steps."""

from __future__ import annotations

from random import Random

import pytest

from codec.errors import RetentionError
from policies.retention.fuzz import draw
from policies.retention.plan import Plan, compile_program
from policies.retention.program import (
    AttentionState,
    CrossState,
    Program,
    Reader,
    RecurrentState,
)
from policies.retention.synthesis import Pinned, Replaced, Slot
from tests.policies.retention.oracle import (
    NUM_QUERIES,
    complaints,
    live_keys,
    program_for,
    reads_grid,
)
from tests.policies.retention.samples import KNOWN, rel

BOUNDARIES = (1, 5, 16, 17, 40, 90)
SMALL = [text for text in KNOWN if not any(big in text for big in ("1024", "8192", "1048576"))]


def plan_of(text: str, page_tokens: int = 4, step_tokens: int = 1) -> Plan:
    """The plan of a one-layer program."""
    return compile_program(program_for(rel(text), page_tokens), step_tokens=step_tokens)


@pytest.mark.parametrize("text", SMALL)
@pytest.mark.parametrize(("page", "step"), [(1, 1), (4, 1), (4, 6), (16, 16)])
def test_known_shapes_are_safe(text: str, page: int, step: int) -> None:
    """No read of a dead page, no shared cell, one page for each key that is read."""
    try:
        plan = plan_of(text, page, step)
    except RetentionError as error:
        assert error.rule == "chunk-not-page-aligned"  # noqa: PT017 - the only way out
        return

    assert complaints(plan, rel(text)) == []


def test_random_relations_are_safe() -> None:
    """Random pages and steps too."""
    rng = Random(2)
    for _ in range(200):
        _, relation = draw(rng)
        page, step = rng.choice([1, 2, 3, 4, 8, 16]), rng.choice([1, 1, 2, 5, 16])
        try:
            plan = compile_program(program_for(relation, page), step_tokens=step)
        except RetentionError:
            continue
        assert complaints(plan, relation) == [], f"{relation}, page {page}, step {step}"


@pytest.mark.parametrize("text", SMALL)
def test_live_and_held_pages_are_right(text: str) -> None:
    """Live keys are those read later; every one is in a page that is needed and held."""
    page = 1 if "8" in text and "//" in text else 4
    plan = plan_of(text, page)
    reads_QK = reads_grid(rel(text))

    for boundary in BOUNDARIES:
        ours: set[int] = set()
        for found in plan.classes:
            keys = {k for part in found.live_claims(boundary) for k in part.walk(0, boundary)}
            pages = {found.page_of(key) for key in keys}
            first, stop = found.continuation(boundary)
            assert pages <= set(range(first, stop))
            assert found.held_pages(boundary) >= len(pages)
            assert found.live_tokens(boundary) == len(keys)
            ours |= keys
        late = {k for k in ours if (plan.lifetimes["s"].last_read(k) or 0) >= NUM_QUERIES}
        assert ours - late == live_keys(reads_QK, boundary) - late


def test_the_partly_filled_page_is_always_needed() -> None:
    """Its tokens may all be dead, but the next one is written there."""
    found = plan_of("q == k").classes[0]

    assert found.live_tokens(5) == 0
    assert found.continuation(5) == (1, 2)
    assert found.continuation(8) == (2, 2)


def test_pages_outside_the_domain_are_refused() -> None:
    """Of a sink, after it; of a window behind a sink, within it."""
    sink, local = plan_of("k < 8 or q - k < 8").classes

    assert (sink.locate(1), local.locate(2)) == ((1, 0), (0, 0))
    for found, ordinal in ((sink, 2), (sink, -1), (local, 1)):
        for ask in (found.locate, found.death, found.tokens_of):
            with pytest.raises(ValueError, match=r"has pages \["):
                ask(ordinal)


def test_ranked_pages_hold_consecutive_members() -> None:
    """A page of every 8th key spans 8 times its size."""
    found = plan_of("k % 8 == 3").classes[0]

    assert [found.page_of(key) for key in (3, 27, 35, 4)] == [0, 0, 1, None]
    assert found.tokens_of(1) == (35, 60)
    assert found.pages_at(36) == (0, 2)
    assert (found.live_tokens(36), found.held_tokens(36)) == (5, 8)


def test_growing_state_that_dies_is_counted_page_by_page() -> None:
    """A lifetime that grows with the key needs cells without bound, but not all of them."""
    found = plan_of("q // 16 == k // 8").classes[0]

    assert found.address.cells is None
    assert found.continuation(200) == (24, 50)
    assert found.held_pages(200) == 26


def test_state_beyond_attention() -> None:
    """Recurrent state is one version in place, an encoder's output stays until release."""
    program = Program(
        page_tokens=16,
        states=(
            RecurrentState(name="ssm", layers=(0, 1), bytes_per_layer=100),
            CrossState(name="enc", layers=(0,), bytes_per_token_layer=4, source_tokens=40),
        ),
    )
    ssm, enc = compile_program(program).classes

    assert (ssm.address, ssm.retirement) == (Slot(), Replaced())
    assert (ssm.held_bytes(0), ssm.held_bytes(1), ssm.held_bytes(9000)) == (0, 200, 200)
    assert (ssm.locate(7), ssm.death(7), ssm.continuation(7)) == ((0, 7), 8, (7, 8))
    assert (enc.address, enc.death(2)) == (Pinned(3), None)
    assert (enc.live_tokens(5), enc.held_tokens(5), enc.live_tokens(0)) == (40, 48, 0)
    assert enc.continuation(5) == (0, 3)


def test_shared_keys_live_as_long_as_any_reader_needs() -> None:
    """A window layer whose keys a full layer reads is kept whole."""
    state = AttentionState(
        name="a",
        layers=(0,),
        reads=rel("q - k < 8"),
        bytes_per_token_layer=4,
        readers=(Reader(1, rel("true")),),
    )
    plan = compile_program(Program(page_tokens=4, states=(state,)))

    assert plan.held_bytes(100) == 400
    assert plan.classes[0].layers == (0,)


def test_all_full_counts_every_state_once() -> None:
    """State that is not per token counts as it is."""
    program = Program(
        page_tokens=16,
        states=(
            AttentionState(
                name="a", layers=(0, 1), reads=rel("k < 4 or q - k < 8"), bytes_per_token_layer=10
            ),
            RecurrentState(name="r", layers=(0,), bytes_per_layer=7),
        ),
    )
    plan = compile_program(program)

    assert plan.all_full_bytes(17) == 32 * 10 * 2 + 7
    assert plan.held_bytes(17) <= plan.all_full_bytes(17)
    assert plan.live_bytes(17) < plan.held_bytes(17)


def test_classes_are_found_by_name() -> None:
    """Or not at all."""
    plan = plan_of("k < 4 or q - k < 8")

    assert plan.class_named("s::sink").region.role == "sink"
    with pytest.raises(KeyError):
        plan.class_named("s")


@pytest.mark.parametrize("step", [0, -1, 1.5, 2**41])
def test_impossible_steps_are_refused(step: int) -> None:
    """A step stores at least one token."""
    with pytest.raises(RetentionError) as caught:
        compile_program(program_for(rel("true"), 4), step_tokens=step)
    assert caught.value.rule == "bad-step"
