"""A pool of slots, each of which holds one page of one class in all its layers.

1. A page goes into a slot that needs no memory beyond what others of the pool use already,
   at the lowest address; so extents fill, and those behind them empty.
2. Only where there is none is an extent taken: one of the pool's own that lies idle, else
   that of the lowest free slot.
3. An extent rests when the last slot that touches it is free.

A slot may lie across two extents: then both stay while it is used, and no bytes are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from actors.arena.driver import Driver, Span
from actors.arena.extents import ExtentPool
from actors.arena.layout import PoolSpec
from actors.arena.number_set import NumberSet
from actors.arena.views import Viewer, keys_values
from codec.errors import ArenaFullError, VmmOutOfMemory

if TYPE_CHECKING:
    import torch

WARM_EXTENTS = 16
"""How many idle extents are looked at for one to use again; all of them would cost too much."""


class PageRegion:
    """A `SlotSource` of pages that may lie anywhere; as thread-safe as ``enter`` makes it.

    Parameters
    ----------
    enter
        Entered by every verb, for as long as it runs.
    """

    def __init__(
        self,
        spec: PoolSpec,
        *,
        pool: ExtentPool,
        driver: Driver,
        enter: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.spec = spec
        self.num_slots = spec.num_slots
        self._pool = pool
        self._enter = enter
        self._viewer = Viewer(driver)
        self._base_va = pool.va_of(spec.first_extent)
        #: ``{extent: used slots that touch it}``; never 0.  These extents are in use.
        self._users: dict[int, int] = {}
        #: Free slots whose extents all are in use, and the other free ones.
        self._ready = NumberSet(spec.num_slots)
        self._bare = NumberSet(spec.num_slots, is_full=True)

    @property
    def used_slots(self) -> int:
        """Slots that hold a page."""
        return self.num_slots - len(self._ready) - len(self._bare)

    @property
    def hot_bytes(self) -> int:
        """Bytes of the pages in use."""
        return self.used_slots * self.spec.page_bytes

    @property
    def used_extents(self) -> set[int]:
        """Extents that the used slots touch."""
        return set(self._users)

    @property
    def num_views(self) -> int:
        """Tensors over this region of which anything is left."""
        return self._viewer.num_views

    def needs_move(self, tenant: int, ordinals: Sequence[int]) -> bool:  # noqa: ARG002
        """See `SlotSource.needs_move`: never."""
        return False

    def reserve(
        self,
        tenant: int,  # noqa: ARG002 - a ring's concern
        ordinals: Sequence[int],
        *,
        move: bool = False,  # noqa: ARG002 - every slot is new
    ) -> list[int]:
        """See `SlotSource.reserve`.

        Raises
        ------
        ArenaFullError
            If there are not so many free slots, or the driver has no more memory; the
            latter has the driver's error as its cause.
        VmmError
            If the driver refuses otherwise; nothing has changed then.
        """
        with self._enter():
            wanted, free = len(ordinals), len(self._ready) + len(self._bare)
            if wanted > free:
                page_bytes = self.spec.page_bytes
                raise ArenaFullError(wanted * page_bytes, free * page_bytes)
            try:
                with ExitStack() as undo:
                    slots, opened = self._take_lowest(wanted, undo)
                    self._pool.use(opened)
                    undo.pop_all()
            except VmmOutOfMemory as error:
                room_bytes = len(self._ready) * self.spec.page_bytes
                raise ArenaFullError(wanted * self.spec.page_bytes, room_bytes) from error
            return slots

    def free(self, slots: Iterable[int]) -> None:
        """See `SlotSource.free`.

        Raises
        ------
        ValueError
            If one of them is free already, or named twice; nothing has changed then.
        """
        with self._enter():
            slots = list(slots)
            self._need_used(*slots)
            if len(set(slots)) < len(slots):
                raise ValueError(f"slots {slots} name one twice")
            self._pool.rest([extent for slot in slots for extent in self._put(slot)])

    def leave(self, tenant: int) -> None:
        """See `SlotSource.leave`; a pool does not know its tenants."""

    def copy(self, source: int, target: int) -> None:
        """See `SlotSource.copy`.

        Raises
        ------
        ValueError
            If one of them is free.
        """
        with self._enter():
            self._need_used(source, target)
            self._whole(target).copy_(self._whole(source))

    def rows(self, slot: int, plane: int, owner: object = None) -> torch.Tensor:
        """The tokens of one layer as bytes; every view of them keeps ``owner`` alive.

        Parameters
        ----------
        plane
            Place of the layer among those of the class.

        Returns
        -------
        rows
            Shape ``(page_tokens, width_bytes)``, uint8: the memory itself.

        Raises
        ------
        ValueError
            If the slot is free, or there is no such plane.
        """
        with self._enter():
            self._need_used(slot)
            spec = self.spec
            if not 0 <= plane < len(spec.layers):
                raise ValueError(f"planes are [0, {len(spec.layers)}), got {plane}")
            va = self._va(slot) + plane * spec.page_tokens * spec.width_bytes
            return self._viewer.rows(va, spec.page_tokens, spec.width_bytes, owner)

    def kv(self, slot: int, layer: int, owner: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, ``layer`` as the model numbers it.

        Shapes ``(page_tokens, num_kv_heads, key_dim)`` and ``(..., value_dim)``.

        Raises
        ------
        ValueError
            If the slot is free, or the class has no such layer or no shape.
        """
        index = self.spec.index_of(layer)
        return keys_values(self.rows(slot, index, owner), self.spec.need_shape())

    def span(self, slot: int) -> Span:
        """Where a slot's page lies: all layers, one after the other."""
        return Span(self._va(slot), self.spec.page_bytes)

    def check(self) -> None:
        """Assert every invariant but those of the lock."""
        self._ready.check()
        self._bare.check()
        users: dict[int, int] = {}
        for slot in range(self.num_slots):
            if self._is_used(slot):
                for extent in self._extents(slot):
                    users[extent] = users.get(extent, 0) + 1
        assert users == self._users
        for slot in range(self.num_slots):
            has_memory = all(extent in users for extent in self._extents(slot))
            assert (slot in self._ready) == (has_memory and not self._is_used(slot))
            assert not (slot in self._ready and slot in self._bare)

    def _is_used(self, slot: int) -> bool:
        return slot not in self._ready and slot not in self._bare

    def _need_used(self, *slots: int) -> None:
        for slot in slots:
            if not 0 <= slot < self.num_slots or not self._is_used(slot):
                raise ValueError(f"slot {slot} of class {self.spec.name!r} holds no page")

    def _va(self, slot: int) -> int:
        return self._base_va + slot * self.spec.slot_bytes

    def _whole(self, slot: int) -> torch.Tensor:
        return self._viewer.rows(self._va(slot), 1, self.spec.page_bytes, None)

    def _extents(self, slot: int) -> range:
        """The extents that a slot touches."""
        start, stop = slot * self.spec.slot_bytes, (slot + 1) * self.spec.slot_bytes
        first = self.spec.first_extent
        extent_bytes = self.spec.extent_bytes
        return range(first + start // extent_bytes, first + (stop - 1) // extent_bytes + 1)

    def _slots(self, extent: int) -> range:
        """The slots that touch an extent."""
        start = (extent - self.spec.first_extent) * self.spec.extent_bytes
        stop = -(-(start + self.spec.extent_bytes) // self.spec.slot_bytes)
        return range(start // self.spec.slot_bytes, min(stop, self.num_slots))

    def _pick(self) -> int:
        """The free slot to take next; there is one."""
        slot = self._ready.least()
        if slot is None:
            slot = self._pick_warm()
        if slot is None:
            slot = self._bare.least()
        assert slot is not None
        return slot

    def _pick_warm(self) -> int | None:
        """The lowest free slot in the pool's youngest idle extents, if there is one."""
        first, stop = self.spec.first_extent, self.spec.first_extent + self.spec.num_extents
        mapped = self._pool.mapped
        warm = (
            extent for extent in self._pool.youngest_idle(WARM_EXTENTS) if first <= extent < stop
        )
        for extent in sorted(extent for extent in warm if extent not in self._users):
            for slot in self._slots(extent):
                if all(touched in mapped for touched in self._extents(slot)):
                    return slot
        return None

    def _take_lowest(self, wanted: int, undo: ExitStack) -> tuple[list[int], list[int]]:
        """Note that so many slots are used; those, and the extents that need memory now."""
        slots: list[int] = []
        opened: list[int] = []
        for _ in range(wanted):
            slot = self._pick()
            opened += self._take(slot)
            undo.callback(self._put, slot)
            slots.append(slot)
        return slots, opened

    def _take(self, slot: int) -> list[int]:
        """Note that a free slot is used; return the extents that were not in use before."""
        self._ready.discard(slot)
        self._bare.discard(slot)
        opened = []
        for extent in self._extents(slot):
            self._users[extent] = self._users.get(extent, 0) + 1
            if self._users[extent] == 1:
                opened.append(extent)
        for extent in opened:
            self._sort(extent)
        return opened

    def _put(self, slot: int) -> list[int]:
        """Note that a used slot is free; return the extents that nobody uses any more."""
        emptied = []
        for extent in self._extents(slot):
            self._users[extent] -= 1
            if not self._users[extent]:
                del self._users[extent]
                emptied.append(extent)
        self._bare.add(slot)
        self._sort_slot(slot)
        for extent in emptied:
            self._sort(extent)
        return emptied

    def _sort(self, extent: int) -> None:
        for slot in self._slots(extent):
            if not self._is_used(slot):
                self._sort_slot(slot)

    def _sort_slot(self, slot: int) -> None:
        """Put a free slot into the set where it belongs."""
        if all(extent in self._users for extent in self._extents(slot)):
            self._bare.discard(slot)
            self._ready.add(slot)
        else:
            self._ready.discard(slot)
            self._bare.add(slot)
