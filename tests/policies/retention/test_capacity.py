"""Bytes and requests: exact counts, and honest kinds of saving."""

from __future__ import annotations

from math import inf

import pytest

from codec.errors import RetentionError
from policies.retention.capacity import (
    admit,
    pools,
    reserved_pages,
    stored_bytes,
    stripe_saving,
    usage_at,
)
from policies.retention.plan import Plan, compile_program
from policies.retention.program import (
    AttentionState,
    CrossState,
    HeadRange,
    Program,
    RecurrentState,
)
from tests.policies.retention.oracle import program_for
from tests.policies.retention.samples import rel


def striped(*windows: tuple[int, int, int, int], layers: tuple[int, ...] = (0,)) -> Plan:
    """One state per ``(window, first head, last head, bytes)``."""
    return compile_program(
        Program(
            page_tokens=16,
            states=tuple(
                AttentionState(
                    name=f"heads{start}",
                    layers=layers,
                    reads=rel(f"q - k < {window}"),
                    bytes_per_token_layer=width,
                    heads=HeadRange(start, stop),
                )
                for window, start, stop, width in windows
            ),
        )
    )


def mixed() -> Plan:
    """A window, recurrent state and an encoder."""
    return compile_program(
        Program(
            page_tokens=16,
            states=(
                AttentionState(
                    name="swa", layers=(0, 1), reads=rel("q - k < 64"), bytes_per_token_layer=100
                ),
                RecurrentState(name="ssm", layers=(2,), bytes_per_layer=1000),
                CrossState(name="enc", layers=(0,), bytes_per_token_layer=10, source_tokens=20),
            ),
        )
    )


def test_usage_adds_up() -> None:
    """Classes sum to the request."""
    usage = usage_at(mixed(), 500)

    assert [found.held_bytes for found in usage.classes] == [5 * 16 * 200, 1000, 320]
    assert [found.live_bytes for found in usage.classes] == [63 * 200, 1000, 200]
    assert usage.held_bytes == usage.reserved_bytes == 16000 + 1320
    assert usage.live_bytes == 13_800
    assert usage.all_full_bytes == 512 * 200 + 1320
    assert usage.kept_ratio == usage.all_full_bytes / usage.held_bytes


def test_an_empty_request_uses_nothing() -> None:
    """At boundary 0, and the ratio is 1."""
    usage = usage_at(mixed(), 0)

    assert (usage.held_bytes, usage.live_bytes, usage.kept_ratio) == (0, 0, 1.0)


@pytest.mark.parametrize("boundary", [-1, 2**41])
def test_impossible_boundaries_are_refused(boundary: int) -> None:
    """They name no instant of a request."""
    with pytest.raises(RetentionError) as caught:
        usage_at(mixed(), boundary)
    assert caught.value.rule == "bad-boundary"


@pytest.mark.parametrize(
    ("text", "boundary", "reserved", "held"),
    [
        ("q - k < 16", 100, 5, 5),
        ("q - k < 16", 9, 3, 3),
        ("true", 100, 25, 25),
        ("q + k < 128", 200, 16, 0),
        ("k < 8", 200, 2, 2),
        ("q // 16 == k // 8", 200, 26, 26),
        ("k % 8 == 0", 200, 7, 7),
    ],
)
def test_reserved_pages_cover_the_way_there(
    text: str, boundary: int, reserved: int, held: int
) -> None:
    """A prefix that has died by the end was needed before."""
    found = compile_program(program_for(rel(text), 4)).classes[0]

    assert (reserved_pages(found, boundary), found.held_pages(boundary)) == (reserved, held)
    assert reserved_pages(found, boundary) >= found.held_pages(boundary)


