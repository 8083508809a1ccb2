"""Rings of one class: the pages of a tenant follow one another, mapped twice in a row.

1. A tenant has one ring to put pages into.  The page with ordinal ``o`` lies in its cell
   ``o % cells``, so slot ``ring * cells + o % cells``.
2. All of a ring's memory comes with its first page and rests with its last: in between, no
   page costs a call of the driver.
3. Where a cell is still taken, as by a page that a snapshot keeps, the tenant can only
   move: all its live pages are copied to a new ring.  The pages of the old one stay where
   they are until they are freed.  If it is the new one that empties, as by an abort, the
   old ring is the tenant's again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import finalize

from actors.arena.driver import Driver, Span
from actors.arena.extents import ExtentPool
from actors.arena.layout import RingSpec
from actors.arena.ring import MirrorRing
from actors.arena.views import Viewer, keys_values
from codec.errors import ArenaFullError, VmmOutOfMemory

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class _Ring:
    """A ring with memory."""

    #: Nothing once it has left.
    tenant: int | None
    #: ``{cell: ordinal}`` of the pages in it; never empty.
    ordinals: dict[int, int] = field(default_factory=dict)


class _RingHold:
    """Dies with the last tensor over a whole ring."""

    __slots__ = ("__weakref__", "keeps")

    def __init__(self, keeps: object) -> None:
        self.keeps = keeps


class RingRegion:
    """A `SlotSource` whose windows are one piece; as thread-safe as ``enter`` makes it.

    Parameters
    ----------
    enter
        Entered by every verb, for as long as it runs.
    do_soon
        Does what a finaliser wants done, within ``enter``.
    """

    def __init__(
        self,
        spec: RingSpec,
        *,
        pool: ExtentPool,
        driver: Driver,
        enter: Callable[[], AbstractContextManager[object]] = nullcontext,
        do_soon: Callable[[Callable[[], None]], None] = lambda chore: chore(),
    ) -> None:
        self.spec = spec
        self.num_slots = spec.num_slots
        self._layout = spec.layout
        self._cells = spec.layout.cells
        self._pool = pool
        self._enter = enter
        self._do_soon = do_soon
        self._viewer = Viewer(driver)
        #: ``{number: ring}`` of the rings with memory; their extents are in use.
        self._rings: dict[int, _Ring] = {}
        #: ``{tenant: its rings with memory}``, the one for new pages last; never empty.
        self._of: dict[int, list[int]] = {}
        #: ``{ring: results of `rings` of which anything is left}``; never 0.
        self._shown: dict[int, int] = {}
        #: Rings without pages that are shown: their extents are in use.
        self._parked: set[int] = set()
        #: The other rings, the one to take next last: the first ones first, but before
        #: them what was given back last, whose memory is likeliest still there.
        self._free = list(range(spec.num_rings))[::-1]

    @property
    def used_slots(self) -> int:
        """Cells that hold a page."""
        return sum(len(ring.ordinals) for ring in self._rings.values())

    @property
    def hot_bytes(self) -> int:
        """Memory of the rings that have any."""
        return (len(self._rings) + len(self._parked)) * self._layout.ring_bytes

    @property
    def used_extents(self) -> set[int]:
        """Extents of the rings that have memory."""
        numbers = (*self._rings, *self._parked)
        return {extent for number in numbers for extent in self._extents(number)}

    @property
    def num_views(self) -> int:
        """Tensors over this region of which anything is left."""
        return self._viewer.num_views

    def needs_move(self, tenant: int, ordinals: Sequence[int]) -> bool:
        """See `SlotSource.needs_move`."""
        with self._enter():
            return tenant not in self._of or not self._fits(self._of[tenant][-1], ordinals)

    def reserve(self, tenant: int, ordinals: Sequence[int], *, move: bool = False) -> list[int]:
        """See `SlotSource.reserve`; without a ring, a tenant gets one in any case.

        Raises
        ------
        ArenaFullError
            If there is no free ring, or no memory for it (which has the driver's error as
            its cause), or two pages would need one cell.
        VmmError
            If the driver refuses otherwise; nothing has changed then.
        """
        if not ordinals:
            return []
        with self._enter():
            cells = [ordinal % self._cells for ordinal in ordinals]
            is_new = move or tenant not in self._of
            number = self._free[-1] if is_new and self._free else None
            if not is_new:
                number = self._of[tenant][-1]
            distinct = len(set(cells)) == len(cells)
            if number is None or not distinct or not (is_new or self._fits(number, ordinals)):
                page_bytes = self.spec.page_bytes
                raise ArenaFullError(len(cells) * page_bytes, 0)
            if is_new:
                self._open(number, tenant)
            for cell, ordinal in zip(cells, ordinals, strict=True):
                self._rings[number].ordinals[cell] = ordinal
            return [number * self._cells + cell for cell in cells]

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
            for slot in slots:
                number, cell = divmod(slot, self._cells)
                del self._rings[number].ordinals[cell]
            for number in sorted({slot // self._cells for slot in slots}):
                if not self._rings[number].ordinals:
                    self._close(number)

    def leave(self, tenant: int) -> None:
        """See `SlotSource.leave`; whoever is unknown has left."""
        with self._enter():
            for number in self._of.pop(tenant, []):
                self._rings[number].tenant = None

    def copy(self, source: int, target: int) -> None:
        """See `SlotSource.copy`.

        Raises
        ------
        ValueError
            If one of them is free.
        """
        with self._enter():
            self._need_used(source, target)
            for plane in range(self._layout.num_planes):
                self._page(target, plane, None).copy_(self._page(source, plane, None))

    def rows(self, slot: int, plane: int, owner: object = None) -> torch.Tensor:
        """One page's tokens in one plane as bytes; every view keeps ``owner`` alive.

        Returns
        -------
        rows
            Shape ``(page_tokens, row_bytes)``, uint8: the memory itself, padding included.

        Raises
        ------
        ValueError
            If the slot is free, or there is no such plane.
        """
        with self._enter():
            self._need_used(slot)
            if not 0 <= plane < self._layout.num_planes:
                raise ValueError(f"planes are [0, {self._layout.num_planes}), got {plane}")
            return self._page(slot, plane, owner)

    def kv(self, slot: int, layer: int, owner: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one page and layer, ``layer`` as the model numbers it.

        Shapes ``(page_tokens, num_kv_heads, key_dim)`` and ``(..., value_dim)``.

        Raises
        ------
        ValueError
            If the slot is free, or the class has no such layer or no shape.
        """
        plane, at = self._layout.locate(self.spec.index_of(layer))
        return keys_values(self.rows(slot, plane, owner), self.spec.need_shape(), at)

    def window(
        self, slot: int, layer: int, boundary: int, num_tokens: int, owner: object = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens before ``boundary``, each in one piece, no copy.

        Shapes ``(num_tokens, num_kv_heads, key_dim)`` and ``(..., value_dim)``.  Tokens are
        counted as the class counts its pages.

        Parameters
        ----------
        slot
            Any page of the ring that is meant: one tenant can have two, during a move.

        Raises
        ------
        ValueError
            If the slot is free, a page of these tokens is not in its ring, or the class has
            no such layer or no shape.
        """
        plane, at = self._layout.locate(self.spec.index_of(layer))
        rows = self.window_rows(slot, plane, boundary, num_tokens, owner)
        return keys_values(rows, self.spec.need_shape(), at)

    def window_rows(
        self, slot: int, plane: int, boundary: int, num_tokens: int, owner: object = None
    ) -> torch.Tensor:
        """The bytes under `window`: shape ``(num_tokens, row_bytes)``, one piece.

        Raises
        ------
        ValueError
            As for `window`.
        """
        with self._enter():
            self._need_used(slot)
            number, start = slot // self._cells, boundary - num_tokens
            if not 0 <= start < boundary or not 0 <= plane < self._layout.num_planes:
                raise ValueError(f"no tokens [{start}, {boundary}) in plane {plane}")
            held, page_tokens = self._rings[number].ordinals, self.spec.page_tokens
            for ordinal in range(start // page_tokens, -(-boundary // page_tokens)):
                if held.get(ordinal % self._cells) != ordinal:
                    why = f"page {ordinal} of class {self.spec.name!r} is not in the ring"
                    raise ValueError(why)
            row_bytes = self._layout.row_bytes
            va = self._plane_va(number, plane) + start % self._layout.rows * row_bytes
            return self._viewer.rows(va, num_tokens, row_bytes, owner)

    def rings(
        self, tenant: int, layer: int, *, num_tokens: int = 0, owner: object = None
    ) -> tuple[MirrorRing, MirrorRing]:
        """Keys and values of a tenant's whole ring, to append to; they keep ``owner`` alive.

        For a tenant that shares no pages with others: what is appended goes round and round
        without a word to the books, wherever pages are or are not.  As long as anything made
        of them lives, the ring has its memory and is nobody else's, even if its pages go.

        Parameters
        ----------
        num_tokens
            Tokens that were stored before.

        Raises
        ------
        ValueError
            If the tenant has no ring, or the class has no such layer or no shape.
        """
        plane, at = self._layout.locate(self.spec.index_of(layer))
        shape, layout = self.spec.need_shape(), self._layout
        with self._enter():
            if tenant not in self._of:
                raise ValueError(f"tenant {tenant} has no pages, so no ring")
            number = self._of[tenant][-1]
            hold = _RingHold(owner)
            self._shown[number] = self._shown.get(number, 0) + 1
            finalizer = finalize(hold, self._do_soon, lambda: self._hide(number))
            finalizer.atexit = False
            va = self._plane_va(number, plane)
            rows = self._viewer.rows(va, 2 * layout.rows, layout.row_bytes, hold)
        keys, values = keys_values(rows, shape, at)
        return MirrorRing(keys, num_tokens=num_tokens), MirrorRing(values, num_tokens=num_tokens)

    def span(self, slot: int, plane: int) -> Span:
        """Where a slot's page lies in one plane."""
        number, cell = divmod(slot, self._cells)
        nbytes = self.spec.page_tokens * self._layout.row_bytes
        return Span(self._plane_va(number, plane) + cell * nbytes, nbytes)

    def check(self) -> None:
        """Assert every invariant but those of the lock."""
        assert sorted([*self._rings, *self._parked, *self._free]) == list(
            range(self.spec.num_rings)
        )
        owned = {number: tenant for tenant, found in self._of.items() for number in found}
        assert sum(map(len, self._of.values())) == len(owned)
        for number, ring in self._rings.items():
            assert ring.tenant == owned.get(number)
            assert all(ordinal % self._cells == at for at, ordinal in ring.ordinals.items())
            assert ring.ordinals
        assert owned.keys() <= self._rings.keys()
        assert all(self._of.values())
        assert self._parked <= self._shown.keys()
        assert all(count > 0 for count in self._shown.values())

    def _fits(self, number: int, ordinals: Iterable[int]) -> bool:
        held = self._rings[number].ordinals
        return not any(ordinal % self._cells in held for ordinal in ordinals)

    def _open(self, number: int, tenant: int) -> None:
        """Give a free ring its memory, and to a tenant."""
        try:
            self._pool.use(self._extents(number))
        except VmmOutOfMemory as error:
            raise ArenaFullError(self._layout.ring_bytes, self._pool.idle_bytes) from error
        self._free.remove(number)
        self._rings[number] = _Ring(tenant)
        self._of.setdefault(tenant, []).append(number)

    def _close(self, number: int) -> None:
        """Let the memory of an empty ring rest."""
        tenant = self._rings.pop(number).tenant
        if tenant is not None:
            self._of[tenant].remove(number)
            if not self._of[tenant]:
                del self._of[tenant]
        if number in self._shown:
            self._parked.add(number)
        else:
            self._rest(number)

    def _hide(self, number: int) -> None:
        """One result of `rings` is gone."""
        self._shown[number] -= 1
        if not self._shown[number]:
            del self._shown[number]
            if number in self._parked:
                self._parked.remove(number)
                self._rest(number)

    def _rest(self, number: int) -> None:
        self._free.append(number)
        self._pool.rest(self._extents(number))

    def _need_used(self, *slots: int) -> None:
        for slot in slots:
            number, cell = divmod(slot, self._cells)
            if number not in self._rings or cell not in self._rings[number].ordinals:
                raise ValueError(f"slot {slot} of class {self.spec.name!r} holds no page")

    def _page(self, slot: int, plane: int, owner: object) -> torch.Tensor:
        va = self.span(slot, plane).va
        return self._viewer.rows(va, self.spec.page_tokens, self._layout.row_bytes, owner)

    def _plane_va(self, number: int, plane: int) -> int:
        return self._pool.va_of(self.spec.plane_extent(number, plane))

    def _extents(self, number: int) -> list[int]:
        length = self._layout.plane_extents
        starts = (self.spec.plane_extent(number, p) for p in range(self._layout.num_planes))
        return [extent for start in starts for extent in range(start, start + length)]
