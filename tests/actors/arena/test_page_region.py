"""`PageRegion`: pages fill extents from below, and what is empty rests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.arena.extents import ExtentPool
from actors.arena.layout import PoolSpec
from actors.arena.page_region import PageRegion
from actors.arena.syscalls import PAGE_BYTES
from codec.errors import ArenaFullError, VmmDriverError, VmmOutOfMemory
from policies.retention.program import KvShape
from tests.suites.faulty_driver import FaultyDriver
from tests.suites.probes import is_readable
from tests.suites.quiet import QUIET

EXTENT = PAGE_BYTES
BUDGET_EXTENTS = 4
SHAPE = KvShape(num_kv_heads=2, key_dim=4, value_dim=2, dtype="bfloat16")
#: 4 tokens of 24 bytes in 14 layers, 1344 bytes: three slots and a bit to an extent.
SPEC = PoolSpec(
    class_index=0,
    name="full",
    layers=tuple(range(10, 24)),
    page_tokens=4,
    width_bytes=SHAPE.bytes_per_token_layer,
    shape=SHAPE,
    extent_bytes=EXTENT,
    first_extent=2,
    num_slots=25,
)


@pytest.fixture
def driver() -> Iterator[FaultyDriver]:
    """A budget of four extents, all of it free after the test."""
    driver = FaultyDriver(BUDGET_EXTENTS * EXTENT, PAGE_BYTES)
    yield driver
    assert driver.physical().measured_bytes == 0
    driver.close()


@pytest.fixture
def pool(driver: FaultyDriver) -> Iterator[ExtentPool]:
    """Two extents before the region, and the region's."""
    pool = ExtentPool(driver, num_extents=2 + SPEC.num_extents, extent_bytes=EXTENT)
    yield pool
    driver.heal()
    pool.close()


@pytest.fixture
def region(driver: FaultyDriver, pool: ExtentPool) -> Iterator[PageRegion]:
    """A region that is consistent after the test."""
    region = PageRegion(SPEC, pool=pool, driver=driver)
    yield region
    region.check()
    pool.check(region.used_extents)


def take(region: PageRegion, count: int) -> list[int]:
    """Slots for some pages of one tenant."""
    return region.reserve(1, range(count))


def test_pages_fill_extents_from_below(region: PageRegion, pool: ExtentPool) -> None:
    """The lowest free slot first, so that the extents behind empty."""
    assert SPEC.slot_bytes == 1344
    assert take(region, 6) == [0, 1, 2, 3, 4, 5]
    assert region.used_extents == {2, 3}
    region.free([1, 5, 4])

    assert take(region, 2) == [1, 4]

    region.free([3, 4])
    assert set(pool.idle) == {3}
    region.check()


def test_memory_in_use_is_filled_before_more_is_taken(
    region: PageRegion, pool: ExtentPool, driver: FaultyDriver
) -> None:
    """A lower slot without memory waits, where a higher one has some."""
    take(region, 11)
    region.free([0, 1, 2, 3, 7])
    pool.trim()
    held = pool.committed_bytes

    assert take(region, 1) == [7]
    # Slot 11 lies in the last used extent, and only slot 12 would leave it.
    assert take(region, 1) == [11]
    assert pool.committed_bytes == held == driver.physical().measured_bytes

    assert take(region, 1) == [0]
    assert pool.committed_bytes == held + EXTENT


def test_an_extent_of_ones_own_that_is_idle_is_used_first(
    region: PageRegion, pool: ExtentPool, driver: FaultyDriver
) -> None:
    """It costs nothing, where the lowest one would cost two calls."""
    slots = take(region, 12)
    region.free(slots)
    pool.trim(keep_bytes=EXTENT)
    (last,) = pool.idle
    calls = driver.stats()["map"].num_calls

    (slot,) = take(region, 1)

    assert region.used_extents == {last}
    assert slot > 0
    assert driver.stats()["map"].num_calls == calls


def test_a_page_is_its_layers_one_after_the_other(region: PageRegion) -> None:
    """Keys and values of every layer are the memory itself, and do not overlap."""
    slot = take(region, 4)[3]  # across two extents
    for number, layer in enumerate(SPEC.layers):
        keys, values = region.kv(slot, layer)
        assert (keys.shape, values.shape) == ((4, 2, 4), (4, 2, 2))
        keys.fill_(number)
        values.fill_(-number)

    for number, layer in enumerate(SPEC.layers):
        keys, values = region.kv(slot, layer)
        assert keys.eq(number).all()
        assert values.eq(-number).all()
        rows = region.rows(slot, number)
        assert rows.shape == (4, SPEC.width_bytes)
        assert rows[3, :16].view(torch.bfloat16).eq(number).all()
    assert region.span(slot).nbytes == SPEC.page_bytes
    del keys, values, rows


def test_copies_are_of_whole_pages(region: PageRegion) -> None:
    """And of nothing beside them."""
    slots = take(region, 3)
    for slot in slots:
        for plane in range(len(SPEC.layers)):
            region.rows(slot, plane).fill_(slot + 1)

    region.copy(0, 1)

    for plane in range(len(SPEC.layers)):
        assert [int(region.rows(slot, plane).min()) for slot in slots] == [1, 1, 3]
        assert [int(region.rows(slot, plane).max()) for slot in slots] == [1, 1, 3]


