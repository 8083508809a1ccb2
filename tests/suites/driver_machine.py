"""A memory driver against a model of it: random verbs, legal or not, all predicted.

Subclass `DriverMachine` with a ``make_driver``; a new driver is walked in each example.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.arena.driver import Access, Driver, Handle, Span
from codec.errors import (
    VmmAlreadyMapped,
    VmmBadHandle,
    VmmError,
    VmmNotMapped,
    VmmNotReserved,
    VmmNotShared,
    VmmOutOfMemory,
)

CAPACITY_GRANULES = 6
NUM_SLOTS = 8
SLOTS = st.integers(0, NUM_SLOTS - 1)


@dataclass
class ModelBlock:
    """What a handle should hold: one byte stands for each granule."""

    content: list[int]
    is_released: bool = False
    lender: ModelBlock | None = None
    """Whose content this is, if it was handed over."""

    is_writable: bool = True


@dataclass
class ModelMap:
    """A handle at a slot."""

    block: ModelBlock
    access: Access = field(default=Access.NONE)


class DriverMachine(RuleBasedStateMachine):
    """Every handle ever made is tried again, and every slot, whatever is there."""

    def make_driver(self, capacity_granules: int) -> Driver:
        """A new driver with that budget."""
        raise AssertionError(f"say how to make a driver of {capacity_granules} granules")

    @initialize()
    def start(self) -> None:
        """Reserve the slots."""
        self.driver = self.make_driver(CAPACITY_GRANULES)
        self.granule = self.driver.caps().granule_min_bytes
        self.base = self.driver.reserve(NUM_SLOTS * self.granule)
        self.blocks: dict[Handle, ModelBlock] = {}
        self.maps: dict[int, ModelMap] = {}

    def expect(self, error: type[VmmError] | None, verb: str, *args: object) -> object:
        """Call ``verb``, which must raise exactly ``error`` if that is given."""
        if error is None:
            return getattr(self.driver, verb)(*args)
        with pytest.raises(error):
            getattr(self.driver, verb)(*args)
        return None

    def va(self, slot: int) -> int:
        """Address of a slot."""
        return self.base + slot * self.granule

    def covering(self, slot: int) -> int | None:
        """Start of the mapping that covers ``slot``."""
        for start, found in self.maps.items():
            if start <= slot < start + len(found.block.content):
                return start
        return None

    def is_live(self, block: ModelBlock) -> bool:
        """Whether a handle or a mapping holds ``block``."""
        return not block.is_released or any(block is m.block for m in self.maps.values())

    def live_blocks(self) -> list[ModelBlock]:
        """Blocks that must be committed."""
        return [b for b in self.blocks.values() if b.lender is None and self.is_live(b)]

    @rule(size=st.integers(1, 3))
    def create(self, size: int) -> None:
        """Commit, unless over budget."""
        used = sum(len(block.content) for block in self.live_blocks())
        error = VmmOutOfMemory if used + size > CAPACITY_GRANULES else None
        handle = self.expect(error, "create", size * self.granule)
        if error is None:
            assert isinstance(handle, int)
            assert handle not in self.blocks
            self.blocks[Handle(handle)] = ModelBlock([0] * size)

    @precondition(lambda self: self.blocks)
    @rule(slot=SLOTS, data=st.data())
    def map(self, slot: int, data: st.DataObject) -> None:
        """Map any handle anywhere."""
        handle = data.draw(st.sampled_from(sorted(self.blocks)))
        block = self.blocks[handle]
        slots = range(slot, slot + len(block.content))
        error: type[VmmError] | None = None
        if block.is_released:
            error = VmmBadHandle
        elif slots.stop > NUM_SLOTS:
            error = VmmNotReserved
        elif any(self.covering(i) is not None for i in slots):
            error = VmmAlreadyMapped
        self.expect(error, "map", self.va(slot), handle)
        if error is None:
            self.maps[slot] = ModelMap(block)

    @rule(slot=SLOTS)
    def unmap(self, slot: int) -> None:
        """Unmap at any slot."""
        self.expect(None if slot in self.maps else VmmNotMapped, "unmap", self.va(slot))
        self.maps.pop(slot, None)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Release any handle."""
        handle = data.draw(st.sampled_from(sorted(self.blocks)))
        block = self.blocks[handle]
        if any(b.lender is block and self.is_live(b) for b in self.blocks.values()):
            return  # it is leased: its owner must not
        self.expect(VmmBadHandle if block.is_released else None, "release", handle)
        block.is_released = True

    @precondition(lambda self: self.blocks)
    @rule(is_writable=st.booleans(), data=st.data())
    def hand_over(self, is_writable: bool, data: st.DataObject) -> None:
        """Export any handle, and import it here."""
        handle = data.draw(st.sampled_from(sorted(self.blocks)))
        block = self.blocks[handle]
        if block.is_released or block.lender is not None:
            self.expect(VmmBadHandle if block.is_released else VmmNotShared, "export", handle)
            return
        share = self.driver.export(handle, writable=is_writable)
        lent = self.driver.import_(share)
        share.close()
        assert lent not in self.blocks
        self.blocks[lent] = ModelBlock(block.content, lender=block, is_writable=is_writable)

    @rule(slot=SLOTS, size=st.integers(1, 5), access=st.sampled_from(Access))
    def set_access(self, slot: int, size: int, access: Access) -> None:
        """Change access over any run of slots."""
        stop = slot + size
        inside = [start for start in self.maps if slot <= start < stop]
        covered = sum(len(self.maps[start].block.content) for start in inside)
        whole = covered == size and all(self.covering(i) in inside for i in range(slot, stop))
        span = Span(self.va(slot), size * self.granule)
        error: type[VmmError] | None = None if whole else VmmNotMapped
        is_open = access is Access.READ_WRITE
        if whole and is_open and not all(self.maps[i].block.is_writable for i in inside):
            error = VmmNotShared
        self.expect(error, "set_access", [span], access)
        if error is None:
            for start in inside:
                self.maps[start].access = access

    @rule(slot=SLOTS, value=st.integers(1, 255))
    def write(self, slot: int, value: int) -> None:
        """Write at the start of any slot."""
        start = self.covering(slot)
        is_open = start is not None and self.maps[start].access is Access.READ_WRITE
        error = None if is_open else VmmNotMapped
        self.expect(error, "copy_in", self.va(slot), bytes([value]))
        if start is not None and is_open:
            self.maps[start].block.content[slot - start] = value

    @invariant()
    def every_slot_reads_as_modelled(self) -> None:
        """Through each alias, the same; what is not open refuses."""
        for slot in range(NUM_SLOTS):
            start = self.covering(slot)
            if start is None or self.maps[start].access is Access.NONE:
                self.expect(VmmNotMapped, "copy_out", self.va(slot), 1)
            else:
                wanted = self.maps[start].block.content[slot - start]
                assert self.driver.copy_out(self.va(slot), 1) == bytes([wanted])

    @invariant()
    def bytes_are_booked_and_measured(self) -> None:
        """To the byte, after every step."""
        physical = self.driver.physical()
        wanted = sum(len(block.content) for block in self.live_blocks()) * self.granule
        assert physical.booked_bytes == wanted
        assert physical.measured_bytes == wanted or not physical.is_exact

    def teardown(self) -> None:
        """Nothing is left when it is closed as it stands."""
        if hasattr(self, "driver"):
            self.driver.close()
