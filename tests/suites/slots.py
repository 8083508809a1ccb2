"""Slots without memory behind them, that remember what is taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from codec.errors import ArenaFullError


class PoolSlots:
    """Any page anywhere, lowest slot first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.taken: set[int] = set()
        self.copies: list[tuple[int, int]] = []

    def needs_move(self, tenant: int, ordinals: Sequence[int]) -> bool:
        """Never."""
        return False

    def reserve(self, tenant: int, ordinals: Sequence[int], *, move: bool) -> list[int]:
        """The lowest free slots."""
        assert not move
        free = [slot for slot in range(self.num_slots) if slot not in self.taken]
        if len(free) < len(ordinals):
            raise ArenaFullError(len(ordinals), len(free))
        self.taken.update(free[: len(ordinals)])
        return free[: len(ordinals)]

    def free(self, slots: Iterable[int]) -> None:
        """Free slots that are taken."""
        for slot in slots:
            self.taken.remove(slot)

    def leave(self, tenant: int) -> None:
        """Nothing is a tenant's own."""

    def copy(self, source: int, target: int) -> None:
        """Take note of it."""
        self.copies.append((source, target))


class RingSlots(PoolSlots):
    """Rings of ``cells`` slots, one tenant's each; page ``o`` lies in cell ``o % cells``."""

    def __init__(self, num_rings: int, cells: int) -> None:
        super().__init__(num_rings * cells)
        self.cells = cells
        #: The ring that each tenant adds to.
        self.rings: dict[int, int] = {}

    def needs_move(self, tenant: int, ordinals: Sequence[int]) -> bool:
        """Whether there is no ring, or a cell is taken."""
        if tenant not in self.rings:
            return True
        return bool(self.taken.intersection(self._slots(self.rings[tenant], ordinals)))

    def reserve(self, tenant: int, ordinals: Sequence[int], *, move: bool) -> list[int]:
        """Cells of the tenant's ring, or of a new one."""
        assert move == self.needs_move(tenant, ordinals)
        if len(set(ordinals)) > self.cells:
            raise ArenaFullError(len(ordinals), self.cells)
        ring = self._empty_ring() if move else self.rings[tenant]
        self.rings[tenant] = ring
        slots = self._slots(ring, ordinals)
        self.taken.update(slots)
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """Free slots; a ring without any is nobody's."""
        slots = list(slots)
        super().free(slots)
        for ring in {slot // self.cells for slot in slots}:
            if self.taken.isdisjoint(range(ring * self.cells, (ring + 1) * self.cells)):
                self.rings = {t: r for t, r in self.rings.items() if r != ring}

    def leave(self, tenant: int) -> None:
        """The tenant adds to no ring."""
        self.rings.pop(tenant, None)

    def _slots(self, ring: int, ordinals: Sequence[int]) -> list[int]:
        return [ring * self.cells + ordinal % self.cells for ordinal in ordinals]

    def _empty_ring(self) -> int:
        for ring in range(self.num_slots // self.cells):
            if self.taken.isdisjoint(range(ring * self.cells, (ring + 1) * self.cells)):
                return ring
        raise ArenaFullError(self.cells, 0)
