"""What holds of every memory driver.

Subclass `DriverSuite` with a ``make_driver``, and `TensorSuite` where torch can reach the
memory.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.arena.driver import Access, Driver, Handle, Physical, Span
from codec.errors import VmmBusy, VmmClosed, VmmMisaligned, VmmNotMapped, VmmOutOfMemory
from tests.suites.driver_contract import (
    CAPACITY_GRANULES,
    CONTRACT_TRACE,
    REFUSALS,
    Rig,
    hand_over,
    set_open,
    walk_contract,
)


class DriverRigs:
    """Drivers to test; subclass it and define `make_driver`."""

    def make_driver(self, capacity_granules: int) -> Driver:
        """A new driver with that budget."""
        raise AssertionError(f"say how to make a driver of {capacity_granules} granules")

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        """A driver that has nothing committed when the test is over, and then closes."""
        driver = self.make_driver(CAPACITY_GRANULES)
        yield driver
        physical = driver.physical()
        assert (physical.booked_bytes, physical.measured_bytes) == (0, 0)
        driver.close()

    @pytest.fixture
    def rig(self, driver: Driver) -> Iterator[Rig]:
        """A driver at work."""
        rig = Rig.build(driver)
        yield rig
        rig.undo()


class DriverSuite(DriverRigs):
    """What holds of every driver."""

    def test_the_contract_is_walked_as_written(self) -> None:
        """Every driver answers the same calls in the same way."""
        trace = walk_contract(self.make_driver(CAPACITY_GRANULES))

        assert trace == " ".join(CONTRACT_TRACE.split()).split(" / ")

    @pytest.mark.parametrize("name", REFUSALS)
    def test_a_refusal_changes_nothing(self, rig: Rig, name: str) -> None:
        """What is out of contract raises its own type, before anything happens."""
        kind, call = REFUSALS[name]
        before = rig.state()

        with pytest.raises(kind) as caught:
            call(rig)

        assert type(caught.value) is kind
        assert rig.state() == before

    def test_memory_starts_as_zeros_and_closed(self, rig: Rig) -> None:
        """Nobody sees what a released handle held, and mapping alone opens nothing."""
        rig.driver.map(rig.at(4), rig.loose)
        with pytest.raises(VmmNotMapped):
            rig.driver.copy_out(rig.at(4), 1)
        set_open(rig, rig.span(4, 2))
        assert rig.driver.copy_out(rig.at(4), 2 * rig.granule) == bytes(2 * rig.granule)
        rig.driver.copy_in(rig.at(4), b"\xff" * 2 * rig.granule)
        rig.driver.unmap(rig.at(4))
        rig.driver.release(rig.loose)

        rig.loose = rig.driver.create(2 * rig.granule)
        rig.driver.map(rig.at(4), rig.loose)
        set_open(rig, rig.span(4, 2))

        assert rig.driver.copy_out(rig.at(4), 2 * rig.granule) == bytes(2 * rig.granule)
        rig.driver.unmap(rig.at(4))

    def test_aliases_agree(self, rig: Rig) -> None:
        """Two mappings of one handle are one memory: what is written here is read there."""
        rig.driver.map(rig.at(8), rig.pair)
        set_open(rig, rig.span(8, 2))

        rig.driver.copy_in(rig.at(9), b"from the alias")

        assert rig.driver.copy_out(rig.at(1), 14) == b"from the alias"
        assert rig.driver.copy_out(rig.at(8), 4) == b"kept"
        rig.driver.unmap(rig.at(8))

    def test_a_released_handle_lives_until_its_last_unmap(self, driver: Driver) -> None:
        """Both orders of release and unmap end with the same bytes."""
        granule = driver.caps().granule_min_bytes
        va, handle = driver.reserve(2 * granule), driver.create(granule)
        for place in (va, va + granule):
            driver.map(place, handle)
        driver.set_access([Span(va, 2 * granule)], Access.READ_WRITE)
        driver.copy_in(va, b"still here")

        driver.release(handle)
        assert driver.physical().booked_bytes == granule
        driver.unmap(va)
        assert driver.copy_out(va + granule, 10) == b"still here"
        assert driver.physical().measured_bytes == granule
        driver.unmap(va + granule)

        assert driver.physical().booked_bytes == 0
        driver.free_va(va, 2 * granule)

    def test_content_moves_with_its_handle(self, rig: Rig) -> None:
        """Unmapped and mapped elsewhere, and back, a handle keeps its bytes."""
        for va in (rig.at(10), rig.base):
            for mapped in {rig.base, rig.at(10)} - {va}:
                rig.driver.unmap(mapped)
            rig.driver.map(va, rig.pair)
            rig.driver.set_access([Span(va, 2 * rig.granule)], Access.READ)

            assert rig.driver.copy_out(va, 4) == b"kept"

    def test_read_only_can_be_read_and_opened_again(self, rig: Rig) -> None:
        """Access is of a mapping, and changes without touching the bytes."""
        rig.driver.set_access([rig.span(0, 2)], Access.READ)
        with pytest.raises(VmmNotMapped, match="writing"):
            rig.driver.copy_in(rig.base, b"lost")
        assert rig.driver.copy_out(rig.base, 4) == b"kept"

        set_open(rig, rig.span(0, 2))

        rig.driver.copy_in(rig.base, b"new!")
        assert rig.driver.copy_out(rig.base, 4) == b"new!"

    def test_access_is_set_over_several_mappings_at_once(self, rig: Rig) -> None:
        """One span over two mappings that touch, and data that crosses the seam."""
        set_open(rig, rig.span(0, 3))

        rig.driver.copy_in(rig.at(2) - 3, b"across")

        assert rig.driver.copy_out(rig.at(2) - 3, 6) == b"across"

    def test_reservations_are_aligned_as_asked(self, driver: Driver) -> None:
        """Larger alignments than the granule are met exactly."""
        granule = driver.caps().granule_min_bytes
        for factor in (1, 2, 16):
            va = driver.reserve(granule, align_bytes=factor * granule)
            assert va % (factor * granule) == 0
            driver.free_va(va, granule)

    def test_handles_are_never_used_again(self, driver: Driver) -> None:
        """A handle kept too long cannot name somebody else's memory."""
        granule = driver.caps().granule_min_bytes
        seen = set()
        for _ in range(2 * CAPACITY_GRANULES):
            handle = driver.create(granule)
            driver.release(handle)
            seen.add(handle)
        assert len(seen) == 2 * CAPACITY_GRANULES

    def test_the_whole_budget_can_be_had_in_any_shape(self, driver: Driver) -> None:
        """Free bytes that do not touch are still worth a large handle, as on a device."""
        granule = driver.caps().granule_min_bytes
        handles = [driver.create(granule) for _ in range(CAPACITY_GRANULES)]
        for handle in handles[::2]:
            driver.release(handle)

        large = driver.create(CAPACITY_GRANULES // 2 * granule)

        with pytest.raises(VmmOutOfMemory) as caught:
            driver.create(granule)
        assert caught.value.free_bytes == 0
        for handle in [large, *handles[1::2]]:
            driver.release(handle)

    def test_shared_memory_is_one_memory(self, rig: Rig) -> None:
        """What either side writes, the other reads."""
        importer = self.make_driver(CAPACITY_GRANULES)
        va = borrow(importer, rig.driver, rig.pair, Access.READ_WRITE)

        assert importer.copy_out(va, 4) == b"kept"
        importer.copy_in(va + rig.granule, b"from there")
        rig.driver.copy_in(rig.base, b"here")

        assert rig.driver.copy_out(rig.at(1), 10) == b"from there"
        assert importer.copy_out(va, 4) == b"here"
        importer.close()

    def test_borrowed_memory_counts_nowhere(self, rig: Rig) -> None:
        """Neither against a budget that is used up, nor as committed; the owner's stays."""
        importer = self.make_driver(1)
        own = importer.create(rig.granule)
        before = rig.driver.physical()

        borrow(importer, rig.driver, rig.pair, Access.READ)

        assert importer.physical().booked_bytes == rig.granule
        assert importer.physical().measured_bytes == rig.granule
        assert rig.driver.physical() == before
        importer.release(own)
        assert importer.physical().measured_bytes == 0
        importer.close()

    @pytest.mark.parametrize("is_released_first", [True, False])
    def test_borrowing_ends_without_a_trace(self, rig: Rig, is_released_first: bool) -> None:
        """Release and unmap end it in either order: no descriptor stays, nor any byte goes."""
        before, num_files = rig.state(), count_open_files()
        lent = hand_over(rig.driver, rig.pair, rig.driver)
        rig.driver.map(rig.at(4), lent)

        ends = [lambda: rig.driver.unmap(rig.at(4)), lambda: rig.driver.release(lent)]
        for end in ends[:: -1 if is_released_first else 1]:
            end()

        assert count_open_files() == num_files
        assert rig.state() == before

    def test_an_importer_that_closes_gives_back_what_it_borrowed(self, rig: Rig) -> None:
        """Mapped or not; and the owner's memory is as it was."""
        before, num_files = rig.state(), count_open_files()
        importer = self.make_driver(1)
        borrow(importer, rig.driver, rig.pair, Access.READ)
        hand_over(rig.driver, rig.single, importer)

        importer.close()

        assert count_open_files() == num_files
        assert rig.state() == before

    def test_an_identity_is_of_one_handle_of_one_driver(self, rig: Rig) -> None:
        """What an importer may key on: an address or a descriptor comes back, this does not."""
        other = self.make_driver(1)
        shares = [
            rig.driver.export(rig.pair),
            rig.driver.export(rig.pair, writable=True),
            rig.driver.export(rig.single),
            other.export(other.create(rig.granule)),
        ]

        identities = [share.identity for share in shares]

        assert identities[0] == identities[1]
        assert len(set(identities)) == 3
        assert [share.is_writable for share in shares] == [False, True, False, False]
        for share in [*shares, *shares]:
            share.close()
        other.close()

    def test_a_share_is_inherited_by_no_program(self, rig: Rig) -> None:
        """Its descriptor closes when this process starts another."""
        share = rig.driver.export(rig.pair)

        assert not os.get_inheritable(share.fd)
        share.close()

    def test_tickets_end(self, driver: Driver) -> None:
        """Work that was recorded is done after waiting for it."""
        first, second = driver.record(), driver.record()

        assert driver.wait(second, timeout_s=10)
        assert driver.done(first)
        assert first != second
        with pytest.raises(ValueError, match="timeout_s"):
            driver.wait(first, timeout_s=-1)

    def test_stats_count_calls_and_refusals(self, driver: Driver) -> None:
        """Each verb by itself."""
        with pytest.raises(VmmMisaligned):
            driver.create(1)
        driver.release(driver.create(driver.caps().granule_min_bytes))

        stats = driver.stats()

        assert (stats["create"].num_calls, stats["create"].num_refusals) == (2, 1)
        assert (stats["release"].num_calls, stats["release"].num_refusals) == (1, 0)
        assert stats["create"].total_us > 0
        assert "unmap" not in stats

    def test_closing_gives_everything_back_once(self) -> None:
        """Whatever was left mapped goes too; later verbs are refused."""
        driver = self.make_driver(CAPACITY_GRANULES)
        Rig.build(driver)

        driver.close()
        driver.close()

        with pytest.raises(VmmClosed):
            driver.physical()

    def test_booked_is_measured(self, rig: Rig) -> None:
        """Where the measure is exact, it is the sum of what was created."""
        physical = rig.driver.physical()

        assert physical.booked_bytes == 5 * rig.granule
        assert isinstance(physical, Physical)
        if physical.is_exact:
            assert physical.measured_bytes == physical.booked_bytes


class TensorSuite(DriverRigs):
    """What holds of tensors over a driver's memory, wherever torch can reach it."""

    def test_a_tensor_is_the_memory_and_keeps_its_owner(self, rig: Rig) -> None:
        """Writes go both ways, and the owner lives as long as the last view of it."""
        lives: list[str] = []
        owner = _Owner(lives)
        tensor = rig.driver.tensor(rig.base, 2 * rig.granule, owner)
        view = tensor[2:4]
        del owner, tensor
        gc.collect()

        view.fill_(ord("!"))

        assert rig.driver.copy_out(rig.base, 4) == b"ke!!"
        assert lives == []
        rig.driver.copy_in(rig.base, b"kept")
        del view
        gc.collect()
        assert lives == ["ended"]

    def test_addresses_stay_while_a_tensor_lives(self, driver: Driver) -> None:
        """Else another mapping could land there and be read as if it were the tensor."""
        granule = driver.caps().granule_min_bytes
        va = driver.reserve(granule)
        tensor = driver.tensor(va, granule, None)

        with pytest.raises(VmmBusy):
            driver.free_va(va, granule)
        with pytest.raises(VmmBusy):
            driver.close()

        del tensor
        gc.collect()
        driver.free_va(va, granule)


def borrow(importer: Driver, owner: Driver, handle: Handle, access: Access) -> int:
    """Address in ``importer`` at which it has the owner's memory, open."""
    is_writable = access is Access.READ_WRITE
    share = owner.export(handle, writable=is_writable)
    lent = importer.import_(share)
    share.close()
    va = importer.reserve(share.nbytes)
    importer.map(va, lent)
    importer.set_access([Span(va, share.nbytes)], access)
    return va


def count_open_files() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


class _Owner:
    """Says when it ends."""

    def __init__(self, lives: list[str]) -> None:
        self._lives = lives

    def __del__(self) -> None:
        self._lives.append("ended")
