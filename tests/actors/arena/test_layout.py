"""Regions of compiled plans: side by side, large enough, and what rounding costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.arena.layout import (
    VERSIONS_PER_REQUEST,
    HotLayout,
    PoolSpec,
    RingSpec,
    may_ring,
    plan_hot_layout,
    ring_need,
)
from actors.arena.syscalls import PAGE_BYTES
from policies.retention.plan import Plan, compile_program
from policies.retention.program import (
    AttentionState,
    CrossState,
    KvShape,
    Program,
    RecurrentState,
)
from policies.retention.text import parse_relation
from tests.policies.retention.samples import KNOWN

SHAPE = KvShape(num_kv_heads=8, key_dim=64, value_dim=64, dtype="bfloat16")
CUDA_EXTENT = 2 << 20


def plan_of(page_tokens: int = 16, step_tokens: int = 1, **reads: str) -> Plan:
    """Layers of 2 KiB a token that read as said, four layers each; and two fixed states."""
    states = [
        AttentionState(
            name=name,
            layers=tuple(range(4 * number, 4 * number + 4)),
            reads=parse_relation(text),
            bytes_per_token_layer=SHAPE.bytes_per_token_layer,
            shape=SHAPE,
        )
        for number, (name, text) in enumerate(reads.items())
    ]
    fixed = (
        RecurrentState(name="ssm", layers=(90, 91), bytes_per_layer=1000),
        CrossState(name="cross", layers=(95,), bytes_per_token_layer=256, source_tokens=100),
    )
    program = Program(page_tokens=page_tokens, states=(*states, *fixed))
    return compile_program(program, step_tokens=step_tokens)


def test_a_hybrid_model() -> None:
    """Full layers and fixed states get pools, window and chunk layers rings."""
    plan = plan_of(full="true", window="q - k < 1024", chunk="q // 64 == k // 64")
    layout = plan_hot_layout(plan, extent_bytes=CUDA_EXTENT, num_requests=3, context_tokens=4096)
    rows = {row.name: row for row in layout.table()}

    assert [row.kind for row in rows.values()] == ["pool", "rings", "rings", "pool", "pool"]
    assert rows["full"].num_slots == 3 * 256
    assert rows["full"].needed_bytes == rows["full"].full_bytes == 3 * 4096 * 2048 * 4
    assert rows["full"].over_allocation == 1
    assert rows["ssm"].num_slots == 3 * VERSIONS_PER_REQUEST
    assert rows["cross"].num_slots == 3 * 7
    # Apart, the layers would take twice the window.
    assert rows["window"].layers_per_row == 4
    assert rows["window"].over_allocation == 1280 / 1024
    assert rows["window"].num_slots == 4 * 1280 // 16
    assert rows["window"].reserved_bytes == 2 * rows["window"].full_bytes
    assert rows["ssm"].pad_bytes == 2048 - 2000
    assert rows["ssm"].full_bytes == CUDA_EXTENT


def test_regions_lie_side_by_side_and_mirrors_within_them() -> None:
    """In the plan's order, behind whatever comes first; each mirror has one extent."""
    plan = plan_of(full="true", window="q - k < 40", chunk="q // 64 == k // 64")
    layout = plan_hot_layout(plan, extent_bytes=PAGE_BYTES, num_requests=2, context_tokens=100)
    moved = layout.behind(7)

    at = 7
    for region, before in zip(moved.regions, layout.regions, strict=True):
        assert region.first_extent == before.first_extent + 7 == at
        stretch = range(at, at + region.num_extents)
        pairs = region.mirrors
        assert set(pairs) | set(pairs.values()) <= set(stretch)
        if isinstance(region, RingSpec):
            assert len(pairs) * 2 == len(stretch)
            assert len(pairs) * PAGE_BYTES == region.full_bytes
            for ring in range(region.num_rings):
                for plane in range(region.layout.num_planes):
                    start = region.plane_extent(ring, plane)
                    length = region.layout.plane_extents
                    assert [pairs[start + n] for n in range(length)] == [
                        start + length + n for n in range(length)
                    ]
        at = stretch.stop
    assert moved.num_extents == layout.num_extents == at - 7
    assert len(moved.mirrors) == sum(len(region.mirrors) for region in moved.regions)
    assert [region.class_index for region in moved.regions] == list(range(len(plan.classes)))