@pytest.mark.parametrize(
    ("budget", "requests", "admitted", "waves"),
    [
        (99, 4, 0, None),
        (100, 4, 1, 4),
        (350, 4, 3, 2),
        (400, 4, 4, 1),
        (10_000, 4, 4, 1),
        (0, 1, 0, None),
    ],
)
def test_a_budget_admits_whole_requests(
    budget: int, requests: int, admitted: int, waves: int | None
) -> None:
    """As many as fit at a time, in as few waves as that takes."""
    found = admit(100, budget_bytes=budget, requests=requests)

    assert (found.admitted, found.waves, found.used_bytes) == (admitted, waves, 100 * admitted)


@pytest.mark.parametrize(
    ("each", "budget", "requests"),
    [(0, 10, 1), (10, -1, 1), (10, 1.5, 1), (10, 2**61, 1), (10, 10, 0), (10, 10, True)],
)
def test_impossible_budgets_are_refused(each: int, budget: int, requests: int) -> None:
    """Negative, broken or absurd numbers."""
    with pytest.raises(RetentionError) as caught:
        admit(each, budget_bytes=budget, requests=requests)
    assert caught.value.rule == "bad-budget"


def test_pools_carry_what_was_admitted() -> None:
    """Their bytes are the reserved bytes of all requests together."""
    found = pools(mixed(), 500, admitted=3)

    assert [(pool.name, pool.pages_per_request, pool.pool_tokens) for pool in found] == [
        ("swa", 5, 240),
        ("ssm", 1, 3),
        ("enc", 2, 96),
    ]
    assert sum(pool.pool_bytes for pool in found) == 3 * usage_at(mixed(), 500).reserved_bytes


def test_a_codec_shrinks_keys_and_values_only() -> None:
    """Recurrent state is stored as it is; halves of a byte are rounded up."""
    usage = usage_at(mixed(), 500)

    assert stored_bytes(usage, 1) == usage.live_bytes
    assert stored_bytes(usage, 16) == -(-63 * 200 // 16) + 1000 + -(-200 // 16)


@pytest.mark.parametrize("target", [0.5, 0, -2, inf, float("nan")])
def test_impossible_targets_are_refused(target: float) -> None:
    """A ratio is at least 1."""
    with pytest.raises(RetentionError) as caught:
        stored_bytes(usage_at(mixed(), 500), target)
    assert caught.value.rule == "bad-target"


def test_stripes_of_the_published_example() -> None:
    """42.105 % saved over giving each head the largest window's pages."""
    plan = striped((512, 0, 8, 4096), (2048, 8, 16, 4096), (8192, 16, 32, 8192))

    saving = stripe_saving(plan, 32_768)

    assert (saving.normalised_bytes, saving.widest_bytes) == (77_856_768, 134_479_872)
    assert (saving.saved_milli_percent, saving.amplification_milli) == (42_105, 1727)


def test_stripes_add_up_over_layers() -> None:
    """Twice the layers, twice the bytes."""
    one = stripe_saving(striped((32, 0, 2, 64), (256, 2, 4, 64)), 1000)
    two = stripe_saving(striped((32, 0, 2, 64), (256, 2, 4, 64), layers=(0, 3)), 1000)

    assert two.saved_bytes == 2 * one.saved_bytes


@pytest.mark.parametrize(
    "windows",
    [
        [(32, 1, 2, 64)],
        [(32, 0, 2, 64), (64, 3, 4, 32)],
        [(32, 0, 2, 64), (64, 2, 4, 32)],
    ],
    ids=["head 0 missing", "a gap", "heads of two sizes"],
)
def test_stripes_that_do_not_tile_a_layer_are_refused(
    windows: list[tuple[int, int, int, int]],
) -> None:
    """The comparison would not be of one layer."""
    with pytest.raises(RetentionError) as caught:
        stripe_saving(striped(*windows), 1000)
    assert caught.value.rule == "not-striped"


def test_whole_layers_and_unbounded_heads_have_no_stripes() -> None:
    """There is no largest number of pages, or nothing to compare."""
    for plan in (mixed(), striped((32, 0, 2, 64))):
        with pytest.raises(RetentionError) as caught:
            stripe_saving(plan, 1000 if plan.classes[0].heads is None else 0)
        assert caught.value.rule == "not-striped"
