"""`LeaseTable` over a pool that others use too; `Arena`'s tests have the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.arena.extents import ExtentPool
from actors.arena.heap import CompressedHeap, Lease
from actors.arena.leases import LeaseTable
from actors.arena.syscalls import PAGE_BYTES
from codec.errors import ArenaFullError, StaleLeaseError
from tests.suites.faulty_driver import FaultyDriver

EXTENT = PAGE_BYTES


@pytest.fixture
def pool() -> Iterator[ExtentPool]:
    """Eight extents with memory for three."""
    driver = FaultyDriver(3 * EXTENT, PAGE_BYTES)
    pool = ExtentPool(driver, num_extents=8, extent_bytes=EXTENT)
    yield pool
    pool.close()
    assert driver.physical().measured_bytes == 0
    driver.close()


@pytest.fixture
def table(pool: ExtentPool) -> Iterator[LeaseTable]:
    """Leases on the first four extents."""
    table = LeaseTable(CompressedHeap(num_extents=4, extent_bytes=EXTENT), pool)
    yield table
    table.check()


def test_only_its_own_idle_extents_are_warm(table: LeaseTable, pool: ExtentPool) -> None:
    """Memory that idles elsewhere is moved; the heap has no extent there."""
    pool.use([2, 6])
    pool.rest([6, 2])

    lease = table.grant(EXTENT)

    assert list(table.heap.extents_of(lease)) == [2]
    assert pool.work.steals == 0
    assert list(table.heap.extents_of(table.grant(EXTENT))) == [0]
    assert pool.work.steals == 1
    assert table.used_extents == {0, 2}
    pool.check({0, 2})


def test_a_lease_that_does_not_fit_leaves_no_trace(table: LeaseTable, pool: ExtentPool) -> None:
    """With the memory used elsewhere, as with the addresses used up."""
    pool.use([5, 6])
    with pytest.raises(ArenaFullError) as no_memory:
        table.grant(2 * EXTENT)
    with pytest.raises(ArenaFullError) as no_addresses:
        table.grant(5 * EXTENT)

    assert no_memory.value.__cause__ is not None
    assert no_addresses.value.__cause__ is None
    assert table.num_live == table.heap.num_leases == 0
    assert table.used_extents == set()
    pool.check({5, 6})


def test_the_dead_stay_as_long_as_somebody_looks(table: LeaseTable, pool: ExtentPool) -> None:
    """A pin and a view each; then the extent rests."""
    lease = table.grant(10)
    grant = table.live(lease)
    table.pin(lease)
    table.add_view(grant)
    table.end_all()
    assert (table.num_live, table.num_dead, table.num_pins) == (0, 1, 2)
    table.end_if_live(lease)
    with pytest.raises(StaleLeaseError):
        table.end(lease)

    table.unpin(lease)
    assert not pool.idle
    table.drop_view(grant)

    assert set(pool.idle) == {0}
    assert (table.num_dead, table.num_pins) == (0, 0)
    for verb in (table.live, table.pin, table.unpin, table.end):
        with pytest.raises(StaleLeaseError):
            verb(lease)


def test_a_forged_lease_ends_nothing(table: LeaseTable) -> None:
    """Its generation alone does not make it live."""
    lease = table.grant(10)
    forged = Lease(lease.generation, lease.offset_bytes, 11)
    for verb in (table.live, table.pin, table.unpin, table.end):
        with pytest.raises(StaleLeaseError):
            verb(forged)
    table.end_if_live(forged)

    assert table.num_live == 1
    table.end(lease)