@pytest.mark.parametrize("text", [text for text in KNOWN if "1048576" not in text])
@pytest.mark.parametrize(("page", "step"), [(4, 1), (16, 5)])
@pytest.mark.parametrize("rings", [False, True])
def test_every_relation_has_room_at_every_boundary(
    text: str, page: int, step: int, rings: bool
) -> None:
    """For as many pages as its requests hold, and for the period of its addresses."""
    plan = plan_of(page, step, state=text)
    layout = plan_hot_layout(
        plan, extent_bytes=PAGE_BYTES, num_requests=2, context_tokens=300, rings=rings
    )

    for found, region in zip(plan.classes, layout.regions, strict=True):
        assert isinstance(region, RingSpec) == (rings and may_ring(found))
        most = max(found.held_pages(boundary) for boundary in range(1, 301))
        if isinstance(region, RingSpec):
            assert region.layout.cells >= max(most, found.address.cells or 0)
        else:
            assert region.num_slots >= 2 * most
            assert region.full_bytes - region.needed_bytes < (
                PAGE_BYTES + region.num_slots * (region.slot_bytes - region.page_bytes)
            )
    assert all(row.over_allocation >= 1 for row in layout.table())


def test_steps_in_flight_keep_their_cells() -> None:
    """A window of 33 tokens needs 3 pages of 16; two steps of 20 tokens in flight, 3 more."""
    plan = plan_of(16, 20, window="q - k < 33")
    window = plan.class_named("window")
    assert window.address.cells == 5

    need = ring_need(window, plan.step_tokens, steps_in_flight=2)

    assert (need.window_tokens, need.seen_tokens, need.late_pages) == (33, 52, 3)
    assert need.least_tokens == (5 + 3) * 16
    layout = plan_hot_layout(
        plan, extent_bytes=PAGE_BYTES, num_requests=1, context_tokens=64, steps_in_flight=2
    )
    assert isinstance(layout.regions[0], RingSpec)
    assert layout.regions[0].layout.cells >= 8


def test_rings_and_sizes_are_chosen_by_name() -> None:
    """Whoever shares prefixes needs more slots than its requests hold by themselves."""
    plan = plan_of(full="true", near="q - k < 64", far="q - k < 256")
    layout = plan_hot_layout(
        plan,
        extent_bytes=PAGE_BYTES,
        num_requests=2,
        context_tokens=512,
        rings=["far"],
        pages={"full": 7, "near": 99},
        spare_rings=3,
        max_layers_per_row=1,
    )
    full, near, far, *_ = layout.regions

    assert (full.num_slots, near.num_slots) == (7, 99)
    assert isinstance(far, RingSpec)
    assert (far.num_rings, far.layout.num_planes) == (5, 4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_requests": 0}, "num_requests"),
        ({"context_tokens": 0}, "context_tokens"),
        ({"pages": {"full": 0}}, "full must be at least 1"),
        ({"pages": {"fool": 1}}, "'fool'.*a pool"),
        ({"pages": {"window": 1}}, "'window'.*a pool"),
        ({"rings": ["full"]}, "'full'.*rings"),
        ({"rings": ["wind"]}, "'wind'.*rings"),
        ({"spare_rings": -1}, "negative"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], match: str) -> None:
    """By the name of what is wrong."""
    plan = plan_of(full="true", window="q - k < 1024")
    sizes: dict[str, object] = {"num_requests": 1, "context_tokens": 64}
    with pytest.raises(ValueError, match=match):
        plan_hot_layout(plan, extent_bytes=PAGE_BYTES, **(sizes | options))  # type: ignore[arg-type]


def test_a_layout_has_no_gaps() -> None:
    """Or its mirrors would be somebody else's extents."""
    plan = plan_of(full="true")
    layout = plan_hot_layout(plan, extent_bytes=PAGE_BYTES, num_requests=1, context_tokens=64)
    gap = [replace(region, first_extent=region.first_extent + 1) for region in layout.regions[1:]]

    with pytest.raises(ValueError, match="does not begin"):
        HotLayout(extent_bytes=PAGE_BYTES, regions=(layout.regions[0], *gap))
    with pytest.raises(ValueError, match="does not begin"):
        HotLayout(extent_bytes=2 * PAGE_BYTES, regions=layout.regions)


def test_layers_are_known_by_the_models_numbers() -> None:
    """And a class that is only bytes has no shape to give."""
    plan = plan_of(full="true", window="q - k < 64")
    layout = plan_hot_layout(plan, extent_bytes=PAGE_BYTES, num_requests=1, context_tokens=64)
    _, window, ssm, _ = layout.regions

    assert [window.index_of(layer) for layer in (4, 7)] == [0, 3]
    assert window.need_shape() == SHAPE
    assert isinstance(ssm, PoolSpec)
    with pytest.raises(ValueError, match="has layers"):
        window.index_of(0)
    with pytest.raises(ValueError, match="no keys and values"):
        ssm.need_shape()
