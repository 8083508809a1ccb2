"""What a restore needs, and which boundaries stay possible, against brute force."""

from __future__ import annotations

import pytest

from policies.retention.plan import Plan, compile_program
from policies.retention.program import (
    AttentionState,
    CrossState,
    Program,
    RecurrentState,
)
from policies.retention.restore import (
    Stored,
    droppable_chunks,
    live_ranges,
    needed_chunks,
    restorable_boundaries,
    restore_needs,
)
from tests.policies.retention.oracle import live_keys, program_for, reads_grid
from tests.policies.retention.samples import rel

CHUNK = 8


def hybrid() -> Plan:
    """Full, sink and window layers, recurrent state, and an encoder."""
    return compile_program(
        Program(
            page_tokens=4,
            states=(
                AttentionState(
                    name="full", layers=(0,), reads=rel("true"), bytes_per_token_layer=8
                ),
                AttentionState(
                    name="swa",
                    layers=(1,),
                    reads=rel("k < 4 or q - k < 10"),
                    bytes_per_token_layer=8,
                ),
                RecurrentState(name="ssm", layers=(2,), bytes_per_layer=64),
                CrossState(name="enc", layers=(0,), bytes_per_token_layer=8, source_tokens=30),
            ),
        )
    )


def windows(window: int = 10) -> Plan:
    """One layer with a window."""
    return compile_program(program_for(rel(f"q - k < {window}"), 4))


def test_needs_of_each_class() -> None:
    """Full everything, window the last W - 1, one snapshot, the whole encoder output."""
    needs = {need.class_name: need for need in restore_needs(hybrid(), 50)}

    assert needs["full"].ranges == ((0, 50),)
    assert needs["swa::sink"].ranges == ((0, 4),)
    assert needs["swa::local"].ranges == ((41, 50),)
    assert needs["swa::local"].pages == (10, 13)
    assert (needs["ssm"].snapshot_boundary, needs["ssm"].ranges) == (50, ())
    assert needs["enc"].ranges == ((0, 30),)
    assert [needs[name].num_tokens for name in ("full", "swa::local", "enc")] == [50, 9, 30]


def test_nothing_is_needed_at_the_beginning() -> None:
    """Boundary 0 is a cold start."""
    assert all(need.ranges == () for need in restore_needs(hybrid(), 0))
    assert all(need.snapshot_boundary is None for need in restore_needs(hybrid(), 0))
    with pytest.raises(ValueError, match="boundary"):
        restore_needs(hybrid(), -1)


@pytest.mark.parametrize(
    ("text", "boundary", "wanted"),
    [
        ("q // 16 == k // 16", 16, ()),
        ("q // 16 == k // 16", 31, ((16, 31),)),
        ("k < 4 or q - k < 10", 12, ((0, 12),)),
        ("k % 8 == 3", 30, ((3, 28),)),
        ("q - k < 4 or k % 8 == 3", 30, ((3, 30),)),
        ("q + k < 40", 30, ((0, 10),)),
    ],
)
def test_ranges_are_tight(text: str, boundary: int, wanted: tuple[tuple[int, int], ...]) -> None:
    """They begin and end with a live token."""
    plan = compile_program(program_for(rel(text), 1))
    ranges = sorted(r for found in plan.classes for r in live_ranges(found, boundary))

    joined = ((min(r[0] for r in ranges), max(r[1] for r in ranges)),) if ranges else ()
    assert joined == wanted


