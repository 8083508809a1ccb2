"""A model's hot keys and values: its page table over the regions of one arena.

A page is known by its name, never by its address; what shows its memory is a tensor that
pins it.  A tensor that outlives its request therefore still shows the bytes that it was
made over, and the slot has its next page only when the tensor is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from actors.arena.arena import Arena
from actors.arena.journal import Journal
from actors.arena.page_region import PageRegion
from actors.arena.page_table import PageTable
from actors.arena.pages import PageName
from actors.arena.ring_region import RingRegion
from actors.arena.steps import Receipt, Step
from policies.retention.plan import Plan, PlannedClass

if TYPE_CHECKING:
    import torch


class _Pin:
    """Dies with the last tensor over a page."""

    __slots__ = ("__weakref__",)


class HotPages:
    """Requests of one model in one arena.

    Parameters
    ----------
    arena
        With one region per class of ``plan``, used by nobody else.
    journal
        Where every event goes before it happens; nowhere, if nothing.
    """

    def __init__(self, arena: Arena, plan: Plan, journal: Journal | None = None) -> None:
        self.table = PageTable(plan, arena.regions, journal or Journal())
        self._plan = plan
        self._regions: tuple[PageRegion | RingRegion, ...] = arena.regions

    def carry_out(self, step: Step) -> Receipt:
        """Make a prepared step's copies; the receipt to commit it with.

        For memory that the processor writes: what is copied when this returns is copied.
        """
        for source, target in step.copies:
            self._regions[source.class_index].copy(source.slot, target.slot)
        return Receipt.of(step)

    def store(
        self, step: Step, layer: int, keys_THD: torch.Tensor, values_THD: torch.Tensor
    ) -> None:
        """Write a committed step's tokens of one layer into its pages.

        Parameters
        ----------
        keys_THD, values_THD
            Shapes ``(after - before, num_kv_heads, key_dim)`` and ``(..., value_dim)``, of
            the class's data type.

        Raises
        ------
        ValueError
            If no class of keys and values has the layer, or the shapes are others.
        """
        count = step.after - step.before
        if len(keys_THD) != count or len(values_THD) != count:
            raise ValueError(f"need {count} tokens, got {len(keys_THD)} and {len(values_THD)}")
        for index, found in self._classes_of(layer):
            region, pages = self._regions[index], step.written(index)
            for ordinal, row, start, stop in _runs(found, step.before, step.after):
                if ordinal not in pages:
                    continue
                keys, values = region.kv(pages[ordinal].slot, layer)
                keys[row : row + stop - start] = keys_THD[start - step.before : stop - step.before]
                values[row : row + stop - start] = values_THD[
                    start - step.before : stop - step.before
                ]

    def kv(self, name: PageName, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one page and layer, without a copy; they pin the page.

        Shapes ``(page_tokens, num_kv_heads, key_dim)`` and ``(..., value_dim)``.

        Raises
        ------
        StaleNameError
            If the page is not live.
        ValueError
            If its class has no such layer, or no keys and values.
        """
        owner = self._pinned(name)
        return self._regions[name.class_index].kv(name.slot, layer, owner)

    def gather(self, request: int, layer: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """What a query behind a request's head may read of one layer, by position.

        Shapes ``(num_kv_heads, key_dim)`` and ``(num_kv_heads, value_dim)``: views that pin
        their pages.

        Raises
        ------
        StaleNameError
            If there is no such request.
        ValueError
            If no class of keys and values has the layer.
        """
        boundary = self.table.boundary(request)
        found_tokens: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for index, found in self._classes_of(layer):
            pages = self.table.pages(request, index)
            live = found.live_claims(boundary)
            for ordinal, row, start, stop in _runs(found, 0, boundary):
                if ordinal not in pages or not any(
                    position in keys for keys in live for position in range(start, stop)
                ):
                    continue
                keys_PHD, values_PHD = self.kv(pages[ordinal], layer)
                for position in range(start, stop):
                    if any(position in keys for keys in live):
                        at = row + position - start
                        found_tokens[position] = (keys_PHD[at], values_PHD[at])
        return dict(sorted(found_tokens.items()))

    def window(
        self, request: int, class_index: int, layer: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last tokens of a request in a class of rings, in one piece, without a copy.

        The tensors pin every page that they show.

        Raises
        ------
        StaleNameError
            If there is no such request.
        ValueError
            If the class has no rings, or not so many tokens are there.
        """
        region = self._regions[class_index]
        if not isinstance(region, RingRegion):
            raise ValueError(f"class {class_index} has no rings")  # noqa: TRY004 - no type of ours
        boundary = self.table.boundary(request)
        page_tokens = self._plan.classes[class_index].page_tokens
        pages = self.table.pages(request, class_index)
        first = (boundary - num_tokens) // page_tokens
        owners = [self._pinned(name) for ordinal, name in pages.items() if ordinal >= first]
        return region.window(request, layer, boundary, num_tokens, owners)

    def _classes_of(self, layer: int) -> list[tuple[int, PlannedClass]]:
        found = [
            (index, planned)
            for index, planned in enumerate(self._plan.classes)
            if planned.kind == "attention" and layer in planned.layers
        ]
        if not found:
            raise ValueError(f"no class keeps keys and values of layer {layer}")
        return found

    def _pinned(self, name: PageName) -> _Pin:
        self.table.pin(name)
        owner = _Pin()
        finalizer = weakref.finalize(owner, self.table.unpin_soon, name)
        finalizer.atexit = False
        return owner


def _runs(found: PlannedClass, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Positions of a class in ``[start, stop)`` that lie side by side in one page.

    Page, first row, first position, and one past the last.
    """
    if not found.region.is_ranked:
        size, position = found.page_tokens, start
        while position < stop:
            ordinal = position // size
            end = min(stop, (ordinal + 1) * size)
            yield ordinal, position % size, position, end
            position = end
        return
    keys = found.region.claims[0].keys
    for position in keys.walk(start, stop):
        ordinal, row = divmod(keys.below(position), found.page_tokens)
        yield ordinal, row, position, position + 1