def test_a_free_slot_can_be_neither_read_nor_freed(region: PageRegion) -> None:
    """Nor one that does not exist; a refusal changes nothing."""
    take(region, 3)
    region.free([1])
    for verb in (
        lambda: region.rows(1, 0),
        lambda: region.kv(1, 10),
        lambda: region.copy(0, 1),
        lambda: region.copy(1, 0),
        lambda: region.free([0, 1]),
        lambda: region.free([-1]),
        lambda: region.free([SPEC.num_slots]),
        lambda: region.free([0, 0]),
        lambda: region.rows(0, len(SPEC.layers)),
        lambda: region.rows(0, -1),
        lambda: region.kv(0, 9),
    ):
        with pytest.raises(ValueError, match=r"slot|planes|layers"):
            verb()
    assert region.used_slots == 2
    assert region.num_views == 0


def test_views_keep_their_owner_and_are_counted(region: PageRegion) -> None:
    """So that whoever hands out slots knows when one may be reused."""
    take(region, 1)
    owner = [object()]

    class Reader:
        """Notes its end."""

        def __del__(self) -> None:
            owner.clear()

    keys, values = region.kv(0, 10, Reader())
    del keys
    assert owner
    assert region.num_views == 1

    del values
    assert not owner
    assert region.num_views == 0


def test_no_room_changes_nothing(
    region: PageRegion, pool: ExtentPool, driver: FaultyDriver
) -> None:
    """All pages or none, whether slots are lacking or memory."""
    take(region, 8)
    before = (region.used_slots, pool.committed_bytes, driver.physical())
    with pytest.raises(ArenaFullError) as no_slots:
        take(region, SPEC.num_slots - 7)
    with pytest.raises(ArenaFullError) as no_memory:
        take(region, 10)

    assert no_slots.value.__cause__ is None
    assert no_slots.value.free_bytes == 17 * SPEC.page_bytes
    assert isinstance(no_memory.value.__cause__, VmmOutOfMemory)
    assert no_memory.value.free_bytes == SPEC.page_bytes
    assert (region.used_slots, pool.committed_bytes, driver.physical()) == before
    region.check()
    assert take(region, 1) == [8]


@pytest.mark.parametrize("verb", ["create", "map", "set_access", "unmap"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_driver_fault_changes_nothing(
    region: PageRegion, pool: ExtentPool, driver: FaultyDriver, verb: str, number: int
) -> None:
    """Slots, memory and what can be read are as before."""
    pool.use([0, 1])
    pool.rest([0])
    take(region, 2)
    places = [is_readable(pool.va_of(extent)) for extent in range(2 + SPEC.num_extents)]
    before = (region.used_slots, set(region.used_extents), pool.committed_bytes)
    driver.fail(verb, number)
    try:
        take(region, 7)
    except VmmDriverError:
        after = (region.used_slots, set(region.used_extents), pool.committed_bytes)
        assert after == before
        now = [is_readable(pool.va_of(extent)) for extent in range(2 + SPEC.num_extents)]
        assert now == places
        region.check()
    else:
        assert driver.has_faults
    driver.heal()
    pool.rest([1])


def test_whatever_interrupts_a_grant_leaves_no_slot_without_memory(
    region: PageRegion, driver: FaultyDriver
) -> None:
    """Not only the driver's own errors: the next pages would lie where no memory is."""
    take(region, 1)
    driver.fail("map", 0, KeyboardInterrupt())  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        take(region, 9)

    region.check()
    assert region.used_slots == 1
    for slot in take(region, 9):
        region.rows(slot, 0).fill_(1)


@QUIET
@given(
    slot_bytes=st.sampled_from([64, 192, 1344, EXTENT, EXTENT + 64, 5 * EXTENT // 2]),
    steps=st.lists(st.integers(-6, 6), max_size=30),
)
def test_slots_of_any_size_come_and_go(slot_bytes: int, steps: list[int]) -> None:
    """Everybody's page keeps its content, and memory is there for exactly the used slots."""
    spec = PoolSpec(
        class_index=0,
        name="any",
        layers=(0,),
        page_tokens=1,
        width_bytes=slot_bytes - 8,
        shape=None,
        extent_bytes=EXTENT,
        first_extent=0,
        num_slots=9,
    )
    driver = FaultyDriver(24 * EXTENT, PAGE_BYTES)
    pool = ExtentPool(driver, num_extents=spec.num_extents, extent_bytes=EXTENT)
    region = PageRegion(spec, pool=pool, driver=driver)
    held: dict[int, int] = {}
    for mark, step in enumerate(steps):
        if step > 0:
            try:
                slots = region.reserve(0, range(step))
            except ArenaFullError:
                assert step > 9 - len(held)
                continue
            for slot in slots:
                assert slot not in held
                held[slot] = mark + 1
                region.rows(slot, 0).fill_(mark + 1)
        else:
            gone = sorted(held)[:-step]
            region.free(gone)
            for slot in gone:
                del held[slot]
            pool.trim(keep_bytes=2 * EXTENT)
        region.check()
        pool.check(region.used_extents)
        assert region.hot_bytes == len(held) * spec.page_bytes
        size = spec.slot_bytes
        ends = [(slot * size, (slot + 1) * size) for slot in held]
        touched = [range(start // EXTENT, -(-stop // EXTENT)) for start, stop in ends]
        assert region.used_extents == {extent for extents in touched for extent in extents}
        assert pool.committed_bytes == driver.physical().measured_bytes
        for slot, content in held.items():
            assert region.rows(slot, 0).eq(content).all()
    pool.close()
    assert driver.physical().measured_bytes == 0
    driver.close()


def test_a_pool_has_no_tenants(region: PageRegion) -> None:
    """Nobody ever has to move, and leaving frees nothing."""
    slots = region.reserve(5, [7, 7000], move=False)
    assert not region.needs_move(6, [7])

    region.leave(5)

    assert region.used_slots == len(slots) == 2
    assert region.reserve(5, []) == []