@pytest.mark.parametrize(
    "text", ["q - k < 10", "k < 3 or q - k < 10", "q // 16 == k // 16", "k % 16 == 3", "true"]
)
def test_needed_chunks_are_those_with_a_live_token(text: str) -> None:
    """By looking at every token."""
    plan = compile_program(program_for(rel(text), 1))
    reads_QK = reads_grid(rel(text))

    for boundary in (8, 16, 40, 88):
        wanted = {key // CHUNK for key in live_keys(reads_QK, boundary)}
        found = [needed_chunks(found, boundary, CHUNK) for found in plan.classes]
        assert frozenset().union(*found) == wanted


def test_ranges_that_touch_are_joined() -> None:
    """A sink's page holds keys that die as well: one range while they live, then the sink."""
    sink = compile_program(program_for(rel("k < 3 or q - k < 8"), 4)).class_named("s::sink")

    assert live_ranges(sink, 6) == ((0, 4),)
    assert live_ranges(sink, 40) == ((0, 3),)


def test_ranges_apart_stay_apart() -> None:
    """Two sinks with a gap."""
    (found,) = compile_program(program_for(rel("k < 2 or k == 6"), 8)).classes

    assert live_ranges(found, 40) == ((0, 2), (6, 7))


def test_a_prefix_with_everything_is_restorable_at_every_chunk() -> None:
    """And at 0."""
    stored = Stored(chunk_tokens=CHUNK, num_chunks=5, dropped={})

    assert restorable_boundaries(windows(), stored) == (0, 8, 16, 24, 32, 40)


def test_dropping_interior_windows_keeps_the_last_boundary() -> None:
    """A window of ten needs the last two chunks of eight."""
    stored = Stored(chunk_tokens=CHUNK, num_chunks=5, dropped={"s": {0, 1, 2}})

    assert restorable_boundaries(windows(), stored) == (0, 40)


def test_boundaries_before_a_gap_stay_possible() -> None:
    """Chunk 2 is gone: what ends before it is whole, what ends far behind it too."""
    stored = Stored(chunk_tokens=CHUNK, num_chunks=6, dropped={"s": {2}})

    assert restorable_boundaries(windows(), stored) == (0, 8, 16, 40, 48)


def test_full_layers_forgive_nothing() -> None:
    """One lost chunk ends every boundary behind it."""
    stored = Stored(chunk_tokens=CHUNK, num_chunks=4, dropped={"full": {1}}, snapshots={8, 16, 32})

    assert restorable_boundaries(hybrid(), stored) == (0, 8)


def test_recurrent_state_is_of_use_at_its_own_boundary() -> None:
    """A snapshot one chunk earlier does not help."""
    stored = Stored(chunk_tokens=CHUNK, num_chunks=4, dropped={}, snapshots={16})

    assert restorable_boundaries(hybrid(), stored) == (0, 16)


def test_without_the_encoder_there_is_only_a_cold_start() -> None:
    """Every query reads it."""
    stored = Stored(
        chunk_tokens=CHUNK, num_chunks=2, dropped={}, snapshots={8, 16}, has_source=False
    )

    assert restorable_boundaries(hybrid(), stored) == (0,)


def test_what_may_be_dropped_leaves_the_wanted_boundaries() -> None:
    """And keeping less would lose one of them."""
    plan = hybrid()
    wanted = (16, 48)
    gone = droppable_chunks(plan, wanted, chunk_tokens=CHUNK, num_chunks=6)

    def left(dropped: dict[str, frozenset[int]]) -> tuple[int, ...]:
        stored = Stored(chunk_tokens=CHUNK, num_chunks=6, dropped=dropped, snapshots=wanted)
        return restorable_boundaries(plan, stored)

    assert gone == {
        "full": frozenset(),
        "swa::sink": frozenset(range(1, 6)),
        "swa::local": frozenset({2, 3}),
    }
    assert left(gone) == (0, *wanted)
    for name, chunks in gone.items():
        for chunk in frozenset(range(6)) - chunks:
            assert left({**gone, name: chunks | {chunk}}) != (0, *wanted)


@pytest.mark.parametrize(("tokens", "count"), [(0, 3), (8, -1)])
def test_impossible_prefixes_cannot_be_built(tokens: int, count: int) -> None:
    """A chunk has tokens."""
    with pytest.raises(ValueError, match="chunks"):
        Stored(chunk_tokens=tokens, num_chunks=count, dropped={})
