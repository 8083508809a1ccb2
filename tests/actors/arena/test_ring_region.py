"""`RingRegion`: windows in one piece, one ring per tenant, and moves between rings."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.arena.extents import ExtentPool
from actors.arena.layout import RingSpec
from actors.arena.ring import RingNeed, ring_candidates
from actors.arena.ring_region import RingRegion
from actors.arena.syscalls import PAGE_BYTES
from codec.errors import ArenaFullError, VmmDriverError, VmmOutOfMemory
from policies.retention.program import KvShape
from tests.suites.faulty_driver import FaultyDriver
from tests.suites.probes import is_readable
from tests.suites.quiet import QUIET

EXTENT = PAGE_BYTES
PAGE = 4
SHAPE = KvShape(num_kv_heads=2, key_dim=24, value_dim=8, dtype="bfloat16")
NEED = RingNeed(
    page_tokens=PAGE,
    cells=6,
    num_layers=3,
    width_bytes=SHAPE.bytes_per_token_layer,
    window_tokens=20,
)
LAYOUT = next(it for it in ring_candidates(NEED, extent_bytes=EXTENT) if it.layers_per_row == 2)
SPEC = RingSpec(
    class_index=1,
    name="window",
    layers=(3, 5, 8),
    page_tokens=PAGE,
    width_bytes=SHAPE.bytes_per_token_layer,
    shape=SHAPE,
    extent_bytes=EXTENT,
    first_extent=1,
    layout=LAYOUT,
    num_rings=3,
)
CELLS = LAYOUT.cells
RING_EXTENTS = LAYOUT.ring_bytes // EXTENT
BUDGET_EXTENTS = 2 * RING_EXTENTS + 1


@pytest.fixture
def driver() -> Iterator[FaultyDriver]:
    """Memory for two rings and an extent, all of it free after the test."""
    driver = FaultyDriver(BUDGET_EXTENTS * EXTENT, PAGE_BYTES)
    yield driver
    assert driver.physical().measured_bytes == 0
    driver.close()


@pytest.fixture
def pool(driver: FaultyDriver) -> Iterator[ExtentPool]:
    """One extent before the region, and the region's."""
    pool = ExtentPool(
        driver,
        num_extents=1 + SPEC.num_extents,
        extent_bytes=EXTENT,
        mirrors=SPEC.mirrors,
    )
    yield pool
    driver.heal()
    pool.close()


@pytest.fixture
def region(driver: FaultyDriver, pool: ExtentPool) -> Iterator[RingRegion]:
    """A region that is consistent after the test."""
    region = RingRegion(SPEC, pool=pool, driver=driver)
    yield region
    region.check()
    pool.check(region.used_extents)


def test_the_sample_has_all_that_can_be_special() -> None:
    """Two planes, of which the last has a layer less, and rows that are two layers wide."""
    assert (LAYOUT.num_planes, LAYOUT.layers_per_row, LAYOUT.plane_extents) == (2, 2, 2)
    assert (CELLS, RING_EXTENTS, LAYOUT.pad_bytes) == (8, 4, 0)


def test_a_page_lies_in_its_cell(region: RingRegion, pool: ExtentPool) -> None:
    """All memory of the ring comes with the first page, and no more with the others."""
    assert region.needs_move(7, [3])
    assert region.reserve(7, [3, 4], move=True) == [3, 4]
    work = pool.work

    assert not region.needs_move(7, [5, CELLS, CELLS + 1])
    assert region.reserve(7, [5, CELLS, CELLS + 1], move=False) == [5, 0, 1]

    assert pool.work == work
    assert pool.committed_bytes == region.hot_bytes == LAYOUT.ring_bytes
    assert work.maps == 2 * RING_EXTENTS
    assert region.reserve(9, [3], move=True) == [CELLS + 3]


