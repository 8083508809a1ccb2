"""A model's hot keys and values: its page table over the regions of one arena.

A page is known by its name, never by its address; what shows its memory is a tensor that
pins it.  A tensor that outlives its request therefore still shows the bytes that it was
made over, and the slot has its next page only when the tensor is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from actors.arena.arena import Arena
from actors.arena.page_region import PageRegion
from actors.arena.ring_region import RingRegion
from actors.arena.table.journal import Journal
from actors.arena.table.page_table import PageTable
from actors.arena.table.pages import PageName
from actors.arena.table.steps import Receipt, Step
from codec.errors import VmmBusy
from policies.retention.plan import Plan, PlannedClass
from policies.retention.program import KvShape

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
        With one region per class of ``plan``, used by nobody else; of another, ValueError.
    journal
        Where every event goes before it happens; nowhere, if nothing.
    """

    def __init__(self, arena: Arena, plan: Plan, journal: Journal | None = None) -> None:
        for found, region in zip(plan.classes, arena.regions, strict=True):
            _need_same(found, region)
        self.table = PageTable(plan, arena.regions, journal or Journal())
        self._plan = plan
        self._regions: tuple[PageRegion | RingRegion, ...] = arena.regions

    def carry_out(self, step: Step) -> Receipt:
        """Make a prepared step's copies; the receipt to commit it with.

        For memory that the processor writes: what is copied when this returns is copied.

        Raises
        ------
        StaleNameError
            If the step is not prepared (any more).
        """
        self.table.need_prepared(step)
        for source, target in step.copies:
            self._regions[source.class_index].copy(source.slot, target.slot)
        return Receipt.of(step)

    def store(
        self, step: Step, layer: int, keys_THD: torch.Tensor, values_THD: torch.Tensor
    ) -> None:
        """Write the tokens of one layer of a step in flight into its pages.

        Parameters
        ----------
        keys_THD, values_THD
            Shapes ``(after - before, num_kv_heads, key_dim)`` and ``(..., value_dim)``, of
            the class's data type.

        Raises
        ------
        StaleNameError
            If the step is not committed, or its work has ended.
        ValueError
            If no class of keys and values has the layer, or shape or type are others.
        """
        classes, count = self._classes_of(layer), step.after - step.before
        for index, _ in classes:
            shape = self._regions[index].spec.need_shape()
            _need_states("keys", keys_THD, (count, shape.num_kv_heads, shape.key_dim), shape)
            _need_states("values", values_THD, (count, shape.num_kv_heads, shape.value_dim), shape)
        self.table.need_running(step)
        for index, found in classes:
            region, pages = self._regions[index], step.written(index)
            for ordinal, row, start, stop in _runs(found, step.before, step.after):
                if ordinal in pages:
                    rows = slice(row, row + stop - start)
                    tokens = slice(start - step.before, stop - step.before)
                    keys, values = region.kv(pages[ordinal].slot, layer)
                    keys[rows], values[rows] = keys_THD[tokens], values_THD[tokens]

    def kv(self, name: PageName, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one page and layer, without a copy; they pin the page.

        Shapes ``(page_tokens, num_kv_heads, key_dim)`` and ``(..., value_dim)``.

        Raises
        ------
        StaleNameError
            If the page is not live.
        VmmBusy
            If a prepared step will write into it.
        ValueError
            If its class has no such layer, or no keys and values.
        """
        self.table.pin(name)
        owner = self._unpinned_with_it([name])
        return self._regions[name.class_index].kv(name.slot, layer, owner)

    def gather(self, request: int, layer: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """What a query behind a request's head may read of one layer, by position.

        Shapes ``(num_kv_heads, key_dim)`` and ``(num_kv_heads, value_dim)``: views that pin
        their pages.

        Raises
        ------
        StaleNameError
            If there is no such request.
        VmmBusy
            If a step of it is prepared, or it went on meanwhile: try again.
        ValueError
            If no class of keys and values has the layer.
        """
        found_tokens: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        boundaries = set()
        for index, found in self._classes_of(layer):
            boundary, pages = self.table.pin_pages(request, index)
            owner = self._unpinned_with_it(pages.values())
            boundaries.add(boundary)
            states = {
                ordinal: self._regions[index].kv(name.slot, layer, owner)
                for ordinal, name in pages.items()
            }
            for live in found.live_claims(boundary):
                for position in live.walk(0, boundary):
                    ordinal = found.page_of(position)
                    assert ordinal is not None, "what is live is in a page"
                    keys_PHD, values_PHD = states[ordinal]
                    row = _row(found, position)
                    found_tokens[position] = (keys_PHD[row], values_PHD[row])
        if len(boundaries) > 1:
            raise VmmBusy(f"request {request}", "it went on while it was read")
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
        VmmBusy
            If a prepared step will write into one of these pages.
        ValueError
            If the class has no rings, or not so many tokens are there.
        """
        region = self._regions[class_index]
        if not isinstance(region, RingRegion):
            raise ValueError(f"class {class_index} has no rings")  # noqa: TRY004 - no type of ours
        boundary, pages = self.table.pin_pages(request, class_index)
        owner = self._unpinned_with_it(pages.values())
        if not pages:
            raise ValueError(f"request {request} has no tokens in class {class_index}")
        last = pages[max(pages)]
        return region.window(last.slot, layer, boundary, num_tokens, owner)

    def _classes_of(self, layer: int) -> list[tuple[int, PlannedClass]]:
        found = [
            (index, planned)
            for index, planned in enumerate(self._plan.classes)
            if planned.kind == "attention" and layer in planned.layers
        ]
        if not found:
            raise ValueError(f"no class keeps keys and values of layer {layer}")
        return found

    def _unpinned_with_it(self, names: Iterable[PageName]) -> _Pin:
        """Something that unpins pages, pinned already, when it is gone."""
        owner = _Pin()
        finalizer = weakref.finalize(owner, self.table.unpin_soon, *names)
        finalizer.atexit = False
        return owner


def _need_same(found: PlannedClass, region: PageRegion | RingRegion) -> None:
    spec = region.spec
    wanted = (found.name, found.layers, found.page_tokens, found.width_bytes, found.shape)
    if wanted != (spec.name, spec.layers, spec.page_tokens, spec.width_bytes, spec.shape):
        raise ValueError(f"the arena's region {spec.name!r} is not of the plan's {found.name!r}")


def _need_states(
    what: str, states: torch.Tensor, wanted: tuple[int, int, int], shape: KvShape
) -> None:
    found_type = str(states.dtype).removeprefix("torch.")
    if tuple(states.shape) != wanted or found_type != shape.dtype:
        raise ValueError(
            f"need {what} of shape {wanted} in {shape.dtype}, "
            f"got {tuple(states.shape)} in {found_type}"
        )


def _row(found: PlannedClass, position: int) -> int:
    """Row of a token in its page."""
    if found.region.is_ranked:
        position = found.region.claims[0].keys.below(position)
    return position % found.page_tokens


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
