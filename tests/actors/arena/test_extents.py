"""`ExtentPool`: memory comes from where it is cheapest, and every fault is undone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.arena.driver import Span
from actors.arena.extents import ExtentPool
from actors.arena.syscalls import PAGE_BYTES
from codec.errors import VmmError, VmmMisaligned, VmmOutOfMemory
from tests.suites.faulty_driver import FaultyDriver

NUM_EXTENTS = 10
EXTENT = 2 * PAGE_BYTES


@pytest.fixture
def driver() -> Iterator[FaultyDriver]:
    """A budget of six extents; nothing is left of it after the test."""
    driver = FaultyDriver(6 * EXTENT, PAGE_BYTES)
    yield driver
    driver.heal()
    assert driver.physical().measured_bytes == 0
    driver.check()
    driver.close()


@pytest.fixture
def pool(driver: FaultyDriver) -> Iterator[ExtentPool]:
    """Ten extents of two granules."""
    pool = ExtentPool(driver, num_extents=NUM_EXTENTS, extent_bytes=EXTENT)
    yield pool
    driver.heal()
    pool.close()


def state(pool: ExtentPool, driver: FaultyDriver) -> tuple[object, ...]:
    """What a failed call must not change."""
    return (
        pool.committed_bytes,
        pool.idle_bytes,
        driver.physical().booked_bytes,
        driver.physical().measured_bytes,
    )


def calls(driver: FaultyDriver) -> dict[str, int]:
    """Calls so far of the verbs that cost."""
    stats = driver.stats()
    verbs = ("create", "release", "map", "unmap", "set_access")
    return {verb: stats[verb].num_calls for verb in verbs if verb in stats}


def test_used_extents_are_open(pool: ExtentPool, driver: FaultyDriver) -> None:
    """One call opens all of them."""
    pool.use(range(3))

    driver.copy_in(pool.base_va, bytes(3 * EXTENT))

    assert calls(driver) == {"create": 3, "map": 3, "set_access": 1}
    assert pool.committed_bytes == driver.physical().measured_bytes == 3 * EXTENT
    pool.check({0, 1, 2})


def test_rest_costs_nothing_and_use_again_neither(pool: ExtentPool, driver: FaultyDriver) -> None:
    """Never unmap at death: an extent is usually needed again."""
    pool.use([0, 1])
    before = calls(driver)

    pool.rest([0, 1])
    assert pool.idle_bytes == 2 * EXTENT
    pool.use([1])

    assert calls(driver) == before
    assert set(pool.idle) == {0}


def test_idle_memory_moves_before_new_is_committed(pool: ExtentPool, driver: FaultyDriver) -> None:
    """To map what is there is an order of magnitude cheaper than to commit."""
    pool.use([0, 1])
    driver.copy_in(pool.base_va, b"moved")
    pool.rest([0])

    pool.use([7])

    assert calls(driver)["create"] == 2
    assert driver.copy_out(pool.base_va + 7 * EXTENT, 5) == b"moved"
    pool.check({1, 7})


def test_trim_gives_back_what_is_idle(pool: ExtentPool, driver: FaultyDriver) -> None:
    """All of it, or all but what is to be kept."""
    pool.use(range(4))
    pool.rest([1, 2, 3])

    assert pool.trim(keep_bytes=EXTENT + 1) == EXTENT
    assert pool.idle_bytes == 2 * EXTENT
    assert pool.trim() == 2 * EXTENT
    assert pool.trim() == 0

    assert pool.committed_bytes == driver.physical().measured_bytes == EXTENT
    pool.check({0})


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("verb", ["create", "map", "set_access", "unmap"])
def test_a_fault_leaves_everything_as_before(
    pool: ExtentPool, driver: FaultyDriver, verb: str, number: int
) -> None:
    """Whichever call of whichever verb fails on the way, and the same works afterwards."""
    pool.use([0, 1, 2])
    pool.rest([1, 2])
    before = state(pool, driver)
    driver.fail(verb, number)

    try:
        pool.use([2, 5, 6, 7])
    except VmmError:
        assert not driver.has_faults
        assert state(pool, driver) == before
        pool.check({0})
    else:
        assert driver.has_faults, "the fault was swallowed"
        pool.check({0, 2, 5, 6, 7})

    driver.heal()
    pool.use([2, 5, 6, 7])
    driver.copy_in(pool.base_va + 5 * EXTENT, bytes(3 * EXTENT))
    pool.check({0, 2, 5, 6, 7})


def test_the_budget_is_a_fault_like_any_other(pool: ExtentPool, driver: FaultyDriver) -> None:
    """What was committed on the way to it is given back."""
    pool.use([0])
    before = state(pool, driver)

    with pytest.raises(VmmOutOfMemory):
        pool.use(range(1, 8))

    assert state(pool, driver) == before
    pool.check({0})


@pytest.mark.parametrize("verb", ["unmap", "release"])
def test_a_fault_of_the_undoing_leaks_nothing(
    pool: ExtentPool, driver: FaultyDriver, verb: str
) -> None:
    """What cannot be given back stays committed and is used next."""
    driver.fail("set_access")
    driver.fail(verb)
    with pytest.raises(VmmError):
        pool.use([0, 1])
    assert not driver.has_faults
    assert pool.committed_bytes == pool.idle_bytes == driver.physical().measured_bytes == EXTENT
    pool.check(set())

    pool.use([0, 1])

    driver.copy_in(pool.base_va, bytes(2 * EXTENT))
    assert driver.physical().measured_bytes == 2 * EXTENT


@pytest.mark.parametrize("verb", ["unmap", "release"])
def test_a_trim_that_fails_goes_on_later(pool: ExtentPool, driver: FaultyDriver, verb: str) -> None:
    """What was given back stays so, and nothing is counted twice."""
    pool.use(range(3))
    pool.rest(range(3))
    driver.fail(verb, after=1)

    with pytest.raises(VmmError):
        pool.trim()
    assert pool.committed_bytes == driver.physical().measured_bytes == 2 * EXTENT
    pool.check(set())

    assert pool.trim() == 2 * EXTENT


@pytest.mark.parametrize("verb", ["unmap", "release"])
def test_a_close_that_fails_goes_on_later(driver: FaultyDriver, verb: str) -> None:
    """Memory and addresses are all gone after the second call."""
    pool = ExtentPool(driver, num_extents=NUM_EXTENTS, extent_bytes=EXTENT)
    pool.use(range(3))
    driver.fail(verb, after=1)

    with pytest.raises(VmmError):
        pool.close()
    pool.close()

    assert driver.physical().measured_bytes == 0
    with pytest.raises(VmmError):
        driver.tensor(*Span(pool.base_va, 1), None)


def test_an_extent_is_whole_granules(driver: FaultyDriver) -> None:
    """Said at once, not by the first reserve; and no addresses are taken."""
    with pytest.raises(VmmMisaligned, match="extent_bytes"):
        ExtentPool(driver, num_extents=2, extent_bytes=PAGE_BYTES // 2)

    assert "reserve" not in driver.stats()