@QUIET
@given(steps=st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_windows_are_what_concatenation_gives(steps: list[int]) -> None:
    """Of every layer, at every boundary, over many times round; pages are dropped when dead."""
    driver = FaultyDriver(RING_EXTENTS * EXTENT, PAGE_BYTES)
    pool = ExtentPool(
        driver, num_extents=1 + SPEC.num_extents, extent_bytes=EXTENT, mirrors=SPEC.mirrors
    )
    region = RingRegion(SPEC, pool=pool, driver=driver)
    slots: dict[int, int] = {}
    whole = {layer: torch.zeros(0, 2, 24, dtype=torch.bfloat16) for layer in SPEC.layers}
    boundary = 0
    for step in [9] * 5 + steps:
        dead = [ordinal for ordinal in slots if (ordinal + 1) * PAGE + 19 <= boundary]
        region.free(slots.pop(ordinal) for ordinal in dead)
        fresh = range(-(-boundary // PAGE), -(-(boundary + step) // PAGE))
        slots |= dict(zip(fresh, region.reserve(1, fresh), strict=True))
        for token in range(boundary, boundary + step):
            for number, layer in enumerate(SPEC.layers):
                key = torch.full((1, 2, 24), float((3 * token + number) % 251)).bfloat16()
                keys, values = region.kv(slots[token // PAGE], layer)
                keys[token % PAGE], values[token % PAGE] = key[0], -key[0, :, :8]
                whole[layer] = torch.cat([whole[layer], key])
        boundary += step
        count, last = min(boundary, 20), slots[max(slots)]
        for layer in SPEC.layers:
            keys, values = region.window(last, layer, boundary, count)
            assert torch.equal(keys, whole[layer][-count:])
            assert torch.equal(values, -whole[layer][-count:, :, :8])
            assert keys.stride() == (LAYOUT.row_bytes // 2, 24, 1)
        rows = region.window_rows(last, 0, boundary, count)
        assert rows.is_contiguous()
        del keys, values, rows
        region.check()
    assert pool.work.maps == 2 * RING_EXTENTS
    assert driver.physical().measured_bytes == LAYOUT.ring_bytes
    region.free(slots.values())
    pool.check(set())
    pool.close()
    driver.close()


def test_a_taken_cell_forces_a_move(region: RingRegion) -> None:
    """The old pages stay until they are freed; the window is over the new ones."""
    region.reserve(1, [0, 1], move=True)
    for slot in (0, 1):
        region.rows(slot, 0).fill_(slot + 1)
        region.rows(slot, 1).fill_(slot + 101)
    assert region.needs_move(1, [1])
    with pytest.raises(ArenaFullError):
        region.reserve(1, [1], move=False)

    moved = region.reserve(1, [0, 1, 2], move=True)
    assert moved == [CELLS, CELLS + 1, CELLS + 2]
    for source, target in zip((0, 1), moved, strict=False):
        region.copy(source, target)

    assert region.rows(0, 0).eq(1).all()
    region.rows(moved[0], 0).fill_(9)
    old, new = (region.window(slot, 3, 8, 8)[0] for slot in (0, moved[2]))
    assert old[0, 0].view(torch.uint8).eq(1).all()
    assert new[0, 0].view(torch.uint8).eq(9).all()
    region.copy(0, moved[0])
    window = [region.window_rows(moved[0], plane, 8, 8) for plane in (0, 1)]
    assert [part[:, 0].tolist() for part in window] == [[1] * 4 + [2] * 4, [101] * 4 + [102] * 4]
    region.free([0, 1])
    assert region.hot_bytes == LAYOUT.ring_bytes
    assert region.needs_move(1, [2])
    assert not region.needs_move(1, [3])
    del window, old, new


def test_a_move_that_is_aborted_leaves_the_old_ring(region: RingRegion) -> None:
    """Its pages are in one piece with those to come."""
    region.reserve(1, [0, 1], move=True)
    region.free(region.reserve(1, [0, 1, 2], move=True))

    assert not region.needs_move(1, [2])
    assert region.reserve(1, [2], move=False) == [2]
    assert len(region.window_rows(2, 0, 12, 12)) == 12


def test_a_ring_rests_with_its_last_page(region: RingRegion, pool: ExtentPool) -> None:
    """Whether its tenant has left or not; its memory is the next one's."""
    slots = region.reserve(1, [0, 1], move=True)
    region.free(slots[:1])
    region.leave(1)
    region.leave(1)
    assert pool.idle_bytes == 0
    assert region.needs_move(1, [2])
    with pytest.raises(ValueError, match="holds no page"):
        region.window_rows(slots[0], 0, 8, 4)
    assert len(region.window(slots[1], 3, 8, 4)[0]) == 4

    region.free(slots[1:])
    assert pool.idle_bytes == LAYOUT.ring_bytes
    assert region.hot_bytes == 0
    work = pool.work

    again = region.reserve(2, [0], move=True)
    assert again == [0]
    region.free(again)
    assert region.needs_move(2, [1])
    assert pool.work == work
    assert pool.idle_bytes == LAYOUT.ring_bytes


def test_who_has_left_can_come_again(region: RingRegion) -> None:
    """Into another ring, while others still read the pages in the first."""
    first = region.reserve(1, [0], move=True)
    region.leave(1)

    second = region.reserve(1, [1], move=False)

    assert second == [CELLS + 1]
    region.free(first)
    assert not region.needs_move(1, [2])
    region.check()


def test_no_room_changes_nothing(
    region: RingRegion, pool: ExtentPool, driver: FaultyDriver
) -> None:
    """No memory for a ring, no ring, or two pages for one cell."""
    region.reserve(1, [0], move=True)
    with pytest.raises(ArenaFullError) as two:
        region.reserve(2, [1, 1 + CELLS], move=True)
    assert two.value.__cause__ is None
    region.reserve(2, [0], move=True)
    before = (region.used_slots, pool.committed_bytes, driver.physical().measured_bytes)

    with pytest.raises(ArenaFullError) as caught:
        region.reserve(3, [0], move=True)

    assert isinstance(caught.value.__cause__, VmmOutOfMemory)
    after = (region.used_slots, pool.committed_bytes, driver.physical().measured_bytes)
    assert after == before
    region.check()
    region.leave(2)
    assert region.needs_move(3, [0])
    assert region.reserve(3, []) == []


def test_there_are_as_many_rings_as_were_asked_for(driver: FaultyDriver) -> None:
    """Then it is full, with memory left."""
    spec = replace(SPEC, num_rings=1, first_extent=0)
    pool = ExtentPool(
        driver, num_extents=spec.num_extents, extent_bytes=EXTENT, mirrors=spec.mirrors
    )
    region = RingRegion(spec, pool=pool, driver=driver)
    region.reserve(1, [0], move=True)
    for tenant in (1, 2):
        with pytest.raises(ArenaFullError) as caught:
            region.reserve(tenant, [1], move=True)
        assert caught.value.__cause__ is None
    assert region.num_slots == CELLS
    pool.close()


@pytest.mark.parametrize("verb", ["create", "map", "set_access", "unmap"])
@pytest.mark.parametrize("number", range(4))
def test_a_driver_fault_changes_nothing(
    region: RingRegion, pool: ExtentPool, driver: FaultyDriver, verb: str, number: int
) -> None:
    """Rings, memory and what can be read are as before, mirrors included."""
    pool.use([0])
    pool.rest([0])
    region.reserve(1, [0], move=True)
    region.free([0])
    region.reserve(2, [0, 1], move=True)
    everywhere = range(1 + SPEC.num_extents)
    places = [is_readable(pool.va_of(extent)) for extent in everywhere]
    before = (region.used_slots, pool.committed_bytes, pool.idle_bytes)
    driver.fail(verb, number)
    try:
        region.reserve(3, [0], move=True)
    except VmmDriverError:
        assert (region.used_slots, pool.committed_bytes, pool.idle_bytes) == before
        assert [is_readable(pool.va_of(extent)) for extent in everywhere] == places
        assert region.needs_move(3, [0])
        region.check()
    else:
        assert driver.has_faults


def test_what_is_not_there_can_be_neither_read_nor_freed(region: RingRegion) -> None:
    """A refusal changes nothing."""
    region.reserve(1, [0, 1, 2], move=True)
    region.free([1])
    for verb in (
        lambda: region.rows(1, 0),
        lambda: region.rows(CELLS, 0),
        lambda: region.rows(0, 2),
        lambda: region.kv(0, 4),
        lambda: region.copy(0, 1),
        lambda: region.copy(1, 0),
        lambda: region.free([0, 1]),
        lambda: region.free([2, 2]),
        lambda: region.free([-1]),
        lambda: region.window(0, 3, 12, 5),
        lambda: region.window(0, 3, 12, 0),
        lambda: region.window(0, 3, 13, 1),
        lambda: region.window(0, 3, 3, 4),
        lambda: region.window(0, 3, 4 * CELLS + 4, 4),
        lambda: region.window(0, 4, 4, 4),
        lambda: region.window(1, 3, 4, 4),
        lambda: region.window(CELLS, 3, 4, 4),
        lambda: region.window(0, 3, 8, 4),
        lambda: region.window_rows(0, 2, 4, 4),
    ):
        with pytest.raises(ValueError, match=r"slot|planes|layers|page|tokens"):
            verb()
    assert region.used_slots == 2
    assert region.num_views == 0


def test_windows_keep_their_owner(region: RingRegion) -> None:
    """So that whoever hands out slots knows when they may be reused."""
    region.reserve(1, [0], move=True)
    ended: list[int] = []

    class Reader:
        """Notes its end."""

        def __del__(self) -> None:
            ended.append(1)

    keys, values = region.window(0, 8, 4, 4, Reader())
    part = values[1:2]
    del keys, values
    assert not ended
    assert region.num_views == 1

    del part
    assert ended
    assert region.num_views == 0


def test_a_ring_can_be_appended_to_by_its_tenant(region: RingRegion) -> None:
    """Over the seam, in every layer for itself, without another page being asked for."""
    region.reserve(1, [0], move=True)
    rings = {layer: region.rings(1, layer) for layer in SPEC.layers}
    total = LAYOUT.rows + 5
    for token in range(total):
        for layer, (keys, values) in rings.items():
            keys.append(torch.full((1, 2, 24), float(token + layer)).bfloat16())
            values.append(torch.full((1, 2, 8), float(-token - layer)).bfloat16())

    for layer, (keys, values) in rings.items():
        wanted = [float(token + layer) for token in range(total - 20, total)]
        assert keys.last(20)[:, 1, 23].tolist() == wanted
        assert values.last(20)[:, 0, 0].tolist() == [-found for found in wanted]
    assert region.num_views == 3
    later, _ = region.rings(1, 5, num_tokens=total)
    assert torch.equal(later.last(9), rings[5][0].last(9))
    with pytest.raises(ValueError, match="tenant 2"):
        region.rings(2, 3)
    with pytest.raises(ValueError, match="layers"):
        region.rings(1, 4)


def test_a_ring_that_somebody_looks_at_keeps_its_memory(
    pool: ExtentPool, region: RingRegion
) -> None:
    """Its pages and its tenant are gone, and others want memory: the tensor shows its own."""
    slots = region.reserve(1, [0], move=True)
    keys, values = region.rings(1, SPEC.layers[0])
    keys.append(torch.ones(1, SHAPE.num_kv_heads, SHAPE.key_dim, dtype=torch.bfloat16))
    seen = keys.last(1)
    wanted = seen.clone()
    held = pool.committed_bytes - pool.idle_bytes
    region.leave(1)
    region.free(slots)

    assert pool.committed_bytes - pool.idle_bytes == held
    assert region.hot_bytes == LAYOUT.ring_bytes
    region.check()
    for tenant in (2, 3):
        region.free(region.reserve(tenant, [0], move=True))
    assert torch.equal(seen, wanted)

    del keys, values, seen
    gc.collect()
    assert region.hot_bytes == 0
    assert pool.committed_bytes == pool.idle_bytes
