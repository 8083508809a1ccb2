"""`ExtentPool`: memory comes from where it is cheapest, and every fault is undone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.arena.driver import Span
from actors.arena.extents import ExtentPool, PoolWork
from actors.arena.syscalls import PAGE_BYTES
from codec.errors import VmmError, VmmMisaligned, VmmOutOfMemory
from tests.suites.faulty_driver import FaultyDriver
from tests.suites.probes import is_readable

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


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


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


def mapped_places(pool: ExtentPool) -> set[int]:
    """Places that can be read, mirrors included."""
    return {place for place in range(NUM_EXTENTS) if is_readable(pool.va_of(place))}


def test_the_youngest_dead_extent_is_taken_first(pool: ExtentPool) -> None:
    """The long idle ones stay for `release_idle`, and their neighbors for their own return."""
    pool.use([0, 1, 2, 3])
    for extent in (3, 1, 2):
        pool.rest([extent])

    pool.use([8])
    assert list(pool.idle) == [3, 1]
    pool.use([9])

    assert list(pool.idle) == [3]
    assert mapped_places(pool) == {0, 3, 8, 9}
    assert pool.work == PoolWork(creates=4, steals=2, maps=6, unmaps=2)


def test_a_fault_gives_stolen_memory_back_to_where_it_was(
    pool: ExtentPool, driver: FaultyDriver
) -> None:
    """The extents that were idle are so again, as long and as readable as before."""
    pool.use([0, 1, 2])
    pool.rest([2, 1])
    driver.copy_in(pool.va_of(1), b"one")
    driver.copy_in(pool.va_of(2), b"two")
    driver.fail("set_access")

    with pytest.raises(VmmError):
        pool.use([5, 6, 7])

    assert list(pool.idle) == [2, 1]
    assert mapped_places(pool) == {0, 1, 2}
    assert driver.copy_out(pool.va_of(1), 3) + driver.copy_out(pool.va_of(2), 3) == b"onetwo"
    assert pool.committed_bytes == 3 * EXTENT


def test_memory_goes_when_it_has_been_idle_for_long(driver: FaultyDriver) -> None:
    """Exactly what is old enough goes; what was used meanwhile is young again."""
    clock = Clock()
    pool = ExtentPool(driver, num_extents=NUM_EXTENTS, extent_bytes=EXTENT, clock=clock)
    pool.use(range(4))
    for extent in (2, 0, 1):
        clock.now_s += 10
        pool.rest([extent])
    pool.use([2])
    pool.rest([2])
    assert pool.release_idle(10.5) == 0

    assert pool.release_idle(10) == EXTENT
    assert list(pool.idle) == [1, 2]
    clock.now_s += 5
    pool.rest([1, 2])  # again: they have been idle all the while
    assert pool.release_idle(5) == 2 * EXTENT

    assert pool.committed_bytes == driver.physical().measured_bytes == EXTENT
    assert pool.work.releases == 3
    pool.close()


@pytest.mark.parametrize("verb", ["unmap", "release"])
def test_a_release_of_the_idle_that_fails_goes_on_later(driver: FaultyDriver, verb: str) -> None:
    """What was unmapped by then is as old as it was."""
    clock = Clock()
    pool = ExtentPool(driver, num_extents=NUM_EXTENTS, extent_bytes=EXTENT, clock=clock)
    pool.use(range(2))
    pool.rest([0])
    clock.now_s = 7
    pool.rest([1])
    driver.fail(verb)
    with pytest.raises(VmmError):
        pool.release_idle(7)
    assert pool.committed_bytes == pool.idle_bytes == 2 * EXTENT
    pool.check(set())

    assert pool.release_idle(7) == EXTENT
    assert list(pool.idle) == [1]
    pool.close()


def test_the_peak_of_memory_stays(pool: ExtentPool) -> None:
    """Whatever is given back afterwards."""
    pool.use(range(5))
    pool.rest(range(5))
    pool.trim()
    pool.use([0])

    assert (pool.peak_committed_bytes, pool.committed_bytes) == (5 * EXTENT, EXTENT)


@pytest.fixture
def mirrored(driver: FaultyDriver) -> Iterator[ExtentPool]:
    """Extents 2 and 3 are seen again at 4 and 5."""
    pool = ExtentPool(driver, num_extents=NUM_EXTENTS, extent_bytes=EXTENT, mirrors={2: 4, 3: 5})
    yield pool
    driver.heal()
    pool.close()


def test_a_mirror_shows_the_same_memory(mirrored: ExtentPool, driver: FaultyDriver) -> None:
    """Read across the seam, written through either place, counted once."""
    mirrored.use([3, 2])

    driver.copy_in(mirrored.va_of(3) + EXTENT - 3, b"seam!!")
    driver.copy_in(mirrored.va_of(5), b"5")

    assert driver.copy_out(mirrored.va_of(2), 3) == b"m!!"
    assert driver.copy_out(mirrored.va_of(3), 1) == b"5"
    assert mirrored.committed_bytes == driver.physical().measured_bytes == 2 * EXTENT
    assert calls(driver) == {"create": 2, "map": 4, "set_access": 1}
    mirrored.check({2, 3})


def test_mirrored_memory_moves_like_any_other(mirrored: ExtentPool, driver: FaultyDriver) -> None:
    """From a pair to a single extent and back; nothing is left behind readable."""
    mirrored.use([2])
    mirrored.rest([2])
    mirrored.use([0])
    assert mapped_places(mirrored) == {0}
    mirrored.rest([0])

    mirrored.use([3])

    assert mapped_places(mirrored) == {3, 5}
    assert mirrored.work == PoolWork(creates=1, steals=2, maps=5, unmaps=3)
    mirrored.rest([3])
    assert mirrored.trim() == EXTENT
    assert mapped_places(mirrored) == set()


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("verb", ["create", "map", "set_access", "unmap"])
def test_a_fault_between_a_place_and_its_mirror_is_undone(
    mirrored: ExtentPool, driver: FaultyDriver, verb: str, number: int
) -> None:
    """Bytes, places and what lies there are as before, whichever call failed."""
    mirrored.use([0, 1, 2])
    driver.copy_in(mirrored.va_of(2), b"kept")
    mirrored.rest([0, 2])
    before, places, idle = state(mirrored, driver), mapped_places(mirrored), list(mirrored.idle)
    driver.fail(verb, number)

    try:
        mirrored.use([3, 6, 7])
    except VmmError:
        assert not driver.has_faults
        assert state(mirrored, driver) == before
        assert mapped_places(mirrored) == places
        assert list(mirrored.idle) == idle
        assert driver.copy_out(mirrored.va_of(4), 4) == b"kept"
        mirrored.check({1})
    else:
        assert driver.has_faults, "the fault was swallowed"
        mirrored.check({1, 3, 6, 7})


def test_an_idle_pair_that_lost_its_mirror_gets_it_again(
    mirrored: ExtentPool, driver: FaultyDriver
) -> None:
    """Where even the undoing fails, the next use makes it whole."""
    mirrored.use([2])
    mirrored.rest([2])
    driver.fail("unmap", after=1)
    driver.fail("map")
    with pytest.raises(VmmError):
        mirrored.trim()
    assert not driver.has_faults
    assert mapped_places(mirrored) == {4}
    mirrored.check(set())

    mirrored.use([2])

    assert mapped_places(mirrored) == {2, 4}
    assert mirrored.committed_bytes == driver.physical().measured_bytes == EXTENT


@pytest.mark.parametrize("mirrors", [{0: 0}, {0: 1, 1: 2}, {0: 2, 1: 2}, {0: 10}, {-1: 3}])
def test_a_mirror_is_a_place_of_its_own(driver: FaultyDriver, mirrors: dict[int, int]) -> None:
    """Of one extent, within the range; and no addresses are taken otherwise."""
    with pytest.raises(ValueError, match="mirror"):
        ExtentPool(driver, num_extents=NUM_EXTENTS, extent_bytes=EXTENT, mirrors=mirrors)

    assert "reserve" not in driver.stats()


def test_an_extent_is_whole_granules(driver: FaultyDriver) -> None:
    """Said at once, not by the first reserve; and no addresses are taken."""
    with pytest.raises(VmmMisaligned, match="extent_bytes"):
        ExtentPool(driver, num_extents=2, extent_bytes=PAGE_BYTES // 2)

    assert "reserve" not in driver.stats()
